"""A defence: from a round's uploads to those that aggregate may believe.

It acts on updates (delta, control) and on plain numbers (weight, reach). An update is taken apart into parts of one
scale each, parameters, running statistics and control variates: who is honest in one can lie in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.algorithm import Server
from ..core.errors import BadInput
from ..core.tree import Tree

UPDATES = ("delta", "control")  # entries of an upload that say how far something moved
_BLOCK = 1 << 22  # values of all clients together that are looked at side by side: what a rule needs beside the uploads


@dataclass(frozen=True)
class Defence:
    """A function of the server and a round's decoded uploads, in client order; there is at least one."""

    name: ClassVar[str] = ""

    def __call__(self, server: Server, uploads: list[Tree]) -> list[Tree]:
        raise NotImplementedError(f"{type(self).__name__} does not say what it does to uploads")

    def check(self, uploads: int) -> None:
        """Refuses rounds of so few uploads that it could promise nothing."""


Change = Callable[[str, list[Tree]], Sequence[Tree]]  # (name, that part of every upload) -> the same, as it is believed


def part_by_part(uploads: list[Tree], change: Change) -> list[Tree]:
    """The same uploads with every part of their updates changed: delta/params, delta/buffers, control."""
    if "delta" not in uploads[0]:  # a simulation refuses it before it begins; nobody should believe that it helped
        raise BadInput(f"defences act on delta, and this method uploads {', '.join(uploads[0]) or 'nothing'}")
    for name in UPDATES:
        if name in uploads[0]:
            updates = [upload[name] for upload in uploads]
            if all(isinstance(part, Tree) for part in updates[0].values()):
                made = {part: _changed(f"{name}/{part}", [u[part] for u in updates], change) for part in updates[0]}
                updates = [Tree({part: made[part][at] for part in made}) for at in range(len(updates))]
            else:
                updates = _changed(name, updates, change)
            uploads = [upload.replace(**{name: update}) for upload, update in zip(uploads, updates, strict=True)]
    return uploads


def _changed(name: str, parts: list[Tree], change: Change) -> Sequence[Tree]:
    return change(name, parts) if parts[0].leaves() else parts


def coordinatewise(parts: Sequence[Tree], f: Callable[[Tensor], Tensor]) -> Tree:
    """One tree, every block of whose values is f of the clients' [clients, values] there."""
    new = parts[0].map(torch.empty_like)
    for leaf, rows in zip(new.leaves(), _rows(parts, parts[0]), strict=True):
        leaf.copy_(torch.cat([f(block) for block in _blocks(rows)]).view(leaf.shape))
    return new


def products(parts: Sequence[Tree]) -> Tensor:
    """[clients, clients] scalar products in double precision, on the host; in the order of names, as `dot`."""
    first, total = parts[0], torch.zeros((), dtype=torch.float64)
    names = [path for path, _ in first.paths()]
    rows = list(_rows(parts, first))
    for _, leaves in sorted(zip(names, rows, strict=True), key=lambda pair: pair[0]):
        for block in _blocks(leaves):
            wide = block.double()
            total = total.to(wide) + wide @ wide.T
    return total.cpu()


def _rows(parts: Sequence[Tree], like: Tree) -> Iterator[tuple[Tensor, ...]]:
    """Leaf by leaf, that of every client."""
    return zip(*(part.leaves(like) for part in parts), strict=True)


def _blocks(rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """[clients, values] pieces of one leaf; at least one, if an empty one."""
    flat, width = [row.reshape(-1) for row in rows], max(1, _BLOCK // len(rows))
    for start in range(0, max(1, len(flat[0])), width):
        yield torch.stack([row[start : start + width] for row in flat])
