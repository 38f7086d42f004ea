"""Training passes through torch.compile: the same numbers, and taps still see what happens."""

import shutil
from dataclasses import replace

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


@pytest.mark.parametrize("tap", ["relu", "conv"])
def test_taps_that_are_inputs_see_what_hooks_see(tap):
    """PSE's step goes back through the same passes twice, to channels and to weights."""
    from fedlens.algorithms import PSE
    from fedlens.cli.bench import Work, parts
    from fedlens.models.pse_net import PseNet

    recipe, found = PSE(xi=0.5, tap=tap), []
    for compile in (False, True):
        net, some = parts(Work("", PseNet(), 3, 2, 4, channels=1, size=8), "fp64", "cpu")
        net.compile = compile
        done = run(recipe, net, Sequential(net, replace(some, data=replace(some.data, prepare=doubled))), PLAN)
        found.append(done.state)
    for (path, a), (_, b) in zip(found[0].paths(), found[1].paths(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11, msg=path)


def doubled(x, key):
    return x.double() / 255


def test_taps_are_not_compiled_away():
    net, data = network(True), federation()
    weights = net.initial_weights()
    x = data.data.x[:4]
    net.forward(weights, x, train=True)
    with torch.enable_grad(), ChannelTaps(net, weights, tap="conv") as taps:
        logits = net.forward(weights, x, train=True).logits
        found = taps.gradients(logits.sum())
    assert list(found) == ["conv"] and float(found.conv.abs().sum()) > 0
