from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import NonNegative
from ..core.network import Network
from ..core.tree import Tree, mean


@dataclass(frozen=True)
class FedMTL(Algorithm):
    """Multi-task learning after Smith et al., 2017, for networks: clients' own models are tied by a penalty.

    down: model, clients; up: delta; memory: own

    The penalty is strength (|W|^2 + tr(W Omega W')), where the columns of W are the models of all clients and only
    the client's own moves. It needs no more of the others than their mean, which the server keeps and sends.

    Differs from the public code, which squares the entries of I - 11'/m one by one (omega=code) and stacks the cohort.
    """

    omega: Literal["laplacian", "code"] = "laplacian"  # laplacian: (I - 11'/m)^2, so that tr is sum |w_i - mean|^2
    strength: NonNegative | None = None  # None: 10^-(floor(log10 parameters) + 2), as public code

    sends_update: ClassVar = False  # but how a client's own model moved

    def __post_init__(self):
        if self.server_lr != 1:
            raise BadInput("fedmtl has no server_lr: the server only follows the mean of clients' models")

    def broadcast(self, server):
        clients = torch.tensor(server.population, dtype=torch.float64)
        return super().broadcast(server).replace(clients=clients)

    def initial_memory(self, client):
        return Tree(own=client.net.initial_weights())

    def start(self, client):
        return client.memory.own

    def gradient(self, client, local, batch):
        grads = super().gradient(client, local, batch)
        return grads + self.pull(client, local.params) * (2 * self.weight(client.net))

    def pull(self, client, column: Tree) -> Tree:
        """Half the penalty's gradient in the client's own column, per strength."""
        count = client.received.clients
        # The mean moves with the client: by its way since the server knew its column, divided by all clients.
        centre = client.received.model.params + (column - client.memory.own.params) / count
        if self.omega == "laplacian":
            return column + (column - centre)
        return column + column * (1 - 2 / count) + centre / count

    def weight(self, net: Network) -> float:
        if self.strength is not None:
            return self.strength
        return 10.0 ** -(2 + math.floor(math.log10(sum(p.numel() for p in net.module.parameters()))))

    def finish(self, client, local):
        own = Tree(params=local.params, buffers=local.buffers)
        return Tree(delta=self.shared_part(client.net, own) - self.shared_part(client.net, client.memory.own)), Tree(
            own=own
        )

    def aggregate(self, server, uploads):
        """The mean over all clients; those that did not answer are where they were."""
        moved = mean([u.delta for u in uploads], [1.0] * len(uploads))
        return self.advance(server, moved * (len(uploads) / server.population))
