"""MOON, FedDecorr and FedAU against plain PyTorch loops over several rounds, in which clients stay away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from textbook import (
    TWO_OF_THREE,
    WORLDS,
    Trained,
    World,
    sgd,
    statistics,
    total,
    vector,
)

worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())


SMALL = World(TWO_OF_THREE, sizes=(1, 3, 2), batch=8)  # one example among them: rows wrap round and stay full


BACK_AGAIN = World(((0, 1), (1, 2), (0, 2), (0, 1, 2), (1,)))


def with_term(world: World, theta: Tensor, running: Tensor, round: int, k: int, term: Callable[..., Any]) -> Trained:
    """Stochastic gradient descent on the cross-entropy plus term(features of the training pass, x, weight)."""
    model = world.at(theta, running).train()
    optimizer, batches = sgd(world, world.rate(round), model.parameters()), world.batches(round, k)
    for x, y, weight in batches:
        optimizer.zero_grad()
        z = model.features(x)
        losses = F.cross_entropy(model.head(z), y, reduction="none")
        ((losses * weight).sum() / weight.sum() + term(z, x, weight)).backward()
        optimizer.step()
    return Trained(vector(model), statistics(model), len(batches))


# ---- MOON ------------------------------------------------------------------------------------------------------------
def contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """-log(e^{cos(z, z_global)/T} / (e^{cos(z, z_global)/T} + e^{cos(z, z_previous)/T})) of every example."""

    def e(a: Tensor, b: Tensor) -> Tensor:
        return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)) / temperature).exp()

    return -(e(z, z_global) / (e(z, z_global) + e(z, z_previous))).log()


def moon(
    world: World,
    mu: float,
    temperature: float,
    server_lr: float = 1.0,
    own: bool = False,
    extra: Callable = lambda *_: 0,
) -> dict[str, Tensor]:
    """No term before a client has a previous model. `own`: running statistics stay with their clients."""
    theta, running = world.start()
    first, previous = running, {}
    for round, cohort in enumerate(world.cohorts):
        p, ends = world.shares(cohort), {}
        for k in cohort:
            begin = previous[k].statistics if own and k in previous else first if own else running

            def term(z, x, weight, k=k, theta=theta, begin=begin, previous=previous):
                if k not in previous:
                    return extra(z, x, weight)
                others = [world.at(theta, begin), world.at(*previous[k][:2])]
                with torch.no_grad():
                    z_global, z_previous = (model.eval().features(x) for model in others)
                terms = contrast(z, z_global, z_previous, temperature)
                return mu * (terms * weight).sum() / weight.sum() + extra(z, x, weight)

            ends[k] = with_term(world, theta, begin, round, k, term)
        previous.update(ends)
        theta = theta + server_lr * total(p[k] * (ends[k].theta - theta) for k in cohort)
        running = total(p[k] * ends[k].statistics for k in cohort)
    nothing = torch.empty(0).double()
    found = {"model": theta, "model statistics": nothing if own else running}
    for k, (theta_k, running_k, _) in previous.items():
        found |= {f"previous of {k}": theta_k, f"previous of {k} statistics": running_k}
        found |= {f"private of {k}": nothing, f"private of {k} statistics": running_k} if own else {}
    return found
