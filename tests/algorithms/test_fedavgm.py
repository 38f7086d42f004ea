"""FedAvgM against its plain loop in textbook.py."""

from __future__ import annotations

import pytest

from fedlens.algorithms import FedAvgM
from textbook import TWO_OF_THREE, World, assert_same, fedavgm, fedavgm_by_torch


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize(
    ("beta", "dampening", "nesterov"),
    [(0.9, 0.0, False), (0.7, 0.3, False), (0.9, 0.1, False), (0.9, 0.0, True), (0.7, 0.3, True)],
)
def test_fedavgm(beta, dampening, nesterov, server_lr):
    world, recipe = World(TWO_OF_THREE), FedAvgM(beta, dampening, nesterov, server_lr=server_lr)
    found = world.run(recipe).values
    assert_same(found, fedavgm(world, beta, dampening, nesterov, server_lr))
    if not dampening:  # torch does not dampen the first step
        assert_same(found, fedavgm_by_torch(world, beta, nesterov, server_lr))
