from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..core.algorithm import Algorithm, Errand
from ..core.fields import NonNegative, Share
from ..core.tree import Tree, grad, mean
from ..models.generators import linear_head


@dataclass(frozen=True)
class FedDBE(Algorithm):
    """Zhang et al., 2023: a private offset takes up a client's mean feature, and features are held at a common centre.

    Before the first round everyone trains once as in FedAvg, keeps nothing of it, and sends the running mean of its
    features. The mean of these is the centre, for good. The global model has no offset; a personal one has it as bias.

    down: centre, model; up: delta, mean, weight; memory: offset
    """

    kappa: NonNegative = 1.0  # how much the distance to the centre counts beside the objective
    momentum: Share = 0.1  # of a batch in the running mean, which starts at zero each round

    def stages(self, plan):
        for stage in super().stages(plan):
            first = stage.errand(FeatureMeans(base=self), epochs=stage.epochs, steps=stage.steps)
            yield from (replace(first, fresh=stage.fresh), replace(stage, fresh=False))

    def setup(self, server):
        state, (weight, _) = super().setup(server), linear_head(server.net, "feddbe")
        return state.replace(centre=torch.zeros_like(state.model.params[weight][0]))

    def broadcast(self, server):
        return super().broadcast(server).replace(centre=server.state.centre)

    def initial_memory(self, client):
        return super().initial_memory(client).replace(offset=torch.zeros_like(client.received.centre))

    def begin(self, client):
        own = Tree(offset=client.memory.offset, optimizer=client.optimizer.init(Tree(offset=client.memory.offset)))
        return super().begin(client).replace(own=own, mean=torch.zeros_like(own.offset))

    def step(self, client, local, batch):
        free = Tree(params=local.params, offset=local.own.offset).map(lambda p: p.detach().requires_grad_())
        with torch.enable_grad():
            weights = local | Tree(params=free.params)
            out = client.net.forward(weights, batch.x, train=True, key=batch.key)
            logits = out.logits + free.params[linear_head(client.net, "feddbe")[0]] @ free.offset
            loss = self.loss(client, weights, batch, out.replace(logits=logits))
            running = torch.lerp(local.mean, batch.weight @ out.features / batch.weight.sum(), self.momentum)
            if self.kappa and client.phase != "first exchange":
                loss = loss + self.kappa * (running - client.received.centre).square().mean() / 2
            grads = grad(loss, free)
        client.optimizer.update_(local.params, grads.params, local.optimizer)
        if client.phase != "first exchange":
            client.optimizer.update_(Tree(offset=local.own.offset), Tree(offset=grads.offset), local.own.optimizer)
        return local.replace(mean=running.detach())

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(offset=local.own.offset)

    def personal(self, client, local=None):
        """W (z + s) + b = W z + (b + W s)."""
        weights, (weight, bias) = super().personal(client, local), linear_head(client.net, "feddbe")
        more = weights.params[weight] @ (client.memory.offset if local is None else local.own.offset)
        return weights | Tree(params=Tree({bias: weights.params[bias] + more}))


@dataclass(frozen=True)
class FeatureMeans(Errand):
    """The first exchange. down: centre, model; up: mean, weight; memory: nothing"""

    evaluated_as: ClassVar = ()
    discloses: ClassVar = "the mean of each client's features leaves once, unprotected"

    def phase(self, epoch):
        return "first exchange"

    def finish(self, client, local):
        return Tree(mean=local.mean, weight=torch.tensor(float(client.weighting(client)), dtype=torch.float64)), Tree()

    def aggregate(self, server, uploads):
        return server.state.replace(centre=mean([Tree(mean=u.mean) for u in uploads], [u.weight for u in uploads]).mean)
