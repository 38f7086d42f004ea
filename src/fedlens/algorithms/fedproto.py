from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import NonNegative
from ..core.objective import weighted
from ..core.tree import Tree
from ..models.generators import head_shape, linear_head
from ._others import prototypes
from ._own_images import class_sums


@dataclass(frozen=True)
class FedProto(Algorithm):
    """Tan et al., 2022: clients share the mean features of each class instead of models, and pull theirs to them.

    A client predicts the class whose shared mean is nearest, and by its own head while there are none. Means are taken
    after local training, of all its images, as the model would predict.

    down: prototypes, known; up: prototypes, counts; memory: private
    """

    pull: NonNegative = 1.0  # lambda, of the mean squared distance to the own class's mean; the paper tunes 0.1 to 4
    mean: Literal["clients", "examples"] = "clients"  # what counts alike when the server averages
    predict: Literal["prototypes", "head"] = "prototypes"  # head: the client's own

    discloses: ClassVar = "each client's mean features of each class, and which classes it has, leave unprotected"

    def __post_init__(self):
        if self.server_lr != 1:
            raise BadInput("fedproto has no step of the server: leave algorithm.server_lr at 1")

    # ---- server ----
    def setup(self, server):
        linear_head(server.net, "fedproto")
        width, classes = head_shape(server.net, "fedproto")
        like = next(iter(server.net.initial_weights().params.values()))
        return super().setup(server).replace(prototypes=like.new_zeros(classes, width), known=like.new_zeros(classes))

    def broadcast(self, server):
        return Tree(prototypes=server.state.prototypes, known=server.state.known)

    def aggregate(self, server, uploads):
        """A class that nobody of the cohort has keeps its mean."""
        return server.state.replace(**prototypes(server.state, uploads, most=1 if self.mean == "clients" else None))

    # ---- client ----
    def is_private(self, net, name):
        return True

    def start(self, client):
        return client.memory.private

    def loss(self, client, weights, batch, out):
        loss, received = super().loss(client, weights, batch, out), client.received
        if not self.pull:
            return loss
        apart = (out.features.flatten(1) - received.prototypes[batch.y]).square().mean(1)
        return loss + self.pull * weighted(apart * received.known[batch.y], batch)

    def finish(self, client, local):
        """counts: how much its means count; with mean=clients one for each class that it has."""
        found, like = class_sums(client.net, local, client.data), client.received.prototypes
        means = (found.sums / found.counts.clamp(min=1)[:, None]).to(like)
        counts = found.counts.clamp(max=1) if self.mean == "clients" else found.counts
        upload = Tree(prototypes=means, counts=counts.to(torch.int32))
        return upload, Tree(private=self.private_part(client.net, local))

    def personal(self, client, local=None):
        """The nearest mean as a linear head: |z - c|^2 is smallest where 2 z c - |c|^2 is largest."""
        own, received = client.memory.private if local is None else local, client.received
        if self.predict == "head" or not received.known.any():
            return own
        weight, bias = linear_head(client.net, "fedproto")
        far = torch.where(received.known > 0, -received.prototypes.square().sum(1), -1e9)
        return own | Tree(params=Tree({weight: 2 * received.prototypes, bias: far}))
