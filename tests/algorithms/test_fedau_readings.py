"""FedAU's weights against the paper's algorithm 2, kept round by round as the released code keeps them."""

from __future__ import annotations

import pytest
import torch

from fedlens.algorithms import FedAU
from fedlens.core.rng import generator
from test_fedau import outcome
from textbook import World


def algorithm_2(comes: list[bool], cutoff: int) -> list[float]:
    """The weight of each participation of one client: M intervals so far, their mean S, and the silence that grows."""
    weights, count, average, silent = [], 0, 1.0, 0
    for here in comes:
        if here:
            weights.append(average)
        silent += 1
        if here or silent == cutoff:
            average = silent if not count else (count * average + silent) / (count + 1)
            count, silent = count + 1, 0
    return weights


@pytest.mark.parametrize("cutoff", [1, 2, 3, 5, 50])
def test_every_participation_weighs_as_in_algorithm_2(cutoff):
    """Forty rounds of three clients that come seldom; one of them comes late."""
    draw = torch.rand(40, 3, generator=generator(4), dtype=torch.float64)
    comes = [[bool(draw[t, k] < 0.25) and (k != 2 or t > 20) for t in range(40)] for k in range(3)]
    world = World(tuple(tuple(k for k in range(3) if comes[k][t]) for t in range(40)), steps=1, norm=False)
    _, _, replies = outcome(world, FedAU(cutoff=cutoff))
    for k in range(3):
        sent = [float(reply.upload.weight) for answers in replies for reply in answers if reply.client == k]
        expected = algorithm_2(comes[k], cutoff)
        assert len(sent) == len(expected) > 2
        assert max(abs(a - b) for a, b in zip(sent, expected, strict=True)) <= 1e-12


def test_a_first_participation_counts_the_silences_that_the_cutoff_closed():
    world = World(((0,),) * 7 + ((0, 1),), steps=1, norm=False)
    _, _, replies = outcome(world, FedAU(cutoff=3))
    assert float(replies[-1][1].upload.weight) == 3.0  # two intervals of three rounds; the third has just begun
    _, _, replies = outcome(world, FedAU(cutoff=50))
    assert float(replies[-1][1].upload.weight) == 1.0  # nothing was closed


def test_what_the_published_runs_had_can_be_asked_for():
    """A first participation had weight 1, however late; what the cutoff had closed counted from the second on."""
    world = World(((0,),) * 7 + ((0, 1), (0, 1)), steps=1, norm=False)
    _, _, replies = outcome(world, FedAU(cutoff=3, **FedAU.presets["earlier"]))
    assert [float(answers[1].upload.weight) for answers in replies[-2:]] == [1.0, 8 / 3]  # 3 + 3 + 2 rounds in three
    _, _, replies = outcome(world, FedAU(cutoff=3))
    assert [float(answers[1].upload.weight) for answers in replies[-2:]] == [3.0, 8 / 3]
