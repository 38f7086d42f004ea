"""FedAS against a plain loop, its limit FedPer, and its weights by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from fedlens import config
from fedlens.algorithms import FedAS, FedPer
from fedlens.core.algorithm import Server
from fedlens.core.batches import identity
from fedlens.core.errors import BadInput
from fedlens.core.objective import by_examples
from fedlens.core.tree import Tree
from personal import Values, assert_same, by_package, descend, gap, is_head, label, loaded, mean, weights
from small import federation
from test_fedproto import own_means
from textbook import TWO_OF_THREE, World

COHORTS = (*TWO_OF_THREE, (0, 1, 2))
WORLD = World(COHORTS, sizes=(13, 2, 9))  # whoever has two images lacks a class


def mine(world: World, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = federation(world.sizes, identity)
    return data.data.x[data.train[k]], data.data.y[data.train[k]]


def fitted(world: World, start: Values, means: dict, k: int, rate: float, epochs: int) -> Values:
    """All of a client's images in one batch."""
    model, (x, y) = loaded(world, start).eval(), mine(world, k)
    for _ in range(epochs):
        model.zero_grad()
        z = model.features(x)
        sum(((v - means[c][0]) ** 2).mean() for v, c in zip(z, y.tolist(), strict=True)).div(len(y)).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if not is_head(name):
                    p -= rate * p.grad
    return weights(model)


def claim(world: World, end: Values, k: int) -> float:
    model, (x, y) = loaded(world, end).eval(), mine(world, k)
    F.cross_entropy(model(x), y).backward()
    return sum(float((p.grad**2).sum()) for p in model.parameters())


def fedas(world: World, rate: float, epochs: int) -> Values:
    first = weights(world.model())
    shared, own, known = {n: v for n, v in first.items() if not is_head(n)}, {}, {}
    for round, cohort in enumerate(world.cohorts):
        local, claims = {}, {}
        for k in cohort:
            start = first | shared | own.get(k, {})
            start = fitted(world, start, known[k], k, rate, epochs) if k in known else start
            local[k] = descend(world, loaded(world, start), round, k)
            known[k], claims[k] = own_means(world, loaded(world, local[k]), k), claim(world, local[k], k)
            own[k] = {n: v for n, v in local[k].items() if is_head(n)}
        shares = {k: claims[k] / sum(claims.values()) for k in cohort}
        shared = mean({k: {n: local[k][n] for n in shared} for k in cohort}, shares)
    found = label("model", shared)
    for k, means in known.items():
        nothing = torch.zeros(64, dtype=torch.float64), 0
        found |= label(f"private of {k}", own[k])
        found[f"prototypes of {k}"] = torch.stack([means.get(c, nothing)[0] for c in range(3)])
        found[f"counts of {k}"] = torch.tensor([float(means.get(c, nothing)[1]) for c in range(3)]).double()
    return found


@pytest.mark.parametrize("world", [WORLD, replace(WORLD, norm=False, momentum=0.0)], ids=["norms", "plain"])
def test_fedas(world):
    recipe = FedAS(align_rate=0.3, align_epochs=2, batch=50)
    assert_same(by_package(world, recipe).values, fedas(world, 0.3, 2))


def test_without_fitting_and_by_size_it_is_fedper():
    found = by_package(WORLD, FedAS(align_epochs=0, weight="samples")).values
    usual = by_package(WORLD, FedPer()).values
    assert all(torch.equal(found[name], usual[name]) for name in usual)


def test_by_hand():
    """Clients that end at 0.81 and 2.53 with gradients of 0.81 and -4.41 count by 0.6561 and 19.4481."""

    def upload(end: float, weight: float) -> Tree:
        delta = Tree(params=Tree(w=torch.tensor(end - 1, dtype=torch.float64)), buffers=Tree())
        return Tree(delta=delta, weight=torch.tensor(weight, dtype=torch.float64))

    state = Tree(model=Tree(params=Tree(w=torch.tensor(1.0).double()), buffers=Tree()))
    server = Server(None, state, 2)  # pyright: ignore[reportArgumentType]
    found = FedAS().aggregate(server, [upload(0.81, 0.6561), upload(2.53, 19.4481)])
    assert float(found.model.params.w) == pytest.approx(2.473867848509267, abs=1e-14)
    idle = FedAS().aggregate(server, [upload(0.81, 0.0), upload(2.53, 0.0)])
    assert float(idle.model.params.w) == pytest.approx(1.67, abs=1e-14)


@dataclass(frozen=True)
class FitsTheHead(FedAS):
    """Means that a client has before its training in place of those after it."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(prototypes=memory.prototypes * 0.9)


def test_the_textbook_notices():
    found = by_package(WORLD, FitsTheHead(align_rate=0.3, align_epochs=2, batch=50)).values
    assert gap(found, fedas(WORLD, 0.3, 2)) > 1e-4


def test_refused():
    with pytest.raises(BadInput, match="leave out weighting"):
        list(FedAS().stages(replace(WORLD.stage(), weighting=by_examples)))
    (note,) = config.read(None, ["algorithm=fedas", "uplink=dp"])._start_notes([10])
    assert note.startswith("uplink=dp does not act on this: how large each client's gradients still are")
