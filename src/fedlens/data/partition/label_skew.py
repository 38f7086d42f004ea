"""Label skew: Dirichlet in its dialects, and shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...core.errors import BadInput
from ...core.fields import Count, Number, Positive
from ..images import Images
from .base import Partition, check_min_size, topped_up
from .counts import Generator, cut, deal, equal_sizes, proportions, top_up

DRAWS = 20  # of a whole assignment; then small clients are topped up instead of drawing for ever


def class_counts(images: Images) -> np.ndarray:
    """How many training examples each class has."""
    return np.bincount(images.y[images.train].numpy(), minlength=len(images.classes))


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew by Dir(alpha). The dialects are not interchangeable in comparisons.

    class: each class is cut by Dir(alpha) over clients, redrawn until all have min_size (Yurochkin et al., 2019).
    balanced: the same, but a client that holds >= N/K examples gets no further class (NIID-Bench; Flower: > N/K).
    client: equal sizes, each client draws its own class mix from Dir(alpha) (Hsu et al., 2019).
    equal: `class`, then examples move from the largest clients to the smallest until all sizes are equal.
    """

    alpha: Positive = 0.5  # of Dir(alpha); smaller is more skewed
    min_size: Number = 10  # images that every client has at least
    dialect: Literal["class", "balanced", "client", "equal"] = "class"  # whose way of drawing; not interchangeable
    name = "dirichlet"

    def check(self, images, clients):
        super().check(images, clients)
        check_min_size(images, clients, self.min_size)

    def assign(self, images, clients, draw):
        counts, notes = self.counts(class_counts(images), clients, draw)
        return deal(counts, images.train.numpy(), images.y.numpy(), draw), notes

    def counts(self, of_class: np.ndarray, clients: int, draw: Generator) -> tuple[np.ndarray, tuple[str, ...]]:
        """How many examples of each class every client gets, [clients, classes]."""
        sizes = equal_sizes(int(of_class.sum()), clients)
        if self.dialect == "client":
            return per_client(of_class, sizes, self.alpha, draw), ()
        if self.dialect == "equal":
            return top_up(per_class(of_class, clients, self.alpha, draw), sizes, draw)[0], ()
        least = np.full(clients, max(self.min_size, 1))
        cap = of_class.sum() / clients if self.dialect == "balanced" else np.inf
        draws = []
        for _ in range(DRAWS):
            counts = per_class(of_class, clients, self.alpha, draw, cap)
            if (counts.sum(1) >= least).all():
                return counts, ()
            draws.append(counts)
        # The draw that needs the fewest changes.
        nearest = min(draws, key=lambda counts: np.maximum(least - counts.sum(1), 0).sum())
        counts, moved, helped = top_up(nearest, least, draw)
        return counts, (f"in the best of {DRAWS} draws {topped_up(helped, clients, least[0], moved)}",)


def per_class(of_class: np.ndarray, clients: int, alpha: float, draw: Generator, cap: float = np.inf) -> np.ndarray:
    """Every class cut by its own draw over the clients that hold fewer than `cap` examples so far."""
    counts = np.zeros((clients, len(of_class)), np.int64)
    for label, examples in enumerate(of_class.tolist()):
        is_open = counts.sum(1) < cap
        for _ in range(DRAWS):
            shares = proportions(alpha, clients, draw) * is_open
            if shares.sum() > 0:
                break
        else:  # with a tiny alpha all of a draw may fall on closed clients, time after time
            shares = is_open.astype(float)
        counts[:, label] = cut(shares, examples)
    return counts


def per_client(of_class: np.ndarray, sizes: np.ndarray, alpha: float, draw: Generator) -> np.ndarray:
    """One client after another, in random order; classes that have run out leave the client's mix."""
    left, counts = of_class.copy(), np.zeros((len(sizes), len(of_class)), np.int64)
    for client in draw.permutation(len(sizes)):
        mix = proportions(alpha, len(of_class), draw)
        while (wanted := int(sizes[client] - counts[client].sum())) > 0:
            still = mix * (left > 0)
            still = still if still.sum() > 0 else left / left.sum()
            got = np.minimum(draw.multinomial(wanted, still / still.sum()), left)
            counts[client] += got
            left -= got
    return counts


@dataclass(frozen=True)
class Shards(Partition):
    """Pathological label skew as in FedRep (Collins et al., 2021): every client gets shards of `classes` classes.

    A client may draw the same class twice, so `classes` is an upper bound; with `distinct` every client has that many.
    Where clients * classes is no multiple of the number of classes, some shards are left over and their examples stay
    unused.
    """

    classes: Count = 2  # per client
    distinct: bool = False  # all shards of a client are of different classes
    name = "shards"

    def check(self, images, clients):
        super().check(images, clients)
        have = f"{images.name} has only {len(images.classes)} classes"
        if self.classes > len(images.classes):
            raise BadInput(f"partition.classes is {self.classes}, but {have}")
        of_class, shards = class_counts(images), self._per_class(images, clients)
        if of_class.min() < shards:
            least = f"class {images.classes[of_class.argmin()]!r} of {images.name} has {of_class.min()} training images"
            each = f"{clients} clients with {self.classes} classes each need {shards} shards of every class"
            raise BadInput(f"{each}, but {least}: lower clients or partition.classes")

    def _per_class(self, images: Images, clients: int) -> int:
        return -(-clients * self.classes // len(images.classes))

    def assign(self, images, clients, draw):
        of_class, shards = class_counts(images), self._per_class(images, clients)
        piles = [draw.permutation(equal_sizes(examples, shards)).tolist() for examples in of_class.tolist()]
        if self.distinct:
            hands = distinct_hands(np.full(len(of_class), shards), clients, self.classes, draw)
        else:
            cards = draw.permutation(np.repeat(np.arange(len(of_class)), shards))
            hands = cards[: clients * self.classes].reshape(clients, self.classes)
        counts = np.zeros((clients, len(of_class)), np.int64)
        for client, hand in enumerate(hands):
            for label in hand:
                counts[client, label] += piles[label].pop()
        left, unused = sum(map(len, piles)), sum(map(sum, piles))
        notes = (f"{left} of {shards * len(of_class)} shards are left over: {unused} training examples are unused",)
        return deal(counts, images.train.numpy(), images.y.numpy(), draw), notes if left else ()


def distinct_hands(left: np.ndarray, clients: int, size: int, draw: Generator) -> np.ndarray:
    """[clients, size] different classes for everyone, drawn card by card from `left` cards of each class.

    A class of which as many cards are left as there are clients to come goes to each of them. That is enough to never
    get stuck, as long as there are `size` classes and clients * size cards, and no class has more cards than clients.
    """
    left, hands = left.copy(), []
    for to_come in range(clients, 0, -1):
        due = np.flatnonzero(left >= to_come)
        due = draw.permutation(due)[:size]
        shares = np.where(np.isin(np.arange(len(left)), due), 0, left) / max(left.sum() - left[due].sum(), 1)
        free = draw.choice(len(left), size - len(due), replace=False, p=shares) if len(due) < size else due[:0]
        hand = np.concatenate([due, free])
        left[hand] -= 1
        hands.append(draw.permutation(hand))
    return np.stack(hands)[draw.permutation(clients)]
