"""Per-FedAvg against a plain loop, of first order and with differences of gradients, and one step by hand."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedlens import config
from fedlens.algorithms import FedAvg, PerFedAvg
from fedlens.algorithms.perfedavg import part
from fedlens.core.algorithm import Algorithm
from fedlens.core.batches import identity
from fedlens.core.objective import uniformly
from fedlens.core.tree import Tree
from personal import Values, assert_same, by_package, gap, label, loaded, mean, sgd, weights
from scalar import number, scalar_run
from small import federation
from textbook import TWO_OF_THREE, World

WORLD = World(TWO_OF_THREE, momentum=0.0)


def rows(batch, k: int, of: int):
    """Every `of`-th image; where none counts, all of them do."""
    x, y, weight = (piece[k::of] for piece in batch)
    return x, y, weight if weight.sum() else torch.ones_like(weight)


def slope(model, params, batch) -> Values:
    x, y, weight = batch
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    losses = F.cross_entropy(functional_call(model, leaves, (x,)), y, reduction="none")
    found = torch.autograd.grad((losses * weight).sum() / weight.sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def perfedavg(world: World, alpha: float, delta: float | None = None, same: bool = False) -> Values:
    theta = weights(world.model())
    for round, cohort in enumerate(world.cohorts):
        local = {}
        for k in cohort:
            model = loaded(world, theta).train()
            descent = sgd(world, world.rate(round), model.parameters())
            for batch in world.batches(round, k):
                of = 2 if delta is None else 3
                parts = [batch] * 3 if same or len(batch[1]) < of else [rows(batch, j % of, of) for j in range(3)]
                w = {n: p.detach().clone() for n, p in model.named_parameters()}
                first = slope(model, w, parts[0])  # moves the statistics; a copy of the model does not
                other = copy.deepcopy(model)
                g = slope(other, {n: w[n] - alpha * first[n] for n in w}, parts[1])
                if delta is not None:
                    ahead = slope(other, {n: w[n] + delta * g[n] for n in w}, parts[2])
                    behind = slope(other, {n: w[n] - delta * g[n] for n in w}, parts[2])
                    g = {n: g[n] - alpha * (ahead[n] - behind[n]) / (2 * delta) for n in w}
                for n, p in model.named_parameters():
                    p.grad = g[n]
                descent.step()
            local[k] = weights(model)
        theta = mean(local, world.shares(cohort, uniformly))
    return label("model", theta)


@pytest.mark.parametrize("world", [WORLD, replace(WORLD, norm=False, momentum=0.9)], ids=["norms", "plain"])
@pytest.mark.parametrize("batches", ["split", "same"])
@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_perfedavg(order, batches, world):
    """The distance is wide, so that rounding is not divided by a small number."""
    recipe = PerFedAvg(alpha=0.3, order=order, delta=0.5, batches=batches)
    expected = perfedavg(world, 0.3, 0.5 if order == "hessian_free" else None, batches == "same")
    assert_same(by_package(world, recipe).values, expected)


@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_without_alpha_it_is_fedavg(order):
    world = replace(WORLD, momentum=0.9, weighting=uniformly)
    recipe = PerFedAvg(alpha=0.0, order=order, batches="same")
    found, usual = by_package(world, recipe).values, by_package(world, FedAvg()).values
    assert all(torch.equal(found[name], usual[name]) for name in usual)
    assert gap(by_package(world, replace(recipe, alpha=0.3)).values, usual) > 1e-4


@pytest.mark.parametrize(("order", "ends"), [("first", (0.82, 2.26)), ("hessian_free", (0.838, 1.882))])
@pytest.mark.parametrize("delta", [1e-2, 1.0])
def test_by_hand(order, ends, delta):
    """On parabolas differences of gradients are exact, however wide."""
    server = scalar_run(PerFedAvg(alpha=0.1, order=order, delta=delta), steps=1, rate=0.2)
    assert number(server) == pytest.approx(sum(ends) / 2, abs=1e-12)


def test_a_client_predicts_after_one_step_on_its_own_images():
    recipe = PerFedAvg(alpha=0.2)
    found = by_package(WORLD, recipe)
    data, mine = federation(WORLD.sizes, identity).data, federation(WORLD.sizes, identity).train[0]
    model = loaded(WORLD, {n.removeprefix("model "): v for n, v in found.values.items()}).eval()
    F.cross_entropy(model(data.x[mine]), data.y[mine]).backward()
    personal = found.personal(0, recipe)
    for n, p in model.named_parameters():
        assert (personal[n] - (p - 0.2 * p.grad)).abs().max() < 1e-14
        assert (personal[n] - p).abs().max() > 1e-6
    assert torch.equal(personal["norm.running_mean"], found.values["model norm.running_mean"])


def test_parts_of_a_batch():
    weight = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    batch = Tree(x=torch.arange(5.0), y=torch.arange(5), weight=weight, key=torch.tensor(7))
    assert part(batch, 0, 2).y.tolist() == [0, 2, 4] and part(batch, 0, 2).weight.tolist() == [1, 0, 0]
    assert part(batch, 1, 2).y.tolist() == [1, 3] and part(batch, 1, 2).weight.tolist() == [1, 1]
    assert int(part(batch, 0, 2).key) != int(part(batch, 1, 2).key)
    one = batch.map(lambda leaf: leaf[:1] if leaf.dim() else leaf)
    assert all(each is one for each in PerFedAvg().parts(one))


@dataclass(frozen=True)
class NeverGoesBack(PerFedAvg):
    """As one public code does: the inner step stays, which makes two plain steps of it."""

    def step(self, client, local, batch):
        first, second, _ = self.parts(batch)
        inner = Algorithm.gradient(self, client, local, first)
        there = local.params - inner * self.alpha
        return super().step(client, local.replace(params=there), second)


def test_the_textbook_notices_an_inner_step_that_stays():
    assert gap(by_package(WORLD, NeverGoesBack(alpha=0.3)).values, perfedavg(WORLD, 0.3)) > 1e-4


def test_spoken_of():
    usual, plain = (config.read(None, ["algorithm=perfedavg/hf", *more]) for more in ((), ("local.momentum=0",)))
    assert usual.algorithm == PerFedAvg(order="hessian_free")
    assert usual._start_notes([10]) == (
        "perfedavg means plain local steps, and local.momentum is 0.9: try local.momentum=0",
    )
    assert plain._start_notes([10]) == ()
