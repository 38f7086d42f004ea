"""Elastic aggregation against a plain loop, its limit, and factors by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedlens import config
from fedlens.algorithms import Elastic, FedAvg
from fedlens.algorithms import elastic as module
from fedlens.core.batches import identity
from fedlens.core.errors import BadInput
from fedlens.core.objective import cross_entropy
from personal import Values, assert_same, by_package, descend, gap, label, loaded, mean, weights
from scalar import number, scalar_run
from small import federation
from textbook import TWO_OF_THREE, World

WORLD = World(TWO_OF_THREE)


def sensitivity(world: World, theta: Values, k: int) -> Values:
    """All of a client's images in one batch, so that the order in which they are drawn does not matter."""
    data, mine = federation(world.sizes, identity).data, federation(world.sizes, identity).train[k]
    model = loaded(world, theta).eval()
    (model(data.x[mine]) ** 2).sum(1).mean().backward()
    return {n: p.grad.abs() for n, p in model.named_parameters()}


def elastic(world: World, tau: float, mu: float, whole: bool = False) -> Values:
    theta = weights(world.model())
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        local = {k: descend(world, loaded(world, theta), round, k) for k in cohort}
        omega = mean({k: {n: (1 - mu) * v for n, v in sensitivity(world, theta, k).items()} for k in cohort}, p)
        most = max(float(v.max()) for v in omega.values())
        middle = mean(local, p)
        for n in theta:
            factor = 1 + tau - omega[n] / (most if whole else omega[n].max()) if n in omega else 1.0
            theta = theta | {n: theta[n] + factor * (middle[n] - theta[n])}
    return label("model", theta)


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_elastic(scope):
    found = by_package(WORLD, Elastic(tau=0.4, mu=0.9, batch=50, scope=scope))
    assert_same(found.values, elastic(WORLD, 0.4, 0.9, scope == "model"))
    assert gap(found.values, by_package(WORLD, FedAvg()).values) > 1e-3


def test_batches_count_less_the_longer_they_are_past():
    """Two batches of one image each: mu (1 - mu) of the first and 1 - mu of the second."""
    world = World(((0,),), sizes=(2,), epochs=1)
    one = by_package(world, Elastic(mu=0.0, batch=1)).replies[0][0].upload.sensitivity
    both = by_package(world, Elastic(mu=0.6, batch=1)).replies[0][0].upload.sensitivity
    middle = by_package(world, Elastic(mu=0.0, batch=2)).replies[0][0].upload.sensitivity
    assert (both["head.bias"] - 0.4 * one["head.bias"]).abs().max() > 1e-6
    assert all((both[n] - 0.4 * one[n]).min() >= 0 for n in both) and middle.keys() == one.keys()


@dataclass(frozen=True)
class AllAlike(Elastic):
    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload.replace(sensitivity=upload.sensitivity.map(torch.ones_like)), memory


def test_where_all_weights_are_as_sensitive_tau_is_the_servers_rate():
    found, usual = by_package(WORLD, AllAlike(tau=0.4)).values, by_package(WORLD, FedAvg(server_lr=0.4)).values
    assert gap(found, usual) < 1e-15


def test_by_hand():
    """Of one weight alone the most sensitive is that one: FedAvg's step of 0.67, times tau."""
    assert number(scalar_run(Elastic(tau=0.5))) == pytest.approx(1 + 0.5 * 0.67, abs=1e-15)
    omega = torch.tensor([1.0, 2.0, 4.0])
    assert Elastic().factor(omega, omega.max()).tolist() == [1.25, 1.0, 0.5]
    assert Elastic().factor(omega * 0, omega.max() * 0).tolist() == [1.0, 1.0, 1.0]


def test_the_textbook_notices_labels(monkeypatch):
    """As one public code does: the loss in place of the outputs."""
    monkeypatch.setattr(module, "size_of_output", cross_entropy)
    assert gap(by_package(WORLD, Elastic(tau=0.4, mu=0.9, batch=50)).values, elastic(WORLD, 0.4, 0.9)) > 1e-4


def test_refused():
    with pytest.raises(BadInput, match=r"algorithm\.mu"):
        config.read(None, ["algorithm=elastic", "algorithm.mu=1"])
    assert "sensitive" in replace(config.read(None, ["algorithm=elastic"])).discloses["Elastic"]
