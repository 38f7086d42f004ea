"""Trees as bytes: the safetensors format, written here so that the length of a message is known before it is made."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from .files import parse_json
from .tree import Tree

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode(tree: Tree, **notes: str) -> bytes:
    """Names are paths. Empty branches (the buffers of a net without BatchNorm) are part of a tree too."""
    return b"".join(parts(tree, **notes))


def parts(tree: Tree, **notes: str) -> list[bytes | memoryview]:
    """The same one after another, without a copy of values that are on the CPU already: a message can be large."""
    return [header(tree, **notes), *(raw(leaf).data for _, leaf in _ordered(tree))]


_hashed: tuple[str, dict[str, tuple[weakref.ref[Tensor], int]]] = "", {}  # the last checksum, and of which leaves


def digest(tree: Tree, data: Sequence[bytes | memoryview] | None = None) -> str:
    """The sha256 of a message, made once of the same leaves: what all clients share can be as large as the data.

    `data` are the parts of the message, where they are made already.
    """
    global _hashed
    leaves, (found, known) = dict(tree.paths()), _hashed
    same = bool(leaves) and leaves.keys() == known.keys() and not any(empty_branches(tree))
    if not same or any(
        known[path][0]() is not leaf or known[path][1] != leaf._version for path, leaf in leaves.items()
    ):
        sha256 = hashlib.sha256()
        for part in parts(tree) if data is None else data:
            sha256.update(part)
        found = sha256.hexdigest()
        _hashed = found, {path: (weakref.ref(leaf), leaf._version) for path, leaf in leaves.items()}
    return found


def header(tree: Tree, **notes: str) -> bytes:
    """All of the message but the values: len(encode(tree)) == len(header(tree)) + tree.nbytes."""
    entries: dict[str, object] = {"__metadata__": {"empty": json.dumps(sorted(empty_branches(tree))), **notes}}
    start = 0
    for path, leaf in _ordered(tree):
        end = start + leaf.numel() * leaf.element_size()
        entries[path] = {"dtype": _NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode(data: bytes) -> Tree:
    """ValueError for what `encode` cannot have written."""
    try:
        # Sorted, as `load` has another order every time. Clones are aligned, slices of the message are not.
        leaves = {path: leaf.clone() for path, leaf in sorted(load(data).items())}
        return nested({**leaves, **{path: Tree() for path in parse_json(notes(data)["empty"])}})
    except (SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a message ({error})") from None


def notes(data: bytes) -> dict[str, str]:
    """What is said beside the values; ValueError or KeyError where that is nothing."""
    return parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def nested(paths: Mapping[str, Tensor | Tree]) -> Tree:
    """A tree from its paths; TypeError where a value stands in the way of others."""
    tree = Tree()
    for path, leaf in paths.items():
        *parents, name = path.split("/")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, Tree())
            if not isinstance(branch, Tree):
                raise TypeError(f"{parent} is a value and a branch")
        branch[name] = leaf
    return tree


def _ordered(tree: Tree) -> list[tuple[str, Tensor]]:
    """Wide types first, so that every value is aligned; then by name, so that equal trees give equal bytes."""
    return sorted(tree.paths(), key=lambda pair: (-pair[1].element_size(), pair[0]))


def raw(leaf: Tensor) -> np.ndarray:
    """A leaf's bytes, without a copy where it is on the CPU and contiguous."""
    return leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def tensor(data: bytes | np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A leaf from its bytes. The copy is aligned as torch's own memory is, on which kernels' rounding can depend."""
    leaf = torch.empty(tuple(shape), dtype=dtype)
    raw(leaf)[:] = np.frombuffer(data, np.uint8)  # a view: what was just made is contiguous
    return leaf


def empty_branches(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Paths of branches without leaves, which a list of leaves would lose."""
    for name, value in tree.items():
        if isinstance(value, Tree):
            yield from empty_branches(value, f"{prefix}{name}/") if value else [prefix + name]
