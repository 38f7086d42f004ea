"""SCAFFOLD against its plain loop in textbook.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedlens.algorithms import Scaffold
from textbook import EVERYONE, TOLERANCE, WEIGHT_DECAY, World, assert_same, loss, scaffold, server_lrs, vector, worlds


@server_lrs
def test_scaffold(world, server_lr):
    assert_same(world.run(Scaffold(server_lr=server_lr)).values, scaffold(world, server_lr))


@worlds
def test_scaffold_with_clipped_gradients(world):
    found = world.run(Scaffold(clip=0.5)).values
    assert_same(found, scaffold(world, clip=0.5))
    assert not torch.equal(found["model"], scaffold(world)["model"])


def test_first_control_of_a_single_full_batch_step_is_the_gradient():
    world = replace(World(EVERYONE[:1], momentum=0.0, steps=1), batch=13)
    found = world.run(Scaffold()).values
    for k in range(3):
        model = world.model().train()
        loss(model, *world.batches(0, k)[0]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        decayed = gradient + WEIGHT_DECAY * vector(world.model())
        assert (found[f"control of {k}"] - decayed).abs().max() <= TOLERANCE
