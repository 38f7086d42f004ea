"""How long a run takes, or would have taken, on its clients' devices: simulated seconds and time to accuracy.

A round lasts as long as its slowest client: until it answers, then download, local training and upload, one after the
other. The server's work counts as nothing, and a client that never replied is not waited for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..core.algorithm import Stage
from ..core.batches import Dataset, Federation
from ..core.dry_run import blank_clients, dry_run
from ..core.engine import Engine, Job
from ..core.ledger import Entry
from ..core.network import Network
from ..core.run import Turn
from .profiles import Devices

# Blank images that work is counted on: few to train on; beside training as many as show what grows with them (SPATL
# keeps back one in twenty).
_FEW, _SOME = 8, 80


class ClientWork(NamedTuple):
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

    def __init__(
        self, turns: Sequence[Turn], work: Mapping[Stage, ClientWork], sizes: Sequence[int], devices: Devices, seed: int
    ):
        """`sizes`: how many training examples each client owns."""
        self.stages, self.work = [turn.stage for turn in turns], work
        self.sizes, self.devices, self.seed = sizes, devices, seed

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


def count_work(
    turns: Sequence[Turn],
    net: Network,
    shape: Sequence[int],
    classes: int,
    engine: Callable[[Network, Federation], Any],
) -> dict[Stage, ClientWork]:
    """Of every stage, counted in a dry run on blank images of this shape; work is linear in their number.

    It is the work of a client's second round in a stage, where there is one: SPATL's first search is longer than all
    later ones. What FedAux does with public images is that of a few.
    """
    like = Dataset(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))
    engines = [engine(net, blank_clients(like, count, classes)) for count in (_SOME, 2 * _SOME, _FEW, _FEW)]
    found = {}
    for (whole, *_), _, job, _ in dry_run(turns, net, shape, engines[0]):
        trains = _FEW - whole.algorithm.holdout_size(_FEW)
        still = replace(job, stage=replace(job.stage, size=trains))
        training = replace(still.stage, epochs=whole.epochs, steps=None if whole.steps is None else 1)
        jobs = [still, still, still, replace(still, stage=training)]
        if whole.rounds > 1:
            for each, its in zip(engines[1:], jobs[1:], strict=True):
                each.run(its, [0])
        some, more, few, trained = (_flops(each, its) for each, its in zip(engines, jobs, strict=True))
        owned, seen = (more - some) / _SOME, passes(training, trains)
        found[whole] = ClientWork(some - _SOME * owned, owned, (trained - few) / seen if seen else 0.0)
    return found


def _flops(engine: Engine, job: Job) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _AnyModule()  # pyright: ignore[reportAttributeAccessIssue]
    with counter:
        engine.run(job, [0])
    return counter.get_total_flops()


class _AnyModule:
    """In place of torch's own, which hooks into every tensor: a method that traces the network cannot bear that."""

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def time_to(curve: Iterable[tuple[int, float]], target: float, seconds: Mapping[int, float]) -> float | None:
    """Simulated seconds until the first look with at least this accuracy; None: never."""
    first = next((round for round, accuracy in curve if accuracy >= target), None)
    return None if first is None else sum(value for round, value in seconds.items() if round <= first)
