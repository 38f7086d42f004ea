"""Fine-tuning against its plain loop in textbook.py."""

from __future__ import annotations

import pytest
import torch

from fedlens.algorithms import FedAvg, FedProx, FineTuned, Scaffold
from textbook import NEVER_THE_LAST, TWO_OF_THREE, World, assert_same, fedavg, fedprox, fine_tuned, scaffold


@pytest.mark.parametrize("part", ["all", "head"])
@pytest.mark.parametrize("world", [World(TWO_OF_THREE), World(NEVER_THE_LAST, momentum=0.0, steps=5)])
def test_fine_tuned_fedavg(world, part):
    found = world.run(FineTuned(FedAvg(), epochs=3, part=part)).values
    assert_same(found, fine_tuned(world, fedavg(world), 3, part))


@pytest.mark.parametrize("part", ["all", "head"])
def test_fine_tuning_fedprox_is_plain_training(part):
    """Nothing holds the last stage back to where it began."""
    world = World(TWO_OF_THREE)
    found = world.run(FineTuned(FedProx(mu=0.3), epochs=2, part=part)).values
    assert_same(found, fine_tuned(world, fedprox(world, 0.3), 2, part))


@pytest.mark.parametrize("part", ["all", "head"])
def test_fine_tuning_scaffold_is_plain_training(part):
    """No control variates in the last stage, and those that clients hold stay as they are."""
    world = World(TWO_OF_THREE)
    found = world.run(FineTuned(Scaffold(), epochs=2, part=part)).values
    assert_same(found, fine_tuned(world, scaffold(world), 2, part))


def test_tuning_the_head_leaves_the_body_bit_for_bit():
    outcome = World().run(FineTuned(FedAvg(), epochs=2, part="head"))
    server, engine = outcome.server, outcome.engine
    for k in range(3):
        tuned = engine.memories.get(k).tuned
        for name, value in server.state.model.buffers.items():
            assert torch.equal(tuned.buffers[name], value)
        for name, value in server.state.model.params.items():
            assert torch.equal(tuned.params[name], value) != name.startswith("head."), name
