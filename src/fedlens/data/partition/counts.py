"""Arithmetic of dealing: count matrices [clients, classes] and the index lists that they stand for."""

from __future__ import annotations

import numpy as np

Generator = np.random.Generator  # noqa: TID251 - the type; the numbers come from core.rng


def proportions(alpha: float, count: int, draw: Generator) -> np.ndarray:
    """One draw of the symmetric Dir(alpha)."""
    shares = draw.dirichlet(np.full(count, alpha))
    if not (np.isfinite(shares).all() and shares.sum() > 0):
        # So small an alpha that everything underflows: in the limit one takes it all.
        shares = np.zeros(count)
        shares[draw.integers(count)] = 1
    return shares


def equal_sizes(examples: int, count: int) -> np.ndarray:
    """As equal as whole numbers can be, the larger ones first."""
    return np.full(count, examples // count) + (np.arange(count) < examples % count)


def cut(shares: np.ndarray, examples: int) -> np.ndarray:
    """Whole numbers that sum to `examples`, each within one of its share: cut at the rounded running sums."""
    # Rounded down, as elsewhere, a running sum of 0.999... would always leave one example for the last client.
    ends = np.rint(np.cumsum(shares) / shares.sum() * examples).astype(np.int64)
    ends[-1] = examples
    return np.diff(ends, prepend=0)


def largest_remainder(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to whole weights that sum to `total`, exact; ties go to the first."""
    whole, rest = np.divmod(weights * total, max(int(weights.sum()), 1))
    short = total - int(whole.sum()) if weights.any() else 0
    whole[np.argsort(-rest, kind="stable")[:short]] += 1
    return whole


def deal(counts: np.ndarray, index: np.ndarray, y: np.ndarray, draw: Generator) -> list[np.ndarray]:
    """Different examples of each class for everyone, counts[client, class] of them."""
    order, labels = draw.permutation(index), np.arange(counts.shape[1])
    order = order[np.argsort(y[order], kind="stable")]
    starts = np.searchsorted(y[order], labels)
    ends = starts + np.cumsum(counts, axis=0)
    begins = ends - counts
    return [
        np.concatenate([order[begins[client, label] : ends[client, label]] for label in np.flatnonzero(counts[client])])
        if counts[client].any()
        else np.empty(0, np.int64)
        for client in range(len(counts))
    ]


def top_up(counts: np.ndarray, least: np.ndarray, draw: Generator) -> tuple[np.ndarray, int, int]:
    """(counts, examples moved, clients helped): from the largest clients, in their own mix, until all have `least`."""
    counts, sizes = counts.copy(), counts.sum(1)
    moved, needy = 0, np.flatnonzero(sizes < least)
    for client in needy:
        while sizes[client] < least[client]:
            donor = int((sizes - least).argmax())
            gift = int(min(sizes[donor] - least[donor], least[client] - sizes[client]))
            given = draw.multivariate_hypergeometric(counts[donor], gift)
            counts[donor] -= given
            counts[client] += given
            sizes[donor] -= gift
            sizes[client] += gift
            moved += gift
    return counts, moved, len(needy)


def matched(
    counts: np.ndarray, test: np.ndarray, y: np.ndarray, draw: Generator
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Test shards in the mix of the training counts: every class's test images are dealt in proportion to them."""
    available = np.bincount(y[test], minlength=counts.shape[1])
    wanted = np.stack([largest_remainder(of_class, n) for of_class, n in zip(counts.T, available, strict=True)], axis=1)
    empty = _one_for_everyone(wanted, counts)
    unused = int(available.sum() - wanted.sum())
    notes = [f"{empty} of {len(counts)} clients have no test images: there are too few for all"] if empty else []
    if unused:
        notes.append(f"{unused} test images are of classes that no client holds and are in no client's test shard")
    return [np.sort(shard) for shard in deal(wanted, test, y, draw)], tuple(notes)


def _one_for_everyone(wanted: np.ndarray, counts: np.ndarray) -> int:
    """Whoever got nothing takes one image of its commonest class from the best supplied client; how many could not."""
    sizes = wanted.sum(1)
    for client in np.flatnonzero(sizes == 0):
        held = np.flatnonzero(counts[client])
        for label in held[np.argsort(-counts[client, held], kind="stable")]:
            donor = int(np.where(wanted[:, label] > 0, sizes, 0).argmax())
            if wanted[donor, label] and sizes[donor] > 1:
                for who, change in ((donor, -1), (client, 1)):
                    wanted[who, label] += change
                    sizes[who] += change
                break
    return int((sizes == 0).sum())


def held_out(
    owned: list[np.ndarray], y: np.ndarray, share: float, draw: Generator
) -> tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...]]:
    """(rest, held out, notes): a share of each client's own examples, of every class alike, one at least."""
    train, test, alone = [], [], 0
    for shard in owned:
        total = min(max(round(share * len(shard)), 1), len(shard) - 1)
        alone += total < 1
        counts = largest_remainder(np.bincount(y[shard]), max(total, 0))
        held = deal(counts[None], shard, y, draw)[0]
        train.append(np.setdiff1d(shard, held))
        test.append(np.sort(held))
    return train, test, (f"{alone} clients have one example only and none to test on",) if alone else ()
