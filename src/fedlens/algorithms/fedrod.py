from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from ..core.algorithm import Algorithm
from ..core.fields import NonNegative
from ..core.objective import cross_entropy
from ..core.tree import Tree, grad
from ..models.generators import linear_head
from .feddisco import label_counts


@dataclass(frozen=True)
class FedRoD(Algorithm):
    """Chen and Chao, 2022: one training gives a global model of balanced classes and a head for each client beside it.

    The global model learns by a balanced softmax: logits get gamma log(images of the class at this client). A client
    predicts with the sum of both heads' logits; its own learns from their sum and moves nothing else.

    down: model; up: delta, weight; memory: head
    """

    gamma: NonNegative = 1.0  # of the log counts; 0 is FedAvg with a head beside it
    head: Literal["zero", "copy"] = "zero"  # how the own head starts; copy: as the first global one, as in public code

    def setup(self, server):
        linear_head(server.net, "fedrod")
        return super().setup(server)

    def initial_memory(self, client):
        generic = self.heads(client, client.received.model)
        own = generic if self.head == "copy" else generic.zeros()
        return super().initial_memory(client).replace(head=own, counts=label_counts(client))

    def heads(self, client, weights: Tree) -> Tree:
        """The global head of these weights, under names that the own one has too."""
        weight, bias = linear_head(client.net, "fedrod")
        return Tree(weight=weights.params[weight], bias=weights.params[bias])

    def begin(self, client):
        own = client.memory.head
        return super().begin(client).replace(own=Tree(params=own, optimizer=client.optimizer.init(own)))

    def loss(self, client, weights, batch, out):
        """A class that the client does not have leaves the softmax: minus infinity, and no gradient."""
        if self.gamma:
            prior = client.memory.counts.to(out.logits).log()
            out = out.replace(logits=out.logits + self.gamma * prior)
        return super().loss(client, weights, batch, out)

    def step(self, client, local, batch):
        """Both losses in one backward pass: they share no variable."""
        free = Tree(params=local.params, own=local.own.params).map(lambda p: p.detach().requires_grad_())
        with torch.enable_grad():
            weights = local | Tree(params=free.params)
            out = client.net.forward(weights, batch.x, train=True, key=batch.key)
            mine = F.linear(out.features.detach(), free.own.weight, free.own.bias)
            both = out.replace(logits=out.logits.detach() + mine)
            # Whatever else the objective has is for the global model alone.
            value = self.loss(client, weights, batch, out) + cross_entropy(client, weights, batch, both)
            grads = grad(value, free)
        client.optimizer.update_(local.params, grads.params, local.optimizer)
        client.optimizer.update_(local.own.params, grads.own, local.own.optimizer)
        return local

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(head=local.own.params)

    def personal(self, client, local=None):
        """Both heads as one: their logits are added."""
        weights, own = (self.start(client), client.memory.head) if local is None else (local, local.own.params)
        both = self.heads(client, weights) + own
        weight, bias = linear_head(client.net, "fedrod")
        return weights | Tree(params=Tree({weight: both.weight, bias: both.bias}))
