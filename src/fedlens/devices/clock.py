"""How long a run takes, or would have taken, on its clients' devices: simulated seconds and time to accuracy.

A round lasts as long as its slowest client: until it answers, then download, local training and upload, one after the
other. The server's work counts as nothing, and a client that never replied is not waited for.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from .. import config
from ..core.algorithm import Server, Stage
from ..core.batches import Dataset, Federation
from ..core.cohort import Everyone
from ..core.engine import Job
from ..core.errors import BadInput
from ..core.ledger import Entry
from ..core.network import Network
from ..core.run import Turn, initial_state, job_of
from ..core.tree import Tree
from ..data import Images
from ..engines.sequential import Sequential
from ..experiment import Experiment
from ..runs.folder import RunFolder
from ..simulate.describe import blank_public, brief
from .profiles import Devices

# Blank images that work is counted on: few to train on; beside training as many as show what grows with them (SPATL
# keeps back one in twenty).
_FEW, _SOME = 8, 80


class Work(NamedTuple):
    """FLOPs of a client in one round of a stage: of convolutions and matrix products, as torch counts them."""

    fixed: float
    owned: float  # for each example it owns: what a method does with its data beside training
    trained: float  # for each example of a training pass: forward, backward and what else the method computes

    def flops(self, stage: Stage, examples: int) -> float:
        trains = examples - stage.algorithm.holdout_size(examples)
        return self.fixed + self.owned * examples + self.trained * passes(stage, trains)


class Seconds(NamedTuple):
    """A client's round, part by part."""

    wait: float
    latency: float
    download: float
    compute: float
    upload: float


class Clock:
    """Seconds of every client in every round, from what it sent and received."""

    def __init__(self, experiment: Experiment, images: Images, sizes: Sequence[int], devices: Devices):
        """`sizes`: how many training examples each client owns."""
        self.devices, self.seed, self.sizes = devices, experiment.seed, sizes
        self.stages = [turn.stage for turn in experiment.timetable()]
        self.work = count_work(experiment, images)

    def clients(self, round: int, entries: Iterable[Entry]) -> dict[int, Seconds]:
        """Of those that replied in this round, counted from 1; entries of measurements do not count."""
        moved: dict[int, dict[str, int]] = defaultdict(dict)
        for entry in entries:
            if not entry.kind.startswith("evaluation"):
                moved[entry.client][entry.kind] = moved[entry.client].get(entry.kind, 0) + entry.total
        return {client: self._client(round, client, kinds) for client, kinds in moved.items() if "upload" in kinds}

    def round(self, round: int, entries: Iterable[Entry]) -> float:
        return max((sum(seconds) for seconds in self.clients(round, entries).values()), default=0.0)

    def _client(self, round: int, client: int, moved: Mapping[str, int]) -> Seconds:
        stage, device = self.stages[round - 1], self.devices.of(client, self.seed)
        received = sum(count for kind, count in moved.items() if kind != "upload")
        return Seconds(
            wait=self.devices.wait(client, round, self.seed),
            latency=self.devices.latency * len(moved),
            download=received / device.down,
            compute=self.work[stage].flops(stage, self.sizes[client]) / device.speed,
            upload=moved["upload"] / device.up,
        )


def passes(stage: Stage, examples: int) -> int:
    """How many examples a client trains on in a round, each as often as it comes."""
    if stage.steps is None or not examples:
        return stage.epochs * examples
    epochs, rest = divmod(stage.steps, math.ceil(examples / stage.size))
    return epochs * examples + rest * stage.size  # the last batch of an epoch, which may be short, is not among these


def count_work(experiment: Experiment, images: Images) -> dict[Stage, Work]:
    """Of every stage, counted while its own hooks run on blank images; work is linear in their number.

    It is the work of a client's second round in a stage, where there is one: SPATL's first search is longer than all
    later ones. What FedAux does with public images is that of a few.
    """
    net = replace(experiment, precision="fp32", compile=False).network(images)
    shape, classes = images.x.shape[1:], len(images.classes)
    engines = [_blank(net, shape, classes, count) for count in (_SOME, 2 * _SOME, _FEW, _FEW)]
    server, found = Server(net, Tree(), 2, auxiliary=blank_public(shape)), {}
    for round, (whole, at, since) in enumerate(experiment.timetable()):
        if at:
            continue
        stage = replace(whole, algorithm=brief(whole.algorithm))
        server = replace(server, state=initial_state(stage, server), round=round)
        trains = _FEW - stage.algorithm.holdout_size(_FEW)
        still = replace(stage, epochs=0, steps=None, size=trains, cohort=Everyone())
        moving = replace(still, epochs=stage.epochs, steps=None if stage.steps is None else 1)
        job = job_of(server, Turn(still, at, since), 0)
        jobs = [job, job, job, replace(job, stage=moving)]
        uploads = [reply.upload for reply in engines[0].run(jobs[0], [0, 1])]
        if stage.rounds > 1:
            for engine, job in zip(engines[1:], jobs[1:], strict=True):
                engine.run(job, [0])
        some, more, few, trained = (_flops(engine, job) for engine, job in zip(engines, jobs, strict=True))
        owned = (more - some) / _SOME
        each = (trained - few) / passes(moving, trains) if passes(moving, trains) else 0.0
        found[whole] = Work(some - _SOME * owned, owned, each)
        for transform in reversed(stage.uplink):
            uploads = [transform.decode(server, upload) for upload in uploads]
        server = replace(server, state=stage.algorithm.aggregate(server, uploads))
    return found


def _blank(net: Network, shape: Sequence[int], classes: int, count: int) -> Sequential:
    """Two clients with so many blank images each, of all classes."""
    data = Dataset(torch.zeros(2 * count, *shape), torch.arange(2 * count) % classes)
    own = {0: torch.arange(count), 1: torch.arange(count, 2 * count)}
    return Sequential(net, Federation(data, own, own, torch.arange(count)))


def _flops(engine: Sequential, job: Job) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        engine.run(job, [0])
    return counter.get_total_flops()


# ---- after the fact ----
class Timing(NamedTuple):
    """A run on devices: seconds of each round, and the parts of its slowest client's."""

    rounds: dict[int, float]
    slowest: dict[int, Seconds]

    def until(self, round: int) -> float:
        return sum(seconds for done, seconds in self.rounds.items() if done <= round)


def timing(path: str | Path, devices: Devices) -> Timing:
    """How long a run would have taken on these devices, from its tables."""
    folder = RunFolder.open(path)
    experiment = config.read(folder.config)
    try:
        sizes = [sum(row) for row in json.loads((folder.path / "label_counts.json").read_text())]
    except FileNotFoundError:
        raise BadInput(f"{folder.path} is incomplete: label_counts.json is missing") from None
    clock = Clock(experiment, experiment.data.load(), sizes, devices)
    entries: dict[int, list[Entry]] = defaultdict(list)
    for row in folder.bytes().to_pylist():
        entries[row["round"]].append(Entry(**row))
    found = {round: clock.clients(round, booked) for round, booked in sorted(entries.items())}
    slowest = {round: max(clients.values(), key=sum) for round, clients in found.items() if clients}
    return Timing({round: sum(seconds) for round, seconds in slowest.items()}, slowest)


def time_to(curve: Iterable[tuple[int, float]], target: float, seconds: Mapping[int, float]) -> float | None:
    """Simulated seconds until the first look with at least this accuracy; None: never."""
    first = next((round for round, accuracy in curve if accuracy >= target), None)
    return None if first is None else sum(value for round, value in seconds.items() if round <= first)
