"""Bring a run to its end: from the beginning, from where it stopped, or from where another run was the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .. import config
from ..core.algorithm import Server
from ..core.batches import Dataset
from ..core.errors import BadInput, RunFailed
from ..core.run import job_of, open_round
from ..core.tree import Tree
from ..engines.sequential import Sequential
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
    alike = None if folder.config.exists() else begin_alike(experiment, among)
    if alike is None and not folder.config.exists():
        simulate.run(experiment, watcher=watcher)
        return
    stored(folder, experiment)
    changed = [word for word in where if again.changeable(word)]  # others stay as they began
    try:
        again.resume(folder.path, changed, watcher=watcher)
    except BadInput:
        if alike is not None:
            alike.withdraw()
        raise


def reason(error: BaseException) -> str:
    """In one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def check_start(experiment: Experiment) -> None:
    """Refuses what a run would before it has a folder, and what its method would before a client's first step."""
    experiment = config.check(experiment).resolved()
    images, federation, _, net, _ = simulate.checked(experiment)
    nothing = Dataset(torch.zeros(0, *images.x.shape[1:]), torch.zeros(0, dtype=torch.long))  # or it would learn long
    turn, server = experiment.timetable()[0], Server(net, Tree(), experiment.clients, auxiliary=nothing)
    job = job_of(open_round(server, turn, experiment.seed), turn, experiment.seed)
    client, _ = Sequential(net, federation).open(job, 0)
    turn.stage.algorithm.begin(client)
