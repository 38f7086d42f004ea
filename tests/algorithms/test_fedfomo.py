"""FedFomo against a plain loop over all clients' models, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedlens import config
from fedlens.algorithms import FedFomo, Local
from fedlens.core.algorithm import Client
from fedlens.core.batches import Dataset, Shard, identity, plan, split_holdout
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import key
from fedlens.core.tree import Tree
from personal import Values, by_package, gap, label, loaded, loss, weights
from scalar import Number, half_square
from small import federation
from textbook import SEED, TOLERANCE, TWO_OF_THREE, World, sgd

WORLDS = {"everyone": World(), "two of three": World(TWO_OF_THREE, momentum=0.0), "no norms": World(norm=False)}
SHARE = 0.3


def split(world: World, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whom a client trains on, and whom it holds back: which these are is the package's draw."""
    mine = federation(world.sizes, identity).train[k]
    return split_holdout(mine, round(SHARE * len(mine)), k)


def descended(world: World, values: Values, round: int, k: int) -> Values:
    data, mine = federation(world.sizes, identity).data, split(world, k)[0]
    drawn = plan(len(mine), world.batch, key(SEED, "batches", round, k), epochs=world.epochs)
    model = loaded(world, values).train()
    descent = sgd(world, world.rate(round), model.parameters())
    for row, weight in zip(*drawn[:2], strict=True):
        descent.zero_grad()
        loss(model, data.x[mine[row]], data.y[mine[row]], weight).backward()
        descent.step()
    return weights(model)


def held_loss(world: World, values: Values, k: int) -> float:
    data, held = federation(world.sizes, identity).data, split(world, k)[1]
    with torch.no_grad():
        logits = loaded(world, values).eval()(data.x[held])
    return float(torch.nn.functional.cross_entropy(logits, data.y[held]))


def far(a: Values, b: Values, norm: int) -> float:
    return float(torch.cat([(a[n] - b[n]).flatten() for n in a if "running" not in n]).norm(norm))


def fedfomo(world: World, norm: int = 2) -> tuple[Values, float]:
    """(what is known at the end, the least share that any client took from another)."""
    own, last, shares = {}, {}, []
    for round, cohort in enumerate(world.cohorts):
        new = {}
        for k in cohort:
            mine, start = own.get(k, weights(world.model())), None
            if len(split(world, k)[1]):
                here = held_loss(world, mine, k)
                raw = {j: (here - held_loss(world, m, k)) / far(m, mine, norm) for j, m in last.items() if j != k}
                raw = {j: max(value, 0.0) for j, value in raw.items()}
                if sum(raw.values()):
                    start = {n: sum(w * last[j][n] for j, w in raw.items()) / sum(raw.values()) for n in mine}
                    shares.append(max(raw.values()) / sum(raw.values()))
            new[k] = descended(world, start or mine, round, k)
        own, last = own | new, new
    found = {}
    for k, model in own.items():
        found |= label(f"private of {k}", model)
    stacks = {f"stacked {n}": torch.stack([m[n] for m in last.values()]) for n in weights(world.model())}
    return found | stacks, min(shares, default=1.0)


def known(found) -> Values:
    """Clients' models, and what the server hands on."""
    models = found.server.state.models
    mine = {n: v for n, v in found.values.items() if n.startswith("private")}
    return mine | {f"stacked {n}": v for n, v in (*models.params.items(), *models.buffers.items())}


@pytest.mark.parametrize("distance", ["l2", "l1"])
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_fedfomo(world, distance):
    found = known(by_package(world, FedFomo(SHARE, distance)))
    expected, least = fedfomo(world, 2 if distance == "l2" else 1)
    assert len(found) > 8 and gap(found, expected) <= TOLERANCE
    assert world is not WORLDS["everyone"] or least < 1  # somebody mixed two models


@dataclass(frozen=True)
class Worse(FedFomo):
    """Nobody's model is ever better."""

    def loss_of(self, client, weights):
        return 0.0


@dataclass(frozen=True)
class Alone(Local):
    """Local, with as many images held back."""

    def holdout_size(self, examples):
        return round(SHARE * examples)


def test_where_nobody_is_better_it_is_local():
    world = WORLDS["everyone"]
    found, usual = by_package(world, Worse(SHARE)).values, by_package(world, Alone()).values
    assert len(usual) > 8 and all(torch.equal(found[name], usual[name]) for name in usual)
    one = World(((0,), (0,), (0,)))
    found, usual = by_package(one, FedFomo(SHARE)).values, by_package(one, Alone()).values
    assert len(usual) > 4 and all(torch.equal(found[name], usual[name]) for name in usual)


@dataclass(frozen=True)
class ByHand(FedFomo):
    """The loss of a number x is x^2 / 2."""

    def loss_of(self, client, weights):
        return float(weights.params["head.w"]) ** 2 / 2


def start_of(own: float, others: list[float], held: int = 1, **settings) -> float:
    net = Network(Number(), "fp64")
    models = Tree(params=Tree({"head.w": torch.tensor(others).double()}), buffers=Tree())
    received = Tree(models=models, tickets=torch.arange(len(others)) + 1)
    private = net.initial_weights().map(lambda leaf: torch.full_like(leaf, own))
    memory = Tree(private=private, ticket=torch.tensor(0))
    data = Shard(Dataset(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), identity), torch.arange(held))
    client = Client(net, received, memory, Tree(), half_square, Sgd(), held=data)
    return float(ByHand(**settings).start(client).params["head.w"])


def test_by_hand():
    """Own 1, others 0.5 and 2: what they gain by the way is 0.75 and less than nothing, so that all goes to 0.5."""
    assert start_of(1.0, [0.5, 2.0]) == 0.5
    # 0.5 gains 0.375 / 0.5 = 0.75, and 0 gains 0.5 / 1: shares 0.6 and 0.4.
    assert start_of(1.0, [0.5, 0.0]) == pytest.approx(0.3, abs=1e-15)
    assert start_of(1.0, [1.0, float("nan")]) == 1.0  # its own values again, and a model that diverged
    assert start_of(1.0, [0.5], held=0) == start_of(1.0, []) == 1.0


@dataclass(frozen=True)
class OnTrainingData(FedFomo):
    """As one public code: judged on images that were trained on."""

    def loss_of(self, client, weights):
        return super().loss_of(replace(client, held=client.data), weights)


@dataclass(frozen=True)
class NormsStay(FedFomo):
    """Statistics of norms are not mixed."""

    def start(self, client):
        return super().start(client).replace(buffers=client.memory.private.buffers)


def test_the_textbook_notices():
    right = fedfomo(WORLDS["everyone"])[0]
    for wrong in (OnTrainingData(SHARE), NormsStay(SHARE)):
        assert gap(known(by_package(WORLDS["everyone"], wrong)), right) > 1e-4


def test_refused_and_told():
    with pytest.raises(BadInput, match="fedfomo has no server_lr"):
        FedFomo(server_lr=0.5)
    with pytest.raises(BadInput, match=r"algorithm\.holdout is 1"):
        config.read(None, ["algorithm=fedfomo", "algorithm.holdout=1"])
    told = config.read(None, ["algorithm=fedfomo"]).discloses
    assert told == {"FedFomo": "every client's model reaches all clients of the next round, unprotected"}
