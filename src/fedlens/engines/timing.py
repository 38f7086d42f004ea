"""How long the server works after clients have answered: aggregation, and whatever a method trains there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..core.engine import Engine, EngineWrapper, Job, Reply


class Timed(EngineWrapper):
    """An engine that remembers the moment its last answers were there."""

    def __init__(self, engine: Engine, device: str):
        super().__init__(engine)
        self.device, self.answered = device, moment(device)

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        replies = self.engine.run(job, cohort)
        self.answered = moment(self.device)
        return replies


def moment(device: str) -> Any:
    """Now, or when a GPU has done all that is queued on it: the host does not wait for that."""
    if not device.startswith("cuda"):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before: Any, after: Any) -> float:
    if isinstance(after, float):
        return after - before
    after.synchronize()
    return before.elapsed_time(after) / 1000
