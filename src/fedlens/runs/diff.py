"""Whether two runs are the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import torch

from ..core.errors import BadInput
from ..core.tree import Tree
from .folder import RunFolder


def differences(a: str | Path, b: str | Path) -> Iterator[str]:
    """What differs, first things first: rounds, weights, client memories, metrics (without timings), bytes."""
    folders = RunFolder.open(a), RunFolder.open(b)
    (first, wrong), (second, more) = (folder.load() for folder in folders)
    if first is None or second is None:
        raise BadInput(f"{a if first is None else b} has no checkpoint yet")
    for name, notes in ((a, wrong), (b, more)):
        yield from (f"{name}: {note}" for note in notes)
    if first.round != second.round:
        yield f"rounds: {first.round} and {second.round}"
    yield from _trees("state", first.state, second.state)
    memories = [folder.client_memories(c.round) for folder, c in zip(folders, (first, second), strict=True)]
    for client in sorted(memories[0].keys() | memories[1].keys()):
        pair = [memory.get(client) for memory in memories]
        if pair[0] is None or pair[1] is None:
            yield f"memory of client {client}: only in {(a, b)[pair.index(None) ^ 1]}"
        else:
            yield from _trees(f"memory of client {client}", pair[0], pair[1])
    yield from _tables("metrics", *(_untimed(folder.metrics(partly=True)) for folder in folders))
    yield from _tables("bytes", *(folder.bytes(partly=True) for folder in folders))


def _trees(name: str, a: Tree, b: Tree) -> Iterator[str]:
    left, right = dict(a.paths()), dict(b.paths())
    for path in sorted(left.keys() | right.keys()):
        if path not in left or path not in right:
            yield f"{name}/{path}: only in the {'first' if path in left else 'second'} run"
        elif left[path].shape != right[path].shape or left[path].dtype != right[path].dtype:
            yield f"{name}/{path}: shapes or types differ"
        elif not torch.equal(_bits(left[path]), _bits(right[path])):
            gap = (left[path].double() - right[path].double()).abs().max().item()
            yield f"{name}/{path}: values differ by up to {gap:.3g}"


def _bits(leaf: torch.Tensor) -> torch.Tensor:
    """As bytes: the same NaN is the same, and 0 is not -0."""
    return leaf.contiguous().reshape(-1).view(torch.uint8)


def _untimed(table: pa.Table) -> pa.Table:
    kept = [metric not in ("seconds", "server seconds") for metric in table["metric"].to_pylist()]
    return table.filter(pa.array(kept, pa.bool_()))  # of no rows, too


def _tables(name: str, a: pa.Table, b: pa.Table) -> Iterator[str]:
    for number, (left, right) in enumerate(zip_longest(a.to_pylist(), b.to_pylist())):
        if repr(left) != repr(right):  # a diverged run has NaN in its rows, which equals nothing
            yield f"{name}, row {number}: {left} and {right}"
            return
