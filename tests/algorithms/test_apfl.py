"""APFL against a plain loop."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from fedlens.algorithms import APFL, FedAvg, Local
from fedlens.core.batches import identity
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential
from personal import WORLDS, apfl, assert_same, by_package, weights, worlds
from small import federation, network
from textbook import EVERYONE, SEED, TOLERANCE, World, star


@star(WORLDS, "every order", [*product(("step", "round", "never"), ("together", "sequential"))])
def test_apfl(world, every, order):
    recipe = APFL(alpha=0.6, alpha_every=every, order=order)
    outcome, expected = by_package(world, recipe), apfl(world, 0.6, every, order)
    assert_same(outcome.values, expected)
    moved = [abs(float(v) - 0.6) for n, v in expected.items() if n.startswith("alpha")]
    assert all(far > 1e-4 for far in moved) if every != "never" else not any(moved)
    for k in (0, 1):  # predicts with the mixture of its own weights and what it would receive now
        a, first = expected[f"alpha of {k}"], weights(world.model())
        for name, found in outcome.personal(k, recipe).items():
            v, theta = expected[f"own of {k} {name}"], expected[f"model {name}"]
            right = v if "running" in name else a * v + (1 - a) * theta
            assert (found - right).abs().max() <= TOLERANCE
            assert name in first


def test_alpha_stays_between_zero_and_one():
    """A rate so large that alpha would leave; float64 and clipped, it ends exactly at one of them."""
    world = replace(World(EVERYONE), momentum=0.0)
    stage = replace(world.stage(), optimizer=replace(world.stage().optimizer, lr=5.0))
    net = network()
    engine = Sequential(net, federation(world.sizes, identity))
    run(APFL(alpha=0.5), net, engine, stage, seed=SEED)
    alphas = [float(engine.memories.get(k).alpha) for k in range(3)]
    assert all(0 <= alpha <= 1 for alpha in alphas) and any(alpha in (0, 1) for alpha in alphas)


@worlds
def test_apfl_at_its_ends(world):
    """alpha = 1: own weights are Local's, by every bit of them and their statistics. alpha = 0: the global model."""
    alone = by_package(world, Local()).values
    mine = by_package(world, APFL(alpha=1.0, alpha_every="never"))
    own = {n.replace("own", "private"): v for n, v in mine.values.items() if n.startswith("own")}
    assert own.keys() == alone.keys() and all(torch.equal(own[n], alone[n]) for n in own)
    recipe = APFL(alpha=0.0, alpha_every="never")
    theirs = by_package(world, recipe)
    for outcome in (mine, theirs):
        shared = {n: v for n, v in outcome.values.items() if n.startswith("model")}
        assert_same(shared, by_package(world, FedAvg()).values)
    for k in range(3):
        found = theirs.personal(k, recipe)
        assert all(torch.equal(v, theirs.values[f"model {n}"]) for n, v in found.items() if "running" not in n)
