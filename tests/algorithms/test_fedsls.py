"""FedSLS and FedSL: saliency by hand and by module hooks, one image at a time; whole runs by plain PyTorch loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedlens.algorithms.fedsls as module
from fedlens import config
from fedlens.algorithms import FedAvg, FedAvgM, FedProx, FedSL, FedSLS, FineTuned, Local, Scaffold
from fedlens.algorithms.fedsl import autoencoder
from fedlens.attribution import layer_saliency
from fedlens.core import evaluate
from fedlens.core.algorithm import Recipe, Stage
from fedlens.core.batches import Dataset, Federation, Shard, identity, plan
from fedlens.core.cohort import Cohort, Everyone
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.objective import by_examples
from fedlens.core.optimizer import Cosine, Exponential, Sgd
from fedlens.core.rng import generator, key, seeded
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.data.prepare import Prepare
from fedlens.engines.sequential import Sequential
from fedlens.experiment import Experiment
from fedlens.models import MODELS
from small import Net, federation, jitter
from textbook import TWO_OF_THREE, assert_same, far, filled, flat, statistics, total, vector

SEED, BATCH, RATE, FADE, WEIGHT_DECAY, MOMENTUM = 5, 4, 0.1, 0.9, 1e-3, 0.9
SIZES = (13, 4, 9)


# ---- saliency by hand ------------------------------------------------------------------------------------------------
class TwoLayers(nn.Module):
    """1 x 1 convolutions on an image of two pixels: every number below can be followed with a pencil."""

    def __init__(self):
        super().__init__()
        self.conv1, self.relu1 = nn.Conv2d(1, 2, 1), nn.ReLU()
        self.conv2, self.relu2 = nn.Conv2d(2, 2, 1), nn.ReLU()
        self.flat, self.head = nn.Flatten(), nn.Linear(4, 2, bias=False)
        values = {
            self.conv1.weight: [[[[1.0]]], [[[-1.0]]]],
            self.conv1.bias: [0.0, 3.0],
            self.conv2.weight: [[[[1.0]], [[-1.0]]], [[[1.0]], [[1.0]]]],
            self.conv2.bias: [0.0, 0.0],
            self.head.weight: [[2.0, 3.0, 1.0, 1.0], [0.0, -5.0, 0.0, 0.0]],
        }
        for parameter, value in values.items():
            assert parameter is not None
            parameter.data = torch.tensor(value)

    def features(self, x):
        return self.flat(self.relu2(self.conv2(self.relu1(self.conv1(x)))))


def saliency(recipe: FedSLS, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """R_i of every image, as the package finds it."""
    net = Network(module, "fp64")
    piece = Shard(Dataset(x, y), torch.arange(len(y)))
    return recipe.of_images(SimpleNamespace(net=net), net.initial_weights(), piece)  # pyright: ignore


# x = [1, 2]: layer 1 is a = [1, 2] and b = 3 - x = [2, 1]; layer 2 is c = a - b = [-1, 1] and d = a + b = [3, 3];
# of class 0 the score is 2 c1 + 3 c2 + d1 + d2, c and d behind their ReLUs.
# Gradient at layer 2: c [0, 3], d [1, 1]. At the ReLUs of layer 1: a [1, 4], b [1, -2]; guided, b is [1, 0].
BY_HAND = {
    # channel means of gradient times activation: layer 1 ([1, 8] + [2, 0]) / 2, layer 2 ([0, 3] + [3, 3]) / 2
    FedSLS(): (math.hypot(1.5, 4), math.hypot(1.5, 3)),
    FedSLS(norm="l1"): (5.5, 4.5),
    FedSLS(norm="l2sq"): (18.25, 11.25),
    FedSLS(norm="sqrt_l2"): (18.25**0.25, 11.25**0.25),
    FedSLS(saliency="guided_grad"): (math.hypot(1, 2), math.hypot(0.5, 2)),
    FedSLS(saliency="plain_grad_x_act"): (math.hypot(1.5, 3), math.hypot(1.5, 3)),  # b: [2, -2]
    # at the output of a ReLU the gradient has not passed it yet: b is [1, -2]
    FedSLS(tap="relu"): (math.hypot(1.5, 3), math.hypot(1.5, 3)),
    # logits are 9 and -5: class 0 is predicted
    FedSLS(target="pred"): (math.hypot(1.5, 4), math.hypot(1.5, 3)),
    # both classes: at layer 2 c [0, 3 - 5 = -2, none of it guided], d [1, 1]; at layer 1 a [1, 1], b [1, 1]
    FedSLS(target="sum"): (math.hypot(1.5, 1.5), math.hypot(1.5, 1.5)),
}


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("recipe", BY_HAND, ids=lambda r: f"{r.saliency} {r.norm} {r.target} {r.tap}")
def test_two_layers_by_hand(recipe, tau):
    """tau = 0 leaves the first layer, tau = 1 weighs all alike."""
    first, second = BY_HAND[recipe]
    x, y = torch.tensor([[[[1.0, 2.0]]]]).double(), torch.tensor([0])
    found = saliency(replace(recipe, tau=tau), TwoLayers().double(), x, y)
    assert found.tolist() == pytest.approx([first + tau * second], rel=1e-14)


def test_scores_by_hand():
    """d log p = (1 - p) d(logit difference), dp = p (1 - p) d(logit difference); one class's row minus the other's."""
    x, y = torch.tensor([[[[1.0, 2.0]]]]).double(), torch.tensor([0])
    # head 0 minus head 1: c [2, 8], d [1, 1]; guided: layer 2 c [0, 8], d [1, 1]; layer 1 a [1, 9], b [1, -7 -> 0]
    unit = math.hypot(1.5, 9) + 0.5 * math.hypot(1.5, 5.5)
    p = 1 / (1 + math.exp(-14))
    for score, factor in (("logprob", 1 - p), ("prob", p * (1 - p))):
        found = saliency(FedSLS(score=score), TwoLayers().double(), x, y)
        assert found.item() == pytest.approx(factor * unit, rel=1e-8)  # 1 - p loses digits


# ---- saliency by hooks -----------------------------------------------------------------------------------------------
class Residual(nn.Module):
    """A block with a projection beside it; layers run in the order conv1, conv2, conv3, downsample."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = nn.Conv2d(3, 4, 3, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.conv3, self.bn3, self.relu3 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1, 2), nn.BatchNorm2d(4))
        self.flat, self.head = nn.Flatten(), nn.Linear(36, 3)

    def features(self, x):
        x = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu2(self.bn2(self.conv2(x)))))
        return self.flat(self.relu3(out + self.downsample(x)))

    def forward(self, x):
        return self.head(self.features(x))


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": lambda m: (m**2).sum().sqrt(),
    "sqrt_l2": lambda m: (m**2).sum().sqrt().sqrt(),
    "l1": lambda m: m.abs().sum(),
    "l2sq": lambda m: (m**2).sum(),
}


def by_hooks(recipe: FedSLS, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """R of one image: hooks on modules, as guided backpropagation is usually written."""
    model = copy.deepcopy(model).eval()
    names, seen = {part: name for name, part in model.named_modules()}, []

    def keep(part, args, out):
        out.retain_grad()
        seen.append((names[part], out))

    for part in names:
        if isinstance(part, nn.ReLU) and recipe.saliency != "plain_grad_x_act":
            part.register_full_backward_hook(lambda part, inside, outside: (inside[0].clamp(min=0),))
        if isinstance(part, nn.Conv2d if recipe.tap == "conv" else nn.ReLU):
            part.register_forward_hook(keep)
    logits = model(x[None])[0]
    scored = {"logit": logits, "logprob": logits.log_softmax(0), "prob": logits.softmax(0)}[recipe.score]
    picked = {"true": scored[y], "pred": scored[logits.argmax()], "sum": scored.sum()}[recipe.target]
    picked.backward()
    found, depth = 0.0, 0
    for name, out in seen:
        if not recipe.include_downsample and name.startswith("downsample"):
            continue
        assert out.grad is not None
        activation = torch.ones_like(out) if recipe.saliency == "guided_grad" else out.clamp(min=0)
        found += recipe.tau**depth * NORMS[recipe.norm]((out.grad * activation).mean(1)).item()
        depth += 1
    return found


def initial(kind: type[nn.Module] = Residual) -> nn.Module:
    """With statistics that are not zero and one."""
    with seeded(7):
        model = kind().double()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
                part.running_mean.copy_(torch.randn(part.num_features) / 4)
                part.running_var.copy_(torch.rand(part.num_features) + 0.5)
    return model


SWITCHES = [
    FedSLS(),
    FedSLS(saliency="guided_grad"),
    FedSLS(saliency="plain_grad_x_act"),
    FedSLS(norm="sqrt_l2"),
    FedSLS(norm="l1"),
    FedSLS(norm="l2sq"),
    FedSLS(target="pred"),
    FedSLS(target="sum"),
    FedSLS(score="logprob"),
    FedSLS(score="prob"),
    FedSLS(tap="relu"),
    FedSLS(tau=0.9),
    FedSLS(tau=0.0),
    FedSLS(include_downsample=False, tau=1.0),
    FedSLS(target="sum", score="logprob", norm="l1", tap="relu", saliency="guided_grad"),
]


def named(recipe: FedSLS) -> str:
    default = FedSLS()
    return " ".join(str(value) for name, value in vars(recipe).items() if value != getattr(default, name)) or "default"


@pytest.mark.parametrize("recipe", SWITCHES, ids=named)
def test_saliency_is_that_of_hooks(recipe):
    data, model = federation(SIZES, identity).data, initial()
    x, y = data.x[:12], data.y[:12]
    expected = [by_hooks(recipe, model, image, label) for image, label in zip(x, y, strict=True)]
    assert saliency(recipe, model, x, y).tolist() == pytest.approx(expected, rel=1e-12)
    if recipe != FedSLS():  # every switch does something, or the oracle would prove nothing
        literal = [by_hooks(FedSLS(), model, image, label) for image, label in zip(x, y, strict=True)]
        assert literal != pytest.approx(expected, rel=1e-3)


def test_positive_networks_have_plain_gradients():
    model = Net(norm=False).double()
    for parameter in model.parameters():
        parameter.data.abs_()
    x, y = federation(SIZES, identity).data.x[:8].abs(), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    guided, plain = (saliency(FedSLS(saliency=s), model, x, y) for s in ("guided_grad_x_act", "plain_grad_x_act"))
    assert torch.equal(guided, plain) and (guided > 0).all()
    with torch.no_grad():
        model.head.weight[:, ::2] *= -1
    guided, plain = (saliency(FedSLS(saliency=s), model, x, y) for s in ("guided_grad_x_act", "plain_grad_x_act"))
    assert (guided - plain).abs().min() > 1e-6


@pytest.mark.parametrize(("norm", "power"), [("l2", 1), ("l1", 1), ("sqrt_l2", 0.5), ("l2sq", 2)])
def test_scaling_the_score_scales_every_client_alike(norm, power):
    data, model = federation(SIZES, identity), initial()
    larger = copy.deepcopy(model)
    larger.head.weight.data *= 7.0
    larger.head.bias.data *= 7.0
    recipe = FedSLS(norm=norm)
    sums = []
    for each in (model, larger):
        values = saliency(recipe, each, data.data.x[:26], data.data.y[:26])
        sums.append(torch.stack([values[data.train[k]].sum() for k in range(3)]))
    assert (sums[1] / sums[0]).tolist() == pytest.approx([7.0**power] * 3, rel=1e-12)
    assert (sums[1] / sums[1].sum()).tolist() == pytest.approx((sums[0] / sums[0].sum()).tolist(), rel=1e-12)


switches = st.builds(
    FedSLS,
    saliency=st.sampled_from(["guided_grad_x_act", "guided_grad", "plain_grad_x_act"]),
    norm=st.sampled_from(sorted(NORMS)),
    target=st.sampled_from(["true", "pred", "sum"]),
    score=st.sampled_from(["logit", "logprob"]),
    tap=st.sampled_from(["conv", "relu"]),
    tau=st.floats(0, 1),
    include_downsample=st.booleans(),
)


@settings(deadline=None, max_examples=25)
@given(recipe=switches, seed=st.integers(0, 99), order=st.permutations(range(7)), cut=st.integers(1, 6))
def test_an_image_does_not_know_its_batch(recipe, seed, order, cut):
    """Alone, in pieces or shuffled: the same number, and never a negative one."""
    x = torch.randn(7, 1, 6, 6, generator=generator(seed), dtype=torch.float64)
    y, model, index = torch.arange(7) % 3, initial(), torch.tensor(order)
    whole = saliency(recipe, model, x, y)
    assert (whole >= 0).all() and whole.isfinite().all()
    halves = torch.cat([saliency(recipe, model, x[:cut], y[:cut]), saliency(recipe, model, x[cut:], y[cut:])])
    assert halves.tolist() == pytest.approx(whole.tolist(), rel=1e-11, abs=1e-14)
    shuffled = saliency(recipe, model, x[index], y[index])
    assert shuffled.tolist() == pytest.approx(whole[index].tolist(), rel=1e-11, abs=1e-14)


# ---- whole runs ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Script(Cohort):
    """Who takes part in which round of the run; everyone is weighed in the others."""

    rounds: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __call__(self, population, key_of_round):
        return {key(SEED, "cohort", round): cohort for round, cohort in self.rounds}[key_of_round]


@dataclass(frozen=True)
class Trial:
    """A small federation that the package and the plain loops run."""

    cohorts: tuple[tuple[int, ...], ...] = TWO_OF_THREE
    every: int = 0  # rounds between weighings; 0: one weighing
    pretrain: int = 2  # epochs
    sizes: tuple[int, ...] = SIZES
    model: nn.Module = initial()
    schedule: Any = Exponential(FADE)

    def timeline(self) -> list[tuple[int, int, bool]]:
        """(round of the run, round of training, whether it is a weighing)."""
        rounds = []
        for at in range(len(self.cohorts)):
            for weighs in (True, False) if at % (self.every or len(self.cohorts)) == 0 else (False,):
                rounds.append((len(rounds), at, weighs))
        return rounds

    def stage(self, **changes: Any) -> Stage:
        script = tuple((round, self.cohorts[at]) for round, at, weighs in self.timeline() if not weighs)
        optimizer = Sgd(RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, schedule=self.schedule)
        stage = Stage(None, len(self.cohorts), Script(script), optimizer, epochs=1, size=BATCH)
        return replace(stage, **changes)

    def run(self, recipe: Recipe, data: Federation | None = None, **changes: Any) -> SimpleNamespace:
        net, seen = Network(self.model, "fp64"), []
        clients = Sequential(net, data or federation(self.sizes, identity), checked=True)
        observe = lambda server, job, replies: seen.append((server, job, replies))  # noqa: E731
        server = run(recipe, net, clients, self.stage(**changes), seed=SEED, observe=observe)
        values = flat("model", server.state.model, self.model)
        return SimpleNamespace(values=values, state=server.state, seen=seen, memories=clients.memories)

    def trained(self, theta: Tensor, running: Tensor, round: int, k: int, at: int, epochs: int = 1) -> nn.Module:
        """Plain descent from theta on client k's rows of a round, at the rate of a round of training."""
        data = federation(self.sizes, identity)
        model, rate = filled(self.model, theta, running).train(), RATE * self.schedule(at, len(self.cohorts))
        descent = torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        rows, weights, _ = plan(self.sizes[k], BATCH, key(SEED, "batches", round, k), epochs=epochs)
        for row, weight in zip(rows, weights, strict=True):
            index = data.train[k][row]
            descent.zero_grad()
            losses = F.cross_entropy(model(data.data.x[index]), data.data.y[index], reduction="none")
            ((losses * weight).sum() / weight.sum()).backward()
            descent.step()
        return model

    def by_hand(self, number: Callable[[nn.Module, int], float], share: Callable | None = None) -> SimpleNamespace:
        """number(model that was trained to be thrown away, client) is R_k; share(cohort, R) may say another weight."""
        theta, running = vector(self.model), statistics(self.model)
        R: dict[int, float] = {}
        history = []
        for round, at, weighs in self.timeline():
            if weighs:
                for k in range(len(self.sizes)):
                    R[k] = number(self.trained(theta, running, round, k, at, self.pretrain), k)
                history.append(dict(R))
                continue
            cohort = self.cohorts[at]
            p = share(cohort, R) if share else {k: R[k] / sum(R[j] for j in cohort) for k in cohort}
            ends = {k: self.trained(theta, running, round, k, at) for k in cohort}
            theta = theta + total(p[k] * (vector(ends[k]) - theta) for k in cohort)
            running = total(p[k] * statistics(ends[k]) for k in cohort)
        return SimpleNamespace(values={"model": theta, "model statistics": running}, history=history)

    def hooked(self, recipe: FedSLS) -> Callable[[nn.Module, int], float]:
        """R_k by hooks, one image after another."""
        data = federation(self.sizes, identity)

        def number(model: nn.Module, k: int) -> float:
            found = sum(by_hooks(recipe, model, data.data.x[i], data.data.y[i]) for i in data.train[k])
            return found / self.sizes[k] if recipe.normalize == "mean" else found

        return number

    def by_samples(self, cohort: tuple[int, ...], R: Any = None) -> dict[int, float]:
        return {k: self.sizes[k] / sum(self.sizes[j] for j in cohort) for k in cohort}


def weighings(outcome: SimpleNamespace) -> list[dict[int, float]]:
    """R_k that the server saw, for every weighing."""
    return [
        {reply.client: float(reply.upload.saliency.total) for reply in replies}
        for _, job, replies in outcome.seen
        if isinstance(job.stage.algorithm, module.MeasureSaliency)
    ]


@pytest.mark.parametrize(
    ("trial", "recipe"),
    [
        (Trial(), FedSLS(pretrain_epochs=2)),
        (Trial(pretrain=0), FedSLS(pretrain_epochs=0, norm="l1", target="pred", tap="relu")),
        (Trial(pretrain=1), FedSLS(pretrain_epochs=1, normalize="mean", saliency="plain_grad_x_act")),
        (Trial(sizes=(1, 3, 6)), FedSLS(pretrain_epochs=2, include_downsample=False)),
        (Trial((*TWO_OF_THREE, (0, 1, 2)), 2, 1), FedSLS(pretrain_epochs=1, recompute_every=2)),
        (Trial(every=1, pretrain=0, schedule=Cosine()), FedSLS(pretrain_epochs=0, recompute_every=1, score="prob")),
        (Trial(every=9), FedSLS(pretrain_epochs=2, recompute_every=9)),
    ],
    ids=["paper", "no copy", "mean", "one example", "dynamic", "every round", "never again"],
)
def test_fedsls(trial, recipe):
    outcome, expected = trial.run(recipe), trial.by_hand(trial.hooked(recipe))
    assert_same(outcome.values, expected.values)
    scale = trial.sizes if recipe.normalize == "mean" else (1, 1, 1)
    found = [{k: total / scale[k] for k, total in totals.items()} for totals in weighings(outcome)]
    assert len(found) == len(expected.history)
    assert found == [pytest.approx(numbers, rel=1e-11) for numbers in expected.history]
    assert int(outcome.state.fallbacks) == 0
    assert not any(job.stage.algorithm.notes(replies) for _, job, replies in outcome.seen)


def test_dynamic_weights_change_and_static_ones_do_not():
    trial = Trial(every=1, pretrain=0)
    numbers = weighings(trial.run(FedSLS(pretrain_epochs=0, recompute_every=1)))
    assert len(numbers) == 3 and max(abs(numbers[0][k] / numbers[2][k] - 1) for k in range(3)) > 1e-3
    assert len(weighings(Trial().run(FedSLS()))) == 1


def test_parts_of_a_constant_rate_are_equal():
    """Recorded steps are kept by stage: equal parts share them."""
    stages = list(FedSLS(recompute_every=2).stages(Trial(((0,),) * 6, schedule=Sgd().schedule).stage()))
    assert len(stages) == 6 and len(set(stages)) == 2
    faded = list(FedSLS(recompute_every=2).stages(Trial(((0,),) * 6).stage()))
    assert len(set(faded)) == 6


def test_the_copy_is_thrown_away():
    """The weighing sends two numbers up, moves no model, and clients keep those numbers alone."""
    outcome = Trial().run(FedSLS(pretrain_epochs=2))
    server, job, replies = outcome.seen[0]
    assert all(torch.equal(a, b) for a, b in zip(server.state.model.leaves(), job.download.model.leaves(), strict=True))
    assert [reply.client for reply in replies] == [0, 1, 2]
    assert all({path for path, _ in r.upload.paths()} == {"saliency/total", "saliency/examples"} for r in replies)
    assert all(reply.upload.nbytes == 16 for reply in replies)
    for reply in replies:
        kept = outcome.memories.get(reply.client)
        assert kept.keys() == {"saliency", "seen"} and kept.saliency.total.dtype == torch.float64
        assert torch.equal(kept.saliency.total, reply.upload.saliency.total)
        assert int(kept.saliency.examples) == SIZES[reply.client]
    for _, _, training in outcome.seen[1:]:
        for reply in training:
            assert torch.equal(reply.upload.weight, outcome.memories.get(reply.client).saliency.total)


def test_the_copy_is_trained_plainly():
    """No proximal term and no control variates: R_k is FedAvg's."""
    expected = weighings(Trial().run(FedSLS(FedAvg())))
    for base in (FedProx(mu=10.0), Scaffold(), FedAvgM()):
        assert weighings(Trial().run(FedSLS(base))) == expected


def test_equal_saliency_is_fedavg(monkeypatch):
    """Every norm forced to one: R_k is n_k times a constant."""

    def ones(net, weights, x, y, **options):
        return x.new_ones(len(x), 4)

    monkeypatch.setattr(module, "layer_saliency", ones)
    trial = Trial()
    plain = trial.by_hand(lambda model, k: trial.sizes[k])
    for recipe in (FedSLS(pretrain_epochs=2), FedSLS(pretrain_epochs=2, tau=0.3)):
        assert_same(trial.run(recipe).values, plain.values)
    factor = sum(0.5**layer for layer in range(4))
    assert weighings(trial.run(FedSLS())) == [{k: factor * n for k, n in enumerate(SIZES)}]
    uniform = trial.by_hand(lambda model, k: 1.0)
    assert_same(trial.run(FedSLS(normalize="mean")).values, uniform.values)
    assert max(far(plain.values, uniform.values).values()) > 1e-4


def test_twice_the_data_is_twice_the_number():
    data = federation(SIZES, identity)
    twice = replace(data, train={k: torch.cat([index, index]) for k, index in data.train.items()})
    recipe = FedSLS(pretrain_epochs=0)
    once, double = (weighings(Trial().run(recipe, each))[0] for each in (data, twice))
    assert double == pytest.approx({k: 2 * value for k, value in once.items()}, rel=1e-12)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_numbers_do_not_depend_on_the_size_of_pieces(size, monkeypatch):
    expected = weighings(Trial().run(FedSLS()))[0]
    monkeypatch.setattr(evaluate, "CHUNK", {"cpu": size})
    assert weighings(Trial().run(FedSLS()))[0] == pytest.approx(expected, rel=1e-12)


def test_a_large_client_is_never_looked_at_whole():
    most = []

    def watched(x, seed):
        most.append(len(x))
        return x

    x = torch.randn(1200, 1, 6, 6, generator=generator(0), dtype=torch.float64)
    data = Dataset(x, torch.arange(1200) % 3, watched)
    everything = Federation(data, {0: torch.arange(1200)}, {0: torch.arange(2)})
    for recipe in (FedSLS(pretrain_epochs=0), FedSLS(pretrain_epochs=1)):
        outcome = Trial(((0,),)).run(recipe, everything, optimizer=Sgd(0.01), size=100)
        assert int(outcome.state.fallbacks) == 0
    assert max(most) == evaluate.CHUNK["cpu"] and sum(n == max(most) for n in most) == 2 * 4


def test_images_are_looked_at_without_augmentation():
    recipe = FedSLS(pretrain_epochs=0)
    plain, jittered = (Trial().run(recipe, federation(SIZES, prepare)) for prepare in (identity, jitter))
    assert weighings(plain) == weighings(jittered)
    assert max(far(plain.values, jittered.values).values()) > 1e-4  # training saw the jitter


def test_layers_of_a_resnet(monkeypatch):
    """Twenty convolutions, three of them in shortcuts."""
    seen = []

    def ones(net, weights, x, y, **options):
        seen.append(layer_saliency(net, weights, x, y, **options).shape[1])
        return x.new_ones(len(x), seen[-1])

    monkeypatch.setattr(module, "layer_saliency", ones)
    with seeded(0):
        model = MODELS["resnet18"]().build(10, 3, 32)
    x, y = torch.zeros(1, 3, 32, 32).double(), torch.tensor([3])
    found = [saliency(FedSLS(tau=1.0, include_downsample=each), model, x, y).item() for each in (True, False)]
    assert found == [20.0, 17.0] and seen == [20, 20]


def test_a_round_goes_downhill_and_towards_the_clients():
    """The paper's algorithm prints the opposite sign."""
    trial = Trial(((0, 1, 2),))
    outcome = trial.run(FedSLS(pretrain_epochs=2))
    data = federation(SIZES, identity).data

    def loss(theta, running):
        model = filled(trial.model, theta, running).eval()
        return F.cross_entropy(model(data.x[:26]), data.y[:26]).item()

    theta, running = vector(trial.model), statistics(trial.model)
    assert loss(*outcome.values.values()) < loss(theta, running)
    uploads = [reply.upload for reply in outcome.seen[-1][2]]
    R = sum(float(u.weight) for u in uploads)
    step = total(flat("d", u.delta, trial.model)["d"] * float(u.weight) / R for u in uploads)
    moved = outcome.values["model"] - theta
    assert moved @ step > 0 and (moved - step).abs().max() < 1e-14


# ---- other bases -----------------------------------------------------------------------------------------------------
def test_weights_reach_other_methods():
    """FedAvgM over saliency weights: momentum on the weighted mean."""
    trial = Trial()
    numbers = weighings(trial.run(FedSLS(FedAvgM(beta=0.5))))[0]
    theta, running = vector(trial.model), statistics(trial.model)
    velocity = torch.zeros_like(theta)
    for round, cohort in enumerate(trial.cohorts, 1):
        ends = {k: trial.trained(theta, running, round, k, round - 1) for k in cohort}
        p = {k: numbers[k] / sum(numbers[j] for j in cohort) for k in cohort}
        velocity = 0.5 * velocity + total(p[k] * (vector(ends[k]) - theta) for k in cohort)
        theta = theta + velocity
        running = total(p[k] * statistics(ends[k]) for k in cohort)
    found = trial.run(FedSLS(FedAvgM(beta=0.5))).values
    assert_same(found, {"model": theta, "model statistics": running})


def test_scaffold_under_saliency_weights_differs_in_the_model_alone():
    trial = Trial(((0, 1, 2),))
    weighed, plain = trial.run(FedSLS(Scaffold())), trial.run(FedSLS(Scaffold(), blend=1.0, blend_with="uniform"))
    assert max(far(weighed.values, plain.values).values()) > 1e-4
    names = list(weighed.state.control)
    assert all(torch.equal(weighed.state.control[name], plain.state.control[name]) for name in names)


def test_fine_tuning_before_and_after():
    """Both ways round the model is the same, and everyone keeps a tuned one."""
    trial = Trial()
    inside, outside = trial.run(FedSLS(FineTuned(FedAvg()))), trial.run(FineTuned(FedSLS(FedAvg())))
    assert_same(inside.values, outside.values)
    assert_same(inside.values, trial.run(FedSLS()).values)
    for k in range(3):
        tuned = [flat("tuned", each.memories.get(k).tuned, trial.model) for each in (inside, outside)]
        assert_same(*tuned)


def test_data_are_weighed_again_where_memories_begin_again():
    @dataclass(frozen=True)
    class Twice:
        """Warm-up, something asked of clients, and a fresh start."""

        def stages(self, plan):
            (stage,) = FedAvg().stages(plan)
            yield replace(stage, rounds=2)
            yield stage.errand(evaluate.Evaluate(base=stage.algorithm))
            yield replace(stage, rounds=1)
            yield replace(stage, rounds=3, fresh=True)

    stages = list(FedSLS(Twice()).stages(Trial().stage()))
    kinds = [(type(stage.algorithm).__name__, stage.rounds, stage.fresh) for stage in stages]
    assert kinds == [
        ("MeasureSaliency", 1, False),
        ("SaliencyWeighted", 2, False),
        ("Evaluate", 1, False),
        ("SaliencyWeighted", 1, False),
        ("MeasureSaliency", 1, True),
        ("SaliencyWeighted", 3, False),
    ]


def test_a_training_stage_is_judged_as_its_base():
    @dataclass(frozen=True)
    class Odd(FedAvg):
        evaluated_as = ("personal before",)
        capturable = False

    *_, stage = FedSLS(Odd()).stages(Trial().stage())
    assert stage.algorithm.evaluated_as == ("personal before",) and stage.algorithm.capturable is False
    *_, stage = FedSLS().stages(Trial().stage())
    assert stage.algorithm.evaluated_as == FedAvg().evaluated_as and stage.algorithm.capturable is True


@pytest.mark.parametrize("blend_with", ["samples", "uniform"])
def test_blended_weights(blend_with):
    trial = Trial()

    def share(cohort, R):
        others = trial.by_samples(cohort) if blend_with == "samples" else dict.fromkeys(cohort, 1 / len(cohort))
        return {k: 0.7 * R[k] / sum(R[j] for j in cohort) + 0.3 * others[k] for k in cohort}

    recipe = FedSLS(pretrain_epochs=2, blend=0.3, blend_with=blend_with)
    assert_same(trial.run(recipe).values, trial.by_hand(trial.hooked(recipe), share).values)


def test_all_of_a_blend_is_the_other_weighting():
    trial = Trial()
    plain = trial.by_hand(lambda model, k: trial.sizes[k])
    assert_same(trial.run(FedSLS(pretrain_epochs=2, blend=1.0)).values, plain.values)


# ---- when saliency is of no use --------------------------------------------------------------------------------------
def test_no_saliency_at_all_counts_examples():
    """A head of zeros has no gradient to send back."""
    silent = initial()
    silent.head.weight.data.zero_()
    trial = Trial(model=silent, pretrain=0)
    outcome = trial.run(FedSLS(pretrain_epochs=0))
    assert weighings(outcome) == [{0: 0.0, 1: 0.0, 2: 0.0}]
    assert_same(outcome.values, trial.by_hand(lambda model, k: 0.0, trial.by_samples).values)
    assert int(outcome.state.fallbacks) == 3
    (_, weighing, answers), (_, job, replies), *_ = outcome.seen
    assert weighing.stage.algorithm.notes(answers) == ["no usable saliency of clients 0 (0), 1 (0), 2 (0)"]
    (note,) = job.stage.algorithm.notes(replies)
    assert note == (
        "saliency weights of clients 0 (0), 1 (0) cannot be divided by their sum: examples count in this round"
    )


@dataclass(frozen=True)
class Poisoned(FedSLS):
    """One client's number is not finite."""

    value: float = torch.nan

    def of_images(self, client, weights, piece):
        found = super().of_images(client, weights, piece)
        return torch.full_like(found, self.value) if client.examples == 4 else found


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rounds_with_a_client_of_no_number_count_examples(value):
    trial = Trial()
    recipe = Poisoned(pretrain_epochs=2, value=value)
    outcome = trial.run(recipe)

    def share(cohort, R):
        return trial.by_samples(cohort) if 1 in cohort else {k: R[k] / sum(R[j] for j in cohort) for k in cohort}

    assert_same(outcome.values, trial.by_hand(trial.hooked(recipe), share).values)
    assert int(outcome.state.fallbacks) == sum(1 in cohort for cohort in trial.cohorts) == 2
    notes = [job.stage.algorithm.notes(replies) for _, job, replies in outcome.seen]
    assert [len(note) for note in notes] == [1, 1, 1, 0]
    assert notes[0] == [f"no usable saliency of clients 1 ({value:g})"]


def test_fallbacks_are_counted_over_parts():
    outcome = Trial(every=1).run(Poisoned(pretrain_epochs=2, recompute_every=1))
    assert int(outcome.state.fallbacks) == 2


def test_a_copy_that_diverges_does_not_stop_the_run():
    outcome = Trial().run(FedSLS(pretrain_epochs=2), optimizer=Sgd(1e200))
    assert all(math.isnan(number) for number in weighings(outcome)[0].values())
    assert int(outcome.state.fallbacks) == 3


def test_an_image_that_is_not_finite_is_named():
    data = federation(SIZES, identity)
    x = data.data.x.clone()
    x[15, 0, 2, 2] = torch.nan
    broken = replace(data, data=replace(data.data, x=x))
    for recipe in (FedSLS(pretrain_epochs=0), FedSL()):
        with pytest.raises(BadInput, match=r"image 15 of the data has values that are not finite"):
            Trial().run(recipe, broken)


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.head = nn.Flatten(), nn.Linear(36, 3)

    def features(self, x):
        return self.flat(x)

    def forward(self, x):
        return self.head(self.features(x))


class Smooth(Net):
    def __init__(self):
        super().__init__()
        self.relu = nn.GELU()


@pytest.mark.parametrize(
    ("kind", "recipe", "sentence"),
    [
        (Flat, FedSLS(pretrain_epochs=1), "needs a convolution, and the network has none"),
        (Flat, FedSLS(pretrain_epochs=1, tap="relu"), "needs a ReLU, and the network has none"),
        (Smooth, FedSLS(pretrain_epochs=1), "guided backpropagation is defined for ReLU, not for gelu"),
    ],
)
def test_networks_without_saliency_are_refused(kind, recipe, sentence):
    with pytest.raises(BadInput, match=sentence):
        Trial(model=initial(kind)).run(recipe)


def test_a_client_without_images_counts_for_nothing():
    trial = Trial(((0, 1, 2),), sizes=(13, 0, 9))
    outcome = trial.run(FedSLS(pretrain_epochs=1, normalize="mean"))
    assert weighings(outcome)[0][1] == 0.0 and int(outcome.state.fallbacks) == 0
    without = Trial(((0, 2),), sizes=(13, 0, 9)).run(FedSLS(pretrain_epochs=1, normalize="mean"))
    assert_same(outcome.values, without.values)


def test_what_contradicts_itself_is_refused():
    with pytest.raises(BadInput, match="target=sum with score=prob"):
        FedSLS(target="sum", score="prob")
    for recipe, name in ((FedSLS(), "fedsls"), (FedSL(), "fedsl")):
        with pytest.raises(BadInput, match=f"{name} itself says how much a client counts: leave weighting at auto"):
            list(recipe.stages(Trial().stage(weighting=by_examples)))
    with pytest.raises(BadInput, match=r"algorithm\.base local averages nothing by weight"):
        Trial().run(FedSLS(Local(), pretrain_epochs=0))


def test_configuration():
    words = ["algorithm=fedsls", "algorithm.base=scaffold", "algorithm.tau=0.3", "algorithm.target=pred"]
    experiment = config.read(words=words)
    assert experiment.algorithm == FedSLS(Scaffold(), tau=0.3, target="pred")
    assert config.resolve(Experiment, config.to_dict(experiment)) == experiment
    small = config.read(words=["algorithm=fedsl", "algorithm.f=8", "algorithm.down=bilinear"])
    assert small.algorithm == FedSL(f=8, down="bilinear")
    for words, key_ in ((["algorithm=fedsl", "algorithm.f=3"], "f"), (["algorithm=fedsls", "algorithm.tau=2"], "tau")):
        with pytest.raises(BadInput, match=rf"algorithm\.{key_}"):
            config.read(words=words)


# ---- FedSL -----------------------------------------------------------------------------------------------------------
def averaged(image: np.ndarray, f: int) -> np.ndarray:
    """Block by block; the last ones are smaller where f does not divide a side."""
    _, height, width = image.shape
    rows, columns = range(0, height, f), range(0, width, f)
    return np.array([[image[:, i : i + f, j : j + f].mean((1, 2)).mean() for j in columns] for i in rows])


def pixel_federation(height: int, width: int, bytes_: bool, channels: int = 3) -> Federation:
    """Normalised by its `prepare`, which the numbers must not notice."""
    draw = generator(4)
    x = torch.randint(0, 256, (20, channels, height, width), generator=draw, dtype=torch.uint8)
    prepare = Prepare((0.5,) * channels, (0.25,) * channels, dtype=torch.float64)
    data = Dataset(x if bytes_ else x.double() / 255, torch.arange(20) % 3, prepare if bytes_ else identity)
    train = {0: torch.arange(0, 9), 1: torch.arange(9, 20)}
    return Federation(data, train, {k: torch.arange(2) for k in train}, torch.arange(4))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.pool = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        self.flat, self.head = nn.Flatten(), nn.Linear(4, 3)

    def features(self, x):
        return self.flat(self.pool(self.relu(self.conv(x))))

    def forward(self, x):
        return self.head(self.features(x))


PIXELS = Trial(((0, 1), (0,), (0, 1)), sizes=(9, 11), model=initial(Pooled))


@pytest.mark.parametrize("f", [2, 4, 8])
@pytest.mark.parametrize(("height", "width"), [(8, 16), (7, 10), (5, 5)])
@pytest.mark.parametrize("bytes_", [True, False], ids=["bytes", "floats"])
def test_fedsl_pools_pixels_between_zero_and_one(f, height, width, bytes_):
    data = pixel_federation(height, width, bytes_)
    scale = 255 if bytes_ else 1
    numbers = [np.linalg.norm(averaged(image.double().numpy() / scale, f)) for image in data.data.x]
    outcome = PIXELS.run(FedSL(f=f), data)
    _, job, replies = outcome.seen[0]
    found = [float(reply.upload.saliency.total) for reply in replies]
    expected = [sum(numbers[:9]), sum(numbers[9:])]
    assert found == pytest.approx(expected, rel=1e-6 if bytes_ else 1e-12)  # bytes become single precision
    assert job.download == Tree()  # the network is not asked
    averages = PIXELS.run(FedSL(f=f, normalize="mean"), data).seen[1][2]
    assert [float(reply.upload.weight) for reply in averages] == pytest.approx([found[0] / 9, found[1] / 11])


def test_a_run_of_fedsl_by_hand():
    """Its weights alone differ from FedAvg's."""
    trial = Trial(pretrain=0)
    data = federation(SIZES, identity)
    numbers = [np.linalg.norm(averaged(image.numpy(), 4)) for image in data.data.x]
    expected = trial.by_hand(lambda model, k: sum(numbers[i] for i in data.train[k]))
    assert_same(trial.run(FedSL(f=4)).values, expected.values)


def test_bilinear_is_the_mean_of_the_four_middle_pixels():
    data = pixel_federation(8, 16, bytes_=False)
    halves = [PIXELS.run(FedSL(f=2, down=down), data).seen[0][2] for down in ("bilinear", "avgpool")]
    for a, b in zip(*halves, strict=True):
        assert float(a.upload.saliency.total) == pytest.approx(float(b.upload.saliency.total), rel=1e-12)
    x = data.data.x.mean(1).numpy()
    middle = sum(x[:, i::4, j::4] for i in (1, 2) for j in (1, 2)) / 4
    expected = np.sqrt((middle**2).sum((1, 2)))
    found = [float(r.upload.saliency.total) for r in PIXELS.run(FedSL(f=4, down="bilinear"), data).seen[0][2]]
    assert found == pytest.approx([expected[:9].sum(), expected[9:].sum()], rel=1e-12)


def as_client(data: Federation, k: int, seed: int = 3) -> Any:
    shard = Shard(data.data, data.train[k])
    return SimpleNamespace(data=shard, examples=len(shard), key=11, received=Tree(seed=torch.tensor(seed)))


@pytest.mark.parametrize("f", [2, 4, 8])
def test_the_autoencoder_learns_and_repeats(f):
    data = pixel_federation(13, 16, bytes_=True)
    ramp = torch.linspace(0, 255, 16).expand(20, 3, 13, 16) * torch.linspace(0.2, 1, 20).view(-1, 1, 1, 1)
    data = replace(data, data=replace(data.data, x=ramp.to(torch.uint8)))
    client, x = as_client(data, 0), data.data.x[:9] / 255

    def error(epochs):
        net, weights = autoencoder(client, f, epochs)
        out = net.forward(weights, x)
        assert out.features.shape[2:] == (math.ceil(13 / f), 16 // f) and (out.features >= 0).all()
        return F.mse_loss(out.logits[..., :13, :16], x).item()

    assert error(40) < error(0) / 2
    again = [autoencoder(as_client(data, 0, seed), f, 2)[1] for seed in (3, 3, 4)]
    same = [all(torch.equal(a, b) for a, b in zip(again[0].leaves(), w.leaves(), strict=True)) for w in again]
    assert same == [True, True, False]


def test_the_autoencoder_s_latents_are_summed():
    data = pixel_federation(8, 16, bytes_=False)
    outcome = PIXELS.run(FedSL(f=4, down="autoencoder", epochs=2), data)
    _, job, replies = outcome.seen[0]
    assert job.download.keys() == {"seed"}
    for reply in replies:
        client = as_client(data, reply.client, int(job.download.seed))
        client.key = key(SEED, "client", 0, reply.client)
        net, weights = autoencoder(client, 4, 2)
        latents = net.forward(weights, data.data.x[data.train[reply.client]]).features.mean(1)
        expected = sum(float(latent.norm()) for latent in latents)
        assert float(reply.upload.saliency.total) == pytest.approx(expected, rel=1e-12) and expected > 0


def test_black_images_have_no_number():
    data = pixel_federation(8, 16, bytes_=True)
    black = replace(data, data=replace(data.data, x=torch.zeros_like(data.data.x)))
    outcome = PIXELS.run(FedSL(), black)
    assert int(outcome.state.fallbacks) == 3
    _, job, replies = outcome.seen[0]
    assert job.stage.algorithm.notes(replies) == ["no usable saliency of clients 0 (0), 1 (0)"]


def test_everyone_is_weighed_once_and_before_training():
    for recipe in (FedSLS(), FedSL()):
        first, second = recipe.stages(Trial().stage())
        assert (first.rounds, first.cohort, first.uplink) == (1, Everyone(), ())
        assert first.epochs == (5 if isinstance(recipe, FedSLS) else 0)
        assert second.rounds == 3 and second.weighting == first.weighting
