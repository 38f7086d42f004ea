"""FedDBE against a plain loop in which the offset is added to the features, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import config
from fedlens.algorithms import FedAvg, FedDBE
from fedlens.algorithms.feddbe import FeatureMeans
from fedlens.core.algorithm import Client, Stage
from fedlens.core.batches import Dataset, Federation
from fedlens.core.cohort import Everyone
from fedlens.core.errors import BadInput
from fedlens.core.evaluate import Evaluate
from fedlens.core.network import Network
from fedlens.core.objective import cross_entropy
from fedlens.core.optimizer import Sgd
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from personal import Values, assert_same, by_package, gap, label, loaded, mean, weights
from scalar import Number, scalar_run
from textbook import EVERYONE, NEVER_THE_LAST, TWO_OF_THREE, World, sgd


@dataclass(frozen=True)
class AfterAnExchange(World):
    """The first of its cohorts is everyone, in the first exchange, which is no round of the plan."""

    def stage(self):
        return replace(super().stage(), rounds=len(self.cohorts) - 1)


WORLDS = {
    "everyone": AfterAnExchange(EVERYONE),
    "two of three": AfterAnExchange((EVERYONE[0], *TWO_OF_THREE), momentum=0.0),
    "one never comes": AfterAnExchange((EVERYONE[0], *NEVER_THE_LAST)),
    "smaller than a batch": AfterAnExchange((EVERYONE[0], *TWO_OF_THREE), sizes=(1, 3, 2), batch=8, norm=False),
}
WORLD = WORLDS["two of three"]


def trained(world, start: Values, s, centre, round: int, at: int, k: int, kappa: float, mu: float):
    """(weights, offset, running mean). Without a centre the offset is no part of it."""
    model, s, r = loaded(world, start).train(), s.clone().requires_grad_(), torch.zeros(64).double()
    descent = sgd(world, world.rate(at), [*model.parameters(), *([] if centre is None else [s])])
    for x, y, weight in world.batches(round, k):
        descent.zero_grad()
        z = model.features(x)
        r = (1 - mu) * r.detach() + mu * (z * weight[:, None]).sum(0) / weight.sum()
        value = (F.cross_entropy(model.head(z + s), y, reduction="none") * weight).sum() / weight.sum()
        if centre is not None:
            value = value + kappa * sum((r - centre) ** 2) / 64 / 2
        value.backward()
        descent.step()
    return weights(model), s.detach(), r.detach()


def feddbe(world, kappa: float, mu: float, server_lr: float = 1.0) -> Values:
    theta, none, offsets = weights(world.model()), torch.zeros(64).double(), {}
    first, everyone = {}, tuple(range(len(world.sizes)))
    for k in everyone:
        first[k] = {"mean": trained(world, theta, none, None, 0, 0, k, kappa, mu)[2]}
    centre = mean(first, world.shares(everyone))["mean"]
    for round, cohort in enumerate(world.cohorts[1:], 1):
        local = {}
        for k in cohort:
            s = offsets.get(k, none)
            local[k], offsets[k], _ = trained(world, theta, s, centre, round, round - 1, k, kappa, mu)
        middle = mean(local, world.shares(cohort))
        theta = {n: theta[n] + (1.0 if "running" in n else server_lr) * (middle[n] - theta[n]) for n in theta}
    return label("model", theta) | {"centre": centre, **{f"offset of {k}": s for k, s in offsets.items()}}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_feddbe(world):
    assert_same(by_package(world, FedDBE(kappa=3.0)).values, feddbe(world, 3.0, 0.1))


def test_other_settings():
    found = by_package(WORLD, FedDBE(kappa=0.0, momentum=0.7, server_lr=0.5)).values
    assert_same(found, feddbe(WORLD, 0.0, 0.7, 0.5))


@dataclass(frozen=True)
class Fixed(FedDBE):
    """No client has an offset."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(offset=client.memory.offset)


class Later:
    """FedAvg after a round in which nothing moves."""

    def stages(self, plan):
        for stage in FedAvg().stages(plan):
            yield from (stage.errand(Evaluate(base=stage.algorithm)), stage)


def test_without_offsets_and_centre_it_is_fedavg():
    """In the first step of a round the offsets are zero."""
    world = replace(WORLD, steps=1)
    found, usual = by_package(world, Fixed(kappa=0.0)).values, by_package(world, Later()).values
    assert len(usual) == 8 and all(torch.equal(found[name], usual[name]) for name in usual)


# ---- by hand ---------------------------------------------------------------------------------------------------------
class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1)
        with torch.no_grad():
            self.head.weight.fill_(3.0)
            self.head.bias.fill_(4.0)

    def features(self, x):
        return x

    def forward(self, x):
        return self.head(x)


def test_by_hand():
    """W = 3 and b = 4 of z = 1 and s = 2 make 13; batches of mean 1 are 0.1, 0.19 and 0.271 in the running mean."""
    net = Network(Line(), "fp64")
    received = Tree(model=net.initial_weights(), centre=torch.zeros(1).double())
    client = Client(net, received, Tree(offset=torch.full((1,), 2.0).double()), Tree(), cross_entropy, Sgd())
    assert net(FedDBE().personal(client), torch.ones(1, 1).double()).item() == 13
    one = {0: torch.tensor([0])}
    data = Federation(Dataset(torch.ones(1, 1).double(), torch.zeros(1, dtype=torch.long)), one, one, one[0])
    for steps, expected in ((1, 0.1), (2, 0.19), (3, 0.271)):
        plan = Stage(None, 1, Everyone(), Sgd(0.1), steps=steps, size=1)
        state = run(FedDBE(), net, Sequential(net, data, checked=True), plan).state
        assert state.centre.item() == pytest.approx(expected, abs=1e-15)


def test_a_clients_own_model_is_the_one_with_the_offset():
    found = by_package(WORLD, FedDBE())
    own, x = loaded(WORLD, found.personal(0, FedDBE())).eval(), found.engine.federation.data.x[:5]
    model = loaded(WORLD, {n[6:]: v for n, v in found.values.items() if n.startswith("model ")}).eval()
    offset = found.values["offset of 0"]
    assert offset.abs().max() > 1e-4
    assert (own(x) - model.head(model.features(x) + offset)).abs().max() < 1e-14


@dataclass(frozen=True)
class EveryRow(FedDBE):
    """Images that only fill up a batch count in its mean."""

    def step(self, client, local, batch):
        weight = torch.ones_like(batch.weight)
        loss = lambda client, weights, inner, out: cross_entropy(client, weights, batch, out)  # noqa: E731
        return super().step(replace(client, objective=loss), local, batch.replace(weight=weight))


def test_the_textbook_notices():
    right = feddbe(WORLD, 3.0, 0.1)
    for wrong in (EveryRow(kappa=3.0), FedDBE(kappa=0.0), Fixed(kappa=3.0)):
        assert gap(by_package(WORLD, wrong).values, right) > 1e-6


def test_refused():
    with pytest.raises(BadInput, match="feddbe needs a model whose head is one linear layer"):
        scalar_run(FedDBE(), module=Number)
    asked = config.read(None, ["algorithm=feddbe", "uplink=dp", "local.momentum=0"])
    alone = "uplink=dp does not act on this: the mean of each client's features leaves once, unprotected"
    assert asked._start_notes([10]) == (alone,)
    with pytest.raises(BadInput, match=r"algorithm\.momentum"):
        config.read(None, ["algorithm=feddbe", "algorithm.momentum=2"])
    first, then = FedDBE().stages(WORLD.stage())
    assert isinstance(first.algorithm, FeatureMeans) and (first.rounds, first.epochs) == (1, 2) and then.rounds == 3
