"""LG-FedAvg against a plain loop."""

from __future__ import annotations

from fedlens.algorithms import LGFedAvg
from fedlens.core.objective import uniformly
from personal import WORLDS, assert_same, by_package, is_head, partly_private
from textbook import star


@star(WORLDS, "server_lr", [1.0, 0.5])
def test_lgfedavg(world, server_lr):
    found = by_package(world, LGFedAvg(shared_layers=1, server_lr=server_lr)).values
    low = lambda name: not is_head(name)  # noqa: E731
    assert_same(found, partly_private(world, low, weighting=uniformly, server_lr=server_lr))
