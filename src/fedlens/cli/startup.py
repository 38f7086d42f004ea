"""What shortens the way to the first round, and from the last to the prompt."""

from __future__ import annotations

import atexit
import gc
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..engines import fork_server

_GPUS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")  # of NVIDIA, of AMD, of either under Windows


def start_workers_early(words: Sequence[str]) -> None:
    """Let worker processes import what they need while this one does, where the run will most likely have some."""
    if _likely_workers(words):
        fork_server.start_early("fedlens.experiment")


def _likely_workers(words: Sequence[str]) -> bool:
    """By what can be known without importing anything; where it is wrong, a process has started in vain."""
    asked = dict(word.split("=", 1) for word in words if "=" in word)
    engine, device = asked.get("engine", "auto"), asked.get("device", "auto")
    if os.name != "posix" or engine not in ("auto", "workers") or device not in ("auto", "cpu"):
        return False
    if engine == "workers":
        return True
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    several = cores > 1 and asked.get("workers") != "1" and asked.get("cohort") != "1"
    return several and (device == "cpu" or not any(map(glob.glob, _GPUS)))


@contextmanager
def importing() -> Iterator[None]:
    """For the imports of a command: modules stay, so that nobody looks through them for garbage, then or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_ended: list[int] = []  # the exit code of the command


def end_at_once() -> None:
    """After all that others do at the end, do not take torch apart object by object: the process is over anyway.

    Call it first: what is registered first runs last. It changes nothing where `fedlens` is not the program itself.
    """
    program = sys.modules["__main__"]
    spec = getattr(program, "__spec__", None)
    if spec.name == "fedlens.__main__" if spec else Path(getattr(program, "__file__", "")).stem == "fedlens":
        atexit.register(_end)


def with_code(code: int) -> int:
    """The same; the process will end with it."""
    _ended.append(code)
    return code


def _end() -> None:
    if not _ended:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # Python tries again, and says so
        return
    os._exit(_ended[-1])
