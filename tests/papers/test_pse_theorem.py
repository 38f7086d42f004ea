"""The counterexample to PSE's theorem 2 on results/pse.md: it meets both assumptions, and its gradients stay."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "results" / "pse.md"
RATE, STEPS, XI, BOUND = 0.1, 5, 0.01, 0.1  # eta, tau, xi of the paper, epsilon

# Of the client whose optimum is at the right: its loss, the loss's slope, and how fast the slope can change.
SQUARES = (lambda w: (w - 1) ** 2 / 2, lambda w: w - 1, 1.0)
ENTROPY = (lambda w: math.log1p(math.exp(-w)), lambda w: -1 / (1 + math.exp(w)), 0.25)


def mean_squared_gradient(slope, rounds: int, averages: bool = True) -> float:
    """Theorem 2's left side, of the first of two clients: their losses are each other's mirror, and both take part."""
    server, kept, total = 0.0, [0.0, 0.0], 0.0
    for _ in range(1, rounds):
        for client, side in enumerate((1.0, -1.0)):
            weight = server if averages else kept[client]
            for step in range(1, STEPS + 1):
                gradient = side * slope(side * weight) + XI * (weight - server)
                total += gradient**2 if client == 0 and step < STEPS else 0.0
                weight -= RATE * gradient
            kept[client] = weight
        server = sum(kept) / 2
    return total / (rounds * STEPS)


def rounds_of_the_theorem(loss, curvature: float) -> int:
    """Its R: the loss and xi / 2 (w - server)^2, first at w = server = 0; nothing is random, so delta is 0."""
    smooth = curvature + XI
    assert 2 / smooth > RATE  # what the theorem asks of the rate
    lowest = min(loss(w) + XI * w**2 / 2 for w in (step / 1000 for step in range(10_000)))
    return math.ceil(2 * (loss(0.0) - lowest) / (STEPS * BOUND * (2 * RATE - smooth * RATE**2)))


@pytest.mark.parametrize("kind", [SQUARES, ENTROPY], ids=["squares", "cross-entropy"])
def test_gradients_stay_above_the_bound_however_many_rounds(kind):
    loss, slope, curvature = kind
    rounds = rounds_of_the_theorem(loss, curvature)
    assert all(mean_squared_gradient(slope, many) > 1.5 * BOUND for many in (rounds, 100 * rounds))
    assert mean_squared_gradient(slope, rounds, averages=False) < BOUND  # it is averaging that breaks it


def test_the_page_has_these_numbers():
    text = " ".join(PAGE.read_text("utf-8").split())
    said = []
    for loss, slope, curvature in (SQUARES, ENTROPY):
        rounds = rounds_of_the_theorem(loss, curvature)
        found = (mean_squared_gradient(slope, many) for many in (rounds, 100 * rounds))
        said += [f"{value:.2f}" for value in found] + [str(rounds), str(100 * rounds)]
    squares = re.search(r"promises at most 0\.1 after (\d+) rounds; it is ([\d.]+), and ([\d.]+) after (\d+)\.", text)
    entropy = re.search(r"in their place it is ([\d.]+) after (\d+), and ([\d.]+) after (\d+)\.", text)
    kept = re.search(r"keeps its own weight, it is ([\d.]+)\.", text)
    assert squares and entropy and kept
    rounds, at, later, many = squares.groups()
    assert [at, later, rounds, many] == said[:4]
    at, rounds, later, many = entropy.groups()
    assert [at, later, rounds, many] == said[4:]
    alone = mean_squared_gradient(SQUARES[1], rounds_of_the_theorem(SQUARES[0], SQUARES[2]), averages=False)
    assert kept[1] == f"{alone:.2f}"
