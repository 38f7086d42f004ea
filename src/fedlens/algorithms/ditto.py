from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.fields import NonNegative
from ..core.tree import Tree


@dataclass(frozen=True)
class Ditto(Algorithm):
    """Li et al., 2021: beside FedAvg every client trains a model of its own, held near the global one it received.

    down: model; up: delta, weight; memory: own
    """

    pull: NonNegative = 1.0  # lambda; the paper tunes it in {0.1, 1, 2}

    def initial_memory(self, client):
        return super().initial_memory(client).replace(own=client.net.initial_weights())

    def begin(self, client):
        own = client.memory.own
        return super().begin(client).replace(own=own.replace(optimizer=client.optimizer.init(own.params)))

    def step(self, client, local, batch):
        own = local.own
        grads = self.gradient(client, own, batch)
        towards = (own.params - client.received.model.params) * self.pull
        client.optimizer.update_(own.params, grads + towards, own.optimizer)
        return super().step(client, local, batch)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(own=Tree(params=local.own.params, buffers=local.own.buffers))

    def personal(self, client, local=None):
        return client.memory.own if local is None else local.own
