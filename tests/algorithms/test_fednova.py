"""FedNova against its plain loop in textbook.py."""

from __future__ import annotations

import pytest

from fedlens.algorithms import FedNova
from textbook import EVERYONE, World, assert_same, effective_steps, fednova, flat, local_training, server_lrs


@server_lrs
def test_fednova(world, server_lr):
    assert_same(world.run(FedNova(server_lr=server_lr)).values, fednova(world, server_lr))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_sends_what_one_step_moved(momentum):
    world = World(EVERYONE[:1], momentum=momentum)
    theta, running = world.start()
    for reply in world.run(FedNova()).replies[0]:
        local = local_training(world, theta, running, 0, reply.client)
        a = effective_steps(world, local.steps)
        assert float(reply.upload.reach) == pytest.approx(a, rel=1e-14)
        sent = flat("delta", reply.upload.delta, world.model())
        assert_same(sent, {"delta": (local.theta - theta) / a, "delta statistics": local.statistics - running})
