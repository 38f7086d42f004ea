"""Local training against its plain loop in textbook.py."""

from __future__ import annotations

from fedlens.algorithms import Local
from textbook import assert_same, local_only, worlds


@worlds
def test_local(world):
    outcome = world.run(Local())
    assert_same(outcome.values, local_only(world))
    assert not any(reply.upload for replies in outcome.replies for reply in replies)
