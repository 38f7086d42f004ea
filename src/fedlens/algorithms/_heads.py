"""A head as the best mix of all clients' heads: what clients measure for it, and the mix."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.algorithm import Client
from ..core.network import Network
from ..core.tree import Tree
from ..models.generators import head_shape
from ._others import nobody, others, row_of
from ._own_images import class_sums


def measured(client: Client, weights: Tree) -> Tree:
    """own: mean features of each class; means: the same times the classes' shares; variance: of those; counts."""
    found, like = class_sums(client.net, weights, client.data), client.received.prototypes
    n = found.counts.sum().clamp(min=1)
    means, square = found.sums / n, found.squares.sum() / n
    variance = (square - means.square().sum()).clamp(min=1e-9 * square) / n  # rounding must not make it zero
    own = found.sums / found.counts.clamp(min=1)[:, None]
    found = Tree(own=own, means=means, variance=variance, counts=found.counts)
    return found.map(lambda leaf: leaf.to(like))


def no_rows(net: Network, method: str) -> Tree:
    """What a client sends for mixes, of nobody."""
    width, classes = head_shape(net, method)
    params = net.initial_weights().params
    means = next(iter(params.values())).new_zeros(classes, width)
    head = params.select(lambda name: name in net.head)
    return nobody(Tree(head=head, means=means, variance=means[0, 0], ticket=torch.tensor(0)))


def best_mix(client: Client, found: Tree) -> Tree:
    """Of the received rows' heads, for this client: shares of less than a thousandth count as none.

    A client whose row is missing enters with what it has found now.
    """
    rows, head = client.received.rows, client.memory.private.params
    theirs = others(client, rows.ticket)
    mine = [row for row in range(len(rows.ticket)) if row not in theirs]
    own = row_of(rows, mine[0]) if mine else found
    both = ((own[name][None], rows[name][theirs]) for name in ("means", "variance"))
    means, variance = (torch.cat(pair).double().cpu() for pair in both)
    apart = (means - means[0]).flatten(1)
    shares = best_shares(apart @ apart.T + variance.diag())
    shares = torch.where(shares < 1e-3, 0, shares)
    first, *rest = (shares / shares.sum()).tolist()
    mixed = head * first
    for row, share in zip(theirs, rest, strict=True):
        mixed = mixed + row_of(rows.head, row) * share if share else mixed
    return mixed


def best_shares(form: Tensor) -> Tensor:
    """The a >= 0 with sum 1 at which a' Q a is smallest, for a positive definite Q in double precision.

    By active sets: shares join one at a time where the slope says so, and leave where they would be negative.
    """
    shares, active = torch.zeros_like(form[0]), [int(form.diagonal().argmin())]
    shares[active] = 1.0
    for _ in range(10 * len(form)):  # a bound against rounding: every turn lowers the value
        slope = form @ shares
        level = float(shares @ slope) * (1 - 1e-12)
        joins = int(slope.index_fill(0, torch.tensor(active), torch.inf).argmin())
        if len(active) == len(form) or float(slope[joins]) >= level:
            break
        active.append(joins)
        while bool(((wanted := _free(form, active)) <= 0).any()):
            now = shares[active]
            ways = torch.where(wanted <= 0, now / (now - wanted), torch.inf)
            shares[active] = (now + ways.min() * (wanted - now)).clamp(min=0)
            gone = active.pop(int(ways.argmin()))
            shares[gone] = 0.0
        shares[active] = wanted
    return shares


def _free(form: Tensor, active: list[int]) -> Tensor:
    """Where the form is smallest among shares of these alone, of any sign."""
    found = torch.linalg.solve(form[active][:, active], torch.ones(len(active), dtype=form.dtype))
    return found / found.sum()
