from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..core.algorithm import Algorithm
from ..core.fields import Share
from ..core.tree import Tree, dot


@dataclass(frozen=True)
class APFL(Algorithm):
    """Deng et al., 2020: a client predicts with alpha times its own weights plus the rest of the global ones.

    down: model; up: delta, weight; memory: own, alpha

    The mixed model has running statistics of its own. Own weights move at alpha times the local rate, with the
    momentum and decay of the local optimizer.
    """

    alpha: Share = 0.5  # of the own weights, at first
    alpha_every: Literal["step", "round", "never"] = "step"  # when alpha moves; round: in the first step of each
    order: Literal["together", "sequential"] = "together"  # sequential: own weights see the step of the global ones

    def initial_memory(self, client):
        own = client.net.initial_weights()
        device = next(iter(own.params.values())).device
        alpha = torch.full((), self.alpha, dtype=torch.float64, device=device)
        return super().initial_memory(client).replace(own=own, alpha=alpha)

    def begin(self, client):
        own, alpha = client.memory.own, client.memory.alpha
        local = super().begin(client).replace(alpha=alpha, first=torch.ones_like(alpha, dtype=torch.bool))
        return local.replace(own=own.replace(optimizer=client.optimizer.init(own.params)))

    def step(self, client, local, batch):
        own, alpha, rate = local.own, local.alpha, local.optimizer.lr
        if self.order == "sequential":
            local = super().step(client, local, batch)
        grads = self.gradient(client, self.mixed(own, local, alpha), batch)
        slope = dot(own.params - local.params, grads)  # d loss / d alpha
        client.optimizer.update_(own.params, grads, own.optimizer.replace(lr=(rate * alpha).to(rate)))
        if self.order == "together":
            local = super().step(client, local, batch)
        moved = (alpha - rate * slope).clamp(0, 1)
        moved = {"step": moved, "round": torch.where(local.first, moved, alpha), "never": alpha}[self.alpha_every]
        return local.replace(alpha=moved, first=torch.zeros_like(local.first))

    def mixed(self, own: Tree, model: Tree, alpha: torch.Tensor) -> Tree:
        return Tree(params=own.params * alpha + model.params * (1 - alpha), buffers=own.buffers)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        own = Tree(params=local.own.params, buffers=local.own.buffers)
        return upload, memory.replace(own=own, alpha=local.alpha)

    def personal(self, client, local=None):
        kept, model = (client.memory, client.received.model) if local is None else (local, local)
        return self.mixed(kept.own, model, kept.alpha)
