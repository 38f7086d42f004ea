"""FedAdam, FedYogi and FedAdagrad against a plain loop, and on a world of one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens import config
from fedlens.algorithms import FedAdagrad, FedAdam, FedAvg, FedYogi
from fedlens.core.errors import BadInput
from fedlens.core.rng import seeded
from fedlens.models import MODELS
from scalar import number, scalar_run
from textbook import TWO_OF_THREE, World, assert_same, far, local_training, total

RULES: dict[str, Any] = {"adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}
WORLD = World(TWO_OF_THREE)


def fedopt(world: World, rule: str, b1: float, b2: float, tau: float, rate: float, zero: bool) -> dict[str, Tensor]:
    theta, running = world.start()
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    if not zero:
        v += tau * tau
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        local = {k: local_training(world, theta, running, round, k) for k in cohort}
        d = total(p[k] * local[k].theta for k in cohort) - theta
        m = b1 * m + (1 - b1) * d
        if rule == "adam":
            v = b2 * v + (1 - b2) * d**2
        elif rule == "yogi":
            v = torch.where(v > d**2, v - (1 - b2) * d**2, v + (1 - b2) * d**2)
        else:
            v = v + d**2
        theta = theta + rate * m / (v**0.5 + tau)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running, "first": m, "second": v}


def recipe(rule: str, b1: float, b2: float, **more: Any) -> Any:
    return RULES[rule](beta1=b1, **({} if rule == "adagrad" else {"beta2": b2}), **more)


@pytest.mark.parametrize("initial", ["tau", "zero"])
@pytest.mark.parametrize("rule", RULES)
def test_fedopt(rule, initial):
    """Running statistics are averages, which no server optimizer touches."""
    found = WORLD.run(recipe(rule, 0.8, 0.9, tau=0.05, server_lr=0.03, initial=initial)).values
    assert_same(found, fedopt(WORLD, rule, 0.8, 0.9, 0.05, 0.03, initial == "zero"))


def test_adagrad_with_a_large_tau_is_fedavg():
    """The root of the mean square and tau are then the same, and twice tau is what the rate makes good."""
    found = WORLD.run(FedAdagrad(tau=1e6, server_lr=2e6)).values
    plain = WORLD.run(FedAvg()).values
    assert_same({name: found[name] for name in plain}, plain)


def test_the_first_step_of_adam_is_as_long_for_every_weight():
    world = World(TWO_OF_THREE[:1])
    theta, _ = world.start()
    moved = world.run(FedAdam(initial="zero", tau=1e-15, server_lr=0.1)).values["model"] - theta
    gone = world.run(FedAvg()).values["model"] - theta
    clear = gone.abs() > 1e-9
    assert clear.sum() > 200 and (moved - 0.1 * gone.sign())[clear].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (FedAdam(server_lr=0.1), 1.098518708500382),
        (FedAdam(server_lr=0.1, initial="zero"), 1.098529411764706),
        (FedYogi(server_lr=0.1), 1.0985186004044833),
        (FedAdagrad(server_lr=0.1), 1.0998508576519763),
    ],
    ids=["adam", "adam from zero", "yogi", "adagrad"],
)
def test_by_hand(recipe, expected):
    assert number(scalar_run(recipe)) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("model", ["cnn", "cnn_small", "cnn2"])
@pytest.mark.parametrize("rule", RULES)
def test_by_default_the_first_step_is_shorter_than_weights_are(rule, model):
    """With 0.1 units of a wide layer die at once: results/all_methods.md has the numbers."""
    with seeded(0):
        module = MODELS[model]().build(10, 1, 28)
    largest = {name: float(p.detach().abs().max()) for name, p in module.named_parameters()}
    assert RULES[rule]().server_lr < min(largest.values())


def test_what_never_moves_stays():
    """A weight without updates keeps tau squared: nothing divides by zero, and nothing drifts."""
    zero = FedAdam().mean_square(torch.zeros(1), torch.zeros(1))  # pyright: ignore[reportArgumentType]
    assert not zero.any()
    still = scalar_run(FedYogi(), steps=0)
    assert number(still) == 1 and float(still.state.second["head.w"]) == pytest.approx(1e-6)


@dataclass(frozen=True)
class SquaresTheMomentum(FedAdam):
    """As one public code does."""

    def advance(self, server, delta):
        first = server.state.first * self.beta1 + delta.params * (1 - self.beta1)
        second = self.mean_square(server.state.second, first * first)
        scaled = first / second.map(lambda v: v.sqrt() + self.tau)
        model = server.state.model + delta.replace(params=scaled * self.server_lr)
        return server.state.replace(model=model, first=first, second=second)


@dataclass(frozen=True)
class ScalesStatistics(FedAdam):
    def advance(self, server, delta):
        state = super().advance(server, delta)
        running = server.state.model.buffers + delta.buffers * self.server_lr
        return state.replace(model=state.model.replace(buffers=running))


@pytest.mark.parametrize("mutant", [SquaresTheMomentum, ScalesStatistics])
def test_the_textbook_notices(mutant):
    found = WORLD.run(mutant(tau=0.05, server_lr=0.03)).values
    assert max(far(found, fedopt(WORLD, "adam", 0.9, 0.99, 0.05, 0.03, False)).values()) > 1e-6


@pytest.mark.parametrize("word", ["algorithm.tau=0", "algorithm.beta1=1", "algorithm.beta2=1", "algorithm.initial=one"])
def test_refused(word):
    with pytest.raises(BadInput, match=word.partition("=")[0]):
        config.read(None, ["algorithm=fedadam", word])
