"""FedBN against a plain loop."""

from __future__ import annotations

from fedlens.algorithms import FedAvg, FedBN
from personal import WORLDS, assert_same, by_package, partly_private, worlds


@worlds
def test_fedbn(world):
    assert_same(by_package(world, FedBN()).values, partly_private(world, lambda name: name.startswith("norm.")))


def test_fedbn_without_norms_is_fedavg():
    world = WORLDS["without norms"]
    assert_same(by_package(world, FedBN()).values, by_package(world, FedAvg()).values)
