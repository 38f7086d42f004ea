"""SCAFFOLD where clients count by size, beside a plain loop over vectors; and what is said before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedlens import config
from fedlens.algorithms import Scaffold
from fedlens.core.algorithm import Stage
from fedlens.core.batches import plan
from fedlens.core.cohort import Cohort
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import key, seeded
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential
from small import Net, federation, network

SEED, BATCH, RATE, TOLERANCE = 5, 2, 0.1, 1e-12
SIZES = (25, 2, 9, 4)  # 13, 1, 5 and 2 steps
COHORTS = ((0, 1), (1, 2, 3), (0, 1, 2), (1, 3), (0, 3))  # the last client comes late, none is in every round
identity: Callable = lambda x, key: x  # noqa: E731


@dataclass(frozen=True)
class Scripted(Cohort):
    def __call__(self, population, key_of_round):
        return {key(SEED, "cohort", round): cohort for round, cohort in enumerate(COHORTS)}[key_of_round]


def by_package(recipe: Scaffold, momentum: float, weighting: Any) -> dict[str, Tensor]:
    """Model, control and the clients' controls after the last round, each as a vector."""
    clients = Sequential(network(norm=False), federation(SIZES, identity), checked=True)
    stage = Stage(None, len(COHORTS), Scripted(), Sgd(RATE, momentum=momentum), size=BATCH, weighting=weighting)
    state = run(recipe, clients.net, clients, stage, seed=SEED).state
    names = [name for name, _ in Net(False).named_parameters()]
    trees = {"model": state.model.params, "control": state.control}
    trees |= {str(k): clients.memories.get(k).control for k in clients.memories}
    return {name: torch.cat([tree[part].flatten() for part in names]) for name, tree in trees.items()}


def effective_steps(steps: int, momentum: float) -> float:
    """What gradients of size one add up to, summed step by step."""
    total = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        total += velocity
    return total


def path(theta: Tensor, round: int, k: int, momentum: float, correction: Tensor) -> tuple[Tensor, Tensor]:
    """Local steps by hand: where they end, and the mean of the loss's gradients as far as each reaches."""
    data, mine = federation(SIZES, identity).data, federation(SIZES, identity).train[k]
    drawn = plan(len(mine), BATCH, key(SEED, "batches", round, k), epochs=1)
    with seeded(7):
        model = Net(False).double()
    w, (velocity, carried, mean) = theta.clone(), torch.zeros(3, len(theta), dtype=torch.float64)
    for row, weight in zip(drawn[0], drawn[1], strict=True):
        vector_to_parameters(w.clone(), model.parameters())
        model.zero_grad()
        losses = F.cross_entropy(model(data.x[mine[row]]), data.y[mine[row]], reduction="none")
        ((losses * weight).sum() / weight.sum()).backward()
        gradient = parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])
        velocity = momentum * velocity + gradient + correction
        carried = momentum * carried + gradient
        w = w - RATE * velocity
        mean = mean + carried
    return w, mean / effective_steps(len(drawn[0]), momentum)


def by_hand(momentum: float, samples: bool, alike: bool) -> dict[str, Tensor]:
    """A client's control is the mean gradient of its loss along its path. `alike`: controls count as models do."""
    with seeded(7):
        theta = parameters_to_vector(Net(False).double().parameters()).detach()
    c, controls = torch.zeros_like(theta), {}
    for round, cohort in enumerate(COHORTS):
        weights = {k: float(SIZES[k]) if samples else 1.0 for k in cohort}
        ends, old = {}, dict(controls)
        for k in cohort:
            correction = c - old.get(k, torch.zeros_like(c))
            ends[k], controls[k] = path(theta, round, k, momentum, correction)
        theta = theta + torch.stack([w / sum(weights.values()) * (ends[k] - theta) for k, w in weights.items()]).sum(0)
        if alike:  # sum of n_k c_k over all clients, where those not seen have c_k = 0 and the seen ones' mean n_k
            size = {k: float(SIZES[k]) if samples else 1.0 for k in controls}
            every = sum(size.values()) / len(size) * len(SIZES)
            c = torch.stack([size[k] * controls[k] for k in controls]).sum(0) / every
        else:
            c = torch.stack(list(controls.values())).sum(0) / len(SIZES)
    return {"model": theta, "control": c, **{str(k): control for k, control in controls.items()}}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("samples", [False, True], ids=["uniform", "samples"])
@pytest.mark.parametrize("by", ["uniform", "samples"])
def test_by_hand(by, samples, momentum):
    found = by_package(Scaffold(by=by), momentum, by_examples if samples else uniformly)
    expected = by_hand(momentum, samples, alike=by == "samples")
    assert found.keys() == expected.keys()
    wrong = {name: gap for name in found if not (gap := (found[name] - expected[name]).abs().max()) <= TOLERANCE}
    assert not wrong
    if by == "samples" and samples:  # it is not what there was before
        assert (found["model"] - by_hand(momentum, samples, alike=False)["model"]).abs().max() > 1e-6


def test_by_samples_weighs_models_by_samples_unless_asked_otherwise():
    asked, left = (by_package(Scaffold(by="samples"), 0.9, weighting) for weighting in (by_examples, None))
    assert all(torch.equal(asked[name], left[name]) for name in asked)


SETTING = ["data=mnist5k", "model=mlp", "clients=10", "cohort=5", "partition=dirichlet", "partition.alpha=0.1"]
SAID = "local steps a round"


@pytest.mark.parametrize("method", ["scaffold", "spatl"])
def test_uneven_steps_are_said_before_the_first_round(method):
    def notes(*words: str) -> list[str]:
        experiment = config.read(None, [*SETTING, f"algorithm={method}", "local.batch_size=8", *words])
        return [note for note in experiment.federation(experiment.data.load())[1].notes if SAID in note]

    (said,) = notes()
    assert "local.steps=" in said
    assert not notes("local.steps=20")
    assert not notes("partition.dialect=client")
    assert not notes("algorithm=fedavg")
    if method == "scaffold":
        assert "algorithm.by=samples" in said and not notes("algorithm.by=samples")
    else:
        assert not notes("algorithm.control_scale=0")
