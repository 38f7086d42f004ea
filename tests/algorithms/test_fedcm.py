"""FedCM against a plain loop, and on a world of one number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedlens import config
from fedlens.algorithms import FedAvg, FedCM
from fedlens.core.errors import BadInput
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.optimizer import Adam
from fedlens.core.tree import mean
from scalar import number, scalar_run
from textbook import (
    TWO_OF_THREE,
    Trained,
    World,
    add_to_gradients,
    assert_same,
    effective_steps,
    far,
    loss,
    sgd,
    shorten_gradients,
    statistics,
    total,
    vector,
)

WORLD = World(TWO_OF_THREE, momentum=0.0)


def mixed(world: World, start: tuple, d: Tensor, round: int, k: int, alpha: float, clip: float | None) -> Trained:
    model, batches = world.at(*start).train(), world.batches(round, k)
    optimizer = sgd(world, world.rate(round), model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        (alpha * loss(model, *batch)).backward()
        add_to_gradients(model, (1 - alpha) * d)
        shorten_gradients(model, clip)
        optimizer.step()
    return Trained(vector(model), statistics(model), len(batches))


def fedcm(world: World, alpha: float, server_lr: float = 1.0, clip: float | None = None) -> dict[str, Tensor]:
    theta, running = world.start()
    d = torch.zeros_like(theta)
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort, uniformly)
        local = {k: mixed(world, (theta, running), d, round, k, alpha, clip) for k in cohort}
        far_gone = {k: world.rate(round) * effective_steps(world, local[k].steps) for k in cohort}
        d = -total(p[k] * (local[k].theta - theta) / far_gone[k] for k in cohort)
        theta = theta + server_lr * total(p[k] * (local[k].theta - theta) for k in cohort)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running, "direction": d}


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedcm(momentum, clip, server_lr):
    world = replace(WORLD, momentum=momentum)
    found = world.run(FedCM(alpha=0.3, clip=clip, server_lr=server_lr)).values
    assert_same(found, fedcm(world, 0.3, server_lr, clip))


def test_clients_that_count_by_size():
    world = replace(WORLD, weighting=by_examples)
    assert_same(world.run(FedCM(alpha=0.3)).values, fedcm(world, 0.3))


def test_with_alpha_one_it_is_fedavg():
    world = World(TWO_OF_THREE, weighting=uniformly)
    found, usual = world.run(FedCM(alpha=1.0)).values, world.run(FedAvg()).values
    assert all(torch.equal(found[name], usual[name]) for name in usual)


def test_by_hand():
    """Also: with one step it is descent with v <- alpha g + (1 - alpha) v, and everyone's gradient is 2 w - 6."""
    for rounds, model, direction in ((1, 1.0787, -0.3935), (2, 1.22441305, -0.72856525)):
        state = scalar_run(FedCM(), rounds)
        assert number(state) == pytest.approx(model, abs=1e-14)
        assert float(state.state.direction["head.w"]) == pytest.approx(direction, abs=1e-14)
    w, v = 1.0, 0.0
    for rounds in range(1, 6):
        v = 0.1 * (2 * w - 6) + 0.9 * v
        w -= 0.1 * v
        assert number(scalar_run(FedCM(), rounds, steps=1)) == pytest.approx(w, abs=1e-14)


def test_who_takes_no_step_says_nothing_of_the_direction():
    state = scalar_run(FedCM(), 2, steps=0).state
    assert float(state.model.params["head.w"]) == 1 and float(state.direction["head.w"]) == 0


@dataclass(frozen=True)
class StepsOfTheFirst(FedCM):
    """As one public code does: everyone's path is divided by the steps of one client."""

    def aggregate(self, server, uploads):
        state = super().aggregate(server, uploads)
        paces = [u.delta.params / -float(uploads[0].reach) for u in uploads]
        return state.replace(direction=mean(paces, [u.weight for u in uploads]))


def test_the_textbook_notices():
    assert max(far(WORLD.run(StepsOfTheFirst(alpha=0.3)).values, fedcm(WORLD, 0.3)).values()) > 1e-4


def test_a_momentum_that_it_does_not_mean_is_spoken_of():
    usual, plain = (config.read(None, ["algorithm=fedcm", *more]) for more in ((), ("local.momentum=0",)))
    assert usual._start_notes([10]) == (
        "fedcm means plain local steps, and local.momentum is 0.9: try local.momentum=0",
    )
    assert plain._start_notes([10]) == () == config.read(None, ["algorithm=fedavg"])._start_notes([10])


def test_refused():
    with pytest.raises(BadInput, match=r"needs local\.optimizer=sgd"):
        list(FedCM().stages(replace(WORLD.stage(), optimizer=Adam())))
    with pytest.raises(BadInput, match="nothing ever moves"):
        FedCM(alpha=0.0)
    with pytest.raises(BadInput, match=r"algorithm\.alpha"):
        config.read(None, ["algorithm=fedcm", "algorithm.alpha=2"])
    assert config.read(None, ["algorithm=fedcm/simulator"]).algorithm == FedCM(clip=10.0)
