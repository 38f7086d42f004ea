from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.fields import NonNegative
from ..core.tree import dot


@dataclass(frozen=True)
class FedProx(Algorithm):
    """Li et al., 2020: local training is held near the global model.

    down: model; up: delta, weight; memory: nothing
    """

    mu: NonNegative = 0.01  # tuned in {0.001, 0.01, 0.1, 1}

    def loss(self, client, weights, batch, out):
        drift = self.shared(client.net, weights).params - client.received.model.params
        return super().loss(client, weights, batch, out) + self.mu / 2 * dot(drift, drift)
