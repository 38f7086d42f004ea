"""FedRep against a plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedlens.algorithms import FedRep
from fedlens.core.errors import BadInput
from personal import WORLDS, assert_same, by_package, head_then_body, is_head, partly_private
from textbook import World, star


@star(WORLDS, "epochs", [2, 5])
def test_fedrep(world, epochs):
    """All epochs but the last are the head's, unless it is said otherwise."""
    world = replace(world, epochs=epochs)
    found = by_package(world, FedRep()).values
    assert_same(found, partly_private(world, is_head, head_then_body(epochs - 1)))
    if epochs > 2:
        assert_same(found, by_package(world, FedRep(head_epochs=epochs - 1)).values)
    assert_same(by_package(world, FedRep(head_epochs=1)).values, partly_private(world, is_head, head_then_body(1)))


def test_fedrep_needs_epochs_for_both():
    with pytest.raises(BadInput, match=r"head_epochs=2 leaves none of local.epochs=2 for the body"):
        by_package(World(), FedRep(head_epochs=2))
    with pytest.raises(BadInput, match=r"give local.epochs=2 or more"):
        by_package(World(epochs=1), FedRep())
    for recipe in (FedRep(), FedRep(head_epochs=1)):
        with pytest.raises(BadInput, match=r"local.steps"):
            by_package(World(steps=5), recipe)
    stage = next(iter(FedRep().stages(replace(World().stage(), epochs=1))))  # to be described it needs none
    assert stage.algorithm == FedRep()
