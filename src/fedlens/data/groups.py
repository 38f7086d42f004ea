"""Images that belong together, such as those of a patient: never some in training and some in test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.errors import BadInput
from ..core.rng import numpy_generator
from .images import Images
from .split import Split


def by_first_appearance(names: Sequence[str]) -> np.ndarray:
    """A number for each name, in the order in which they come; an empty name is nobody else's."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(name or (index,), len(known)) for index, name in enumerate(names)], np.int64)


def held_out_groups(strata: np.ndarray, groups: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (rest, held out): whole groups, about `share` of every stratum; a stratum keeps one image at least.

    Groups come in a random order. Each is held out where that brings the counts of its strata nearer to the share.
    """
    _, strata, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    _, groups = np.unique(groups, return_inverse=True)
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    wanted, held = share * sizes, np.zeros(len(sizes))
    chosen = np.zeros(len(members), bool)
    for number in numpy_generator(seed).permutation(len(members)).tolist():
        kinds, counts = np.unique(strata[members[number]], return_counts=True)
        before, after = held[kinds] - wanted[kinds], held[kinds] + counts - wanted[kinds]
        nearer = (after**2 / sizes[kinds]).sum() < (before**2 / sizes[kinds]).sum()
        if nearer and (held[kinds] + counts < sizes[kinds]).all():
            held[kinds] += counts
            chosen[number] = True
    test = chosen[groups]
    return np.flatnonzero(~test), np.flatnonzero(test)


def check_apart(images: Images, split: Split) -> None:
    """Refuses a split that trains some client on a patient whom another, or the same, is tested on."""
    if images.groups is None:
        return
    groups = images.groups.numpy()
    train, test = (np.unique(groups[np.concatenate(shards)]) for shards in (split.train, split.test))
    if both := len(np.intersect1d(train, test)):
        raise BadInput(
            f"this split has {both} of {images.groups.max() + 1} patients or groups both in training and in test: "
            "use partition.test=matched, or set data.group=none"
        )
