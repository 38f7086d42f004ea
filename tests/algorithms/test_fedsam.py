"""FedSAM against its plain loop in textbook.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedlens.algorithms import FedSAM
from fedlens.core.batches import identity
from fedlens.core.optimizer import Sgd
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential
from small import federation, network
from textbook import EVERYONE, RATE, SEED, SIZES, World, assert_same, fedsam, flat, server_lrs


@server_lrs
def test_fedsam(world, server_lr):
    assert_same(world.run(FedSAM(rho=0.2, server_lr=server_lr)).values, fedsam(world, 0.2, server_lr))


def test_fedsam_rests_where_the_gradient_is_zero():
    world = World(EVERYONE[:1])
    stage = replace(world.stage(), objective=flat_land, optimizer=Sgd(RATE, momentum=0.9))
    net = network()
    server = run(FedSAM(rho=0.2), net, Sequential(net, federation(SIZES, identity)), stage, seed=SEED)
    found = flat("model", server.state.model, world.model())
    assert torch.equal(found["model"], world.start()[0])
    assert found["model statistics"].isfinite().all()


def flat_land(client, weights, batch, out):
    return 0 * out.logits.sum()
