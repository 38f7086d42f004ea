"""Bring a run to its end: from the beginning, from where it stopped, or from where another run was the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core.errors import BadInput, RunFailed
from ..experiment import Experiment
from ..runs.folder import RunFolder
from ..runs.grid import stored
from ..runs.reuse import begin_alike
from . import resume as again
from . import run as simulate
from .recorder import Watcher

GOES_WRONG = (BadInput, RunFailed, MemoryError, OSError, RuntimeError)  # in one run, and the others can go on


def finish(experiment: Experiment, where: Sequence[str], watcher: Watcher, among: Path) -> None:
    """Run it, or go on with what its folder holds, or with a beginning that is the same in another run of `among`.

    `where` says on what engine, should it have begun on another.
    """
    folder = RunFolder(experiment.execution.out)
    if not folder.config.exists() and begin_alike(experiment, among) is None:
        simulate.run(experiment, watcher=watcher)
        return
    stored(folder, experiment)
    changed = [word for word in where if again.changeable(word)]  # others stay as they began
    again.resume(folder.path, changed, watcher=watcher)


def reason(error: BaseException) -> str:
    """In one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
