"""Personalised methods against plain PyTorch loops over modules, round by round, with what every client remembers.

The loops know modules, state dicts and torch.optim, and no Tree, hook or engine. Shared with the package are the first
weights, the rows that `plan` draws, and L2GD's coins.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from fedlens.algorithms import APFL, L2GD, Ditto, FedAvg, FedBN, FedMTL, FedPer, FedRep, FineTuned, LGFedAvg, Local
from fedlens.algorithms.lgfedavg import layers
from fedlens.core.algorithm import Algorithm, Server
from fedlens.core.batches import identity
from fedlens.core.engine import Job, Reply
from fedlens.core.errors import BadInput
from fedlens.core.evaluate import Evaluate
from fedlens.core.network import Buffers, Network
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.rng import key, seeded
from fedlens.core.run import run, timetable
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.models import MODELS
from small import federation, network
from test_algorithms_by_hand import EVERYONE, NEVER_THE_LAST, SEED, TOLERANCE, TWO_OF_THREE, World, loss, sgd

Values = dict[str, Tensor]

WORLDS = {
    "everyone": World(),
    "two of three": World(TWO_OF_THREE),
    "without momentum": World(TWO_OF_THREE, momentum=0.0),
    "one never comes": World(NEVER_THE_LAST),
    "without norms": World(TWO_OF_THREE, norm=False),
    "smaller than a batch": World(TWO_OF_THREE, sizes=(1, 3, 2), batch=8),
}
worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())


# ---- what the package makes of it ------------------------------------------------------------------------------------
class Outcome(NamedTuple):
    values: Values  # "model conv.weight" of the server, "own of 2 conv.weight" of a client's memory
    replies: list[list[Reply]]
    jobs: list[Job]
    server: Server
    engine: Sequential

    def personal(self, client: int, recipe: Algorithm) -> Values:
        """The weights that a client predicts with after the last round."""
        stage = replace(self.jobs[-1].stage, algorithm=recipe)
        job = replace(self.jobs[-1], stage=stage, download=recipe.broadcast(self.server), round=self.server.round)
        return named("", recipe.personal(self.engine.open(job, client)[0]))


def by_package(world: World, recipe: Any, buffers: Buffers = "average") -> Outcome:
    """Checked: nothing that is read-only may be written."""
    net, replies, jobs = network(world.norm, buffers), [], []
    engine = Sequential(net, federation(world.sizes, identity), checked=True)

    def observe(server, job, answers):
        replies.append(answers)
        jobs.append(job)

    server = run(recipe, net, engine, world.stage(), seed=SEED, observe=observe)
    values: Values = {}
    for name, tree in server.state.items():
        values |= named(name, tree)
    for client in engine.memories:
        for name, tree in engine.memories.get(client).items():
            values |= named(f"{name} of {client}", tree) if name != "seen" else {}
    return Outcome(values, replies, jobs, server, engine)


def named(name: str, tree: Tree | Tensor) -> Values:
    if isinstance(tree, Tensor):
        return {name: tree}
    return {f"{name} {path.partition('/')[2]}".strip(): leaf for path, leaf in tree.paths()}


def gap(found: Values, expected: Values) -> float:
    """The largest difference; both sides must know the same names."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in found)


def assert_same(found: Values, expected: Values) -> None:
    assert gap(found, expected) <= TOLERANCE


# ---- plain pieces ----------------------------------------------------------------------------------------------------
def weights(model: nn.Module) -> Values:
    return {n: v.detach().clone() for n, v in model.state_dict().items() if v.is_floating_point()}


def loaded(world: World, values: Values) -> nn.Module:
    model = world.model()
    model.load_state_dict(values, strict=False)
    return model


def label(name: str, values: Values) -> Values:
    return {f"{name} {weight}": value for weight, value in values.items()}


def mean(models: dict[int, Values], shares: dict[int, float]) -> Values:
    first = next(iter(models.values()))
    return {n: torch.stack([shares[k] * models[k][n] for k in models]).sum(0) for n in first}


def descend(world: World, model: nn.Module, round: int, client: int) -> Values:
    model.train()
    descent = sgd(world, world.rate(round), model.parameters())
    for batch in world.batches(round, client):
        descent.zero_grad()
        loss(model, *batch).backward()
        descent.step()
    return weights(model)


# ---- a part of the network stays: FedPer, FedBN, LG-FedAvg, FedRep ---------------------------------------------------
Training = Callable[[World, nn.Module, int, int], Values]


def partly_private(
    world: World,
    stays: Callable[[str], bool],
    train: Training = descend,
    weighting: Callable = by_examples,
    server_lr: float = 1.0,
) -> Values:
    """Every client goes on from the server's part and its own; the server averages its part alone."""
    first = weights(world.model())
    shared, own = {n: v for n, v in first.items() if not stays(n)}, {}
    for round, cohort in enumerate(world.cohorts):
        local = {k: train(world, loaded(world, shared | own.get(k, {})), round, k) for k in cohort}
        own |= {k: {n: v for n, v in local[k].items() if stays(n)} for k in cohort}
        middle = mean({k: {n: local[k][n] for n in shared} for k in cohort}, world.shares(cohort, weighting))
        rate = {n: 1.0 if "running" in n else server_lr for n in shared}
        shared = {n: shared[n] + rate[n] * (middle[n] - shared[n]) for n in shared}
    found = label("model", shared)
    for k, values in own.items():
        found |= label(f"private of {k}", values)
    return found


def is_head(name: str) -> bool:
    return name.startswith("head.")


def head_then_body(head_epochs: int) -> Training:
    """FedRep's two descents: in the first the body is out of training, in the second the head is fixed."""

    def train(world: World, model: Any, round: int, client: int) -> Values:
        batches = world.batches(round, client)
        turn = head_epochs * len(batches) // world.epochs
        body = [p for n, p in model.named_parameters() if not is_head(n)]
        for part, rows, mode in ((model.head.parameters(), batches[:turn], False), (body, batches[turn:], True)):
            model.train(mode)
            descent = sgd(world, world.rate(round), part)  # its momentum begins here
            for batch in rows:
                model.zero_grad()
                loss(model, *batch).backward()
                descent.step()
        return weights(model)

    return train


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@worlds
def test_fedper(world, server_lr):
    outcome = by_package(world, FedPer(server_lr=server_lr))
    assert_same(outcome.values, partly_private(world, is_head, server_lr=server_lr))


@worlds
def test_fedbn(world):
    assert_same(by_package(world, FedBN()).values, partly_private(world, lambda name: name.startswith("norm.")))


@pytest.mark.parametrize("epochs", [2, 5])
@worlds
def test_fedrep(world, epochs):
    """All epochs but the last are the head's, unless it is said otherwise."""
    world = replace(world, epochs=epochs)
    found = by_package(world, FedRep()).values
    assert_same(found, partly_private(world, is_head, head_then_body(epochs - 1)))
    assert_same(found, by_package(world, FedRep(head_epochs=epochs - 1)).values)
    assert_same(by_package(world, FedRep(head_epochs=1)).values, partly_private(world, is_head, head_then_body(1)))


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@worlds
def test_lgfedavg(world, server_lr):
    found = by_package(world, LGFedAvg(shared_layers=1, server_lr=server_lr)).values
    low = lambda name: not is_head(name)  # noqa: E731
    assert_same(found, partly_private(world, low, weighting=uniformly, server_lr=server_lr))


@worlds
def test_with_nothing_private_it_is_fedavg(world):
    usual = by_package(world, FedAvg()).values
    assert_same(by_package(world, FedPer(private="none")).values, usual)
    assert_same(by_package(world, FedRep(private="none", head_epochs=0)).values, usual)
    uniform = replace(world, weighting=uniformly)
    assert_same(by_package(world, LGFedAvg(shared_layers=2)).values, by_package(uniform, FedAvg()).values)
    counted = replace(world, weighting=by_examples)
    assert_same(by_package(counted, LGFedAvg(shared_layers=2)).values, usual)


def test_fedbn_without_norms_is_fedavg():
    world = WORLDS["without norms"]
    assert_same(by_package(world, FedBN()).values, by_package(world, FedAvg()).values)


@pytest.mark.parametrize(
    ("recipe", "stays"),
    [
        (FedPer(), is_head),
        (FedRep(), is_head),
        (FedBN(), lambda name: name.startswith("norm.")),
        (LGFedAvg(), lambda name: not is_head(name)),
    ],
    ids=["FedPer", "FedRep", "FedBN", "LGFedAvg"],
)
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_private_weights_never_travel(recipe, stays, buffers):
    outcome = by_package(World(TWO_OF_THREE), recipe, buffers)
    sent = [job.download for job in outcome.jobs] + [r.upload for replies in outcome.replies for r in replies]
    names = {path.rpartition("/")[2] for message in sent for path, _ in message.paths()} - {"weight"}
    first = weights(World().model())
    assert names == {n for n in first if not stays(n) and not (buffers == "local" and "running" in n)}
    assert {n.split()[-1] for n in outcome.values if n.startswith("private")} == first.keys() - names


def test_frozen_weights_rest_bit_for_bit():
    """Without an epoch for it, the body is what was sent; its statistics, too."""

    @dataclass(frozen=True)
    class HeadAlone(FedRep):
        def phase(self, epoch):
            return "head"

    outcome = by_package(World(EVERYONE[:1]), HeadAlone())
    first = weights(World().model())
    for k in range(3):
        delta = outcome.replies[0][k].upload.delta
        assert not any(leaf.any() for leaf in delta.leaves()) and delta.buffers
        assert not torch.equal(outcome.values[f"private of {k} head.weight"], first["head.weight"])


def test_fedrep_needs_epochs_for_both():
    with pytest.raises(BadInput, match=r"head_epochs=2 leaves none of local.epochs=2 for the body"):
        by_package(World(), FedRep(head_epochs=2))
    with pytest.raises(BadInput, match=r"give local.epochs=2 or more"):
        by_package(World(epochs=1), FedRep())
    for recipe in (FedRep(), FedRep(head_epochs=1)):
        with pytest.raises(BadInput, match=r"local.steps"):
            by_package(World(steps=5), recipe)
    stage = next(iter(FedRep().stages(replace(World().stage(), epochs=1))))  # to be described it needs none
    assert stage.algorithm == FedRep()


# ---- which layers are the last ---------------------------------------------------------------------------------------
def test_layers_are_counted_from_the_top():
    with seeded(0):
        net = Network(MODELS["pse_net"]().build(10, 3, 16))
        deep = Network(MODELS["resnet8"]().build(10, 3, 16))
    for count, expected in ((1, {"head"}), (2, {"head", "hidden"}), (3, {"head", "hidden", "value.conv"})):
        shared = LGFedAvg(shared_layers=count).shared_part(net, net.initial_weights())
        assert {name.rpartition(".")[0] for name in shared.params} == expected
    everything = [name for layer in layers(deep) for name in layer]
    whole = deep.initial_weights()
    assert len(everything) == len(set(everything)) and {*whole.params, *whole.buffers} <= set(everything)
    recipe = LGFedAvg(shared_layers=len(layers(deep)))
    assert recipe.shared_part(deep, whole).keys() == whole.keys() and not recipe.private_part(deep, whole).leaves()


class Backwards(nn.Module):
    """Its layers are registered from the top, as in the released code."""

    def __init__(self):
        super().__init__()
        self.last, self.head = nn.Linear(36, 5), nn.Linear(5, 3)
        self.first = nn.Linear(36, 36)

    def features(self, x):
        return self.last(self.first(x.flatten(1)))

    def forward(self, x):
        return self.head(self.features(x))


def test_layers_registered_in_another_order_are_refused():
    with seeded(0):
        net = Network(Backwards(), "fp64")
    engine = Sequential(net, federation((4, 5, 6), identity))
    with pytest.raises(BadInput, match=r"first is among the last 1 layers but runs before head"):
        run(LGFedAvg(), net, engine, World().stage(), seed=SEED)
    run(LGFedAvg(shared_layers=3), net, engine, World().stage(), seed=SEED)  # all are shared: no order matters


def test_more_layers_than_there_are():
    with pytest.raises(BadInput, match=r"shared_layers=3, but the network has 2 layers"):
        by_package(World(), LGFedAvg(shared_layers=3))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "custom"])
def test_every_model_registers_layers_in_the_order_they_run(name):
    with seeded(0):
        net = Network(MODELS[name]().build(4, 3, 32))
    x = torch.zeros(1, 3, 32, 32)
    engine = Sequential(net, replace(federation((1,), identity), data=replace(federation((1,)).data, x=x)))
    stage = next(iter(LGFedAvg().stages(World().stage())))
    recipe, server = LGFedAvg(), Server(net, Tree(), 1)
    for count in (1, 2):
        recipe = LGFedAvg(shared_layers=count)
        job = Job(replace(stage, algorithm=recipe), Tree(model=recipe.setup(server).model), Tree(), 0, 0, 0, 0)
        engine.open(job, 0)  # BadInput otherwise


# ---- Ditto -----------------------------------------------------------------------------------------------------------
def ditto(world: World, pull: float, server_lr: float = 1.0) -> Values:
    """v <- v - eta (grad f(v) + pull (v - theta)), theta the model that was received; beside it, FedAvg."""
    theta, own = weights(world.model()), {}
    for round, cohort in enumerate(world.cohorts):
        local = {k: descend(world, loaded(world, theta), round, k) for k in cohort}
        for k in cohort:
            v = loaded(world, own.get(k, weights(world.model()))).train()
            descent = sgd(world, world.rate(round), v.parameters())
            for batch in world.batches(round, k):
                descent.zero_grad()
                near = sum(((p - theta[n]) ** 2).sum() for n, p in v.named_parameters())
                (loss(v, *batch) + pull / 2 * near).backward()
                descent.step()
            own[k] = weights(v)
        middle = mean(local, world.shares(cohort))
        theta = {n: theta[n] + (1.0 if "running" in n else server_lr) * (middle[n] - theta[n]) for n in theta}
    found = label("model", theta)
    for k, values in own.items():
        found |= label(f"own of {k}", values)
    return found


@pytest.mark.parametrize(("pull", "server_lr"), [(0.1, 1.0), (1.0, 0.5)])
@worlds
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


# ---- APFL ------------------------------------------------------------------------------------------------------------
def apfl(world: World, alpha: float, every: str, order: str) -> Values:
    """The mixed model as one function of (v, w, alpha), differentiated by autograd in all of them."""
    theta, own, alphas = weights(world.model()), {}, {}
    for round, cohort in enumerate(world.cohorts):
        local = {}
        for k in cohort:
            w = loaded(world, theta).train()
            v = loaded(world, own.get(k, weights(world.model()))).train()
            a = alphas.get(k, torch.tensor(alpha, dtype=torch.float64))
            steps_w, steps_v = (sgd(world, world.rate(round), m.parameters()) for m in (w, v))
            for t, (x, y, weight) in enumerate(world.batches(round, k)):

                def step_w(batch=(x, y, weight), w=w, steps=steps_w):
                    steps.zero_grad()
                    loss(w, *batch).backward()
                    steps.step()

                if order == "sequential":
                    step_w()
                share = a.clone().requires_grad_()
                theirs = dict(w.named_parameters())
                mixed = {n: share * p.detach() + (1 - share) * theirs[n].detach() for n, p in v.named_parameters()}
                losses = F.cross_entropy(functional_call(v, mixed, (x,)), y, reduction="none")
                value = (losses * weight).sum() / weight.sum()
                slope, *grads = torch.autograd.grad(value, [share, *mixed.values()])
                for p, g in zip(v.parameters(), grads, strict=True):
                    p.grad = g
                steps_v.param_groups[0]["lr"] = world.rate(round) * a.item()
                if order == "together":
                    step_w()
                steps_v.step()
                if every == "step" or (every == "round" and t == 0):
                    a = (a - world.rate(round) * slope).clamp(0, 1)
            local[k], own[k], alphas[k] = weights(w), weights(v), a
        theta = mean(local, world.shares(cohort))
    found = label("model", theta)
    for k, values in own.items():
        found |= label(f"own of {k}", values) | {f"alpha of {k}": alphas[k]}
    return found


@pytest.mark.parametrize("order", ["together", "sequential"])
@pytest.mark.parametrize("every", ["step", "round", "never"])
@worlds
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


# ---- L2GD ------------------------------------------------------------------------------------------------------------
def runs_of_aggregations(recipe: L2GD, rounds: int) -> list[int]:
    server = Server(network(), Tree(), 3)
    return [recipe.aggregations(replace(server, key=key(SEED, "server", round))) for round in range(rounds)]


def l2gd(world: World, recipe: L2GD) -> tuple[dict[int, Values], dict[int, Values], Values]:
    """One iteration after the other: (models before the last aggregations, after them, the last mean).

    With everyone in every round, so that a mean is the mean of all: each aggregation computes it anew.
    """
    models = {k: weights(world.model()) for k in range(len(world.sizes))}
    middle, before, n = weights(world.model()), models, len(models)
    for round, times in enumerate(runs_of_aggregations(recipe, len(world.cohorts))):
        before = models = {k: descend(world, loaded(world, models[k]), round, k) for k in models}
        # The rate of a local step is eta / (n (1 - p)); clients aggregate at the rate of the round they come back in.
        eta = world.rate(min(round + 1, len(world.cohorts) - 1)) * n * (1 - recipe.p)
        for _ in range(times):
            middle, share = mean(models, dict.fromkeys(models, 1 / n)), eta * recipe.pull / (n * recipe.p)
            models = {k: {w: (1 - share) * v + share * middle[w] for w, v in m.items()} for k, m in models.items()}
    return before, models, middle


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


# ---- Fed-MTL ---------------------------------------------------------------------------------------------------------
def relation(kind: str, m: int) -> Tensor:
    """Omega as a matrix: I - 11'/m times itself, or with squared entries."""
    centring = torch.eye(m, dtype=torch.float64) - torch.ones(m, m, dtype=torch.float64) / m
    return centring @ centring if kind == "laplacian" else centring**2


def flat(values: Values) -> Tensor:
    return torch.cat([v.flatten() for n, v in values.items() if "running" not in n])


def fedmtl(world: World, kind: str, strength: float) -> Values:
    """W with all clients' columns, penalised as a matrix; autograd, and only the own column is free."""
    m = len(world.sizes)
    columns = {k: weights(world.model()) for k in range(m)}
    omega, seen = relation(kind, m), set()
    for round, cohort in enumerate(world.cohorts):
        start = {k: flat(values) for k, values in columns.items()}
        for k in cohort:
            model = loaded(world, columns[k]).train()
            descent = sgd(world, world.rate(round), model.parameters())
            for batch in world.batches(round, k):
                descent.zero_grad()
                own = torch.cat([p.flatten() for p in model.parameters()])
                W = torch.stack([own if j == k else start[j] for j in range(m)], 1)
                (loss(model, *batch) + strength * (W.norm() ** 2 + (W @ omega @ W.T).trace())).backward()
                descent.step()
            columns[k] = weights(model)
        seen |= set(cohort)
    found = label("model", mean(columns, dict.fromkeys(columns, 1 / m)))
    for k in seen:
        found |= label(f"own of {k}", columns[k])
    return found


@pytest.mark.parametrize("kind", ["laplacian", "code"])
@worlds
def test_fedmtl(world, kind):
    outcome = by_package(world, FedMTL(omega=kind, strength=0.02))
    assert_same(outcome.values, fedmtl(world, kind, 0.02))
    assert all(set(reply.upload) == {"delta"} for replies in outcome.replies for reply in replies)


def test_the_laplacian_is_the_spread_and_pulls_together_while_the_code_does_not():
    m, d = 4, 6
    with seeded(1):
        W = torch.randn(d, m, dtype=torch.float64)
    spread = sum((W[:, i] - W.mean(1)).square().sum() for i in range(m))
    assert abs((W @ relation("laplacian", m) @ W.T).trace() - spread) < 1e-12
    together = W.mean(1, keepdim=True).expand(d, m)
    assert abs((together @ relation("laplacian", m) @ together.T).trace()) < 1e-12
    assert (together @ relation("code", m) @ together.T).trace() > 0.1
    world = World()
    apart = {}
    for kind, strength in (("laplacian", 0.5), ("code", 0.5), ("laplacian", 0.0)):
        found = by_package(world, FedMTL(omega=kind, strength=strength)).values
        own = [flat({n: v for n, v in found.items() if n.startswith(f"own of {k}")}) for k in range(3)]
        norm = torch.stack(own).norm()
        apart[kind, strength] = (torch.stack(own) - torch.stack(own).mean(0)).norm() / norm
    assert apart["laplacian", 0.5] < 0.8 * apart["code", 0.5]


def test_fedmtl_without_strength_is_local():
    world = World(TWO_OF_THREE)
    found = by_package(world, FedMTL(strength=0.0)).values
    own = {n.replace("own", "private"): v for n, v in found.items() if n.startswith("own")}
    assert_same(own, by_package(world, Local()).values)


@pytest.mark.parametrize(("parameters", "strength"), [(9, 1e-2), (10, 1e-3), (99, 1e-3), (100, 1e-4), (276_000, 1e-7)])
def test_default_strength_follows_the_number_of_parameters(parameters, strength):
    net = Network(nn.Linear(parameters, 1, bias=False))
    assert FedMTL().weight(net) == pytest.approx(strength, rel=1e-12)
    assert FedMTL(strength=0.3).weight(net) == 0.3


def test_fedmtl_has_no_server_lr():
    with pytest.raises(BadInput, match="server_lr"):
        FedMTL(server_lr=0.5)


# ---- all of them -----------------------------------------------------------------------------------------------------
METHODS = [
    FedPer(),
    FedRep(),
    FedBN(),
    LGFedAvg(),
    Ditto(),
    APFL(),
    L2GD(p=0.5, pull=2.0),
    FedMTL(strength=0.02),
]
methods = pytest.mark.parametrize("recipe", METHODS, ids=lambda recipe: type(recipe).__name__)


@methods
def test_evaluation_after_training_sees_the_trained_model(recipe):
    """An errand with the usual epochs judges what `personal` gives for the trained weights, and changes nothing."""
    world = World(EVERYONE[:2])
    outcome = by_package(world, recipe)
    stage, job = outcome.jobs[-1].stage, outcome.jobs[-1]
    before = [copy.deepcopy(dict(outcome.engine.memories.get(k).paths())) for k in range(3)]
    scores = {}
    for epochs in (0, 2):
        errand = stage.errand(Evaluate(base=stage.algorithm), epochs=epochs)
        look = replace(job, stage=errand, download=stage.algorithm.broadcast(outcome.server), round=2)
        scores[epochs] = [float(reply.upload.loss) for reply in outcome.engine.run(look, [0, 1, 2])]
    assert all(math.isfinite(value) for values in scores.values() for value in values)
    assert all(a != b for a, b in zip(scores[0], scores[2], strict=True))
    for k in range(3):
        after = dict(outcome.engine.memories.get(k).paths())
        assert all(torch.equal(after[path], leaf) for path, leaf in before[k].items())


@methods
def test_statistics_may_stay_at_their_clients(recipe):
    """With buffers=local no running statistic is sent, and parameters are the same as ever."""
    world = World(TWO_OF_THREE)
    usual, local = by_package(world, recipe), by_package(world, recipe, "local")
    sent = [job.download for job in local.jobs] + [r.upload for replies in local.replies for r in replies]
    assert not [path for message in sent for path, _ in message.paths() if "running" in path]
    if not isinstance(recipe, FedRep):  # its head is trained on a body that reads statistics: there they matter
        parameters = {n for n in usual.values if "running" not in n}
        assert_same({n: local.values[n] for n in parameters}, {n: usual.values[n] for n in parameters})


@methods
def test_fine_tuning_starts_from_the_personal_model(recipe):
    world = World(TWO_OF_THREE)
    base = by_package(world, recipe)
    trained = [stage for stage, _, _ in timetable(recipe, world.stage())][-1].algorithm
    tuned = by_package(world, FineTuned(recipe, epochs=2)).values
    rate = replace(world, epochs=2)
    for k in range(3):
        model = loaded(world, first_rate(base, k, trained)).train()
        descent = sgd(world, world.rate(0), model.parameters())
        for batch in rate.batches(3, k):
            descent.zero_grad()
            loss(model, *batch).backward()
            descent.step()
        found = {n.removeprefix(f"tuned of {k} "): v for n, v in tuned.items() if n.startswith(f"tuned of {k} ")}
        assert_same(found, weights(model))


def first_rate(outcome: Outcome, client: int, recipe: Algorithm) -> Values:
    """Personal weights as the last stage sees them: its rate is the first round's again."""
    jobs = [replace(job, at=0) for job in outcome.jobs]
    return outcome._replace(jobs=jobs).personal(client, recipe)


# ---- mutants: methods with one mistake each, which the plain loops must notice ---------------------------------------
@dataclass(frozen=True)
class Masked(FedRep):
    """The body's gradient is dropped in the head's phase, but its statistics move."""

    def trains(self, client, name):
        return True

    def gradient(self, client, local, batch):
        wanted = lambda name: FedRep.trains(self, client, name)  # noqa: E731
        return super().gradient(client, local, batch).select(wanted)


@dataclass(frozen=True)
class BodyFirst(FedRep):
    def phase(self, epoch):
        return "body" if super().phase(epoch) == "head" else "head"


@dataclass(frozen=True)
class NearTheMoving(Ditto):
    """Held near the global model as it is trained here, not as it was received."""

    def step(self, client, local, batch):
        moving = client.received.replace(model=Tree(params=local.params, buffers=local.buffers))
        return super().step(replace(client, received=moving), local, batch)


@dataclass(frozen=True)
class Unmixed(APFL):
    """Both weights times alpha, as a public code has it."""

    def mixed(self, own, model, alpha):
        return Tree(params=(own.params + model.params) * alpha, buffers=own.buffers)


@dataclass(frozen=True)
class FullRate(APFL):
    """Own weights move without the factor alpha."""

    def step(self, client, local, batch):
        same = super().step(client, local.replace(own=local.own.map(torch.clone)), batch)
        own = local.own
        grads = self.gradient(client, self.mixed(own, local, local.alpha), batch)
        client.optimizer.update_(own.params, grads, own.optimizer)
        return same.replace(own=own)


@dataclass(frozen=True)
class OwnTwice(L2GD):
    """The mean counts the first client twice, as a public code has it."""

    def aggregate(self, server, uploads):
        return super().aggregate(server, [*uploads, uploads[0]])


@dataclass(frozen=True)
class StandingMean(FedMTL):
    """The mean does not move with the client."""

    def pull(self, client, column):
        return column + (column - client.received.model.params)


MUTANTS = {
    Masked: (FedRep(), Masked(), lambda w: partly_private(w, is_head, head_then_body(1))),
    BodyFirst: (FedRep(), BodyFirst(), lambda w: partly_private(w, is_head, head_then_body(1))),
    NearTheMoving: (Ditto(pull=0.5), NearTheMoving(pull=0.5), lambda w: ditto(w, 0.5)),
    Unmixed: (APFL(alpha=0.6), Unmixed(alpha=0.6), lambda w: apfl(w, 0.6, "step", "together")),
    FullRate: (APFL(alpha=0.6), FullRate(alpha=0.6), lambda w: apfl(w, 0.6, "step", "together")),
    StandingMean: (FedMTL(strength=0.1), StandingMean(strength=0.1), lambda w: fedmtl(w, "laplacian", 0.1)),
}


@pytest.mark.parametrize(("right", "wrong", "by_hand"), MUTANTS.values(), ids=[m.__name__ for m in MUTANTS])
def test_the_plain_loops_notice(right, wrong, by_hand):
    world = World(EVERYONE)
    expected = by_hand(world)
    assert gap(by_package(world, right).values, expected) <= TOLERANCE
    assert gap(by_package(world, wrong).values, expected) > 1e-6


def test_the_iterations_notice_a_wrong_mean():
    world, recipe = World(((0, 1, 2),) * 5), OwnTwice(p=0.9, pull=6.0)
    middle = label("model", l2gd(world, L2GD(p=0.9, pull=6.0))[2])
    found = by_package(world, recipe).values
    assert gap({n: v for n, v in found.items() if n.startswith("model")}, middle) > 1e-6
