from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.fields import NonNegative
from ..core.tree import Tree, dot


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """Qu et al., 2022: clients step along the gradient of a worse neighbour, towards flat minima.

    down: model; up: delta, weight; memory: nothing
    """

    rho: NonNegative = 0.1  # how far a step looks uphill

    def gradient(self, client, local, batch):
        """At the ascended point; only the first pass advances the statistics."""
        first = super().gradient(client, local, batch)
        ascent = first * (self.rho / (dot(first, first).sqrt() + 1e-12))
        above = Tree(params=local.params.within(first) + ascent, buffers=local.buffers.clone())
        return super().gradient(client, local | above, batch)
