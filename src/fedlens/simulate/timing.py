"""How long a run takes, or would have taken, on its clients' devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.algorithm import Stage
from ..core.errors import BadInput
from ..core.ledger import Entry
from ..data import Images
from ..devices.clock import ClientWork, Clock, Seconds, count_work
from ..devices.profiles import Devices
from ..engines.sequential import Sequential
from ..experiment import Experiment
from ..runs.folder import RunFolder
from ..runs.places import opened
from ..runs.read import label_counts


def work_of(experiment: Experiment, images: Images) -> dict[Stage, ClientWork]:
    """FLOPs of a client in every stage."""
    net = experiment.with_execution(precision="fp32", compile=False).network(images)
    return count_work(experiment.timetable(), net, images.x.shape[1:], len(images.classes), Sequential)


def clock_of(experiment: Experiment, images: Images, sizes: Sequence[int], devices: Devices) -> Clock:
    """`sizes`: how many training examples each client owns."""
    return Clock(experiment.timetable(), work_of(experiment, images), sizes, devices, experiment.seed)


class Timing(NamedTuple):
    """A run on devices: seconds of each round, and the parts of its slowest client's."""

    rounds: dict[int, float]
    slowest: dict[int, Seconds]

    def until(self, round: int) -> float:
        return sum(seconds for done, seconds in self.rounds.items() if done <= round)


def timing(path: str | Path, devices: Devices) -> Timing:
    """How long a run would have taken on these devices, from its tables."""
    folder = RunFolder.open(path)
    experiment = opened(folder)
    if (counts := label_counts(folder)) is None:
        raise BadInput(f"{folder.path} is incomplete: label_counts.json is missing")
    sizes = [sum(row) for row in counts]
    clock = clock_of(experiment, experiment.images(), sizes, devices)
    entries: dict[int, list[Entry]] = defaultdict(list)
    for row in folder.bytes().to_pylist():
        entries[row["round"]].append(Entry(**row))
    found = {round: clock.clients(round, booked) for round, booked in sorted(entries.items())}
    slowest = {round: max(clients.values(), key=sum) for round, clients in found.items() if clients}
    return Timing({round: sum(seconds) for round, seconds in slowest.items()}, slowest)
