"""Ranks, tests and intervals of a league against SciPy, textbook tables and by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedlens.league.statistics import (
    bootstrap,
    critical_difference,
    friedman,
    pair,
    pairs,
    ranking,
    studentised_range,
)

# Demsar (2006), table 5a: q at 5 %, of 2 to 10 methods; and table 6, four methods on 14 sets.
NEMENYI = (1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164)


@pytest.mark.parametrize(("methods", "q"), list(enumerate(NEMENYI, 2)))
def test_critical_values_are_those_of_the_table(methods, q):
    assert studentised_range(methods, 0.05) / 2**0.5 == pytest.approx(q, abs=1e-3)  # there cut after three digits


def test_critical_difference_of_the_textbook():
    """Four methods on 14 data sets: 1.25."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def scores(table):
    return {f"w{i}": {f"m{j}": float(value) for j, value in enumerate(row)} for i, row in enumerate(table)}


@pytest.mark.parametrize("seed", range(4))
def test_friedman_as_in_scipy(seed):
    """Iman and Davenport's F is made of SciPy's chi-square; draws are among the values."""
    stats = pytest.importorskip("scipy.stats")
    table = np.random.default_rng(seed).integers(0, 6 if seed % 2 else 1000, (9, 5)) / 10 + np.arange(5) / 5
    places = np.array([stats.rankdata(-np.round(row, 12)) for row in table])
    chi = stats.friedmanchisquare(*(-np.round(table, 12)).T).statistic
    ratio = (9 - 1) * chi / (9 * 4 - chi)
    assert friedman(places) == pytest.approx(stats.f.sf(ratio, 4, 32), rel=1e-9)
    found = ranking(scores(table))
    assert list(found.ranks.values()) == pytest.approx(sorted(places.mean(0)))
    assert found.friedman == friedman(places)


def test_by_hand():
    """Two methods, three worlds: a wins twice and draws once. Ranks (1 + 1 + 1.5) / 3."""
    found = ranking({"x": {"a": 0.9, "b": 0.8}, "y": {"a": 0.5, "b": 0.4}, "z": {"a": 0.3, "b": 0.3}})
    assert found.ranks == {"a": pytest.approx(3.5 / 3), "b": pytest.approx(5.5 / 3)}
    (one,) = found.pairs
    assert (one.worlds, one.difference, one.wins) == (3, pytest.approx(0.2 / 3), pytest.approx(5 / 6))
    assert 0 <= one.low <= one.difference <= one.high <= 0.1 + 1e-12 and one.p == 0.5  # two pairs: no sign is rare
    assert found.groups == [("a", "b")] and not one.differs
    assert friedman(np.array([[1.0, 2.0]])) is None and friedman(np.array([[1.5, 1.5]] * 3)) == 1.0
    # The same order in every world: by chance one time in four, and with three of four drawn one in four for two.
    assert friedman(np.array([[1.0, 2.0]] * 3)) == pytest.approx(0.25)
    assert friedman(np.array([[2.0, 2.0, 2.0, 4.0]] * 2)) == pytest.approx(0.25)
    assert friedman(np.array([[1.0, 2.0, 3.0]] * 4)) == pytest.approx(1 / 6**3)


def test_what_differs_and_what_does_not():
    """In twelve worlds a is always ahead of b and c, which take turns."""
    table = {f"w{i}": {"a": 0.9, "b": 0.5 + 0.01 * (i % 2), "c": 0.5 + 0.01 * ((i + 1) % 2)} for i in range(12)}
    found = ranking(table)
    sure = {(one.a, one.b) for one in found.pairs if one.differs}
    assert sure == {("a", "b"), ("a", "c")} and found.groups == [("b", "c")] and found.friedman < 1e-6
    assert list(found.ranks) == ["a", "b", "c"]


def test_a_method_under_two_names_cannot_be_told_from_itself():
    draw = np.random.default_rng(3).random((12, 3))
    table = {f"w{i}": {"a": a, "twin": a, "b": b} for i, (a, b, _) in enumerate(draw)}
    found = ranking(table)
    (same,) = [one for one in found.pairs if {one.a, one.b} == {"a", "twin"}]
    assert found.ranks["a"] == found.ranks["twin"]
    assert (same.difference, same.low, same.high, same.wins, same.p) == (0, 0, 0, 0.5, None) and not same.differs
    assert any({"a", "twin"} <= set(group) for group in found.groups)


def test_pairs_over_shared_worlds_and_correction():
    table = {"x": {"a": 0.9, "b": 0.1}, "y": {"a": 0.8}, "z": {"b": 0.5}}
    assert pair(table, "a", "b").worlds == 1 and pair({"y": {"a": 0.8}}, "a", "b").worlds == 0
    many = scores(np.random.default_rng(0).random((8, 4)) + np.arange(4))
    raw = {(one.a, one.b): one.p for one in pairs(many)}
    alone = {names: pairs({w: {n: by[n] for n in names} for w, by in many.items()})[0].p for names in raw}
    assert len(raw) == 6 and all(raw[names] >= alone[names] for names in raw)
    assert min(raw.values()) == pytest.approx(6 * min(alone.values()))


def test_fewer_pairs_are_corrected_less():
    """Always ahead in twelve worlds: 2 / 2^12 is rare among 15 pairs with one method, and not among all 120."""
    table = scores(np.arange(16) + np.zeros((12, 1)) + np.linspace(0, 0.1, 12)[:, None] * np.arange(16))
    chosen, every = pairs(table, "m0"), pairs(table)
    assert (len(chosen), len(every)) == (15, 120) and all("m0" in (one.a, one.b) for one in chosen)
    assert max(one.p for one in chosen) == pytest.approx(15 * 2 / 2**12) and all(one.differs for one in chosen)
    assert min(one.p for one in every) == pytest.approx(120 * 2 / 2**12) and not any(one.differs for one in every)


def test_intervals():
    """Those of a mean of many normal numbers are the textbook's; of equal numbers a point."""
    values = np.random.default_rng(1).normal(2, 1, 400)
    low, high = bootstrap(values, "x")
    assert low == pytest.approx(values.mean() - 1.96 * values.std() / 20, abs=0.02)
    assert high == pytest.approx(values.mean() + 1.96 * values.std() / 20, abs=0.02)
    assert bootstrap(values, "x") == (low, high) != bootstrap(values, "y")
    assert bootstrap(np.full(5, 0.5), "x") == (0.5, 0.5)
    table = {f"w{i}": {"a": value, "b": 1.0} for i, value in enumerate(values[:9])}
    other = pair(dict(reversed(table.items())), "b", "a")  # whoever comes first, and in any order of worlds
    mine = pair(table, "a", "b")
    assert (other.low, other.high) == pytest.approx((-mine.high, -mine.low), abs=1e-12)
    heavy = bootstrap(np.array([0.0, 1.0]), "x", np.array([1e-6, 1.0]))
    assert heavy == (1.0, 1.0)


def test_groups_are_the_largest_ones():
    ranks = dict(zip("abcdef", (1.0, 2.0, 3.0, 4.5, 5.0, 5.5), strict=True))
    found = ranking(scores(np.zeros((2, 2))))
    found = type(found)(found.worlds, ranks, 0.01, 2.1, ())
    assert found.groups == [("a", "b", "c"), ("c", "d", "e"), ("d", "e", "f")]
    for group in found.groups:
        assert all(abs(ranks[a] - ranks[b]) < 2.1 for a, b in itertools.combinations(group, 2))
