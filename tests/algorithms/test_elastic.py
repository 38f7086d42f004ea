"""Elastic aggregation against a plain loop, its limit, and factors by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedlens import config
from fedlens.algorithms import Elastic, FedAvg
from fedlens.algorithms import elastic as module
from fedlens.core.batches import identity
from fedlens.core.errors import BadInput
from fedlens.core.objective import cross_entropy
from fedlens.core.rng import generator, key
from fedlens.core.tree import Tree
from personal import Values, assert_same, by_package, descend, gap, label, loaded, mean, weights
from scalar import number, scalar_run
from small import federation
from textbook import SEED, TWO_OF_THREE, World

WORLD = World(TWO_OF_THREE)


def sensitivity(world: World, theta: Values, round: int, k: int, mu: float, part: float, batch: int) -> Values:
    """Batch by batch of the images that are drawn: omega <- mu omega + (1 - mu) |slope|."""
    data, mine = federation(world.sizes, identity).data, federation(world.sizes, identity).train[k]
    order = torch.randperm(len(mine), generator=generator(key(key(SEED, "client", round, k), "sensitivity")))
    omega = {n: torch.zeros_like(p) for n, p in loaded(world, theta).named_parameters()}
    for rows in mine[order[: int(part * len(mine) + 0.5)]].split(batch):
        model = loaded(world, theta).eval()
        (model(data.x[rows]) ** 2).sum(1).mean().backward()
        omega = {n: mu * omega[n] + (1 - mu) * p.grad.abs() for n, p in model.named_parameters()}
    return omega


def elastic(world: World, tau: float, mu: float, whole: bool = False, part: float = 1.0, batch: int = 50) -> Values:
    theta = weights(world.model())
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        local = {k: descend(world, loaded(world, theta), round, k) for k in cohort}
        omega = mean({k: sensitivity(world, theta, round, k, mu, part, batch) for k in cohort}, p)
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


def test_batches_of_a_part_of_the_images():
    """Batches count less the longer they are past: two thirds of 9, 4 and 6 images, two at a time."""
    recipe = Elastic(tau=0.4, mu=0.6, batch=2, data=0.66)
    right = elastic(WORLD, 0.4, 0.6, part=0.66, batch=2)
    assert_same(by_package(WORLD, recipe).values, right)
    for other in (replace(recipe, mu=0.5), replace(recipe, data=1.0), replace(recipe, batch=3)):
        assert gap(by_package(WORLD, other).values, right) > 1e-5


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
    model = nn.Linear(1, 1, bias=False)  # |w x|^2 at w = 2 and x = 1 has a slope of 4
    nn.init.constant_(model.weight, 2.0)
    size = module.size_of_output(None, Tree(), Tree(weight=torch.ones(1)), Tree(logits=model(torch.ones(1, 1))))
    assert torch.autograd.grad(size, model.weight)[0].item() == 4
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
