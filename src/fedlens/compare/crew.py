"""How many runs at a time pay on a GPU: found out while a comparison goes on, and remembered for the next one.

One process begins. While four times as many do at least a tenth more rounds a second, there are four times as many;
then as many stay as did best. Nothing is measured apart from the runs themselves, whose results do not depend on their
number.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import config
from ..core.files import write_atomic
from ..experiment import Experiment

MOST = 16  # with NVIDIA's MPS fifteen did the most on an H200
FACTOR = 4  # a process takes ten seconds to begin: many steps would outlast a grid of short runs
WINDOW, ROUNDS, GAIN = 6.0, 10, 1.1  # seconds and rounds at least that a number is measured by, and what it must gain


class Crew(NamedTuple):
    """How many processes begin, and how many there can be."""

    first: int
    most: int


class Growth:
    """Says from time to time how many processes there should be, by the rounds that all have done."""

    def __init__(self, crew: Crew, clock: Callable[[], float] = time.monotonic):
        self.count, self.most, self.clock = crew.first, crew.most, clock
        self.rates: dict[int, float] = {}
        self.settled = crew.first >= crew.most
        self._since: tuple[float, int] | None = None

    def look(self, rounds: int, busy: int) -> int:
        """How many there should be, where so many rounds are done in all and so many processes train by now."""
        if self.settled or busy < self.count:
            return self.count
        now = self.clock()
        if self._since is None:
            self._since = now, rounds
        seconds, done = now - self._since[0], rounds - self._since[1]
        if seconds < WINDOW or done < ROUNDS:
            return self.count
        self._since = None
        self.rates[self.count] = done / seconds
        before = max((rate for count, rate in self.rates.items() if count < self.count), default=0.0)
        if self.rates[self.count] >= GAIN * before and self.count < self.most:
            self.count = min(FACTOR * self.count, self.most)
        else:
            self.settled = True
            self.count = self.best
        return self.count

    @property
    def best(self) -> int:
        return max(self.rates, key=self.rates.__getitem__)


def known(experiment: Experiment) -> int | None:
    """How many runs of such a network paid on this device before."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return max(1, min(MOST, int(json.loads(_file().read_bytes())[_what(experiment)])))
    return None


def remember(experiment: Experiment, count: int) -> None:
    with suppress(OSError):
        file, found = _file(), {}
        with suppress(OSError, ValueError):
            found = json.loads(file.read_bytes())
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps({**found, _what(experiment): count}).encode())


def _file() -> Path:
    """Beside the compiler's cache, as what is known of compiled networks."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "fedlens" / "side_by_side.json"


def _what(experiment: Experiment) -> str:
    """The device, and what decides how much of it a run fills."""
    parts: list[Any] = [experiment.model, experiment.cohort, experiment.local]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    said = json.dumps([name, experiment.clients, *map(config.to_dict, parts)], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]
