"""Trees between machines: the bytes of every leaf as a numpy array, which Ray lays into its store without pickling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.tree import Tree
from ..core.wire import empty_branches, nested

Leaf = tuple[torch.dtype, tuple[int, ...], Any]  # type, shape, bytes as an array


@dataclass(frozen=True)
class Parcel:
    """A tree on its way. The arrays of one that arrived are views of the store, and read-only."""

    leaves: dict[str, Leaf]
    empty: tuple[str, ...]


def pack(tree: Tree) -> Parcel:
    """Without a copy, where the leaves are on the CPU and contiguous."""
    leaves = {path: (leaf.dtype, tuple(leaf.shape), _bytes(leaf).numpy()) for path, leaf in tree.paths()}
    return Parcel(leaves, tuple(empty_branches(tree)))


def unpack(parcel: Parcel, device: torch.device | str = "cpu") -> Tree:
    """Copied once: the store gets its room back, and torch's own alignment keeps kernels rounding alike."""
    leaves = {path: _copied(*leaf).to(device) for path, leaf in parcel.leaves.items()}
    return nested({**leaves, **{path: Tree() for path in parcel.empty}})


def _bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _copied(dtype: torch.dtype, shape: tuple[int, ...], array: Any) -> torch.Tensor:
    leaf = torch.empty(shape, dtype=dtype)
    _bytes(leaf).numpy()[:] = array  # a view: what was just made is contiguous
    return leaf
