"""Exact counts, ties, and maps brought to one scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlens.attribution import kept, normalised, top_share
from fedlens.core.errors import BadInput
from fedlens.core.rng import generator

SOME = settings(deadline=None, max_examples=60)
rows = st.integers(1, 40).flatmap(
    lambda n: st.lists(st.lists(st.integers(-3, 3), min_size=n, max_size=n), min_size=1, max_size=4)
)


@SOME
@given(rows, st.integers(0, 100))
def test_the_largest_stay_and_ties_keep_the_lower_index(values, drop):
    scores = torch.tensor(values, dtype=torch.float64)
    mask = top_share(scores, drop=drop)
    count = len(values[0]) - len(values[0]) * drop // 100
    for row, marked in zip(values, mask.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        assert {i for i, m in enumerate(marked) if m} == set(order[:count])


@SOME
@given(st.integers(1, 5000), st.integers(0, 1000))
def test_counts_are_those_of_integers(count, permille):
    """Tenths of a percent, where doubles round: 0.7 * 1000 is 700, 1000 * (1 - 0.3) is not."""
    expected = count - count * permille // 1000
    assert kept(count, drop=permille / 10) == expected
    assert kept(count, keep=(1000 - permille) / 1000) == expected


def test_counts_where_floats_go_wrong():
    assert kept(1024, drop=70) == 1024 - 716
    assert kept(1000, keep=0.3) == 300 == kept(1000, drop=70) and math.floor(1000 * (1 - 0.9)) != 100
    assert kept(1000, drop=0) == 1000 and kept(1000, drop=100) == 0 and kept(10, keep=0) == 0


def test_shapes():
    draw = generator(0)
    relevance = torch.randn(3, 3, 8, 8, generator=draw)
    chosen = relevance.sum(1, keepdim=True)
    mask = top_share(chosen, drop=70)
    assert mask.shape == (3, 1, 8, 8) and (mask.flatten(1).sum(1) == 64 - 44).all()
    assert (chosen[mask].view(3, -1).amin(1) >= chosen[~mask].view(3, -1).amax(1)).all()
    norms = torch.randn(1, 10, generator=draw).square()
    assert top_share(norms, keep=0.3)[0].nonzero()[:, 0].tolist() == sorted(norms[0].topk(3)[1].tolist())
    assert top_share(torch.zeros(1, 5), keep=0.4).tolist() == [[True, True, False, False, False]]
    assert top_share(torch.full((1, 4), math.nan), drop=50).tolist() == [[True, True, False, False]]
    assert top_share(torch.tensor([[math.nan, 1, math.inf, -math.inf]]), keep=0.5).tolist() == [
        [False, True, True, False]
    ]


@SOME
@given(rows)
def test_normalised_maps_have_no_nan(values):
    maps = torch.tensor(values, dtype=torch.float64)
    unit, signed = normalised(maps), normalised(maps, "signed")
    for row, u, s in zip(values, unit.tolist(), signed.tolist(), strict=True):
        low, high, size = min(row), max(row), max(map(abs, row))
        assert u == pytest.approx([(v - low) / (high - low) if high > low else 0 for v in row])
        assert s == pytest.approx([v / size if size else 0 for v in row])


def test_bad_input():
    scores = torch.zeros(2, 4)
    for options, message in (
        (dict(keep=1.2), "keep=1.2 must lie between 0 and 1"),
        (dict(drop=-1), "drop=-1"),
        (dict(drop=math.nan), "drop=nan"),
        (dict(), "give either keep"),
        (dict(keep=0.5, drop=50), "give either keep"),
    ):
        with pytest.raises(BadInput, match=message):
            top_share(scores, **options)
