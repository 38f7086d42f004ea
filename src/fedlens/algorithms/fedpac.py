from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import Count, NonNegative
from ..core.objective import weighted
from ..core.tree import Tree
from ._heads import best_mix, measured, no_rows
from ._others import new_ticket, nobody, prototypes, stacked


@dataclass(frozen=True)
class FedPAC(Algorithm):
    """Xu et al., 2023: a shared body with aligned features, and a head that is each client's best mix of all heads.

    A client mixes by what the last round's clients measured before they trained. One that was not among them enters
    with what it measures now. head_epochs of the head come before local.epochs of the body. Clients see others' heads.

    down: model, known, prototypes, rows; up: delta, weight, counts, prototypes, row; memory: private, ticket
    """

    pull: NonNegative = 1.0  # lambda, of the mean squared distance to the mean features of an image's class
    mix: bool = True  # False: every client keeps its own head
    head_epochs: Count = 1  # epochs of the head, before those of the body

    discloses: ClassVar = "every client's head and class means reach all clients of the next round, unprotected"

    def setup(self, server):
        rows = no_rows(server.net, "fedpac")
        none = rows.means.new_zeros(rows.means.shape[1:])
        return super().setup(server).replace(known=none[:, 0], prototypes=none, rows=rows)

    def broadcast(self, server):
        return Tree({name: server.state[name] for name in ("model", "known", "prototypes", "rows")})

    def aggregate(self, server, uploads):
        """Clients without images measured nothing."""
        state, seen = super().aggregate(server, uploads), [u.row for u in uploads if u.counts.any()]
        rows = stacked(seen) if seen else nobody(uploads[0].row)
        return state.replace(rows=rows, **prototypes(state, uploads))

    def stages(self, plan):
        if plan.steps is not None:
            raise BadInput("fedpac trains the head and then the body, by epochs: leave local.steps empty")
        yield from super().stages(replace(plan, epochs=self.closing_epochs(plan.epochs)))

    def is_private(self, net, name):
        return name in net.head or super().is_private(net, name)

    def initial_memory(self, client):
        return super().initial_memory(client).replace(ticket=new_ticket(client))

    def closing_epochs(self, epochs):
        return self.head_epochs + epochs

    def phase(self, epoch):
        return "head" if epoch < self.head_epochs else "body"

    def trains(self, client, name):
        return (name in client.net.head) == (client.phase == "head")

    def start(self, client, found=None):
        weights, mixes = super().start(client), self.mix and len(client.received.rows.ticket) and len(client.data)
        return weights | Tree(params=best_mix(client, found or measured(client, weights))) if mixes else weights

    def begin(self, client):
        found, known = measured(client, super().start(client)), client.received.known > 0
        weights, target = self.start(client, found), torch.where(known[:, None], client.received.prototypes, found.own)
        pull = self.pull * known.any().to(target)  # in the first round there is nothing to align with
        return weights.replace(optimizer=client.optimizer.init(weights.params), target=target, pull=pull, found=found)

    def loss(self, client, weights, batch, out):
        loss = super().loss(client, weights, batch, out)
        if not self.pull or client.phase == "head":
            return loss
        apart = (out.features.flatten(1) - weights.target[batch.y]).square().mean(1)
        return loss + weights.pull * weighted(apart, batch)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        after, ticket = measured(client, local), client.memory.ticket
        row = Tree(head=memory.private.params, means=local.found.means, variance=local.found.variance, ticket=ticket)
        return upload.replace(counts=after.counts.int(), prototypes=after.own, row=row), memory.replace(ticket=ticket)
