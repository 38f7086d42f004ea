"""FedBABU against a plain loop: the body moves as in FedAvg under a head that never does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedlens.algorithms import FedAvg, FedBABU, FineTuned
from fedlens.core.errors import BadInput
from personal import WORLDS, assert_same, by_package, gap, is_head, label, loss, partly_private, sgd, weights
from scalar import Number, scalar_run
from textbook import TWO_OF_THREE, World, star


def body_alone(world, model, round, client):
    """The head is in no optimizer: neither gradients nor weight decay reach it."""
    model.train()
    descent = sgd(world, world.rate(round), [p for n, p in model.named_parameters() if not is_head(n)])
    for batch in world.batches(round, client):
        model.zero_grad()
        loss(model, *batch).backward()
        descent.step()
    return weights(model)


def fedbabu(world, server_lr=1.0):
    head = {n: v for n, v in weights(world.model()).items() if is_head(n)}
    return partly_private(world, is_head, body_alone, server_lr=server_lr) | label("head", head)


@star(WORLDS, "server_lr", [1.0, 0.5])
def test_fedbabu(world, server_lr):
    found = by_package(world, FedBABU(server_lr=server_lr))
    assert_same(found.values, fedbabu(world, server_lr))
    first = weights(world.model())
    whole = FedBABU().global_model(found.server.state)
    for k in found.engine.memories:
        mine = found.personal(k, FedBABU())
        for name in ("head.weight", "head.bias"):
            assert torch.equal(mine[name], first[name]) and torch.equal(whole.params[name], first[name])
    assert whole.params.keys() | whole.buffers.keys() == first.keys()


def test_after_one_step_the_body_is_that_of_fedavg():
    world = World(TWO_OF_THREE[:1], steps=1)
    found, usual = by_package(world, FedBABU()).values, by_package(world, FedAvg()).values
    body = [name for name in found if name.startswith("model ")]
    assert len(body) == 6 and all(torch.equal(found[name], usual[name]) for name in body)
    assert all(
        "head" not in path for reply in by_package(world, FedBABU()).replies[0] for path, _ in reply.upload.paths()
    )


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, z):
        return self.w * z[:, :1] - z[:, 1:]


class TwoFactors(nn.Module):
    """f_i = (w2 a_i w1 - c_i)^2 / 2, w2 = 2 the head; its slope by w1 is w2 a_i (w2 a_i w1 - c_i)."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))
        self.head = Line()

    def features(self, x):
        return torch.cat([self.w * x[:, :1], x[:, 1:]], 1)

    def forward(self, x):
        return self.head(self.features(x))


def test_by_hand():
    """The clients move to 0.6 and 1.4 in a step, and to 0.36 and 1.64 in two: their mean stays where it was."""
    for steps in (1, 2):
        state = scalar_run(FedBABU(), steps=steps, module=TwoFactors, curvatures=(1.0, 1.0)).state
        assert float(state.model.params["w"]) == pytest.approx(1.0, abs=1e-15)
        assert float(FedBABU().global_model(state).params["head.w"]) == 2
    state = scalar_run(FedBABU(), steps=1, module=TwoFactors, curvatures=(1.0, 4.0)).state
    assert float(state.model.params["w"]) == pytest.approx((0.6 - 2.2) / 2, abs=1e-15)


def test_fine_tuning_moves_the_head_too():
    world = WORLDS["two of three"]
    found = by_package(world, FineTuned(FedBABU(), epochs=1))
    first = weights(world.model())
    for k in range(3):
        tuned = found.engine.memories.get(k).tuned.params
        assert all((tuned[name] - first[name]).abs().max() > 1e-4 for name in tuned if is_head(name))
    assert torch.equal(found.server.state.head.params["head.weight"], first["head.weight"])


@dataclass(frozen=True)
class ZeroGradient(FedBABU):
    """As one public code does: the optimizer still has the head, and weight decay shrinks it."""

    def trains(self, client, name):
        return True

    def gradient(self, client, local, batch):
        grads = super().gradient(client, local, batch)
        return grads | grads.select(lambda name: name in client.net.head).zeros()


def test_the_textbook_notices_a_head_that_decays():
    world = WORLDS["two of three"]
    assert gap(by_package(world, ZeroGradient()).values, fedbabu(world)) > 1e-5


def test_refused():
    with pytest.raises(BadInput, match="this model has nothing else"):
        scalar_run(FedBABU(), module=Number)
