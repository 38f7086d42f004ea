"""FedRoD against a plain loop with two losses one after the other, and its balanced loss by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import config
from fedlens.algorithms import FedAvg, FedRoD
from fedlens.core.algorithm import Client, Server
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.objective import cross_entropy
from fedlens.core.tree import Tree
from logits import counts
from personal import Values, assert_same, by_package, gap, label, loaded, mean, sgd, weights
from test_fedproto import TwoLayers
from textbook import TWO_OF_THREE, World

WORLD = World(TWO_OF_THREE, sizes=(13, 2, 9))  # whoever has two images lacks a class


def fedrod(world: World, gamma: float, copy: bool = False) -> Values:
    theta, heads = weights(world.model()), {}
    for round, cohort in enumerate(world.cohorts):
        local = {}
        for k in cohort:
            model, own = loaded(world, theta).train(), nn.Linear(64, 3).double()
            first = {n: theta[f"head.{n}"] * copy for n in ("weight", "bias")}
            own.load_state_dict(heads.get(k, first))
            prior = gamma * torch.tensor(counts(world, k)).double().log()
            for_model, for_own = (sgd(world, world.rate(round), part.parameters()) for part in (model, own))
            for x, y, weight in world.batches(round, k):
                z = model.features(x)
                logits = model.head(z)
                for_own.zero_grad()
                both = F.cross_entropy(logits.detach() + own(z.detach()), y, reduction="none")
                ((both * weight).sum() / weight.sum()).backward()
                for_model.zero_grad()
                balanced = F.cross_entropy(logits + prior, y, reduction="none")
                ((balanced * weight).sum() / weight.sum()).backward()
                for_own.step()
                for_model.step()
            local[k], heads[k] = weights(model), weights(own)
        theta = mean(local, world.shares(cohort))
    found = label("model", theta)
    for k, head in heads.items():
        found |= {f"head of {k} {name}": value for name, value in head.items()}
    return found


def by_fedlens(world: World, recipe: FedRoD) -> Values:
    """The global model and the clients' heads, which lie in no tree of params."""
    outcome = by_package(world, recipe)
    found = {name: value for name, value in outcome.values.items() if name.startswith("model ")}
    for k in outcome.engine.memories:
        found |= {f"head of {k} {name}": value for name, value in outcome.engine.memories.get(k).head.items()}
    return found


@pytest.mark.parametrize(
    ("world", "head"),
    [(WORLD, "zero"), (replace(WORLD, momentum=0.0), "copy"), (replace(WORLD, norm=False), "zero")],
    ids=["norms", "copied head", "no norms"],
)
def test_fedrod(world, head):
    assert_same(by_fedlens(world, FedRoD(gamma=0.8, head=head)), fedrod(world, 0.8, head == "copy"))


def test_without_gamma_the_global_model_is_that_of_fedavg():
    found, usual = by_package(WORLD, FedRoD(gamma=0.0)).values, by_package(WORLD, FedAvg()).values
    assert all(torch.equal(found[name], usual[name]) for name in usual)
    balanced = by_package(WORLD, FedRoD()).values
    assert max((balanced[name] - usual[name]).abs().max() for name in usual) > 1e-4


@dataclass(frozen=True)
class AsMany(FedRoD):
    """Every client has as many images of each class."""

    def initial_memory(self, client):
        memory = super().initial_memory(client)
        return memory.replace(counts=torch.full_like(memory.counts, 7))


def test_with_equal_counts_the_global_model_is_that_of_fedavg():
    found, usual = by_package(WORLD, AsMany()).values, by_package(WORLD, FedAvg()).values
    assert 0 < gap({name: found[name] for name in usual}, usual) < 1e-12


def test_both_heads_are_one():
    """The folded head gives the sum of both logits; one that never trained adds nothing."""
    found = by_package(WORLD, FedRoD())
    client = found.engine.open(replace(found.jobs[-1], download=FedRoD().broadcast(found.server)), 0)[0]
    x, own = client.test.x, client.memory.head
    out = client.net.forward(client.received.model, x)
    apart = client.net(FedRoD().personal(client), x) - (out.logits + F.linear(out.features, own.weight, own.bias))
    assert apart.abs().max() < 1e-13 and own.weight.abs().max() > 1e-3
    fresh = replace(client, memory=client.memory.replace(head=own.zeros()))
    assert torch.equal(client.net(FedRoD().personal(fresh), x), out.logits)


def test_by_hand():
    """Counts (1, 16), logits (0, 0), class 0: log 17. A class that is missing has no gradient."""
    for images, expected, slopes in (
        ([1, 16], 2.833213344056216, [-16 / 17, 16 / 17]),
        ([3, 0], 0.0, [0.0, 0.0]),
    ):
        z = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
        memory = Tree(counts=torch.tensor(images, dtype=torch.int32))
        client = Client(None, Tree(), memory, Tree(), cross_entropy, None)  # pyright: ignore[reportArgumentType]
        batch = Tree(y=torch.tensor([0]), weight=torch.ones(1).double())
        loss = FedRoD().loss(client, Tree(), batch, Tree(features=z, logits=z))
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-15)
        assert torch.autograd.grad(loss, z)[0][0].tolist() == pytest.approx(slopes, abs=1e-15)


@dataclass(frozen=True)
class TrainsTheBody(FedRoD):
    """As one public code does: the own head predicts alone, and its loss moves the body, too."""

    def loss(self, client, weights, batch, out):
        mine = F.linear(out.features, client.memory.head.weight, client.memory.head.bias)
        return super().loss(client, weights, batch, out) + cross_entropy(
            client, weights, batch, out.replace(logits=mine)
        )


def test_the_textbook_notices_a_head_that_trains_the_body():
    assert gap(by_fedlens(WORLD, TrainsTheBody(head="copy")), fedrod(WORLD, 1.0, copy=True)) > 1e-4


def test_refused():
    with pytest.raises(BadInput, match="fedrod needs a model whose head is one linear layer"):
        FedRoD().setup(Server(Network(TwoLayers(), "fp64"), Tree(), 2))
    with pytest.raises(BadInput, match=r"algorithm\.gamma"):
        config.read(None, ["algorithm=fedrod", "algorithm.gamma=-1"])
