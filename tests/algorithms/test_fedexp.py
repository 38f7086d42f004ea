"""FedExP against a plain loop, and its rate by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedlens import config
from fedlens.algorithms import FedAvg, FedExP
from fedlens.core.algorithm import Server
from fedlens.core.errors import BadInput
from fedlens.core.objective import uniformly
from fedlens.core.tree import Tree, dot, mean
from personal import Values, assert_same, by_package, descend, gap, label, loaded, weights
from scalar import number, scalar_run
from textbook import World, total

MANY = ((0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (0, 2, 3, 4, 5))
WORLD = World(MANY, sizes=(9, 4, 7, 5, 6, 3), momentum=0.0, epochs=1)  # two clients cannot disagree enough


def square(step: Values) -> float:
    return sum(float((part * part).sum()) for name, part in step.items() if "running" not in name)


def fedexp(world: World, epsilon: float) -> Values:
    theta = before = weights(world.model())
    rate = 1.0
    for round, cohort in enumerate(world.cohorts):
        p, steps = world.shares(cohort), {}
        for k in cohort:
            end = descend(world, loaded(world, theta), round, k)
            steps[k] = {name: end[name] - theta[name] for name in theta}
        d = {name: total(p[k] * steps[k][name] for k in cohort) for name in theta}
        rate = max(1.0, sum(p[k] * square(steps[k]) for k in cohort) / (2 * (square(d) + epsilon)))
        before, theta = theta, {n: theta[n] + (1.0 if "running" in n else rate) * d[n] for n in theta}
    return label("model", theta) | label("previous", before) | {"rate": torch.tensor(rate, dtype=torch.float64)}


@pytest.mark.parametrize("world", [WORLD, replace(WORLD, weighting=uniformly)], ids=["by samples", "alike"])
def test_fedexp(world):
    """With an epsilon so small that the server goes further than the mean in some round."""
    outcome = by_package(world, FedExP(epsilon=1e-6))
    assert_same(outcome.values, fedexp(world, 1e-6))
    assert gap(outcome.values, fedexp(world, 1e12)) > 1e-4
    judged = FedExP().global_model(outcome.server.state)
    for name, value in {**judged.params, **judged.buffers}.items():
        middle = (outcome.values[f"model {name}"] + outcome.values[f"previous {name}"]) / 2
        assert (value - middle).abs().max() < 1e-15


def test_with_a_large_epsilon_it_is_fedavg():
    found, usual = by_package(WORLD, FedExP(epsilon=1e12, judge="last")).values, by_package(WORLD, FedAvg()).values
    assert found.keys() - usual.keys() == {"rate"} and all(torch.equal(found[name], usual[name]) for name in usual)


@pytest.mark.parametrize(
    ("steps", "rate"),
    [([[1.0, 2.0]] * 3, 1.0), (torch.eye(2), 1.0), (torch.eye(6), 3.0), ([[0.0, 0.0]], 1.0)],
    ids=["equal", "two orthogonal", "six orthogonal", "nobody moved"],
)
def test_the_rate(steps, rate):
    rows = torch.as_tensor(steps, dtype=torch.float64)
    uploads = [Tree(delta=Tree(params=Tree(w=row), buffers=Tree()), weight=torch.tensor(1.0)) for row in rows]
    model = Tree(params=Tree(w=torch.zeros_like(rows[0])), buffers=Tree())
    server = Server(None, Tree(model=model, previous=model, rate=torch.ones(()).double()), 1)  # pyright: ignore
    state = FedExP(epsilon=0.0).aggregate(server, uploads)
    assert float(state.rate) == pytest.approx(rate, abs=1e-15)
    assert (state.model.params.w - rate * rows.mean(0)).abs().max() < 1e-15


def test_by_hand():
    server = scalar_run(FedExP())
    assert float(server.state.rate) == pytest.approx(1.3208490775727937, abs=1e-14)
    assert number(server) == pytest.approx(1.884968881973772, abs=1e-14)
    assert number(server, FedExP()) == pytest.approx((1 + 1.884968881973772) / 2, abs=1e-14)


@dataclass(frozen=True)
class Extrapolates(FedExP):
    """As one public code does: running statistics go further, too."""

    def aggregate(self, server, uploads):
        state = super().aggregate(server, uploads)
        delta = mean([u.delta for u in uploads], [u.weight for u in uploads])
        return state.replace(model=server.state.model + delta * state.rate)


@dataclass(frozen=True)
class CountsAlike(FedExP):
    """Another's: the mean is weighted, its rate is not."""

    def aggregate(self, server, uploads):
        delta = mean([u.delta for u in uploads], [u.weight for u in uploads]).params
        lengths = sum(float(dot(u.delta.params, u.delta.params)) for u in uploads) / len(uploads)
        rate = max(1.0, lengths / 2 / (float(dot(delta, delta)) + self.epsilon))
        state = super().aggregate(server, uploads)
        params = server.state.model.params + delta * rate
        return state.replace(model=state.model.replace(params=params), rate=torch.full_like(state.rate, rate))


@pytest.mark.parametrize("mutant", [Extrapolates, CountsAlike])
def test_the_textbook_notices(mutant):
    assert gap(by_package(WORLD, mutant(epsilon=1e-6)).values, fedexp(WORLD, 1e-6)) > 1e-6


def test_refused():
    with pytest.raises(BadInput, match=r"leave algorithm\.server_lr at 1"):
        config.read(None, ["algorithm=fedexp", "algorithm.server_lr=0.5"])
    assert config.read(None, ["algorithm=fedexp/emnist"]).algorithm == FedExP(epsilon=0.1)
