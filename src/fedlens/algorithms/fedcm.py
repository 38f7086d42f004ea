from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import Positive, Share
from ..core.objective import uniformly
from ..core.tree import clipped, mean


@dataclass(frozen=True)
class FedCM(Algorithm):
    """Xu et al., 2021: every local step carries the direction in which the last round's clients went.

    It means plain steps: give local.momentum=0, or two momenta add up. With momentum the local path is divided by its
    reach instead of the number of steps.

    down: model, direction; up: delta, weight, reach; memory: nothing
    """

    alpha: Share = 0.1  # of the gradient; the rest is the direction's, and 1 is FedAvg
    clip: Positive | None = None  # of the norm of both together

    default_weighting = uniformly
    needs_effective_steps = True
    wants_momentum = False
    presets: ClassVar[dict[str, dict[str, Any]]] = {"simulator": {"clip": 10.0}}

    def __post_init__(self):
        if not self.alpha:
            raise BadInput("fedcm: with alpha=0 no gradient counts and nothing ever moves: give more, up to 1")

    def setup(self, server):
        state = super().setup(server)
        return state.replace(direction=state.model.params.zeros())

    def broadcast(self, server):
        return super().broadcast(server).replace(direction=server.state.direction)

    def gradient(self, client, local, batch):
        grads = super().gradient(client, local, batch) * self.alpha
        grads = grads.plus(client.received.direction * (1 - self.alpha))
        return grads if self.clip is None else clipped(grads, self.clip)

    def finish(self, client, local):
        """reach: how far a gradient of one would have gone, at this round's rate."""
        upload, memory = super().finish(client, local)
        reach = client.optimizer.lr * client.optimizer.effective_steps(client.steps)
        return upload.replace(reach=torch.tensor(reach, dtype=torch.float64)), memory

    def aggregate(self, server, uploads):
        """Of clients that took no step the direction learns nothing."""
        state = super().aggregate(server, uploads)
        moved = [u for u in uploads if float(u.reach) and float(u.weight)]
        if not moved:
            return state
        paces = (u.delta.params / -float(u.reach) for u in moved)
        return state.replace(direction=mean(paces, [u.weight for u in moved]))
