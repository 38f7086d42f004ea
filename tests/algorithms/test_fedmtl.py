"""Fed-MTL against a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlens.algorithms import FedMTL, Local
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import seeded
from personal import WORLDS, assert_same, by_package, fedmtl, flat, relation
from textbook import TWO_OF_THREE, World, star


@star(WORLDS, "kind", ["laplacian", "code"])
def test_fedmtl(world, kind):
    outcome = by_package(world, FedMTL(omega=kind, strength=0.02))
    assert_same(outcome.values, fedmtl(world, kind, 0.02))
    assert all(set(reply.upload) == {"delta"} for replies in outcome.replies for reply in replies)


def test_the_laplacian_is_the_spread_and_pulls_together_while_the_code_does_not():
    m, d = 4, 6
    with seeded(1):
        W = torch.randn(d, m, dtype=torch.float64)
    spread = sum((W[:, i] - W.mean(1)).square().sum() for i in range(m))
    assert abs((W @ relation("laplacian", m) @ W.T).trace() - spread) < 1e-12
    together = W.mean(1, keepdim=True).expand(d, m)
    assert abs((together @ relation("laplacian", m) @ together.T).trace()) < 1e-12
    assert (together @ relation("code", m) @ together.T).trace() > 0.1
    world = World()
    apart = {}
    for kind, strength in (("laplacian", 0.1), ("code", 0.1), ("laplacian", 0.0)):
        found = by_package(world, FedMTL(omega=kind, strength=strength)).values
        own = [flat({n: v for n, v in found.items() if n.startswith(f"own of {k}")}) for k in range(3)]
        norm = torch.stack(own).norm()
        apart[kind, strength] = (torch.stack(own) - torch.stack(own).mean(0)).norm() / norm
    assert apart["laplacian", 0.1] < 0.8 * apart["code", 0.1]


def test_fedmtl_without_strength_is_local():
    world = World(TWO_OF_THREE)
    found = by_package(world, FedMTL(strength=0.0)).values
    own = {n.replace("own", "private"): v for n, v in found.items() if n.startswith("own")}
    assert_same(own, by_package(world, Local()).values)


@pytest.mark.parametrize(("parameters", "strength"), [(9, 1e-2), (10, 1e-3), (99, 1e-3), (100, 1e-4), (276_000, 1e-7)])
def test_default_strength_follows_the_number_of_parameters(parameters, strength):
    net = Network(nn.Linear(parameters, 1, bias=False))
    assert FedMTL(strength=None).weight(net) == pytest.approx(strength, rel=1e-12)
    assert FedMTL(strength=0.3).weight(net) == 0.3


def test_fedmtl_has_no_server_lr():
    with pytest.raises(BadInput, match="server_lr"):
        FedMTL(server_lr=0.5)
