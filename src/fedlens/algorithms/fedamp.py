from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.algorithm import Client
from ..core.errors import BadInput
from ..core.fields import NonNegative, Positive
from ..core.tree import Tree, dot
from ._others import mean_distance, new_ticket, nobody, others, row_of, stacked
from .local import Local


@dataclass(frozen=True)
class FedAMP(Local):
    """Huang et al., 2021: every client has a model of its own, which is drawn to those of clients that are like it.

    A round's models go to all clients of the next one; each moves its own towards every other, the less the further it
    is away, and trains near that centre. Clients see each other's models. Statistics of norms stay where they are.

    The paper's alpha of 1e4 and sigma of 1e6 suit its networks alone. Without sigma it is the mean squared distance of
    the models, and without alpha sigma divided by their number: this choice is ours.

    down: models, spread, tickets; up: model, ticket; memory: private, ticket
    """

    pull: NonNegative = 1.0  # lambda; without alpha it is lambda / alpha
    alpha: Positive | None = None  # how far a centre goes; alpha / sigma is the share of a model that is equal
    sigma: Positive | None = None  # squared distance at which a model counts a third

    discloses: ClassVar = "every client's model reaches all clients of the next round, unprotected"

    def __post_init__(self):
        if self.server_lr != 1:
            raise BadInput("fedamp has no server_lr: the server only hands models on")
        if self.alpha is not None and self.sigma is None:
            raise BadInput("fedamp: alpha means nothing without sigma: give both, or sigma alone")

    def setup(self, server):
        params = server.net.initial_weights().params
        none = {"spread": torch.zeros((), dtype=torch.float64), "tickets": torch.zeros(0, dtype=torch.long)}
        return super().setup(server).replace(models=nobody(params), **none)

    def broadcast(self, server):
        return Tree({name: server.state[name] for name in ("models", "spread", "tickets")})

    def initial_memory(self, client):
        """ticket: by which a client knows its own model among the others."""
        return super().initial_memory(client).replace(ticket=new_ticket(client))

    def begin(self, client):
        return super().begin(client).replace(centre=self.centre(client))

    def centre(self, client: Client) -> Tree:
        received, own = client.received, client.memory.private.params
        rows = others(client, received.tickets)
        sigma = self.sigma or float(received.spread) or 1.0
        share = (self.alpha or sigma / (len(rows) + 1)) / sigma
        centre = own
        for row in rows:
            way = row_of(received.models, row) - own
            centre = centre + way * (share * math.exp(-float(dot(way, way)) / sigma))
        return centre

    def gradient(self, client, local, batch):
        grads = super().gradient(client, local, batch)
        return grads.plus((local.params - local.centre) * (self.pull / (self.alpha or 1.0))) if self.pull else grads

    def finish(self, client, local):
        _, memory = super().finish(client, local)
        ticket = client.memory.ticket
        return Tree(model=Tree(params=local.params, buffers=Tree()), ticket=ticket), memory.replace(ticket=ticket)

    def aggregate(self, server, uploads):
        sent = [u.model.params for u in uploads]
        if self.alpha and self.sigma and self.alpha * (len(sent) - 1) > self.sigma:
            most = self.sigma / (len(sent) - 1)
            raise BadInput(f"fedamp: with {len(sent)} clients a round alpha is at most {most:g}, or centres leave them")
        known = torch.full_like(server.state.spread, mean_distance(sent))
        return server.state.replace(
            models=stacked(sent), spread=known, tickets=torch.stack([u.ticket for u in uploads])
        )

    def notes(self, replies):
        apart = mean_distance([reply.upload.model.params for reply in replies]) if self.sigma else 0.0
        alone = "models are far apart for such a small sigma, so that all train alone: raise it"
        return [f"fedamp: {alone}"] if self.sigma and apart > 10 * self.sigma else []
