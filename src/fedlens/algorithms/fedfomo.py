from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..core.algorithm import Client
from ..core.errors import BadInput
from ..core.evaluate import pieces, score, total
from ..core.fields import Open
from ..core.tree import Tree, dot
from ._others import new_ticket, nobody, others, row_of, stacked
from .local import Local


@dataclass(frozen=True)
class FedFomo(Local):
    """Zhang et al., 2021: a client begins nearer to those models of others that do better on images it holds back.

    A round's models go to all clients of the next one, so that clients see each other's models. Statistics of norms are
    mixed as weights are. Clients without images held back go on with their personal model.

    Differs from the paper: the whole last cohort is offered, and no server chooses for a client.

    down: models, tickets; up: model, ticket; memory: private, ticket
    """

    holdout: Open = 0.2  # share of a client's images that is never trained on, and judges others' models
    distance: Literal["l2", "l1"] = "l2"  # by which what a model gains is divided; l1: the authors' code

    discloses: ClassVar = "every client's model reaches all clients of the next round, unprotected"

    def __post_init__(self):
        if self.server_lr != 1:
            raise BadInput("fedfomo has no server_lr: the server only hands models on")

    def setup(self, server):
        none = Tree(models=nobody(server.net.initial_weights()), tickets=torch.zeros(0, dtype=torch.long))
        return super().setup(server).replace(**none)

    def broadcast(self, server):
        return Tree(models=server.state.models, tickets=server.state.tickets)

    def aggregate(self, server, uploads):
        tickets = torch.stack([u.ticket for u in uploads])
        return server.state.replace(models=stacked([u.model for u in uploads]), tickets=tickets)

    def holdout_size(self, examples):
        return round(self.holdout * examples)

    def initial_memory(self, client):
        """ticket: by which a client knows its own model among the others."""
        return super().initial_memory(client).replace(ticket=new_ticket(client))

    def start(self, client):
        own, received = client.memory.private, client.received
        models = [row_of(received.models, row) for row in others(client, received.tickets)]
        if not models or not len(client.held):
            return own
        here, mixed = self.loss_of(client, own), own
        gains = [self.gain(here - self.loss_of(client, model), (model - own).params) for model in models]
        for model, gain in zip(models, gains, strict=True):
            mixed = mixed + (model - own) * (gain / sum(gains)) if gain else mixed
        return mixed

    def loss_of(self, client: Client, weights: Tree) -> float:
        """Of these weights on what the client holds back, as they predict."""
        found = total([score(client.net, weights, piece) for piece in pieces(client.held)])
        return float(found.loss) / int(found.examples)

    def gain(self, better: float, way: Tree) -> float:
        """How much lower the loss is, by the way there; nothing where it is no lower, or not a number."""
        squared = sum(float(leaf.abs().sum()) for leaf in way.leaves()) ** 2 if self.distance == "l1" else dot(way, way)
        return better / math.sqrt(squared) if better > 0 and 0 < squared < math.inf else 0.0

    def finish(self, client, local):
        _, memory = super().finish(client, local)
        ticket, model = client.memory.ticket, Tree(params=local.params, buffers=local.buffers)
        return Tree(model=model, ticket=ticket), memory.replace(ticket=ticket)
