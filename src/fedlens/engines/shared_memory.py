"""Trees from one process to another through shared memory; only their layout goes through the pipe."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..core.tree import Tree
from ..core.wire import empty_branches, nested

_ALIGNMENT = 64  # what torch's allocator gives: kernels may round differently on less aligned memory


Where = tuple[torch.dtype, tuple[int, ...], int]  # type, shape, offset


@dataclass(frozen=True)
class Layout:
    """Where a tree lies."""

    file: str
    leaves: tuple[tuple[str, Where], ...]
    empty: tuple[str, ...]


class Writer:
    """Writes trees into a mapped file, each over the last; a larger one gets a larger file."""

    def __init__(self) -> None:
        self._file, self._map = "", memoryview(b"")

    def put(self, tree: Tree) -> Layout:
        leaves, offset = [], 0
        for path, leaf in tree.paths():
            leaves.append((path, (leaf.dtype, tuple(leaf.shape), offset)))
            offset += -(-leaf.numel() * leaf.element_size() // _ALIGNMENT) * _ALIGNMENT
        if offset > len(self._map):
            self.withdraw()
            self._file, self._map = _mapped(offset + offset // 4)
        for (_, leaf), (_, where) in zip(tree.paths(), leaves, strict=True):
            _view(self._map, *where).copy_(leaf)
        return Layout(self._file, tuple(leaves), tuple(empty_branches(tree)))

    def withdraw(self) -> None:
        """Take the file's name away; whoever has opened it keeps the memory, and none is left behind after a crash."""
        if self._file:
            Path(self._file).unlink(missing_ok=True)


class Reader:
    """Reads what one Writer wrote. The sole reader takes the file's name away once it has opened it."""

    def __init__(self, sole: bool = False) -> None:
        self._file, self._map, self._sole = "", memoryview(b""), sole

    def get(self, layout: Layout) -> Tree:
        """The tree, copied: the sender writes over its own."""
        if layout.leaves and layout.file != self._file:
            with open(layout.file, "r+b") as file:
                self._file, self._map = layout.file, memoryview(mmap.mmap(file.fileno(), 0))
            if self._sole:
                Path(layout.file).unlink(missing_ok=True)
        leaves = {path: _view(self._map, *where).clone() for path, where in layout.leaves}
        return nested({**leaves, **{path: Tree() for path in layout.empty}})


def _mapped(size: int) -> tuple[str, memoryview]:
    """A new file of this size, in memory where there is room for it."""
    reason = None
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if not os.path.isdir(folder):
            continue
        handle, path = tempfile.mkstemp(prefix="fedlens-", dir=folder)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)  # room is made now: a full disk is an error here, a crash later
            else:
                os.truncate(handle, size)
            return path, memoryview(mmap.mmap(handle, size))
        except OSError as error:
            os.unlink(path)
            reason = error
        finally:
            os.close(handle)
    raise reason or OSError("no folder for shared memory")


def _view(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
