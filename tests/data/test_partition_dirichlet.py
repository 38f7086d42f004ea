"""The dialects of Dirichlet against slow textbook loops, in distribution."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

from fedlens.core.rng import numpy_generator
from fedlens.data.partition.counts import cut, equal_sizes, largest_remainder, proportions, top_up
from fedlens.data.partition.label_skew import Dirichlet, per_class, per_client

CLASSES, EXAMPLES, CLIENTS = 10, 400, 20
OF_CLASS = np.full(CLASSES, EXAMPLES)


def textbook_shares(alpha, count, draw):
    """Dir(alpha) as gamma variables over their sum."""
    gammas = [draw.gamma(alpha) for _ in range(count)]
    return [gamma / sum(gammas) for gamma in gammas]


def textbook_cut(shares, examples):
    """Example i goes to the client whose interval holds the middle of its cell."""
    counts, client, end = [0] * len(shares), 0, shares[0]
    for example in range(examples):
        while (example + 0.5) / examples > end and client < len(shares) - 1:
            client += 1
            end += shares[client]
        counts[client] += 1
    return counts


def textbook_class(alpha, draw, cap=None):
    counts = [[0] * CLASSES for _ in range(CLIENTS)]
    for label in range(CLASSES):
        while True:
            shares = textbook_shares(alpha, CLIENTS, draw)
            if cap is not None:
                shares = [0 if sum(counts[k]) >= cap else share for k, share in enumerate(shares)]
            if sum(shares) > 0:
                break
        total = sum(shares)
        for client, got in enumerate(textbook_cut([share / total for share in shares], EXAMPLES)):
            counts[client][label] = got
    return np.array(counts)


def textbook_client(alpha, draw):
    """Hsu et al., 2019: one example at a time from the client's own mix, without classes that have run out."""
    left, counts = [EXAMPLES] * CLASSES, [[0] * CLASSES for _ in range(CLIENTS)]
    for client in draw.permutation(CLIENTS):
        mix = textbook_shares(alpha, CLASSES, draw)
        for _ in range(CLASSES * EXAMPLES // CLIENTS):
            still = [share if left[label] else 0 for label, share in enumerate(mix)]
            if sum(still) == 0:
                still = [float(some) for some in left]
            at, label = draw.random() * sum(still), 0
            while at >= still[label] and label < CLASSES - 1:
                at, label = at - still[label], label + 1
            while not left[label]:  # rounding at the very end of the line
                label -= 1
            counts[client][label] += 1
            left[label] -= 1
    return np.array(counts)


def summaries(counts):
    """A class's share at a client, a client's size, the share of its commonest class; one client per draw each, as
    the clients of one draw are not independent of each other."""
    return counts[0, 0] / EXAMPLES, counts[1].sum(), counts[2].max() / max(counts[2].sum(), 1)


def agree(ours, textbook):
    """Kolmogorov-Smirnov on independent draws; 27 tests in this file, so 0.001 each errs once in 37 new seeds."""
    for mine, theirs in zip(zip(*ours, strict=True), zip(*textbook, strict=True), strict=True):
        assert ks_2samp(mine, theirs).pvalue > 0.001


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_class_dialect_in_distribution(alpha):
    draw, other = numpy_generator(1), np.random.default_rng(2)
    ours = [summaries(per_class(OF_CLASS, CLIENTS, alpha, draw)) for _ in range(300)]
    agree(ours, [summaries(textbook_class(alpha, other)) for _ in range(300)])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_balanced_dialect_in_distribution(alpha):
    cap, draw, other = CLASSES * EXAMPLES / CLIENTS, numpy_generator(3), np.random.default_rng(4)
    ours = [summaries(per_class(OF_CLASS, CLIENTS, alpha, draw, cap)) for _ in range(300)]
    agree(ours, [summaries(textbook_class(alpha, other, cap)) for _ in range(300)])


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_client_dialect_in_distribution(alpha):
    draw, other, sizes = numpy_generator(5), np.random.default_rng(6), equal_sizes(CLASSES * EXAMPLES, CLIENTS)
    ours = [summaries(per_client(OF_CLASS, sizes, alpha, draw)) for _ in range(60)]
    agree(ours, [summaries(textbook_client(alpha, other)) for _ in range(60)])


def test_the_dialects_differ():
    """What the tests above must be able to see: the wrong dialect, or another alpha."""

    def largest(dialect, alpha=0.5, draws=150):
        draw = numpy_generator(7)
        return [Dirichlet(alpha, 0, dialect).counts(OF_CLASS, CLIENTS, draw)[0].sum(1).max() for _ in range(draws)]

    assert ks_2samp(largest("class"), largest("balanced")).pvalue < 1e-6
    assert ks_2samp(largest("class"), largest("class", 0.1)).pvalue < 1e-6
    assert set(largest("equal", draws=50)) == set(largest("client", draws=50)) == {200}


def test_balanced_closes_a_client_that_is_full():
    """At >= N/K no further class; checked class by class."""
    draw = numpy_generator(8)
    for _ in range(50):
        counts = per_class(OF_CLASS, CLIENTS, 0.2, draw, cap=200)
        held = np.cumsum(counts, axis=1)
        assert (counts[:, 1:][held[:, :-1] >= 200] == 0).all()


def test_redrawn_until_min_size_rather_than_topped_up():
    """Where a few draws do, the draw that is kept is one that nobody touched."""
    for seed in range(20):
        draw, again = numpy_generator(seed), numpy_generator(seed)
        counts, notes = Dirichlet(0.5, 60).counts(OF_CLASS, CLIENTS, draw)
        if notes:
            continue
        while (fresh := per_class(OF_CLASS, CLIENTS, 0.5, again)).sum(1).min() < 60:
            pass
        assert (fresh == counts).all()


def test_equal_dialect_keeps_the_skew():
    """Levelling sizes must not mix the classes: as few classes a client as before, at the same alpha."""
    draw = numpy_generator(9)
    levelled = Dirichlet(0.01, 1, "equal").counts(OF_CLASS, CLIENTS, draw)[0]
    assert (levelled.sum(1) == 200).all() and (levelled.sum(0) == EXAMPLES).all()
    assert (levelled > 0).sum(1).mean() < 3


@pytest.mark.parametrize("alpha", [1e-3, 1e-6, 1e-300])
def test_small_alpha_has_the_moments_of_the_closed_form(alpha):
    """E[sum of squared shares] = (alpha + 1) / (K alpha + 1); a plain quotient of gammas would be 0/0 here."""
    draw, draws = numpy_generator(10), 400
    shares = np.stack([proportions(alpha, 2000, draw) for _ in range(draws)])
    assert np.isfinite(shares).all() and np.allclose(shares.sum(1), 1)
    squares = (shares**2).sum(1)
    expected = (alpha + 1) / (2000 * alpha + 1)
    assert abs(squares.mean() - expected) < 4 * squares.std() / np.sqrt(draws) + 1e-3
    # Everybody is as likely as anybody: the middle of where the largest share falls.
    assert abs(shares.argmax(1).mean() - 999.5) < 4 * 577 / np.sqrt(draws)


def test_cut_and_largest_remainder_against_loops():
    draw = np.random.default_rng(11)
    for _ in range(100):
        shares, examples = draw.dirichlet(np.full(7, 0.3)), int(draw.integers(0, 200))
        assert cut(shares, examples).tolist() == textbook_cut(shares.tolist(), examples)
        weights = draw.integers(0, 9, 7)
        got = largest_remainder(weights, examples)
        if not weights.any():
            assert not got.any()
            continue
        exact = weights * examples / weights.sum()
        slow = np.floor(exact).astype(int)
        for _ in range(examples - slow.sum()):
            slow[np.argmax(np.round(exact - slow, 9))] += 1
        assert got.tolist() == slow.tolist()


def test_topping_up_takes_from_the_largest_and_loses_nothing():
    draw = numpy_generator(12)
    before = np.array([[90, 10], [30, 0], [1, 0], [0, 0]])
    after, moved, helped = top_up(before, np.full(4, 10), draw)
    assert (after.sum(0) == before.sum(0)).all() and after.sum(1).min() == 10
    assert (moved, helped) == (19, 2) and after[1].tolist() == [30, 0]
