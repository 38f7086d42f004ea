"""Optimizers over trees against torch.optim, schedules against closed forms, reach against the momentum recursion."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlens.core.errors import BadInput
from fedlens.core.optimizer import SCHEDULES, Adam, Cosine, Exponential, Optimizer, Schedule, Sgd, Staircase
from fedlens.core.rng import generator
from fedlens.core.tree import Tree

TOLERANCE = 1e-12  # absolute, on values of size one after 20 steps in double precision
STEPS = 20
SHAPES = {"weight": (4, 3), "bias": (4,), "scale": ()}

CASES = {
    "sgd": (Sgd(0.05), torch.optim.SGD, dict(lr=0.05)),
    "sgd, decay": (Sgd(0.05, weight_decay=0.1), torch.optim.SGD, dict(lr=0.05, weight_decay=0.1)),
    "sgd, momentum": (Sgd(0.05, momentum=0.9), torch.optim.SGD, dict(lr=0.05, momentum=0.9)),
    "sgd, both": (
        Sgd(0.05, momentum=0.5, weight_decay=0.1),
        torch.optim.SGD,
        dict(lr=0.05, momentum=0.5, weight_decay=0.1),
    ),
    "adam": (Adam(0.05), torch.optim.Adam, dict(lr=0.05)),
    "adam, decay": (Adam(0.05, weight_decay=0.1), torch.optim.Adam, dict(lr=0.05, weight_decay=0.1)),
    "adam, all": (
        Adam(0.02, 0.8, 0.95, 1e-3, weight_decay=0.01),
        torch.optim.Adam,
        dict(lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.01),
    ),
}
cases = pytest.mark.parametrize(("ours", "theirs", "options"), CASES.values(), ids=CASES.keys())

# What gets a gradient in a step: everything, or another part each time; nothing at all is a part too.
EVERYTHING = [set(SHAPES)] * STEPS
PARTS = [[{"weight"}, {"bias", "scale"}, set(SHAPES), set()][t % 4] for t in range(STEPS)]


def drawn(seed: int) -> dict[str, Tensor]:
    draw = generator(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def by_tree(ours: Optimizer, present: list[set[str]]) -> Iterator[tuple[Tree, Tree]]:
    """(params, state) after every step; gradients arrive in another order than the parameters."""
    params = Tree(drawn(0)).clone()
    state = ours.init(params)
    for t, names in enumerate(present):
        grads = Tree({name: value for name, value in reversed(drawn(1 + t).items()) if name in names})
        ours.update_(params, grads, state)
        yield params, state


def by_torch(theirs, options: dict, present: list[set[str]]) -> Iterator[tuple[dict[str, nn.Parameter], dict]]:
    params = {name: nn.Parameter(value.clone()) for name, value in drawn(0).items()}
    optimizer = theirs(params.values(), **options)
    for t, names in enumerate(present):
        for name, value in drawn(1 + t).items():
            params[name].grad = value if name in names else None
        optimizer.step()
        yield params, {name: optimizer.state[parameter] for name, parameter in params.items()}


@pytest.mark.parametrize("present", [EVERYTHING, PARTS], ids=["everything", "parts"])
@cases
def test_twenty_steps_of_torch(ours, theirs, options, present):
    for (mine, _), (expected, _) in zip(by_tree(ours, present), by_torch(theirs, options, present), strict=True):
        for name, value in expected.items():
            assert (mine[name] - value.detach()).abs().max() <= TOLERANCE, name


@cases
def test_state_is_that_of_torch(ours, theirs, options):
    """Also where parameters come and go: their moments and their count of steps wait."""
    *_, (_, mine) = by_tree(ours, PARTS)
    *_, (_, expected) = by_torch(theirs, options, PARTS)
    names = {"velocity": "momentum_buffer", "first": "exp_avg", "second": "exp_avg_sq", "steps": "step"}
    kept = {name for name in names if mine.get(name)}
    assert kept == {name for name, theirs in names.items() if expected["weight"].get(theirs) is not None}
    for name in kept:
        for parameter, state in expected.items():
            assert (mine[name][parameter] - state[names[name]]).abs().max() <= TOLERANCE, (name, parameter)


@cases
def test_without_gradient_everything_rests(ours, theirs, options):
    """Even under weight decay and momentum that is already moving."""
    params = Tree(drawn(0)).clone()
    state = ours.init(params)
    ours.update_(params, Tree(drawn(1)), state)
    before = params.clone(), state.clone()
    ours.update_(params, Tree(), state)
    ours.update_(params, Tree(bias=drawn(2)["bias"]), state)
    moved = {name for name in SHAPES if not torch.equal(params[name], before[0][name])}
    assert moved == {"bias"}
    changed = {path for path, value in state.paths() if not torch.equal(value, dict(before[1].paths())[path])}
    assert {path.rpartition("/")[2] for path in changed} <= {"bias"}


def test_sgd_by_hand():
    """v <- rho v + g + decay w; w <- w - lr v."""
    rho, decay, lr = 0.9, 0.01, 0.1
    w, v = {name: value.clone() for name, value in drawn(0).items()}, dict.fromkeys(SHAPES, torch.zeros(()).double())
    for t in range(STEPS):
        for name, g in drawn(1 + t).items():
            v[name] = rho * v[name] + g + decay * w[name]
            w[name] = w[name] - lr * v[name]
    *_, (mine, _) = by_tree(Sgd(lr, momentum=rho, weight_decay=decay), EVERYTHING)
    assert max((mine[name] - w[name]).abs().max() for name in SHAPES) <= TOLERANCE


def test_adam_by_hand():
    """Kingma & Ba, algorithm 1, with decay added to the gradient."""
    lr, beta1, beta2, epsilon, decay = 0.05, 0.9, 0.99, 1e-6, 0.1
    w = {name: value.clone() for name, value in drawn(0).items()}
    m, v = (dict.fromkeys(SHAPES, torch.zeros(()).double()) for _ in range(2))
    for t in range(1, STEPS + 1):
        for name, g in drawn(t).items():
            g = g + decay * w[name]
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            first, second = m[name] / (1 - beta1**t), v[name] / (1 - beta2**t)
            w[name] = w[name] - lr * first / (second.sqrt() + epsilon)
    *_, (mine, _) = by_tree(Adam(lr, beta1, beta2, epsilon, weight_decay=decay), EVERYTHING)
    assert max((mine[name] - w[name]).abs().max() for name in SHAPES) <= TOLERANCE


# ---- schedules ----
ROUNDS = 12


@pytest.mark.parametrize(
    ("schedule", "closed_form"),
    [
        (Schedule(), lambda t: 1.0),
        (Exponential(0.9), lambda t: 0.9**t),
        (Cosine(), lambda t: 0.5 * (1 + math.cos(math.pi * t / 11))),
        (Cosine(floor=0.2), lambda t: 0.2 + 0.4 * (1 + math.cos(math.pi * t / 11))),
        (Staircase(every=5, factor=0.1), lambda t: 1.0 if t < 5 else 0.1 if t < 10 else 0.01),
    ],
    ids=lambda case: str(case) if isinstance(case, Schedule) else "",
)
def test_schedules_follow_their_closed_form(schedule, closed_form):
    factors = [schedule(t, ROUNDS) for t in range(ROUNDS)]
    assert factors == pytest.approx([closed_form(t) for t in range(ROUNDS)], abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "theirs", "options"),
    [
        (Exponential(0.9), torch.optim.lr_scheduler.ExponentialLR, dict(gamma=0.9)),
        (Cosine(0.2), torch.optim.lr_scheduler.CosineAnnealingLR, dict(T_max=ROUNDS - 1, eta_min=0.2 * 0.3)),
        (Staircase(5, 0.1), torch.optim.lr_scheduler.StepLR, dict(step_size=5, gamma=0.1)),
    ],
    ids=str,
)
def test_schedules_follow_torch(schedule, theirs, options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.3)
    scheduler, rates = theirs(optimizer, **options), []
    for _ in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = Sgd(0.3, schedule=schedule)
    assert [ours.at(t, ROUNDS).lr for t in range(ROUNDS)] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("schedule", [kind() for kind in SCHEDULES.values()], ids=SCHEDULES.keys())
def test_every_schedule_starts_at_one_and_knows_runs_of_one_round(schedule):
    assert schedule(0, ROUNDS) == schedule(0, 1) == 1


def test_the_rate_of_a_round_is_in_the_state_and_is_not_scheduled_again():
    ours = Adam(0.4, schedule=Exponential(0.5)).at(3, 10)
    assert ours.at(3, 10) == ours
    assert float(ours.init(Tree(drawn(0))).lr) == 0.4 * 0.5**3


# ---- reach ----
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 300), st.floats(0, 0.99))
def test_reach_sums_the_momentum_recursion(steps, momentum):
    velocity = travelled = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        travelled += velocity
    assert Sgd(0.1, momentum=momentum).effective_steps(steps) == pytest.approx(travelled, rel=1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_reach_is_how_far_a_constant_gradient_goes(momentum):
    ours, params = Sgd(0.25, momentum=momentum), Tree(w=torch.zeros(3).double())
    state, gradient = ours.init(params), Tree(w=torch.tensor([1.0, -2.0, 0.0]).double())
    assert ours.effective_steps(0) == 0
    for steps in range(1, STEPS + 1):
        ours.update_(params, gradient, state)
        travelled = -0.25 * ours.effective_steps(steps) * gradient.w
        assert (params.w - travelled).abs().max() <= TOLERANCE


def test_adam_has_no_reach():
    with pytest.raises(BadInput, match="sgd"):
        Adam().effective_steps(3)
