"""What can be told apart: ranks over worlds, Friedman's test, critical differences, win rates, bootstrap intervals.

Scores are a mapping world -> method -> accuracy; a world is one block, its seeds are averaged beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
import torch

from ..compare.significance import holm, wilcoxon
from ..core.rng import generator, key

ALPHA = 0.05
DRAWS = 10_000  # of a bootstrap
Scores = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Pair:
    """Two methods: a's accuracy less b's, over the worlds that both have."""

    a: str
    b: str
    worlds: int
    difference: float
    low: float  # of a 95 % bootstrap interval of the mean difference, over worlds
    high: float
    wins: float  # share of worlds in which a is ahead; a draw counts half
    p: float | None = None  # Wilcoxon's, corrected for all pairs by Holm

    @property
    def differs(self) -> bool:
        return self.p is not None and self.p < ALPHA


@dataclass(frozen=True)
class Ranking:
    """Of the methods that all worlds have."""

    worlds: Sequence[str]
    ranks: Mapping[str, float]  # mean rank over worlds, the best first; draws share one
    friedman: float | None  # p that all are alike (Iman and Davenport's F); None where that cannot be told
    critical: float  # Nemenyi's difference of mean ranks at 5 %
    pairs: Sequence[Pair]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Largest sets of neighbours in rank that cannot be told apart: closer than the critical difference."""
        names = list(self.ranks)
        alike = [
            [n for n in names[i:] if self.ranks[n] - self.ranks[names[i]] < self.critical] for i in range(len(names))
        ]
        return [
            tuple(one) for i, one in enumerate(alike) if len(one) > 1 and not any(set(one) <= set(o) for o in alike[:i])
        ]


def ranking(scores: Scores) -> Ranking:
    """Methods that some world lacks are left out."""
    shared = set.intersection(*(set(by) for by in scores.values())) if scores else set()
    names = sorted(shared)
    table = np.array([[by[name] for name in names] for by in scores.values()]).reshape(len(scores), len(names))
    places = np.array([_ranks(-row) for row in table]).reshape(table.shape)
    means = places.mean(0) if len(places) else np.zeros(len(names))
    order = sorted(range(len(names)), key=lambda i: (means[i], names[i]))
    found = pairs({world: {name: by[name] for name in names} for world, by in scores.items()})
    return Ranking(
        tuple(scores),
        {names[i]: float(means[i]) for i in order},
        friedman(places),
        critical_difference(len(names), len(scores)) if len(names) > 1 and scores else math.inf,
        found,
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    """From 1, the smallest first; equal ones share the mean of their places."""
    _, place, count = np.unique(np.round(values, 12), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


# ---- are there differences at all? -----------------------------------------------------------------------------------
def friedman(places: np.ndarray) -> float | None:
    """p of Friedman's test in Iman and Davenport's form; None with one world or one method.

    With few worlds F promises too much: p is at least the chance that all worlds have the same order.
    """
    blocks, methods = places.shape
    if blocks < 2 or methods < 2:
        return None
    squares = float((places**2).sum())
    middle = blocks * methods * (methods + 1) ** 2 / 4
    if squares == middle:
        return 1.0  # all ranks are shared
    # Corrected for draws (Conover): the same as the textbook's formula where there are none.
    statistic = (methods - 1) * float(((places.sum(0) - blocks * (methods + 1) / 2) ** 2).sum()) / (squares - middle)
    least = math.prod(1 / count for count in sorted(map(_orders, places))[1:])
    if statistic >= blocks * (methods - 1) - 1e-12:
        return least  # the same order in every world
    ratio = (blocks - 1) * statistic / (blocks * (methods - 1) - statistic)
    return max(least, beyond_f(ratio, methods - 1, (methods - 1) * (blocks - 1)))


def _orders(places: np.ndarray) -> float:
    """In how many ways these places can be given to the methods; equal ones cannot be told apart."""
    _, counts = np.unique(places, return_counts=True)
    return math.factorial(len(places)) / math.prod(math.factorial(int(count)) for count in counts)


def beyond_f(ratio: float, above: int, below: int) -> float:
    """P(F > ratio) of Fisher's distribution with so many degrees of freedom."""
    return _beta(below / (below + above * ratio), below / 2, above / 2)


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny, c, d = 1e-300, 1.0, 1 / max(1 - (a + b) * x / (a + 1), 1e-300)
    value = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value


# ---- how far apart ---------------------------------------------------------------------------------------------------
def critical_difference(methods: int, worlds: int, alpha: float = ALPHA) -> float:
    """Nemenyi's: mean ranks closer than this cannot be told apart."""
    return studentised_range(methods, alpha) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * worlds))


@lru_cache
def studentised_range(count: int, alpha: float) -> float:
    """What the range of so many standard normal numbers exceeds with probability alpha."""
    z = np.linspace(-9, 9, 6001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    def below(q: float) -> float:
        inside = torch.special.ndtr(torch.from_numpy(z)) - torch.special.ndtr(torch.from_numpy(z - q))
        return float((count * density * inside.numpy() ** (count - 1)).sum() * (z[1] - z[0]))

    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 1 - alpha else (low, middle)
    return (low + high) / 2


# ---- pairs -----------------------------------------------------------------------------------------------------------
def pairs(scores: Scores, reference: str = "") -> list[Pair]:
    """All pairs of methods, or those with one of them; p is corrected for the number of pairs that could be tested.

    Few worlds cannot tell many pairs apart: of 12 the least p is 2 / 2^12, which times 120 pairs is more than 5 %.
    """
    names = sorted({name for by in scores.values() for name in by})
    found = [pair(scores, a, b) for a, b in combinations(names, 2) if not reference or reference in (a, b)]
    tests = [wilcoxon(differences(scores, one.a, one.b)) for one in found]
    known = [p for p in tests if p is not None]
    corrected = iter(holm(known))
    return [
        Pair(**{**vars(one), "p": None if p is None else next(corrected)}) for one, p in zip(found, tests, strict=True)
    ]


def pair(scores: Scores, a: str, b: str) -> Pair:
    """Without a test."""
    found = np.array(differences(scores, a, b))
    if not len(found):
        return Pair(a, b, 0, math.nan, math.nan, math.nan, math.nan)
    low, high = bootstrap(found, " ".join(sorted((a, b))))  # the same worlds are drawn, whoever comes first
    wins = float(((found > 1e-12) + (np.abs(found) <= 1e-12) / 2).mean())
    return Pair(a, b, len(found), float(found.mean()), low, high, wins)


def turned(one: Pair, first: str) -> Pair:
    """The same pair with this method first."""
    if one.a == first:
        return one
    return replace(one, a=one.b, b=one.a, difference=-one.difference, low=-one.high, high=-one.low, wins=1 - one.wins)


def differences(scores: Scores, a: str, b: str) -> list[float]:
    """In the order of the worlds' names, so that the same pair has the same interval everywhere."""
    return [by[a] - by[b] for _, by in sorted(scores.items()) if a in by and b in by]


def bootstrap(values: np.ndarray, name: str, weights: np.ndarray | None = None) -> tuple[float, float]:
    """A 95 % interval of the mean: worlds are drawn again, each as often as its weight says; the same every time."""
    chances = torch.ones(len(values)) if weights is None else torch.from_numpy(np.asarray(weights, np.float32))
    rows = torch.multinomial(chances.expand(DRAWS, -1), len(values), True, generator=generator(key("league", name)))
    low, high = np.quantile(values[rows.numpy()].mean(1), (0.025, 0.975))
    return float(low), float(high)
