"""FedProx against its plain loop in textbook.py."""

from __future__ import annotations

from fedlens.algorithms import FedProx
from textbook import assert_same, fedprox, server_lrs


@server_lrs
def test_fedprox(world, server_lr):
    assert_same(world.run(FedProx(mu=0.3, server_lr=server_lr)).values, fedprox(world, 0.3, server_lr))
