"""FedAvg against its plain loop in textbook.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Stage
from fedlens.core.batches import identity, plan
from fedlens.core.cohort import Everyone
from fedlens.core.objective import by_batches, by_examples, uniformly
from fedlens.core.optimizer import Exponential, Sgd
from fedlens.core.rng import key, seeded
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential
from small import Net, federation, network
from textbook import SEED, TOLERANCE, TWO_OF_THREE, World, assert_same, fedavg, server_lrs


# ---- tests -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [None, 5, 9], ids=["epochs", "5 steps", "9 steps"])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 1e-3)])
def test_one_client_is_plain_pytorch(momentum, weight_decay, steps):
    data, rounds = federation((13,), identity), 3
    optimizer = Sgd(0.1, momentum=momentum, weight_decay=weight_decay, schedule=Exponential(0.9))
    stage = Stage(None, rounds, Everyone(), optimizer, epochs=2, steps=steps, size=4)
    server = run(FedAvg(), network(), Sequential(network(), data), stage, seed=SEED)

    with seeded(7):
        model = Net().double()
    for round in range(rounds):
        descent = torch.optim.SGD(model.parameters(), 0.1 * 0.9**round, momentum=momentum, weight_decay=weight_decay)
        rows, weights, _ = plan(13, 4, key(SEED, "batches", round, 0), epochs=2, steps=steps)
        assert len(rows) == (8 if steps is None else steps)
        for row, weight in zip(rows, weights, strict=True):
            descent.zero_grad()
            losses = F.cross_entropy(model(data.data.x[row]), data.data.y[row], reduction="none")
            ((losses * weight).sum() / weight.sum()).backward()
            descent.step()

    weights = {**server.state.model.params, **server.state.model.buffers}
    trained = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    assert weights.keys() == trained.keys()
    assert any(name.endswith("running_var") for name in trained)
    for name, value in trained.items():
        assert (weights[name] - value).abs().max() <= TOLERANCE, name


@server_lrs
def test_fedavg(world, server_lr):
    assert_same(world.run(FedAvg(server_lr=server_lr)).values, fedavg(world, server_lr))


@pytest.mark.parametrize("weighting", [by_examples, uniformly, by_batches])
def test_fedavg_with_other_weights(weighting):
    world = World(TWO_OF_THREE, weighting=weighting)
    outcome = world.run(FedAvg())
    assert_same(outcome.values, fedavg(world))
    for cohort, replies in zip(world.cohorts, outcome.replies, strict=True):
        sent = {reply.client: float(reply.upload.weight) for reply in replies}
        assert {k: weight / sum(sent.values()) for k, weight in sent.items()} == pytest.approx(world.shares(cohort))
