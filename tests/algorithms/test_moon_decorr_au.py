"""MOON, FedDecorr and FedAU against plain PyTorch loops over several rounds, in which clients stay away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.algorithms import FedAU, FedAvg, FedDecorr, FedProx, FedSL, FedSLS, Moon
from fedlens.algorithms.feddecorr import Decorrelated, correlation
from fedlens.core.algorithm import Algorithm, Recipe, Server
from fedlens.core.batches import identity
from fedlens.core.engine import Reply
from fedlens.core.errors import BadInput
from fedlens.core.network import Buffers
from fedlens.core.objective import by_examples, uniformly, weighted
from fedlens.core.rng import generator
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from small import federation, network
from test_algorithms_by_hand import (
    EVERYONE,
    NEVER_THE_LAST,
    SEED,
    TOLERANCE,
    TWO_OF_THREE,
    WORLDS,
    Trained,
    World,
    assert_same,
    far,
    filled,
    flat,
    loss,
    sgd,
    statistics,
    total,
    vector,
)

worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
SMALL = World(TWO_OF_THREE, sizes=(1, 3, 2), batch=8)  # one example among them: rows wrap round and stay full
BACK_AGAIN = World(((0, 1), (1, 2), (0, 2), (0, 1, 2), (1,)))


def with_term(world: World, theta: Tensor, running: Tensor, round: int, k: int, term: Callable[..., Any]) -> Trained:
    """Stochastic gradient descent on the cross-entropy plus term(features of the training pass, x, weight)."""
    model = filled(world.model(), theta, running).train()
    optimizer, batches = sgd(world, world.rate(round), model.parameters()), world.batches(round, k)
    for x, y, weight in batches:
        optimizer.zero_grad()
        z = model.features(x)
        losses = F.cross_entropy(model.head(z), y, reduction="none")
        ((losses * weight).sum() / weight.sum() + term(z, x, weight)).backward()
        optimizer.step()
    return Trained(vector(model), statistics(model), len(batches))


# ---- MOON ------------------------------------------------------------------------------------------------------------
def contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """-log(e^{cos(z, z_global)/T} / (e^{cos(z, z_global)/T} + e^{cos(z, z_previous)/T})) of every example."""

    def e(a: Tensor, b: Tensor) -> Tensor:
        return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)) / temperature).exp()

    return -(e(z, z_global) / (e(z, z_global) + e(z, z_previous))).log()


def moon(
    world: World,
    mu: float,
    temperature: float,
    server_lr: float = 1.0,
    own: bool = False,
    extra: Callable = lambda *_: 0,
) -> dict[str, Tensor]:
    """No term before a client has a previous model. `own`: running statistics stay with their clients."""
    theta, running = world.start()
    first, previous = running, {}
    for round, cohort in enumerate(world.cohorts):
        p, ends = world.shares(cohort), {}
        for k in cohort:
            begin = previous[k].statistics if own and k in previous else first if own else running

            def term(z, x, weight, k=k, theta=theta, begin=begin, previous=previous):
                if k not in previous:
                    return extra(z, x, weight)
                others = [filled(world.model(), theta, begin), filled(world.model(), *previous[k][:2])]
                with torch.no_grad():
                    z_global, z_previous = (model.eval().features(x) for model in others)
                terms = contrast(z, z_global, z_previous, temperature)
                return mu * (terms * weight).sum() / weight.sum() + extra(z, x, weight)

            ends[k] = with_term(world, theta, begin, round, k, term)
        previous.update(ends)
        theta = theta + server_lr * total(p[k] * (ends[k].theta - theta) for k in cohort)
        running = total(p[k] * ends[k].statistics for k in cohort)
    nothing = torch.empty(0).double()
    found = {"model": theta, "model statistics": nothing if own else running}
    for k, (theta_k, running_k, _) in previous.items():
        found |= {f"previous of {k}": theta_k, f"previous of {k} statistics": running_k}
        found |= {f"private of {k}": nothing, f"private of {k} statistics": running_k} if own else {}
    return found


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


# ---- FedDecorr -------------------------------------------------------------------------------------------------------
def textbook_correlation(z: Tensor, x: Any, weight: Tensor) -> Tensor:
    """Over the examples that count alone: columns standardised by the unbiased variance, products of pairs of them."""
    z = z[weight > 0]
    if len(z) == 1:
        return torch.zeros(()).double()
    z = (z - z.mean(0)) / (z.var(0) + 1e-8).sqrt()
    c, d = z.T @ z, z.shape[1]
    return c[~torch.eye(d, dtype=torch.bool)].square().mean() / len(z)


def feddecorr(world: World, beta: float) -> dict[str, Tensor]:
    theta, running = world.start()
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        penalty = lambda z, x, weight: beta * textbook_correlation(z, x, weight)  # noqa: E731
        ends = {k: with_term(world, theta, running, round, k, penalty) for k in cohort}
        theta = total(p[k] * ends[k].theta for k in cohort)
        running = total(p[k] * ends[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running}


@worlds
def test_feddecorr(world):
    assert_same(world.run(FedDecorr(beta=0.1)).values, feddecorr(world, 0.1))


def test_feddecorr_with_small_clients():
    """One client has a single example: its penalty is zero, not a division by zero."""
    assert_same(SMALL.run(FedDecorr(beta=0.3)).values, feddecorr(SMALL, 0.3))


@worlds
def test_feddecorr_without_beta_is_fedavg(world):
    found, plain = world.run(FedDecorr(beta=0.0)).values, world.run(FedAvg()).values
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert max(far(world.run(FedDecorr(beta=0.1)).values, plain).values()) > 1e-5


def test_feddecorr_over_moon():
    found = BACK_AGAIN.run(FedDecorr(Moon(mu=0.7), beta=0.1)).values
    penalty = lambda z, x, weight: 0.1 * textbook_correlation(z, x, weight)  # noqa: E731
    assert_same(found, moon(BACK_AGAIN, 0.7, 0.5, extra=penalty))


def test_feddecorr_nests_with_other_objectives():
    """The plan's own objective is kept, and every stage of a base gets the penalty."""

    def doubled(client, weights, batch, out):
        return 2 * weighted(F.cross_entropy(out.logits, batch.y, reduction="none"), batch)

    plan = replace(BACK_AGAIN.stage(), objective=doubled)
    (stage,) = FedDecorr(FedProx(), beta=0.2).stages(plan)
    assert stage.objective == Decorrelated(0.2, doubled)
    assert isinstance(stage.algorithm, FedProx)


class CountsWrapped(FedDecorr):
    """Statistics over the whole row, its wrapped examples with it."""

    def stages(self, plan):
        def objective(client, weights, batch, out):
            ones = torch.ones_like(batch.weight)
            return plan.objective(client, weights, batch, out) + self.beta * correlation(out.features, ones)

        yield from self.base.stages(replace(plan, objective=objective))


def test_the_textbook_notices_wrapped_examples():
    world = World(TWO_OF_THREE)
    assert max(far(world.run(CountsWrapped(beta=0.1)).values, feddecorr(world, 0.1)).values()) > 1e-6


@pytest.mark.parametrize("shape", [(40, 5), (6, 30), (9, 9), (2, 3)], ids=str)
def test_correlation_is_that_of_numpy(shape):
    """Narrow and wide: two ways to the same norm."""
    x = torch.randn(*shape, generator=generator(1), dtype=torch.float64)
    n, d = shape
    corr = np.corrcoef(x.numpy(), rowvar=False)
    expected = sum(((n - 1) * corr[i, j]) ** 2 for i in range(d) for j in range(d) if i != j) / (d * (d - 1)) / n
    assert float(correlation(x, torch.ones(n).double(), epsilon=0.0)) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), n=st.integers(2, 9), d=st.integers(2, 12), wrapped=st.integers(0, 5))
def test_examples_of_weight_zero_do_not_exist(seed, n, d, wrapped):
    x = torch.randn(n + wrapped, d, generator=generator(seed), dtype=torch.float64, requires_grad=True)
    weight = (torch.arange(n + wrapped) < n).double()
    value = correlation(x, weight)
    alone = correlation(x[:n], torch.ones(n).double())
    assert value.item() == pytest.approx(alone.item(), rel=1e-12, abs=1e-15) and value.item() > -1e-12
    (slope,) = torch.autograd.grad(value, x)
    assert not slope[n:].any() and slope[:n].isfinite().all()
    (slope_alone,) = torch.autograd.grad(alone, x)
    assert (slope - slope_alone).abs().max() < 1e-11


def test_a_feature_that_never_moves_is_harmless():
    x = torch.randn(8, 4, generator=generator(2), dtype=torch.float64)
    x[:, 1] = 3.0
    x.requires_grad_()
    value = correlation(x, torch.ones(8).double())
    (slope,) = torch.autograd.grad(value, x)
    assert slope.isfinite().all()
    others = correlation(x[:, [0, 2, 3]], torch.ones(8).double())
    assert value.item() == pytest.approx(others.item() * 6 / 12, rel=1e-12)  # its pairs count with zero


def test_the_correlation_of_one_example_or_one_feature_is_zero():
    for shape in ((1, 5), (6, 1)):
        x = torch.randn(*shape, generator=generator(3), dtype=torch.float64, requires_grad=True)
        value = correlation(x, torch.ones(shape[0]).double())
        (slope,) = torch.autograd.grad(value, x)
        assert abs(value.item()) < 1e-12 and not (slope.abs() > 1e-9).any()


# ---- FedAU -----------------------------------------------------------------------------------------------------------
@dataclass
class Bookkeeping:
    """One client's intervals, kept as a list and round by round, also while it is away."""

    cutoff: int

    def __post_init__(self):
        self.intervals: list[int] = []
        self.absent, self.known = 0, False

    def comes(self) -> float:
        """omega of this round; the interval that ends now is put down afterwards."""
        omega = float(np.mean(self.intervals)) if self.known and self.intervals else 1.0
        self.intervals.append(self.absent + 1)
        self.absent, self.known = 0, True
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


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize("cutoff", [1, 2, 3, 50])
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
    assert [omega[2] for omega in cut if 2 in omega] == [1.0, 7 / 3, 2.0]


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
