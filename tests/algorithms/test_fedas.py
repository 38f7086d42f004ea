"""FedAS against a plain loop, its limit FedPer, and its weights by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from fedlens import config
from fedlens.algorithms import FedAS, FedPer
from fedlens.algorithms._own_images import class_sums
from fedlens.core.algorithm import Server
from fedlens.core.batches import identity
from fedlens.core.errors import BadInput
from fedlens.core.objective import by_examples, uniformly
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


def pieces(world: World, k: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A client's images in their order, so many at a time."""
    return [*zip(*(part.split(batch) for part in mine(world, k)), strict=True)]


def fitted(world: World, start: Values, means: dict, k: int, rate: float, epochs: int, batch: int) -> Values:
    model = loaded(world, start).eval()
    for x, y in pieces(world, k, batch) * epochs:
        model.zero_grad()
        z = model.features(x)
        sum(((v - means[c][0]) ** 2).mean() for v, c in zip(z, y.tolist(), strict=True)).div(len(y)).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if not is_head(name):
                    p -= rate * p.grad
    return weights(model)


def claim(world: World, end: Values, k: int, batch: int) -> float:
    """The squared length of each batch's gradient, added up."""
    found = 0.0
    for x, y in pieces(world, k, batch):
        model = loaded(world, end).eval()
        F.cross_entropy(model(x), y).backward()
        found += sum(float((p.grad**2).sum()) for p in model.parameters())
    return found


def fedas(world: World, rate: float, epochs: int, batch: int = 50) -> Values:
    first = weights(world.model())
    shared, own, known = {n: v for n, v in first.items() if not is_head(n)}, {}, {}
    for round, cohort in enumerate(world.cohorts):
        local, claims = {}, {}
        for k in cohort:
            start = first | shared | own.get(k, {})
            start = fitted(world, start, known[k], k, rate, epochs, batch) if k in known else start
            local[k] = descend(world, loaded(world, start), round, k)
            known[k], claims[k] = own_means(world, loaded(world, local[k]), k), claim(world, local[k], k, batch)
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
@pytest.mark.parametrize("batch", [50, 4])
def test_fedas(world, batch):
    """With four at a time the client of 13 images has a batch of one at the end, which counts as much as others."""
    recipe = FedAS(align_rate=0.3, align_epochs=2, batch=batch)
    assert_same(by_package(world, recipe).values, fedas(world, 0.3, 2, batch))


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


def test_gradients_that_are_as_large_count_alike():
    """Where every client claims the same, it is FedPer with uniform weights."""
    found = by_package(WORLD, Alike(align_epochs=0)).values
    usual = by_package(replace(WORLD, weighting=uniformly), FedPer()).values
    assert gap({name: found[name] for name in usual}, usual) < 1e-14


@dataclass(frozen=True)
class Alike(FedAS):
    def unlearned(self, client, weights):
        return torch.tensor(0.7, dtype=torch.float64)


@dataclass(frozen=True)
class MeansBefore(FedAS):
    """Means that a client has before its training in place of those after it."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        before = class_sums(client.net, self.start(client), client.data)
        return upload, memory.replace(prototypes=before.sums / before.counts.clamp(min=1)[:, None])


@dataclass(frozen=True)
class MeanGradient(FedAS):
    """One gradient of all images in place of one for each batch."""

    def unlearned(self, client, weights):
        return FedAS(batch=1000).unlearned(client, weights)


@pytest.mark.parametrize("mutant", [MeansBefore, MeanGradient])
def test_the_textbook_notices(mutant):
    found = by_package(WORLD, mutant(align_rate=0.3, align_epochs=2, batch=4)).values
    assert gap(found, fedas(WORLD, 0.3, 2, 4)) > 1e-4


def test_refused():
    with pytest.raises(BadInput, match="leave out weighting"):
        list(FedAS().stages(replace(WORLD.stage(), weighting=by_examples)))
    (note,) = config.read(None, ["algorithm=fedas", "uplink=dp"])._start_notes([10])
    assert note.startswith("uplink=dp does not act on this: how large each client's gradients still are")
