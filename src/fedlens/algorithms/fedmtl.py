from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import NonNegative
from ..core.network import Network
from ..core.tree import Tree, mean


@dataclass(frozen=True)
class FedMTL(Algorithm):
    """Multi-task learning after Smith et al., 2017, for networks: clients' personal models are tied by a penalty.

    down: model, clients; up: delta; memory: own

    The penalty is strength (|W|^2 + tr(W Omega W')), where the columns of W are the models of all clients and only
    the client's own moves. It needs no more of the others than their mean, which the server keeps and sends.

    How strong: MOCHA chooses among 1e-5, 1e-4 ... 10 by cross-validation; 0.01 is the largest that cost no accuracy on
    digits (docs/decisions.md). LG-FedAvg's code, where baselines of this name come from, divides by the number of
    weights: with 1e-7, as for a small network, clients train alone in all but name.

    Differs from that code, which knows as many models as a cohort has, those of the first clients. It has a matrix of
    ones in place of I, so that the sum of models is pulled to zero (omega=code). It also leaves up to 3,999 of the
    weights out of the second term. Omega is not learned here, as MOCHA's can be. Not compared with MOCHA's own code.
    """

    omega: Literal["laplacian", "code"] = "laplacian"  # laplacian: (I - 11'/m)^2, so that tr is sum |w_i - mean|^2
    strength: NonNegative | None = 0.01  # None: 10^-(floor(log10 parameters) + 2), as public code

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "code": {"omega": "code", "strength": None},
        "weak": {"strength": None},  # what the runs of results/pse_details.md and docs/methods.md had
    }

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
        return column + centre * (count * (1 - 1 / count) ** 2)  # each entry of (11' - 11'/m), squared

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
