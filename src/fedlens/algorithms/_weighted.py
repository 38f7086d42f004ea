"""A base whose clients count by what another method finds out about their data (FedSLS, FedSL, FedDISCO)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..core.algorithm import Errand, Recipe, Stage, chain
from ..core.errors import BadInput
from ..core.optimizer import Schedule
from ..core.tree import Tree


@dataclass(frozen=True)
class Weighted(Errand):
    """Training under weights that a subclass sets in `aggregate`: all else is the base's."""

    updates_model: ClassVar[bool] = True  # it asks as an errand does, and trains
    say: ClassVar[str]  # what decides on the weights, for a base that has none: "labels have"

    @property
    def evaluated_as(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.evaluated_as

    def start(self, client):
        return self.base.start(client)

    def finish(self, client, local):
        upload, memory = self.base.finish(client, local)
        if "weight" not in upload:
            name = type(self.base).__name__.lower()
            raise BadInput(f"algorithm.base {name} averages nothing by weight, so that {self.say} no say in it")
        return upload, memory


def with_weights(uploads: Sequence[Tree], weights: Sequence[float]) -> list[Tree]:
    """The same uploads under these weights."""
    exact = (torch.tensor(weight, dtype=torch.float64) for weight in weights)
    return [upload.replace(weight=weight) for upload, weight in zip(uploads, exact, strict=True)]


# ---- when ------------------------------------------------------------------------------------------------------------
def reweighed(
    base: Recipe, plan: Stage, find: Errand | None, training: Weighted, *, epochs: int = 0, every: int = 0
) -> Iterator[Stage]:
    """The base's stages as `training`; what its weights need is found where memories begin, and `every` so many rounds.

    Without `find` nothing needs to be found beforehand.
    """
    for inner in chain(base):
        if getattr(inner, "reweighs", False):
            name = type(inner).__name__.lower()
            raise BadInput(f"algorithm.base {name} decides itself how much a client counts: leave out one of the two")
    known = False
    for stage in base.stages(plan):
        known = known and not stage.fresh
        if isinstance(stage.algorithm, Errand) or not stage.rounds:  # nothing is averaged there
            yield stage
            continue
        for begin in range(0, stage.rounds, every or stage.rounds):
            part = _part(stage, begin, every)
            if find is not None and (every or not known):
                yield part.errand(replace(find, base=stage.algorithm), epochs=epochs)
                part, known = replace(part, fresh=False), True
            yield replace(part, algorithm=replace(training, base=stage.algorithm))


def _part(stage: Stage, begin: int, every: int) -> Stage:
    """`every` rounds of a stage, from `begin` on. Parts are equal where the rate is constant: recorded steps serve."""
    if not every or every >= stage.rounds:
        return stage
    optimizer = stage.optimizer
    if type(optimizer.schedule) is not Schedule:
        optimizer = replace(optimizer, schedule=Continued(optimizer.schedule, begin, stage.rounds))
    rounds = min(every, stage.rounds - begin)
    return replace(stage, rounds=rounds, optimizer=optimizer, fresh=stage.fresh and not begin)


@dataclass(frozen=True)
class Continued(Schedule):
    """Another schedule from round `begin` of its `rounds` on."""

    schedule: Schedule = Schedule()
    begin: int = 0
    rounds: int = 1

    def __call__(self, at, rounds):
        return self.schedule(self.begin + at, self.rounds)
