"""Runs that begin alike: the rounds that another run has made already are taken over, to the same bits.

A sweep over what follows a warm-up repeats the warm-up in every run; a run of more rounds repeats a shorter one. Each
run keeps a checkpoint after each stage that trains, so that others can begin there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from .. import config
from ..core.errors import BadInput
from ..core.memories import name
from ..experiment import Experiment
from .folder import RunFolder, code_hash, config_hash, device_name
from .places import places, stored_places
from .rounds import Rounds

_DEPTH = 4  # reproduced/PAPER/TABLE/CELL/SEED, or COMPARISON/METHOD/SEED


def begin_alike(experiment: Experiment, among: Path) -> RunFolder | None:
    """A folder with the longest beginning that any run below `among` has kept of this one; None: none has any."""
    if experiment.execution.transcript:  # it would lack the messages of those rounds
        return None
    experiment = config.check(experiment).resolved()
    found = [(most, donor) for donor in _runs(among) if (most := _shared(donor, experiment))]
    for round, donor in sorted(found, key=lambda pair: -pair[0]):
        folder, mine = RunFolder(experiment.execution.out), _as_decided(experiment, config.read(donor.config))
        try:
            _copy(donor, folder, round)
        except (OSError, BadInput):  # it is being changed, or damaged: another may do
            shutil.rmtree(folder.path, ignore_errors=True)
            continue
        RunFolder.create(mine)
        folder.is_new = True
        folder.log(f"rounds 1 to {round} are those of {donor.path}")
        return folder
    return None


def _runs(among: Path) -> Iterator[RunFolder]:
    for depth in range(1, _DEPTH + 1):
        for path in sorted(among.glob("*/" * depth + "config.yaml")):
            yield RunFolder(path.parent)


def _shared(donor: RunFolder, experiment: Experiment) -> int:
    """How many rounds are the same in both and can be taken up; 0 if none."""
    try:
        card, other, known = donor.passport(), config.read(donor.config), stored_places(donor)
    except BadInput:
        return 0
    if card["code"]["sha256"] != code_hash() or card["device_name"] != device_name(experiment.execution.device):
        return 0  # other bits
    like = replace(other, algorithm=experiment.algorithm, rounds=experiment.rounds)
    if config_hash(like) != config_hash(_as_decided(experiment, other)):
        return 0
    if known != places(experiment):  # the same name of another file
        return 0
    mine, theirs = steps(experiment), steps(other)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False)))
    # Towards its end a run is looked at more often.
    open_ends = [_before_the_end(each) for each in (experiment, other)]
    return max((round for round in donor.rounds() if round <= min(alike, *open_ends)), default=0)


def _as_decided(experiment: Experiment, other: Experiment) -> Experiment:
    """Where it is open whether to compile, as the other run did."""
    is_open = experiment.execution.compile == "auto"
    return experiment.with_execution(compile=other.execution.compile) if is_open else experiment


def _before_the_end(experiment: Experiment) -> int:
    """The last round before those that are evaluated because the run ends."""
    turns = experiment.timetable()
    counts, closing = Rounds.of(turns), experiment.evaluate.closing
    last = len(turns) - 1
    while last and counts.trained(last) > max(0, counts.total - closing):
        last -= 1
    return last


def steps(experiment: Experiment) -> list[Any]:
    """What each round does, however many more there will be."""
    return [
        (replace(stage, rounds=0, optimizer=stage.optimizer.at(at, stage.rounds)), at, since)
        for stage, at, since in experiment.timetable()
    ]


def _copy(donor: RunFolder, folder: RunFolder, round: int) -> None:
    taken = donor.at(round)
    for place in (folder.checkpoints, folder.memories):
        folder.unsynced.mkdir(place)
    for version in taken.versions.items():
        folder.unsynced.write(folder.memories / name(*version), (donor.memories / name(*version)).read_bytes())
    grown = folder.tables()
    for source, target in zip((donor.metrics(), donor.bytes()), grown, strict=True):
        target.take(source, round)
    if {table.folder.name: table.seal() for table in grown} != taken.tables:
        raise BadInput(f"{donor.path}: its tables are damaged")
    folder.save(replace(taken, transcript={}))
