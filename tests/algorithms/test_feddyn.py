"""FedDyn against its plain loop in textbook.py."""

from __future__ import annotations

import pytest

from fedlens.algorithms import FedDyn
from fedlens.core.errors import BadInput
from textbook import TOLERANCE, WORLDS, World, assert_same, feddyn, feddyn_by_displacement, star, worlds


@star(WORLDS, "clip", [None, 0.5])
def test_feddyn(world, clip):
    assert_same(world.run(FedDyn(alpha=0.1, clip=clip)).values, feddyn(world, 0.1, clip))


@worlds
def test_feddyn_equals_its_other_form(world):
    assert_same(world.run(FedDyn(alpha=0.1, clip=None)).values, feddyn_by_displacement(world, 0.1))


def test_feddyn_judges_the_mean_of_models_before_the_shift():
    server = World().run(FedDyn(alpha=0.1)).server
    judged = FedDyn(alpha=0.1).global_model(server.state)
    shift = server.state.model.params - judged.params
    assert max(leaf.abs().max() for leaf in (shift + server.state.dual / 0.1).leaves()) <= TOLERANCE
    assert max(leaf.abs().max() for leaf in shift.leaves()) > 1e-3


def test_feddyn_has_no_server_lr():
    with pytest.raises(BadInput, match="server_lr"):
        FedDyn(server_lr=0.5)
