"""What a step of PSE launches, and that what several of its passes share changes no bit."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedlens.algorithms import PSE, FedRep
from fedlens.core.network import Network
from fedlens.core.tree import Tree, grad
from fedlens.engines.sequential import Sequential
from fedlens.models.pse_net import PseNet
from small import same
from test_pse import by_package, federation, tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "steps.py"))


@pytest.fixture
def halved(monkeypatch):
    """Weights are made bfloat16 before a pass, as on a GPU."""
    monkeypatch.setattr(Network, "_halves", lambda net, like: net.precision == "bf16")


def test_a_step_of_pse_beside_one_of_fedrep(steps, halved, monkeypatch):
    """By operations that launch something. The aim of 1.8 is one of milliseconds on a GPU."""
    operations = steps["operations"]
    in_halves = lambda work, *_: steps["Lanes"](*steps["parts"](work, "bf16", "cpu"))  # noqa: E731
    monkeypatch.setitem(operations.__globals__, "engine_of", in_halves)
    work = replace(steps["PSE_WORK"], clients=1, steps=1)
    fedrep, pse, v1 = (
        operations(work, recipe)["kernels"]
        for recipe in (FedRep(private="classifier", head_epochs=1), PSE(), PSE(excite="none"))
    )
    assert pse <= 1.95 * fedrep and v1 <= 1.25 * fedrep, (fedrep, pse, v1)


def test_weights_are_made_smaller_once(monkeypatch):
    """The same bits as when autocast casts each weight at each use."""

    def trained() -> Tree:
        net = tiny(PseNet(count=2, hidden=8), widths=(4, 8, 8), scale=1.0, precision="bf16")
        data = federation()
        data = replace(data, data=replace(data.data, x=data.data.x.float()))
        return by_package(PSE(xi=0.5), net, data, engine=Sequential)[0]

    usual = trained()
    monkeypatch.setattr(Network, "_halves", lambda net, like: net.precision == "bf16")
    assert same(trained(), usual)


def test_a_parameter_that_several_passes_share_has_one_gradient(halved):
    net = tiny(scale=1.0, precision="bf16")
    params = net.initial_weights().params.map(lambda p: p.requires_grad_())
    once = net.in_halves(params)
    assert once.keys() == params.keys() and once["head.weight"].dtype == torch.bfloat16
    assert once["position"] is params["position"]  # no matrix product: it stays as it is
    assert net.in_halves(once)["head.weight"] is once["head.weight"]
    some = once["head.weight"].sum() + once["hidden.bias"].sum()
    found = grad(some, params)
    assert all(g.dtype == torch.float32 for g in found.leaves())
    assert found["head.weight"].eq(1).all() and not found["query.conv.weight"].any()


def test_a_gradient_is_laid_out_like_its_parameter():
    """Sides of length one may have any stride: no copy is made for these."""
    p = torch.zeros(4, 3, 1, 1, requires_grad=True)
    other = torch.ones(4, 3, 1, 1).as_strided((4, 3, 1, 1), (3, 1, 3, 3))
    found = grad((p * other).sum(), Tree(p=p)).p
    assert found.stride() == p.stride() and found.eq(1).all()
    turned = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    found = grad((turned * torch.arange(48.0).view(4, 3, 2, 2)).sum(), Tree(p=turned)).p
    assert found.stride() == turned.stride() and torch.equal(found, torch.arange(48.0).view(4, 3, 2, 2))
