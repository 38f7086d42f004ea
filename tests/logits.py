"""FedLC and FedRS against one plain loop, in which a client's loss sees logits that its label counts changed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.core.algorithm import Client
from fedlens.core.batches import identity
from fedlens.core.tree import Tree
from small import federation
from textbook import TWO_OF_THREE, World, sgd, statistics, total, vector

WORLD = World(TWO_OF_THREE, sizes=(13, 2, 9))  # whoever has two images lacks a class


def counts(world: World, client: int) -> list[int]:
    data = federation(world.sizes, identity)
    labels = data.data.y[data.train[client]].tolist()
    return [labels.count(c) for c in range(3)]


def plain_loop(world: World, loss: Callable[[Tensor, int, list[int]], Tensor]) -> dict[str, Tensor]:
    """FedAvg with a loss of (logits of one image, its class, the client's counts)."""
    theta, running = world.start()
    for round, cohort in enumerate(world.cohorts):
        p, ends = world.shares(cohort), {}
        for k in cohort:
            model = world.at(theta, running).train()
            optimizer = sgd(world, world.rate(round), model.parameters())
            for x, y, weight in world.batches(round, k):
                optimizer.zero_grad()
                each = [loss(z, c, counts(world, k)) for z, c in zip(model(x), y.tolist(), strict=True)]
                ((torch.stack(each) * weight).sum() / weight.sum()).backward()
                optimizer.step()
            ends[k] = vector(model), statistics(model)
        theta = total(p[k] * ends[k][0] for k in cohort)
        running = total(p[k] * ends[k][1] for k in cohort)
    return {"model": theta, "model statistics": running}


def value(objective: Callable, logits: list[float], truth: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Of one image: the objective, and its slope by the logits."""
    z = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    memory = Tree(labels=torch.tensor(counts, dtype=torch.int32))
    client = Client(None, Tree(), memory, Tree(), objective, None)  # pyright: ignore[reportArgumentType]
    batch = Tree(y=torch.tensor([truth]), weight=torch.ones(1).double())
    found = objective(client, Tree(), batch, Tree(features=z, logits=z))
    return found.detach(), torch.autograd.grad(found, z)[0][0]


def plain(logits: list[float], truth: int) -> float:
    return float(F.cross_entropy(torch.tensor([logits], dtype=torch.float64), torch.tensor([truth])))
