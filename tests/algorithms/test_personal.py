"""What all personalised methods have in common, and mutants that the plain loops must catch."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedlens.algorithms import APFL, L2GD, Ditto, FedAvg, FedBN, FedMTL, FedPer, FedRep, FineTuned, LGFedAvg
from fedlens.algorithms.lgfedavg import layers
from fedlens.core.algorithm import Algorithm, Server
from fedlens.core.batches import identity
from fedlens.core.engine import Job
from fedlens.core.errors import BadInput
from fedlens.core.evaluate import Evaluate
from fedlens.core.network import Network
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.rng import seeded
from fedlens.core.run import run, timetable
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.models import MODELS
from personal import (
    Outcome,
    Values,
    apfl,
    assert_same,
    by_package,
    ditto,
    fedmtl,
    gap,
    head_then_body,
    is_head,
    l2gd,
    label,
    loaded,
    partly_private,
    weights,
    worlds,
)
from small import federation
from textbook import EVERYONE, SEED, TOLERANCE, TWO_OF_THREE, World, loss, sgd


@worlds
def test_with_nothing_private_it_is_fedavg(world):
    usual = by_package(world, FedAvg()).values
    assert_same(by_package(world, FedPer(private="none")).values, usual)
    assert_same(by_package(world, FedRep(private="none", head_epochs=0)).values, usual)
    uniform = replace(world, weighting=uniformly)
    assert_same(by_package(world, LGFedAvg(shared_layers=2)).values, by_package(uniform, FedAvg()).values)
    counted = replace(world, weighting=by_examples)
    assert_same(by_package(counted, LGFedAvg(shared_layers=2)).values, usual)


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
