"""Switches of the process: memory that stays with it, threads, and how precise matrix products are."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_LARGEST_ON_HEAP, _LARGEST_KEPT = 32 << 20, 512 << 20


def keep_freed_memory() -> None:
    """Steps allocate and free the same activations: given back to the system each time, a fifth or more of a small
    CNN's round would be page faults. Only where the C library is glibc; elsewhere nothing changes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
            library.mallopt(_TRIM_THRESHOLD, _LARGEST_KEPT)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """The number of intra-op threads changes how sums round; one everywhere gives one result."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def matmuls(precision: str) -> Iterator[None]:
    """tf32 is a switch of the process."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    reduced = precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = reduced
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
