"""FedAU against a book of intervals that is kept by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.algorithms import FedAU, FedAvg, FedDecorr, FedSL, FedSLS
from fedlens.core.algorithm import Recipe, Server
from fedlens.core.batches import identity
from fedlens.core.engine import Reply
from fedlens.core.errors import BadInput
from fedlens.core.network import Buffers
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential
from small import federation, network
from terms import with_term, worlds
from textbook import (
    NEVER_THE_LAST,
    SEED,
    TOLERANCE,
    TWO_OF_THREE,
    World,
    assert_same,
    far,
    flat,
    total,
)


# ---- FedAU -----------------------------------------------------------------------------------------------------------
@dataclass
class Bookkeeping:
    """One client's intervals, kept as a list and round by round, also while it is away."""

    cutoff: int

    def __post_init__(self):
        self.intervals: list[int] = []
        self.absent = 0

    def comes(self) -> float:
        """omega of this round; the interval that ends now is put down afterwards."""
        omega = float(np.mean(self.intervals)) if self.intervals else 1.0
        self.intervals.append(self.absent + 1)
        self.absent = 0
        return omega

    def stays_away(self) -> None:
        self.absent += 1
        if self.absent == self.cutoff:
            self.intervals.append(self.absent)
            self.absent = 0


def fedau(world: World, cutoff: int, server_lr: float = 1.0) -> tuple[dict[str, Tensor], list[dict[int, float]]]:
    theta, running = world.start()
    books = {k: Bookkeeping(cutoff) for k in range(len(world.sizes))}
    omegas = []
    for round, cohort in enumerate(world.cohorts):
        omega = {k: books[k].comes() for k in cohort}
        for k in books.keys() - set(cohort):
            books[k].stays_away()
        ends = {k: with_term(world, theta, running, round, k, lambda *_: 0) for k in cohort}
        theta = theta + server_lr / len(books) * total(omega[k] * (ends[k].theta - theta) for k in cohort)
        running = total(omega[k] * ends[k].statistics for k in cohort) / sum(omega.values())
        omegas.append(omega)
    return {"model": theta, "model statistics": running}, omegas


def outcome(world: World, recipe: Recipe, buffers: Buffers = "average") -> tuple[Server, Sequential, list[list[Reply]]]:
    net, replies = network(world.norm, buffers), []
    clients = Sequential(net, federation(world.sizes, identity), checked=True)
    observe = lambda server, job, answers: replies.append(answers)  # noqa: E731
    return run(recipe, net, clients, world.stage(), seed=SEED, observe=observe), clients, replies


def assert_fedau(world: World, cutoff: int, server_lr: float = 1.0) -> list[dict[int, float]]:
    server, _, replies = outcome(world, FedAU(cutoff=cutoff, server_lr=server_lr))
    expected, omegas = fedau(world, cutoff, server_lr)
    assert_same(flat("model", server.state.model, world.model()), expected)
    sent = [{reply.client: float(reply.upload.weight) for reply in answers} for answers in replies]
    assert sent == [pytest.approx(omega, rel=1e-15) for omega in omegas]
    return omegas


LONG = World(((0, 1), (0,), (0, 1), (0,), (0,), (0,), (0, 1, 2), (0, 2), (1,), (0, 1, 2)), epochs=1)


@pytest.mark.parametrize(("cutoff", "server_lr"), [(1, 1.0), (2, 0.5), (3, 1.0), (50, 0.5)])
def test_fedau(cutoff, server_lr):
    assert_fedau(LONG, cutoff, server_lr)


@worlds
def test_fedau_in_other_worlds(world):
    assert_fedau(world, 50)


def test_weights_of_fedau_by_hand():
    """Client 1 comes in rounds 0, 2, 6, 8, 9: intervals 1, 2, 4, 2. Client 2 comes first in round 6, and counts one."""
    omegas = assert_fedau(LONG, 50)
    assert [omega[1] for omega in omegas if 1 in omega] == [1.0, 1.0, 1.5, 7 / 3, 9 / 4]
    assert [omega[2] for omega in omegas if 2 in omega] == [1.0, 7.0, 4.0]
    cut = assert_fedau(LONG, 3)  # of client 1: 1, 2, then a silence of 3 and 1 more; of client 2: 3, 3, 1
    assert [omega[1] for omega in cut if 1 in omega] == [1.0, 1.0, 2.0, 7 / 4, 9 / 5]
    assert [omega[2] for omega in cut if 2 in omega] == [3.0, 7 / 3, 2.0]


@settings(deadline=None, max_examples=12)
@given(
    comes=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=14),
    cutoff=st.integers(1, 6),
)
def test_fedau_remembers_what_a_list_of_intervals_says(comes, cutoff):
    cohorts = tuple(tuple(k for k, here in enumerate(row) if here) for row in comes)
    world = World(cohorts, steps=1, norm=False)
    _, clients, replies = outcome(world, FedAU(cutoff=cutoff))
    books = {k: Bookkeeping(cutoff) for k in range(3)}
    for cohort, answers in zip(cohorts, replies, strict=True):
        expected = {k: book.comes() for k, book in books.items() if k in cohort}
        for k in books.keys() - set(cohort):
            books[k].stays_away()
        assert {reply.client: float(reply.upload.weight) for reply in answers} == pytest.approx(expected, rel=1e-15)
    for k in clients.memories:
        kept = clients.memories.get(k)
        last = max(round for round, cohort in enumerate(cohorts) if k in cohort)
        silences = (len(cohorts) - 1 - last) // cutoff  # the client itself learns of these when it comes again
        intervals = books[k].intervals[: len(books[k].intervals) - silences]
        assert (int(kept.intervals), int(kept.waited), int(kept.last)) == (len(intervals), sum(intervals), last)


class UniformFedAvg(FedAvg):
    default_weighting = uniformly


def test_fedau_with_everyone_is_uniform_fedavg():
    server, _, _ = outcome(World(), FedAU())
    found = flat("model", server.state.model, World().model())
    assert_same(found, World().run(UniformFedAvg()).values)
    absent = World(TWO_OF_THREE)
    found = flat("model", outcome(absent, FedAU())[0].state.model, World().model())
    assert max(far(found, absent.run(UniformFedAvg()).values).values()) > 1e-4


def test_statistics_stay_means_however_large_the_weights():
    """Client 2 comes back after thirty rounds: the sum of weights is ten times the population."""
    world = World(((2,), *[(0,)] * 30, (2,), (2,)), steps=1)
    server, _, replies = outcome(world, FedAU())
    assert float(replies[-1][0].upload.weight) == 16.0
    expected, _ = fedau(world, 50)
    assert (server.state.model.buffers["norm.running_var"] > 0).all()
    assert_same(flat("model", server.state.model, world.model()), expected)


def test_private_statistics_under_fedau():
    world = World(NEVER_THE_LAST)
    server, _, _ = outcome(world, FedAU(), buffers="local")
    expected, _ = fedau(world, 50)
    assert (flat("model", server.state.model, world.model())["model"] - expected["model"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    "recipe",
    [FedSLS(FedAU()), FedSL(FedAU()), FedDecorr(FedSLS(FedAU()))],
    ids=["fedsls", "fedsl", "feddecorr of fedsls"],
)
def test_fedau_and_another_weighting_are_refused(recipe):
    with pytest.raises(BadInput, match="fedau decides itself how much a client counts: leave out one of the two"):
        list(recipe.stages(World().stage()))


def test_fedau_has_weights_of_its_own():
    with pytest.raises(BadInput, match="fedau itself says how much a client counts: leave weighting at auto"):
        list(FedAU().stages(World(weighting=by_examples).stage()))
    (stage,) = FedAU().stages(World(weighting=uniformly).stage())
    assert stage.weighting is uniformly


class WithThisInterval(FedAU):
    """The interval that ends now counts already."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload.replace(weight=(memory.waited / memory.intervals).double()), memory


class OverTheCohort(FedAU):
    """Divides by the cohort."""

    def aggregate(self, server, uploads):
        return super().aggregate(replace(server, population=len(uploads)), uploads)


@pytest.mark.parametrize("wrong", [WithThisInterval, OverTheCohort])
def test_the_bookkeeping_notices(wrong):
    found = flat("model", outcome(LONG, wrong())[0].state.model, LONG.model())
    assert max(far(found, fedau(LONG, 50)[0]).values()) > 1e-6
