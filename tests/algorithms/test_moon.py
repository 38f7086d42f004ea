"""MOON against a plain loop."""

from __future__ import annotations

import pytest
import torch

from fedlens.algorithms import FedAvg, Moon
from fedlens.core.algorithm import Algorithm
from fedlens.core.tree import Tree
from terms import BACK_AGAIN, SMALL, moon, with_term, worlds
from textbook import (
    EVERYONE,
    World,
    assert_same,
    far,
    loss,
    sgd,
    vector,
)


@worlds
def test_moon(world):
    assert_same(world.run(Moon(mu=0.7)).values, moon(world, 0.7, 0.5))


@pytest.mark.parametrize(("mu", "temperature", "server_lr"), [(5.0, 0.5, 1.0), (1.0, 0.05, 1.0), (0.7, 2.0, 0.5)])
@pytest.mark.parametrize("world", [BACK_AGAIN, SMALL], ids=["back again", "small clients"])
def test_moon_with_other_settings(world, mu, temperature, server_lr):
    found = world.run(Moon(mu=mu, temperature=temperature, server_lr=server_lr)).values
    assert_same(found, moon(world, mu, temperature, server_lr))


def test_moon_with_own_statistics():
    found = BACK_AGAIN.run(Moon(mu=0.7), buffers="local").values
    assert_same(found, moon(BACK_AGAIN, 0.7, 0.5, own=True))


def test_a_first_participation_has_no_term():
    """Not even by rounding: the two gradients cancel before they meet the loss's."""
    for world in (World(EVERYONE[:1]), World(((0,), (1,), (2,)))):
        found, plain = world.run(Moon(mu=5.0)).values, world.run(FedAvg()).values
        assert all(torch.equal(found[name], plain[name]) for name in plain)


@worlds
def test_moon_without_mu_is_fedavg(world):
    found, plain = world.run(Moon(mu=0.0)).values, world.run(FedAvg()).values
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    some = world.run(Moon(mu=0.1)).values
    assert max(far({name: some[name] for name in plain}, plain).values()) > 1e-5


class EvaluationFeatures(Moon):
    """Contrasts features of an evaluation pass."""

    def loss(self, client, weights, batch, out):
        still = client.net.forward(Tree(params=weights.params, buffers=weights.buffers.clone()), batch.x)
        return super().loss(client, weights, batch, out.replace(features=still.features))


class Unweighted(Moon):
    """Wrapped examples count in the term."""

    def loss(self, client, weights, batch, out):
        ones = batch.replace(weight=torch.ones_like(batch.weight))
        with_all, without = super().loss(client, weights, ones, out), Algorithm.loss(self, client, weights, ones, out)
        return Algorithm.loss(self, client, weights, batch, out) + with_all - without


class Swapped(Moon):
    """Pulled to the previous model and away from the global one."""

    def loss(self, client, weights, batch, out):
        plain = Algorithm.loss(self, client, weights, batch, out)
        return 2 * plain - super().loss(client, weights, batch, out)


class Forgetful(Moon):
    """The previous model is never written back."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(previous=client.memory.previous)


@pytest.mark.parametrize("wrong", [EvaluationFeatures, Unweighted, Swapped, Forgetful])
def test_the_plain_loop_notices(wrong):
    expected = moon(BACK_AGAIN, 0.7, 0.5)
    found = BACK_AGAIN.run(wrong(mu=0.7)).values
    assert max(far({"model": found["model"]}, {"model": expected["model"]}).values()) > 1e-6


def test_plain_descent_is_that_of_the_other_tests():
    """The loop above without a term, against the loss that the other loops use."""
    world = World(EVERYONE[:1])
    model = world.model().train()
    optimizer = sgd(world, world.rate(0), model.parameters())
    for x, y, weight in world.batches(0, 0):
        optimizer.zero_grad()
        loss(model, x, y, weight).backward()
        optimizer.step()
    assert torch.equal(with_term(world, *world.start(), 0, 0, lambda *_: 0).theta, vector(model))
