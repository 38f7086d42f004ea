"""What an engine is given and gives back: a Job for a cohort, a Reply for each client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .algorithm import Stage
from .files import Seal
from .memories import Version
from .tree import Tree


@dataclass(frozen=True)
class Job:
    """One round's work order: identical for every client of the cohort, and all that it needs."""

    stage: Stage
    download: Tree
    shared: Tree
    round: int  # of the run
    at: int  # of the stage
    since: int  # memories from before this round do not count
    seed: int
    attempt: int = 0  # those who were silent may be asked again


@dataclass(frozen=True)
class Reply:
    client: int
    upload: Tree
    seconds: float = 0.0  # until it came
    round: int | None = None  # that it answers; None: the one that was asked
    damage: str = ""  # why nothing could be read of it


OnProgress = Callable[[int, int], None]  # so many clients of so many have answered


def ignore(answered: int, asked: int) -> None:
    pass


class Engine(Protocol):
    """Runs client hooks. Owns the clients' data and memories, wherever those live."""

    population: int

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]: ...

    def measure(self, weights: Tree, detailed: bool = False) -> list[Tree]:
        """The score of each chunk of the pooled test set, in order."""
        ...

    def save(self, round: int) -> dict[Version, Seal]:
        """Write all memories as they are before this round; which files are new since the last time."""
        ...

    def close(self) -> None: ...


class EngineWrapper:
    """Another engine, whose answers are changed on their way: a subclass says how in `run`."""

    def __init__(self, engine: Engine):
        self.engine, self.population = engine, engine.population

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        return self.engine.run(job, cohort)

    def measure(self, weights: Tree, detailed: bool = False) -> list[Tree]:
        return self.engine.measure(weights, detailed)

    def save(self, round: int) -> dict[Version, Seal]:
        return self.engine.save(round)

    def close(self) -> None:
        self.engine.close()
