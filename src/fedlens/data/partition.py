"""Which client gets which examples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from ..core.errors import BadInput
from ..core.fields import Count, Number, Positive, Share
from ..core.rng import key, numpy_generator
from .images import Images
from .shares import cut, deal, held_out, matched, top_up
from .split import Split

DRAWS = 20  # of a whole assignment; then small clients are topped up instead of drawing for ever


@dataclass(frozen=True)
class Partition:
    """Deals the training part to clients. A subclass writes `assign`."""

    # matched: from the canonical test part, in each client's own class mix; holdout: a share of its own examples.
    test: Literal["matched", "holdout"] = field(default="matched", kw_only=True)
    holdout: Share = field(default=0.2, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)  # None: the experiment's

    name: ClassVar[str]

    def split(self, images: Images, clients: int, seed: int) -> Split:
        """The same for the same arguments, whatever else runs."""
        seed = seed if self.seed is None else self.seed
        self.check(images, clients)
        owned, notes = self.assign(images, clients, numpy_generator(key(seed, "partition")))
        owned = [np.sort(shard) for shard in owned]
        train, test, more = self.tests(images, owned, numpy_generator(key(seed, "test shards")))
        return Split(train, test, (*notes, *more))

    def check(self, images: Images, clients: int) -> None:
        """BadInput for what cannot be done, before any work."""
        if clients < 1:
            raise BadInput(f"clients is {clients}, but a federation needs at least one")
        if clients > len(images.train):
            raise BadInput(
                f"clients is {clients}, but {images.name} has only {len(images.train)} training images: "
                "lower clients or take more data"
            )
        if self.test == "holdout" and not 0 < self.holdout < 1:
            raise BadInput(f"partition.holdout is {self.holdout}, but it must lie between 0 and 1")

    def assign(
        self, images: Images, clients: int, draw: np.random.Generator
    ) -> tuple[list[np.ndarray], tuple[str, ...]]:
        """Each client's examples as indices into images.x, and what there is to say about it."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it assigns examples")

    def tests(
        self, images: Images, owned: list[np.ndarray], draw: np.random.Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...]]:
        """(training shards, test shards, notes)."""
        y, classes = images.y.numpy(), len(images.classes)
        if self.test == "holdout":
            return held_out(owned, y, self.holdout, draw)
        counts = np.stack([np.bincount(y[shard], minlength=classes) for shard in owned])
        shards, notes = matched(counts, images.test.numpy(), y, draw)
        return owned, shards, notes


def class_counts(images: Images) -> np.ndarray:
    """How many training examples each class has."""
    return np.bincount(images.y[images.train].numpy(), minlength=len(images.classes))


def check_min_size(images: Images, clients: int, min_size: int) -> None:
    if min_size * clients > len(images.train):
        raise BadInput(
            f"partition.min_size {min_size} for {clients} clients needs {min_size * clients} training images, but "
            f"{images.name} has {len(images.train)}: lower partition.min_size or clients"
        )


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffled and cut into equal parts."""

    name = "iid"

    def assign(self, images, clients, draw):
        return np.array_split(draw.permutation(images.train.numpy()), clients), ()


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew. The dialects are not interchangeable in comparisons.

    class: each class is cut by Dir(alpha) over clients, redrawn until all have min_size (Yurochkin et al., 2019).
    balanced: the same, but a client that holds >= N/K examples gets no more classes (NIID-Bench; Flower closes at > N/K).
    client: equal sizes, each client draws its own class mix from Dir(alpha) (Hsu et al., 2019).
    equal: `class`, then examples move from the largest clients to the smallest until sizes differ by one at most.
    """

    alpha: Positive = 0.5
    min_size: Number = 10
    dialect: Literal["class", "balanced", "client", "equal"] = "class"
    name = "dirichlet"

    def check(self, images, clients):
        super().check(images, clients)
        check_min_size(images, clients, self.min_size)

    def assign(self, images, clients, draw):
        counts, notes = self.counts(class_counts(images), clients, draw)
        return deal(counts, images.train.numpy(), images.y.numpy(), draw), notes

    def counts(self, of_class: np.ndarray, clients: int, draw: np.random.Generator) -> tuple[np.ndarray, tuple]:
        """How many examples of each class every client gets, [clients, classes]."""
        least = np.full(clients, max(self.min_size, 1))
        if self.dialect == "equal":
            sizes = equal_sizes(int(of_class.sum()), clients)
            # Who gets the one example more must not be told by the client's number.
            return top_up(per_class(of_class, clients, self.alpha, draw), draw.permutation(sizes), draw)[0], ()
        if self.dialect == "client":
            return per_client(of_class, equal_sizes(int(of_class.sum()), clients), self.alpha, draw), ()
        cap = of_class.sum() / clients if self.dialect == "balanced" else None
        best = None
        for _ in range(DRAWS):
            counts = per_class(of_class, clients, self.alpha, draw, cap)
            lacking = np.maximum(least - counts.sum(1), 0).sum()
            if best is None or lacking < best[0]:
                best = lacking, counts
            if not lacking:
                return counts, ()
        assert best is not None
        counts, moved, clients_helped = top_up(best[1], least, draw)
        return counts, (
            f"after {DRAWS} draws {clients_helped} of {clients} clients still had fewer than {least[0]} examples; "
            f"{moved} examples were moved to them from the largest clients",
        )


def equal_sizes(examples: int, clients: int) -> np.ndarray:
    return np.full(clients, examples // clients) + (np.arange(clients) < examples % clients)


def shares_of(alpha: float, count: int, draw: np.random.Generator) -> np.ndarray:
    """Dir(alpha) of a symmetric kind; where alpha is so small that all of it underflows, one takes everything."""
    shares = draw.dirichlet(np.full(count, alpha))
    if not np.isfinite(shares).all() or not shares.sum() > 0:
        shares = np.zeros(count)
        shares[draw.integers(count)] = 1
    return shares / shares.sum()


def per_class(
    of_class: np.ndarray, clients: int, alpha: float, draw: np.random.Generator, cap: float | None = None
) -> np.ndarray:
    counts = np.zeros((clients, len(of_class)), np.int64)
    for label, examples in enumerate(of_class):
        shares = shares_of(alpha, clients, draw)
        if cap is not None:
            full = counts.sum(1) >= cap
            for _ in range(DRAWS):
                if shares[~full].sum() > 0:
                    break
                shares = shares_of(alpha, clients, draw)
            shares = np.where(full, 0, shares if shares[~full].sum() > 0 else 1)
            shares = shares / shares.sum()
        counts[:, label] = cut(shares, int(examples))
    return counts


def per_client(of_class: np.ndarray, sizes: np.ndarray, alpha: float, draw: np.random.Generator) -> np.ndarray:
    """One client after another, in random order; classes that have run out leave the client's mix."""
    left, counts = of_class.copy(), np.zeros((len(sizes), len(of_class)), np.int64)
    for client in draw.permutation(len(sizes)):
        mix = shares_of(alpha, len(of_class), draw)
        while (wanted := int(sizes[client] - counts[client].sum())) > 0:
            open_mix = np.where(left > 0, mix, 0)
            open_mix = open_mix if open_mix.sum() > 0 else left.astype(float)
            got = np.minimum(draw.multinomial(wanted, open_mix / open_mix.sum()), left)
            counts[client] += got
            left -= got
    return counts


@dataclass(frozen=True)
class Shards(Partition):
    """Pathological label skew as in FedRep (Collins et al., 2021): every client gets shards of `classes` classes.

    A client may draw the same class twice, so `classes` is an upper bound. Where clients * classes is no multiple of
    the number of classes, some shards are left over and their examples stay unused.
    """

    classes: Count = 2  # per client
    name = "shards"

    def check(self, images, clients):
        super().check(images, clients)
        if self.classes > len(images.classes):
            raise BadInput(
                f"partition.classes is {self.classes}, but {images.name} has only {len(images.classes)} classes"
            )
        per_class = -(-clients * self.classes // len(images.classes))
        if (fewest := class_counts(images)).min() < per_class:
            label = images.classes[int(fewest.argmin())]
            raise BadInput(
                f"{clients} clients with {self.classes} classes each need {per_class} shards per class, but class "
                f"{label!r} of {images.name} has only {fewest.min()} training images: lower clients or partition.classes"
            )

    def assign(self, images, clients, draw):
        of_class = class_counts(images)
        per_class = -(-clients * self.classes // len(of_class))
        cards = draw.permutation(np.repeat(np.arange(len(of_class)), per_class))[: clients * self.classes]
        hands = cards.reshape(clients, self.classes)
        piles = [draw.permutation(equal_sizes(int(examples), per_class)).tolist() for examples in of_class]
        counts = np.zeros((clients, len(of_class)), np.int64)
        for client, hand in enumerate(hands):
            for label in hand:
                counts[client, label] += piles[label].pop()
        unused = sum(sum(pile) for pile in piles)
        left = clients * self.classes
        notes = (
            f"{per_class * len(of_class) - left} of {per_class * len(of_class)} shards were left over: "
            f"{unused} training examples are unused",
        )
        return deal(counts, images.train.numpy(), images.y.numpy(), draw), notes if unused else ()


__all__ = ["Dirichlet", "Iid", "Partition", "Shards", "replace"]
