from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.fields import Share


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """Hsu et al., 2019: the server moves with momentum.

    down: model; up: delta, weight; memory: nothing
    """

    beta: Share = 0.9  # how much of the earlier direction stays
    dampening: Share = 0.0  # as large as beta: the exponential average that some public code has
    nesterov: bool = False  # look ahead by one step

    def setup(self, server):
        state = super().setup(server)
        return state.replace(velocity=state.model.params.zeros())

    def advance(self, server, delta):
        velocity = server.state.velocity * self.beta + delta.params * (1 - self.dampening)
        ahead = delta.params + velocity * self.beta if self.nesterov else velocity
        return super().advance(server, delta.replace(params=ahead)).replace(velocity=velocity)
