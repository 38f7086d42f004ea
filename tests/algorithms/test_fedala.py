"""FedALA against a plain loop that differentiates by the shares themselves, its limit, and a mixture by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedlens import config
from fedlens.algorithms import FedALA, FedAvg, FedPer
from fedlens.core.algorithm import Client, Server
from fedlens.core.batches import Dataset, Shard, identity
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.objective import weighted
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import generator, key
from fedlens.core.tree import Tree
from personal import Values, assert_same, by_package, descend, gap, label, loaded, mean, weights
from small import federation, network
from textbook import SEED, TWO_OF_THREE, World

COHORTS = (*TWO_OF_THREE, (0, 1, 2))
WORLD = World(COHORTS)
HEAD = ("head.weight", "head.bias")
TOPS = {1: HEAD, 2: ("conv.weight", "conv.bias", "norm.weight", "norm.bias", *HEAD)}


def mixture(
    world, theta: Values, own: Values, share: Values, rows: Sequence[torch.Tensor], rate: float, passes: int
) -> tuple[Values, Values]:
    """Shares after so many passes over these rows, batch by batch."""
    data, model = federation(world.sizes, identity).data, loaded(world, theta).eval()
    for batch in [*rows] * passes:
        free = {n: v.clone().requires_grad_() for n, v in share.items()}
        mixed = {n: own[n] + (theta[n] - own[n]) * free[n] for n in own}
        value = F.cross_entropy(functional_call(model, mixed, (data.x[batch],)), data.y[batch])
        slopes = torch.autograd.grad(value, list(free.values()))
        share = {n: (share[n] - rate * g).clamp(0, 1) for n, g in zip(free, slopes, strict=True)}
    return theta | {n: own[n] + (theta[n] - own[n]) * share[n] for n in own}, share


def drawn(world, round: int, k: int, part: float, batch: int) -> Sequence[torch.Tensor]:
    """The images that a client learns its mixture from; which these are is the package's draw."""
    mine = federation(world.sizes, identity).train[k]
    order = torch.randperm(len(mine), generator=generator(key(key(SEED, "client", round, k), "mixture")))
    return mine[order[: max(1, int(part * len(mine) + 0.5))]].split(batch)


def fedala(world: World, rate: float, first: int, layers: int = 1, part: float = 1.0, batch: int = 50) -> Values:
    theta, own, shares, turns = weights(world.model()), {}, {}, {}
    for round, cohort in enumerate(world.cohorts):
        local = {}
        for k in cohort:
            start, shares[k] = theta, shares.get(k, {n: torch.ones_like(theta[n]) for n in TOPS[layers]})
            if k in own:
                passes = first if turns[k] == 1 else 1
                rows = drawn(world, round, k, part, batch)
                start, shares[k] = mixture(world, theta, own[k], shares[k], rows, rate, passes)
            local[k] = descend(world, loaded(world, start), round, k)
            own[k], turns[k] = {n: local[k][n] for n in TOPS[layers]}, turns.get(k, 0) + 1
        theta = mean(local, world.shares(cohort))
    found = label("model", theta)
    for k in own:
        found |= {f"own of {k} {n}": v for n, v in own[k].items()}
        found |= {f"share of {k} {n}": v for n, v in shares[k].items()}
        found[f"turns of {k}"] = torch.tensor(turns[k])
    return found


def by_fedlens(world: World, recipe: FedALA) -> Values:
    """With names of shares and own weights in full: they lie in no tree of params."""
    outcome = by_package(world, recipe)
    kept = ("model", "turns")
    found = {name: value for name, value in outcome.values.items() if name.startswith(kept)}
    for k in outcome.engine.memories:
        memory = outcome.engine.memories.get(k)
        for what in ("own", "share"):
            found |= {f"{what} of {k} {n}": v for n, v in memory[what].items()}
    return found


@pytest.mark.parametrize("world", [WORLD, replace(WORLD, norm=False, momentum=0.0)], ids=["norms", "plain"])
@pytest.mark.parametrize("layers", [1, 2])
def test_fedala(layers, world):
    if layers == 2 and not world.norm:
        pytest.skip("the loop's names are those of a network with a norm")
    recipe = FedALA(share_rate=8.0, data=1.0, batch=50, mixed_layers=layers, first=3)
    found = by_fedlens(world, recipe)
    assert_same(found, fedala(world, 8.0, 3, layers))
    shares = torch.cat([v.flatten() for n, v in found.items() if n.startswith("share")])
    assert (shares < 1).any() and (shares >= 0).all() and (shares <= 1).all()


def test_batches_of_a_part_of_the_images():
    """Two thirds of 9, 4 and 6 images, two at a time: three, two and two batches a pass."""
    recipe = FedALA(share_rate=3.0, data=0.66, batch=2, first=2)
    assert [len(drawn(WORLD, 0, k, 0.66, 2)) for k in range(3)] == [3, 2, 2]
    assert_same(by_fedlens(WORLD, recipe), fedala(WORLD, 3.0, 2, part=0.66, batch=2))
    assert gap(by_fedlens(WORLD, replace(recipe, data=1.0)), fedala(WORLD, 3.0, 2, part=0.66, batch=2)) > 1e-6


def test_shares_that_never_move_make_it_fedavg():
    found, usual = by_package(WORLD, FedALA(share_rate=0.0)).values, by_package(WORLD, FedAvg()).values
    assert gap({n: found[n] for n in usual}, usual) < 1e-13
    assert gap({n: v for n, v in by_package(WORLD, FedALA(share_rate=50.0)).values.items() if n in usual}, usual) > 1e-6


@dataclass(frozen=True)
class NothingGlobal(FedALA):
    def initial_memory(self, client):
        memory = super().initial_memory(client)
        return memory.replace(share=memory.share.zeros())


def test_without_shares_the_head_is_never_overwritten():
    """FedPer, with a mean of all heads at the server that nobody takes."""
    found, usual = by_fedlens(World(), NothingGlobal(share_rate=0.0)), by_package(World(), FedPer()).values
    assert len(usual) > 8
    assert all(torch.equal(found[name.replace("private of", "own of")], value) for name, value in usual.items())


def test_a_client_predicts_with_the_mixture():
    """Before training with the mixture, which whoever never took part has not: it has the global model."""
    recipe = FedALA(share_rate=8.0, data=1.0, batch=50, first=3)
    world = World(((0, 1), (0, 1)))
    found = by_package(world, recipe)
    theta = {n.removeprefix("model "): v for n, v in found.values.items() if n.startswith("model ")}
    memory = found.engine.memories.get(0)
    rows = drawn(world, len(world.cohorts), 0, 1.0, 50)
    expected, _ = mixture(world, theta, dict(memory.own), dict(memory.share), rows, 8.0, 1)
    assert max((found.personal(0, recipe)[n] - expected[n]).abs().max() for n in expected) < 1e-13
    assert max((expected[n] - theta[n]).abs().max() for n in memory.own) > 1e-6
    assert all(torch.equal(found.personal(2, recipe)[n], theta[n]) for n in theta)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False)

    def features(self, x):
        return x

    def forward(self, x):
        return self.head(x)


def test_by_hand():
    """Own 0, global 1, f(w) = (w - 0.25)^2 / 2: the share goes from 1 to 0.25 in a pass, and stays."""
    net, one = Network(Line(), "fp64"), torch.ones(1, 1, dtype=torch.float64)
    data = Shard(Dataset(one, torch.zeros(1, dtype=torch.long)), torch.tensor([0]))

    def objective(client, weights, batch, out):
        return weighted((out.logits[:, 0] - 0.25) ** 2 / 2, batch)

    model = Tree(params=Tree({"head.weight": one}), buffers=Tree())
    own = Tree({"head.weight": one * 0})
    memory = Tree(own=own, share=Tree({"head.weight": one}), turns=torch.tensor(1))
    client = Client(net, Tree(model=model), memory, Tree(), objective, Sgd(), key=3, data=data)
    for passes in (1, 5):
        mixed, share = FedALA(first=passes).mixture(client)
        assert float(share["head.weight"]) == 0.25 == float(mixed.params["head.weight"])


@dataclass(frozen=True)
class MixesAnothers(FedALA):
    """As one public code does: what a worker had before is mixed in, that is, another client's."""

    def mixture(self, client):
        other = client.memory.own.map(lambda leaf: leaf.roll(1, 0))
        return super().mixture(replace(client, memory=client.memory.replace(own=other)))


def test_the_textbook_notices():
    found = by_fedlens(WORLD, MixesAnothers(share_rate=8.0, data=1.0, batch=50, first=3))
    assert gap(found, fedala(WORLD, 8.0, 3)) > 1e-4


def test_refused():
    with pytest.raises(BadInput, match="mixed_layers=3, but the network has 2 layers"):
        FedALA(mixed_layers=3).setup(Server(network(), Tree(), 2))
    with pytest.raises(BadInput, match=r"algorithm\.data"):
        config.read(None, ["algorithm=fedala", "algorithm.data=2"])
