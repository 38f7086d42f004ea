from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.algorithm import Algorithm
from ..core.tree import mean


@dataclass(frozen=True)
class FedNova(Algorithm):
    """Wang et al., 2020: updates count per step, so that clients with more steps do not pull the mean towards them.

    down: model; up: delta, weight, reach; memory: nothing
    """

    needs_effective_steps = True

    def finish(self, client, local):
        """delta.params is what one step moved: the update divided by the reach of the client's steps."""
        upload, memory = super().finish(client, local)
        reach = client.optimizer.effective_steps(client.steps)
        pace = upload.delta.params / reach if reach else upload.delta.params
        delta = upload.delta.replace(params=pace)
        return upload.replace(delta=delta, reach=torch.tensor(reach, dtype=torch.float64)), memory

    def aggregate(self, server, uploads):
        weights = [float(u.weight) for u in uploads]
        reach = sum(w * float(u.reach) for w, u in zip(weights, uploads, strict=True)) / sum(weights)
        delta = mean([u.delta for u in uploads], weights)
        return self.advance(server, delta.replace(params=delta.params * reach))
