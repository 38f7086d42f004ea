from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core.algorithm import Algorithm
from ..core.fields import NonNegative, Positive
from ..core.objective import weighted
from ..core.tree import Tree


@dataclass(frozen=True)
class Moon(Algorithm):
    """Li et al., 2021: local features are pulled to the global model's and away from the client's previous ones.

    down: model; up: delta, weight; memory: previous

    Differs from the paper: features are those before the head; there is no projection of its own.
    """

    mu: NonNegative = 1.0  # tuned in {0.1, 1, 5, 10}; 5 on CIFAR-10, 1 on CIFAR-100
    temperature: Positive = 0.5  # of the contrast; lower is sharper

    def initial_memory(self, client):
        """Before its first round a client's previous model is what it starts from: the term has no gradient there."""
        memory = super().initial_memory(client)
        return memory.replace(previous=client.received.model | memory.get("private", Tree()))

    def loss(self, client, weights, batch, out):
        loss = super().loss(client, weights, batch, out)
        if not self.mu:
            return loss
        with torch.no_grad():
            others = [client.net.forward(w, batch.x).features for w in (self.start(client), client.memory.previous)]
        # Both at once: where they are the same model, the two gradients are summed before anything else and cancel.
        alike = F.cosine_similarity(out.features.flatten(1)[:, None], torch.stack(others, 1).flatten(2), dim=2)
        contrast = -F.logsigmoid((alike[:, 0] - alike[:, 1]) / self.temperature)
        return loss + self.mu * weighted(contrast, batch)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(previous=Tree(params=local.params, buffers=local.buffers))
