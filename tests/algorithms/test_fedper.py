"""FedPer against a plain loop."""

from __future__ import annotations

from fedlens.algorithms import FedPer
from personal import WORLDS, assert_same, by_package, is_head, partly_private
from textbook import star


@star(WORLDS, "server_lr", [1.0, 0.5])
def test_fedper(world, server_lr):
    outcome = by_package(world, FedPer(server_lr=server_lr))
    assert_same(outcome.values, partly_private(world, is_head, server_lr=server_lr))
