"""The counterexample to PSE's theorem 2 on results/pse.md: it meets both assumptions, and its gradients stay."""

from __future__ import annotations

import math
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "results" / "pse.md"
RATE, STEPS, XI, BOUND = 0.1, 5, 0.01, 0.1  # eta, tau, xi of the paper, epsilon


def mean_squared_gradient(rounds: int, averages: bool = True) -> float:
    """Theorem 2's left side, of the first client: its optimum is at 1, the other's at -1, and both take part."""
    server, locals_, total = 0.0, [0.0, 0.0], 0.0
    for _ in range(1, rounds):
        for at, optimum in enumerate((1.0, -1.0)):
            weight = server if averages else locals_[at]
            for step in range(1, STEPS + 1):
                gradient = weight - optimum + XI * (weight - server)
                total += gradient**2 if at == 0 and step < STEPS else 0.0
                weight -= RATE * gradient
            locals_[at] = weight
        server = sum(locals_) / 2
    return total / (rounds * STEPS)


def rounds_of_the_theorem() -> int:
    """Its R: the loss is (w - 1)^2 / 2 + xi / 2 (w - server)^2, first at w = server = 0; no noise, so delta is 0."""
    smooth, best = 1 + XI, 1 / (1 + XI)
    assert 2 / smooth > RATE  # what the theorem asks of the rate
    lowest = (best - 1) ** 2 / 2 + XI * best**2 / 2
    return math.ceil(2 * (0.5 - lowest) / (STEPS * BOUND * (2 * RATE - smooth * RATE**2)))


def test_gradients_stay_above_the_bound_however_many_rounds():
    rounds = rounds_of_the_theorem()
    found = mean_squared_gradient(rounds), mean_squared_gradient(100 * rounds)
    assert all(value > 5 * BOUND for value in found)
    said = re.search(r"promises at most ([\d.]+) after (\d+) rounds; it is ([\d.]+), and ([\d.]+) after (\d+)", _text())
    assert said is not None
    assert [*said.groups()] == [str(BOUND), str(rounds), f"{found[0]:.2f}", f"{found[1]:.2f}", str(100 * rounds)]


def test_without_averaging_the_bound_holds():
    assert mean_squared_gradient(rounds_of_the_theorem(), averages=False) < BOUND


def _text() -> str:
    return " ".join(PAGE.read_text("utf-8").split())
