"""Ditto against a plain loop."""

from __future__ import annotations

from fedlens.algorithms import Ditto, FedAvg, Local
from personal import WORLDS, assert_same, by_package, ditto, weights, worlds
from textbook import star


@star(WORLDS, "pull server_lr", [(0.1, 1.0), (1.0, 0.5)])
def test_ditto(world, pull, server_lr):
    recipe = Ditto(pull=pull, server_lr=server_lr)
    outcome, expected = by_package(world, recipe), ditto(world, pull, server_lr)
    assert_same(outcome.values, expected)
    for k in range(3):
        own = {n.removeprefix(f"own of {k} "): v for n, v in expected.items() if n.startswith(f"own of {k} ")}
        assert_same(outcome.personal(k, recipe), own or weights(world.model()))


@worlds
def test_ditto_without_pull_is_fedavg_and_local(world):
    found, alone = by_package(world, Ditto(pull=0.0)).values, by_package(world, Local()).values
    assert_same({n: v for n, v in found.items() if n.startswith("model")}, by_package(world, FedAvg()).values)
    assert_same({n.replace("own", "private"): v for n, v in found.items() if n.startswith("own")}, alone)
