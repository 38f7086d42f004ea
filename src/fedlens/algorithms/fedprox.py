from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.fields import NonNegative


@dataclass(frozen=True)
class FedProx(Algorithm):
    """Li et al., 2020: local training is held near the global model.

    down: model; up: delta, weight; memory: nothing
    """

    mu: NonNegative = 0.01  # weight of the proximal term; tuned in {0.001, 0.01, 0.1, 1}

    def gradient(self, client, local, batch):
        """Of the loss + mu/2 |w - received|^2, over what is shared."""
        grads, received = super().gradient(client, local, batch), client.received.model.params
        pull = (self.shared_part(client.net, local).params - received) * self.mu
        return grads.plus(pull)
