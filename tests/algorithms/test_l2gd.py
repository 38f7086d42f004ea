"""L2GD against a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.algorithms import L2GD, Local
from fedlens.core.algorithm import Server
from fedlens.core.errors import BadInput
from fedlens.core.tree import Tree
from personal import assert_same, by_package, descend, l2gd, label, loaded, mean, runs_of_aggregations, weights
from small import network
from textbook import TWO_OF_THREE, World


@pytest.mark.parametrize("pull", [0.5, 4.0])
@pytest.mark.parametrize("p", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_l2gd(p, pull, momentum):
    """Five rounds whose runs of aggregations are the coins'; among them rounds without any."""
    world, recipe = World(((0, 1, 2),) * 5, momentum=momentum), L2GD(p=p, pull=pull)
    outcome = by_package(world, recipe)
    before, after, middle = l2gd(world, recipe)
    times = runs_of_aggregations(recipe, 5)
    expected = label("model", middle) | {"times": torch.tensor(times[-1])}
    for k, values in before.items():
        expected |= label(f"own of {k}", values)
    assert_same(outcome.values, expected)
    for k, values in after.items():
        assert_same(outcome.personal(k, recipe), values)
    if p == 0.3:
        assert 0 in times and max(times) > 0  # else one of the two kinds of rounds was not seen


@pytest.mark.parametrize("p", [0.3, 0.7])
def test_l2gd_talks_only_when_it_must(p):
    """Up: after rounds that an aggregation follows. Down: in the round after. Else nothing but the coin."""
    recipe = L2GD(p=p)
    outcome = by_package(World(((0, 1, 2),) * 6), recipe)
    times = runs_of_aggregations(recipe, 6)
    for round, (job, replies) in enumerate(zip(outcome.jobs, outcome.replies, strict=True)):
        assert all(bool(reply.upload) == (times[round] > 0) for reply in replies)
        assert ("model" in job.download) == (round > 0 and times[round - 1] > 0)
        assert bool(job.download.upload) == (times[round] > 0)
    assert {time > 0 for time in times} == {True, False}


def test_l2gd_moves_absent_clients_to_the_last_mean():
    """Two of three clients: the mean is the cohort's, and who comes back moves to the newest one alone."""
    world, recipe = World(TWO_OF_THREE * 2), L2GD(p=0.9, pull=5.0)
    times, own, middle = runs_of_aggregations(recipe, 6), {}, weights(world.model())
    assert 0 in times and sum(time > 0 for time in times) > 3
    for round, cohort in enumerate(world.cohorts):
        pending = times[round - 1] if round else 0
        left = (1 - world.rate(round) * 5.0 * 0.1 / 0.9) ** pending
        for k in cohort:
            start = {n: left * v + (1 - left) * middle[n] for n, v in own.get(k, weights(world.model())).items()}
            own[k] = descend(world, loaded(world, start), round, k)
        if times[round]:
            middle = mean({k: own[k] for k in cohort}, dict.fromkeys(cohort, 0.5))
    expected = label("model", middle) | {"times": torch.tensor(times[-1])}
    for k, values in own.items():
        expected |= label(f"own of {k}", values)
    assert_same(by_package(world, recipe).values, expected)


def test_l2gd_without_pull_is_local():
    world = World(TWO_OF_THREE)
    found = by_package(world, L2GD(pull=0.0)).values
    own = {n.replace("own", "private"): v for n, v in found.items() if n.startswith("own")}
    assert_same(own, by_package(world, Local()).values)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.05, 0.95))
def test_runs_of_aggregations_are_geometric(p):
    """2,000 rounds: mean p / (1 - p), none at all in 1 - p of them; within five standard errors."""
    recipe, server, n = L2GD(p=p), Server(network(), Tree(), 3), 2000
    times = [recipe.aggregations(replace(server, key=round)) for round in range(n)]
    assert min(times) == 0
    assert abs(sum(times) / n - p / (1 - p)) < 5 * math.sqrt(p / (1 - p) ** 2 / n)
    assert abs(times.count(0) / n - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)


def test_l2gd_refuses_to_overshoot():
    with pytest.raises(BadInput, match=r"beyond their mean; lower pull"):
        by_package(World(), L2GD(p=0.1, pull=2.0))  # 0.1 * 2 * 0.9 / 0.1 = 1.8
    with pytest.raises(BadInput, match="server_lr"):
        L2GD(server_lr=0.5)
