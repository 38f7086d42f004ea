"""Whether two methods differ by more than chance: paired tests, and the correction for making many of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

FEWEST = 3  # seeds for a test over them
_EXACT = 200  # pairs at most for which all ways of swapping them are counted


def paired_t(differences: Sequence[float]) -> float | None:
    """Two-sided p of Student's t-test that their mean is zero; None where so few, or such equal ones, cannot tell."""
    if len(differences) < FEWEST or len(set(differences)) == 1:
        return None
    t = fmean(differences) / (stdev(differences) / math.sqrt(len(differences)))
    return two_sided(t, len(differences) - 1)


def two_sided(t: float, freedom: int) -> float:
    """P(|T| > |t|) of Student's distribution, by its finite series (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= square * number / (number + 1)
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))


def wilcoxon(differences: Sequence[float]) -> float | None:
    """Two-sided p of the signed-rank test that they lie evenly about zero; zeros are left out, ties share a rank.

    Exact, over all signs, for up to 200 pairs; by the normal approximation beyond.
    """
    # Two shares of few images, such as 5/6 - 3/4 and 11/12 - 5/6, differ in their last bit and are the same.
    x = np.array([value for value in np.round(np.asarray(differences, float), 12) if value])
    if not len(x):
        return None
    _, place, count = np.unique(np.abs(x), return_inverse=True, return_counts=True)
    ranks = 2 * np.cumsum(count)[place] - count[place] + 1  # twice the mean rank, which is whole
    found = int(ranks[x > 0].sum())
    if len(x) > _EXACT:
        middle, variance = ranks.sum() / 2, (ranks.astype(float) ** 2).sum() / 4
        return math.erfc(abs(found - middle) / math.sqrt(2 * variance))
    chance = np.ones(1)  # of each sum of the ranks that are positive
    for rank in ranks:
        more = np.zeros(len(chance) + rank)
        more[: len(chance)] += chance / 2
        more[rank:] += chance / 2
        chance = more
    return min(1.0, 2 * min(chance[: found + 1].sum(), chance[found:].sum()))


def holm(values: Sequence[float]) -> list[float]:
    """Each p as if it were the only one: the chance of a false alarm among all of them stays below (Holm, 1979)."""
    adjusted, largest = [0.0] * len(values), 0.0
    for place, number in enumerate(sorted(range(len(values)), key=lambda number: values[number])):
        largest = max(largest, min(1.0, (len(values) - place) * values[number]))
        adjusted[number] = largest
    return adjusted
