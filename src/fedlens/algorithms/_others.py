"""What methods have in common that send something of every client to the clients of the next round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.algorithm import Client
from ..core.tree import Tree, dot, mean


def nobody(tree: Tree) -> Tree:
    """No rows of such trees."""
    return tree.map(lambda leaf: leaf[None][:0])


def stacked(trees: Sequence[Tree]) -> Tree:
    """One row for each of them."""
    rows = zip(*(tree.leaves(trees[0]) for tree in trees), strict=True)
    return trees[0].rebuild(map(torch.stack, rows))


def row_of(tree: Tree, row: int) -> Tree:
    return tree.map(lambda leaf: leaf[row])


def new_ticket(client: Client) -> Tensor:
    """By which a client knows its own row again; kept in its memory."""
    return torch.tensor(client.key % 2**62)


def others(client: Client, tickets: Tensor) -> list[int]:
    """Rows that are not the client's own."""
    own = int(client.memory.ticket)
    return [row for row, ticket in enumerate(tickets.tolist()) if ticket != own]


def mean_distance(trees: Sequence[Tree]) -> float:
    """The mean squared distance over pairs of them."""
    middle = mean(trees, [1.0] * len(trees))
    ways = [tree - middle for tree in trees]
    return sum(float(dot(way, way)) for way in ways) * 2 / max(len(trees) - 1, 1)


def prototypes(state: Tree, uploads: Sequence[Tree], most: int | None = None) -> Tree:
    """prototypes [C, d] and known [C] from clients' prototypes and counts; a class that none has stays.

    most: what a class of a client counts at most, whatever it says.
    """
    counts, means = (torch.stack([u[name] for u in uploads]).double() for name in ("counts", "prototypes"))
    counts, before = counts if most is None else counts.clamp(max=most), state.prototypes
    total = counts.sum(0)
    new = ((counts[..., None] * means).sum(0) / total.clamp(min=1)[:, None]).to(before)
    seen = total > 0
    return Tree(prototypes=torch.where(seen[:, None], new, before), known=torch.where(seen, 1, state.known))
