"""Training passes through torch.compile: the same numbers, and taps still see what happens."""

import shutil

import pytest
import torch

from fedlens.algorithms import FedAvg
from fedlens.attribution.channels import ChannelTaps
from fedlens.core.network import Network
from fedlens.core.rng import seeded
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential
from small import PLAN, Net, federation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"),
]


def network(compile: bool) -> Network:
    with seeded(7):
        return Network(Net(), "fp64", compile=compile)


def test_a_run_is_the_same_to_rounding():
    plain, compiled = (run(FedAvg(), net, Sequential(net, federation()), PLAN) for net in map(network, (False, True)))
    for (path, a), (_, b) in zip(plain.state.paths(), compiled.state.paths(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11, msg=path)


def test_taps_are_not_compiled_away():
    net, data = network(True), federation()
    weights = net.initial_weights()
    x = data.data.x[:4]
    net.forward(weights, x, train=True)
    with torch.enable_grad(), ChannelTaps(net, weights, tap="conv") as taps:
        logits = net.forward(weights, x, train=True).logits
        found = taps.gradients(logits.sum())
    assert list(found) == ["conv"] and float(found.conv.abs().sum()) > 0
