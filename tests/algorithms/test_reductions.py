"""Methods that must agree with one another, edges of cohorts and clients, and mutants that plain loops must catch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.algorithms import FedAvg, FedAvgM, FedDyn, FedNova, FedProx, FedSAM, FineTuned, Local, Scaffold
from fedlens.algorithms.finetune import FineTune
from fedlens.core.algorithm import Algorithm
from fedlens.core.batches import identity
from fedlens.core.network import Network
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.rng import generator, seeded
from fedlens.core.run import run
from fedlens.core.tree import Tree, mean
from fedlens.engines.sequential import Sequential
from small import Net, federation, network, same
from textbook import (
    EVERYONE,
    NEVER_THE_LAST,
    RATE,
    SEED,
    SIZES,
    TOLERANCE,
    TWO_OF_THREE,
    WEIGHT_DECAY,
    WORLDS,
    World,
    assert_same,
    far,
    fedavg,
    fedavgm,
    feddyn,
    fednova,
    fedprox,
    fedsam,
    fine_tuned,
    flat,
    local_only,
    local_training,
    scaffold,
    server_lrs,
    total,
    vector,
)

worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())


def model_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values[name] for name in ("model", "model statistics")}


def gap(values: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max(far(values, others).values())


# ---- one method is a case of another ---------------------------------------------------------------------------------
@cache
def averaged(world: World, server_lr: float) -> dict[str, Tensor]:
    return world.run(FedAvg(server_lr=server_lr)).values


@pytest.mark.parametrize(
    "recipe",
    [FedProx(mu=0.0), FedAvgM(beta=0.0), FedAvgM(beta=0.0, nesterov=True), FedSAM(rho=0.0)],
    ids=["FedProx(0)", "FedAvgM(0)", "FedAvgM(0), nesterov", "FedSAM(0)"],
)
@server_lrs
def test_without_its_own_term_a_method_is_fedavg(recipe, world, server_lr):
    found = world.run(replace(recipe, server_lr=server_lr)).values
    assert_same(model_of(found), averaged(world, server_lr))


@pytest.mark.parametrize("recipe", [FedProx(mu=0.1), FedAvgM(beta=0.1), FedSAM(rho=0.1), FedNova(), Scaffold()])
def test_with_its_own_term_it_is_not(recipe):
    world = World()
    assert gap(model_of(world.run(recipe).values), world.run(FedAvg()).values) > 1e-4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_is_fedavg_when_all_do_the_same_steps(momentum):
    world = World(TWO_OF_THREE, momentum=momentum, steps=5)
    assert_same(world.run(FedNova()).values, world.run(FedAvg()).values)
    unequal = replace(world, steps=None)
    assert gap(unequal.run(FedNova()).values, unequal.run(FedAvg()).values) > 1e-4


class FrozenControls(Scaffold):
    """Both controls stay at zero."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload.replace(control=upload.control.zeros()), memory.replace(control=upload.control.zeros())


class UniformFedAvg(FedAvg):
    default_weighting = uniformly


@worlds
def test_scaffold_without_controls_is_uniform_fedavg(world):
    """Not the FedAvg that counts examples: SCAFFOLD divides by the size of the cohort."""
    found = model_of(world.run(FrozenControls()).values)
    assert_same(found, world.run(UniformFedAvg()).values)
    assert gap(found, world.run(FedAvg()).values) > 1e-4


def test_first_round_of_scaffold_is_uniform_fedavg():
    world = World(EVERYONE[:1])
    assert_same(model_of(world.run(Scaffold()).values), world.run(UniformFedAvg()).values)


def test_feddyn_does_not_approach_fedavg():
    """With hardly any alpha the first round of everyone still goes twice as far as the mean: h / alpha stays."""
    world = World(EVERYONE[:1])
    theta, average = world.start()[0], world.run(UniformFedAvg()).values["model"]
    found = world.run(FedDyn(alpha=1e-9, clip=None)).values
    assert (found["averaged"] - average).abs().max() < 1e-8
    assert (found["model"] - (theta + 2 * (average - theta))).abs().max() < 1e-6


# ---- averages --------------------------------------------------------------------------------------------------------
def drawn_tree(seed: int) -> Tree:
    draw = generator(seed)
    a, b = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((3, 2), (4,)))
    return Tree(params=Tree(a=a, b=b), buffers=Tree())


def test_the_mean_of_one_is_itself():
    assert same(mean([drawn_tree(0)], [0.3]), drawn_tree(0))


weights_of_clients = st.lists(st.floats(0, 1e3), min_size=1, max_size=6).filter(lambda shares: sum(shares) > 1e-3)


@settings(deadline=None, max_examples=50)
@given(weights_of_clients)
def test_the_mean_of_equals_is_any_of_them(shares):
    found = mean([drawn_tree(0)] * len(shares), shares) - drawn_tree(0)
    assert max(leaf.abs().max() for leaf in found.leaves()) <= TOLERANCE


@settings(deadline=None, max_examples=50)
@given(weights_of_clients, st.randoms(use_true_random=False))
def test_the_mean_is_that_of_numpy_in_any_order(shares, draw):
    order = list(range(len(shares)))
    draw.shuffle(order)
    found = mean([drawn_tree(k) for k in order], [shares[k] for k in order])
    for path, leaf in found.paths():
        leaves = [dict(drawn_tree(k).paths())[path].numpy() for k in range(len(shares))]
        assert np.abs(leaf.numpy() - np.average(leaves, axis=0, weights=shares)).max() <= TOLERANCE


@pytest.mark.parametrize("shares", [[0.0, 0.0], [1.0, -0.5], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_are_none(shares):
    with pytest.raises(ValueError, match="weights"):
        mean([drawn_tree(0), drawn_tree(1)], shares)


@pytest.mark.parametrize("recipe", [FedAvg(), FedProx(mu=0.3), FedSAM(rho=0.2), FedNova(), FedAvgM(), Scaffold()])
def test_a_cohort_of_one_returns_that_client(recipe):
    world = World(((1,),))
    upload = world.run(recipe).replies[0][0].upload
    theta, running = world.start()
    moved = flat("model", upload.delta, world.model())
    pace = float(upload.reach) if "reach" in upload else 1.0
    expected = {"model": theta + pace * moved["model"], "model statistics": running + moved["model statistics"]}
    assert_same(model_of(world.run(recipe).values), expected)


def test_equal_clients_are_one_client():
    """Three clients that own the same examples and see all of them in a step; sums in another order, hence rounding."""
    alone = federation((13,), identity)
    thrice = replace(alone, train={k: alone.train[0] for k in range(3)}, test={k: alone.test[0] for k in range(3)})
    world, found = World(((0,),) * 3, batch=13), []
    for cohorts, clients in ((((0,),) * 3, alone), (EVERYONE, thrice)):
        stage, net = replace(world, cohorts=cohorts).stage(), network()
        server = run(FedAvg(), net, Sequential(net, clients), stage, seed=SEED)
        found.append(flat("model", server.state.model, world.model()))
    assert_same(*found)


# ---- orders and edges of cohorts -------------------------------------------------------------------------------------
METHODS = [FedAvg(), FedAvgM(), FedNova(), FedProx(mu=0.3), FedSAM(rho=0.2), Scaffold(), FedDyn(alpha=0.1), Local()]
methods = pytest.mark.parametrize("recipe", METHODS, ids=lambda recipe: type(recipe).__name__)


class Backwards(Sequential):
    """Clients work and answer in the opposite order."""

    def run(self, job, cohort):
        return super().run(job, list(cohort)[::-1])


def assert_bitwise(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


@methods
def test_order_does_not_matter(recipe):
    """Neither of the replies nor of the cohort as it was drawn; not by a bit."""
    world = World(TWO_OF_THREE)
    usual = world.run(recipe).values
    shuffled = replace(world, cohorts=tuple(cohort[::-1] for cohort in world.cohorts))
    assert_bitwise(world.run(recipe, engine=Backwards).values, usual)
    assert_bitwise(shuffled.run(recipe).values, usual)


@methods
def test_an_empty_cohort_leaves_everything(recipe):
    """Also what would move by itself, such as a velocity."""
    once = World(((0, 1, 2),)).run(recipe).values
    assert_bitwise(World(((0, 1, 2), (), ())).run(recipe).values, once)


def test_without_anyone_the_model_is_the_first_one():
    world = World(((), ()))
    outcome = world.run(FedAvg())
    theta, running = world.start()
    assert_bitwise(outcome.values, {"model": theta, "model statistics": running})
    assert outcome.replies == [[], []]
    assert outcome.server.round == 2


def test_fine_tuning_reaches_clients_that_never_came():
    outcome = World(NEVER_THE_LAST).run(FineTuned(FedAvg()))
    assert [reply.client for reply in outcome.replies[-1]] == [0, 1, 2]
    assert "tuned of 2" in outcome.values


# ---- small clients ---------------------------------------------------------------------------------------------------
SMALL = World(TWO_OF_THREE, sizes=(1, 3, 2), batch=8)


@pytest.mark.parametrize(
    ("recipe", "by_hand"),
    [
        (FedAvg(), fedavg),
        (FedNova(), fednova),
        (Scaffold(), scaffold),
        (FedDyn(alpha=0.1, clip=0.5), lambda world: feddyn(world, 0.1, 0.5)),
        (FedSAM(rho=0.2), lambda world: fedsam(world, 0.2)),
        (Local(), local_only),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, Algorithm) else "",
)
def test_clients_smaller_than_a_batch(recipe, by_hand):
    """One example among them, with BatchNorm: rows wrap round and stay full."""
    expected = by_hand(SMALL)
    assert all(value.isfinite().all() for value in expected.values())
    assert_same(SMALL.run(recipe).values, expected)


@pytest.mark.parametrize("steps", [None, 5], ids=["epochs", "steps"])
def test_a_client_without_examples_counts_for_nothing(steps):
    full, without = World(sizes=(13, 0, 9), steps=steps), World(((0, 2),) * 3, sizes=(13, 0, 9), steps=steps)
    assert_same(full.run(FedAvg()).values, without.run(FedAvg()).values)
    assert torch.equal(full.run(Scaffold()).values["control of 1"], torch.zeros_like(full.start()[0]))


@pytest.mark.parametrize("sizes", [(1, 3, 2), (8, 1, 7)])
def test_a_batch_larger_than_a_client_is_all_of_it_once(sizes):
    """Without BatchNorm the wrapped row is the plain loss of the client, whatever row was drawn."""
    world = World(EVERYONE[:1], momentum=0.0, epochs=2, sizes=sizes, batch=8, norm=False)
    data, ends = federation(sizes, identity), []
    for k in range(3):
        model = world.model()
        descent = torch.optim.SGD(model.parameters(), RATE, weight_decay=WEIGHT_DECAY)
        for _ in range(2):
            descent.zero_grad()
            F.cross_entropy(model(data.data.x[data.train[k]]), data.data.y[data.train[k]]).backward()
            descent.step()
        ends.append(vector(model))
    expected = total(n / sum(sizes) * end for n, end in zip(sizes, ends, strict=True))
    assert_same(world.run(FedAvg()).values, {"model": expected, "model statistics": torch.empty(0).double()})


# ---- statistics that stay, integers that do not exist ----------------------------------------------------------------
shared_methods = pytest.mark.parametrize("recipe", METHODS[:-1], ids=lambda recipe: type(recipe).__name__)


@shared_methods
def test_private_statistics_never_travel(recipe):
    outcome = World(TWO_OF_THREE).run(recipe, buffers="local")
    sent = [job.download for job in outcome.jobs] + [r.upload for replies in outcome.replies for r in replies]
    assert len(sent) == 3 + 6
    paths = {path for message in sent for path, _ in message.paths()}
    assert "model/params/norm.weight" in paths
    assert not [path for path in paths if "running" in path]
    assert not [path for path, _ in outcome.server.state.paths() if "running" in path]


@shared_methods
def test_private_statistics_do_not_change_the_shared_parameters(recipe):
    """Training reads the statistics of the batch: who keeps the running ones makes no difference to parameters."""
    world = World(TWO_OF_THREE)
    averaged, private = world.run(recipe).values, world.run(recipe, buffers="local").values
    kept = {name for name in averaged if not name.endswith("statistics")}
    assert_same({name: private[name] for name in kept}, {name: averaged[name] for name in kept})


def private_statistics(world: World) -> dict[str, Tensor]:
    """FedAvg by hand in which every client goes on from its own running statistics."""
    theta, first = world.start()
    running: dict[int, Tensor] = {}
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        local = {k: local_training(world, theta, running.get(k, first), round, k) for k in cohort}
        theta = total(p[k] * local[k].theta for k in cohort)
        running |= {k: local[k].statistics for k in cohort}
    nothing = torch.empty(0).double()
    found = {"model": theta, "model statistics": nothing}
    for k, own in running.items():
        found |= {f"private of {k}": nothing, f"private of {k} statistics": own}
    return found


@pytest.mark.parametrize("cohorts", [TWO_OF_THREE, NEVER_THE_LAST])
def test_every_client_goes_on_from_its_own_statistics(cohorts):
    world = World(cohorts)
    assert_same(world.run(FedAvg(), buffers="local").values, private_statistics(world))


def test_personal_models_have_shared_parameters_and_own_statistics():
    """Client 2 never took part: its statistics are the first ones."""
    world = World(NEVER_THE_LAST)
    outcome, expected = world.run(FedAvg(), buffers="local"), private_statistics(world)
    job = replace(outcome.jobs[-1], download=FedAvg().broadcast(outcome.server), round=outcome.server.round)
    x = federation(SIZES, identity).data.x[:5]
    answers = []
    for k in range(3):
        client, _ = outcome.engine.open(job, k)
        own = expected.get(f"private of {k} statistics", world.start()[1])
        plain = world.at(expected["model"], own).eval()
        answers.append(outcome.engine.net(FedAvg().personal(client), x))
        assert (answers[-1] - plain(x)).abs().max() <= TOLERANCE
    assert (answers[0] - answers[1]).abs().max() > 1e-4


@pytest.mark.parametrize("part", ["all", "head"])
def test_fine_tuning_starts_from_own_statistics(part):
    world = World(TWO_OF_THREE)
    base = private_statistics(world)
    found = world.run(FineTuned(FedAvg(), epochs=2, part=part), buffers="local").values
    for k in range(3):
        mine = {"model": base["model"], "model statistics": base[f"private of {k} statistics"]}
        tuned = fine_tuned(world, mine, 2, part)
        for name in (f"tuned of {k}", f"tuned of {k} statistics"):
            assert (found[name] - tuned[name]).abs().max() <= TOLERANCE


class Counting(Net):
    """With integers and a constant among its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("updates", torch.tensor(3))
        self.register_buffer("offset", torch.full((), 0.25))


class Misnamed(Counting):
    """With an integer by a statistic's name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_updates", torch.tensor([5, 6]))


@pytest.mark.parametrize("kind", [Counting, Misnamed])
@pytest.mark.parametrize("recipe", [FedAvg(), Scaffold(), FedDyn(alpha=0.1)], ids=lambda recipe: type(recipe).__name__)
def test_integers_and_constants_are_never_sent_or_averaged(recipe, kind):
    """BatchNorm's counter of batches is one of the integers."""
    sent: set[tuple[str, torch.dtype]] = set()
    with seeded(7):
        net = Network(kind(), "fp64")

    def observe(server, job, replies):
        for message in (job.download, server.state, *(reply.upload for reply in replies)):
            sent.update((path.rpartition("/")[2], leaf.dtype) for path, leaf in message.paths())

    clients = Sequential(net, federation(SIZES, identity))
    run(recipe, net, clients, World(TWO_OF_THREE).stage(), seed=SEED, observe=observe)
    names = {"weight", *(name for name, _ in Net().named_parameters()), "norm.running_mean", "norm.running_var"}
    assert sent <= {(name, torch.float64) for name in names}
    assert ("norm.running_var", torch.float64) in sent


# ---- mutants: methods with one mistake each, which the plain loops must notice ---------------------------------------
class StepsForReach(Scaffold):
    """Divides by the number of steps although there is momentum."""

    def finish(self, client, local):
        upload, memory = Algorithm.finish(self, client, local)
        moved = upload.delta.params / (-client.optimizer.lr * client.steps) - client.received.control
        return upload.replace(control=moved), memory.replace(control=client.memory.control + moved)


class Forgetful(Scaffold):
    """The client's control is never written back."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(control=client.memory.control)


class ByTheCohort(Scaffold):
    """The server's control moves by the mean over the cohort instead of the population."""

    def aggregate(self, server, uploads):
        return super().aggregate(replace(server, population=len(uploads)), uploads)


class WrongWay(Scaffold):
    """The correction is subtracted."""

    def gradient(self, client, local, batch):
        swapped = client.received.replace(control=client.memory.control)
        memory = client.memory.replace(control=client.received.control)
        return super().gradient(replace(client, received=swapped, memory=memory), local, batch)


class ByExamples(Scaffold):
    """Weighted by examples."""

    default_weighting = by_examples


class PlainSteps(FedNova):
    """Counts steps although there is momentum."""

    def finish(self, client, local):
        plain = replace(client.optimizer, momentum=0.0)
        return super().finish(replace(client, optimizer=plain), local)


class Unweighted(FedNova):
    """Takes the plain mean of reaches for the effective number of steps."""

    def aggregate(self, server, uploads):
        delta = mean([u.delta for u in uploads], [u.weight for u in uploads])
        reach = sum(float(u.reach) for u in uploads) / len(uploads)
        return self.advance(server, delta.replace(params=delta.params * reach))


class WithoutHalf(FedProx):
    """mu |w - theta|^2."""

    def gradient(self, client, local, batch):
        return replace(self, mu=2 * self.mu).pulled(client, local, batch)

    pulled = FedProx.gradient


class ScaledStatistics(FedAvg):
    """The server's rate acts on buffers too."""

    def advance(self, server, delta):
        return server.state.replace(model=server.state.model + delta * self.server_lr)


class DampedTwice(FedAvgM):
    """Dampening acts on what is added ahead, too."""

    def advance(self, server, delta):
        return super().advance(server, delta.replace(params=delta.params * (1 - self.dampening)))


class WithoutDual(FedDyn):
    """A proximal term alone: the dual is never written back."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(dual=client.memory.dual)


class DualOfTheCohort(FedDyn):
    """The server's dual is divided by the cohort."""

    def aggregate(self, server, uploads):
        return super().aggregate(replace(server, population=len(uploads)), uploads)


class TracksTwice(FedSAM):
    """The pass at the ascended point advances the statistics as well."""

    def gradient(self, client, local, batch):
        grads = super().gradient(client, local, batch)
        client.net.forward(local, batch.x, train=True, key=batch.key)
        return grads


class StartsAgain(Local):
    """Every round from the first weights."""

    def start(self, client):
        return client.net.initial_weights()


@dataclass(frozen=True)
class MaskedTune(FineTune):
    """The body's gradient is dropped, but its statistics move."""

    def trains(self, client, name):
        return True

    def gradient(self, client, local, batch):
        return super().gradient(client, local, batch).select(lambda name: name in client.net.head)


class Masked(FineTuned):
    def stages(self, plan):
        *before, last = super().stages(plan)
        yield from before
        yield replace(last, algorithm=MaskedTune(base=last.algorithm.base, part=self.part))


WORLD = World(TWO_OF_THREE)
MUTANTS = {
    StepsForReach: (Scaffold(), StepsForReach(), scaffold),
    Forgetful: (Scaffold(), Forgetful(), scaffold),
    ByTheCohort: (Scaffold(), ByTheCohort(), scaffold),
    WrongWay: (Scaffold(), WrongWay(), scaffold),
    ByExamples: (Scaffold(), ByExamples(), scaffold),
    PlainSteps: (FedNova(), PlainSteps(), fednova),
    Unweighted: (FedNova(), Unweighted(), fednova),
    WithoutHalf: (FedProx(mu=0.3), WithoutHalf(mu=0.3), lambda world: fedprox(world, 0.3)),
    ScaledStatistics: (FedAvg(server_lr=0.5), ScaledStatistics(server_lr=0.5), lambda world: fedavg(world, 0.5)),
    DampedTwice: (
        FedAvgM(0.9, 0.3, True),
        DampedTwice(0.9, 0.3, True),
        lambda world: fedavgm(world, 0.9, 0.3, True, 1.0),
    ),
    WithoutDual: (FedDyn(0.1, None), WithoutDual(0.1, None), lambda world: feddyn(world, 0.1, None)),
    DualOfTheCohort: (FedDyn(0.1, None), DualOfTheCohort(0.1, None), lambda world: feddyn(world, 0.1, None)),
    "clip ignored": (FedDyn(0.1, 0.5), FedDyn(0.1, None), lambda world: feddyn(world, 0.1, 0.5)),
    TracksTwice: (FedSAM(rho=0.2), TracksTwice(rho=0.2), lambda world: fedsam(world, 0.2)),
    StartsAgain: (Local(), StartsAgain(), local_only),
    Masked: (
        FineTuned(epochs=2, part="head"),
        Masked(epochs=2, part="head"),
        lambda world: fine_tuned(world, fedavg(world), 2, "head"),
    ),
}


@pytest.mark.parametrize(
    ("right", "wrong", "by_hand"), MUTANTS.values(), ids=[getattr(m, "__name__", m) for m in MUTANTS]
)
def test_the_plain_loops_notice(right, wrong, by_hand):
    expected = by_hand(WORLD)
    assert gap(WORLD.run(right).values, expected) <= TOLERANCE
    assert gap(WORLD.run(wrong).values, expected) > 1e-6


def test_the_plain_loops_notice_a_patched_method(monkeypatch):
    """The same in place, as a careless edit would have it."""
    monkeypatch.setattr(Scaffold, "finish", StepsForReach.finish)
    assert gap(WORLD.run(Scaffold()).values, scaffold(WORLD)) > 1e-6
    calm = replace(WORLD, momentum=0.0)  # without momentum reach is the number of steps
    assert gap(calm.run(Scaffold()).values, scaffold(calm)) <= TOLERANCE
