"""Memory that a step frees stays with the process: the next step takes it again without page faults."""

import contextlib
import ctypes
import sys

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
