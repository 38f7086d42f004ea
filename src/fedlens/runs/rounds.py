"""Which rounds of a run train its model: the one place that decides. The others cost bytes and time, and count nowhere.

Others are a warm-up whose model is thrown away, a weighing, an exchange, fine-tuning at the end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from ..algorithms import ALGORITHMS
from ..core.errors import BadInput
from ..core.run import Turn

T = TypeVar("T")


def stage_names(turns: Sequence[Turn]) -> list[str]:
    """What each round does besides training the model; nothing for those that train it."""
    counts = Rounds.of(turns)
    names = ["warm-up" if type(t.stage.algorithm) in ALGORITHMS.values() else _words(t) for t in turns]
    trains = [counts.trained(round) > counts.trained(round - 1) for round in range(1, len(turns) + 1)]
    return ["" if is_training else name for name, is_training in zip(names, trains, strict=True)]


def _words(turn: Turn) -> str:
    """MeasureSaliency as measure saliency."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(turn.stage.algorithm).__name__).lower()


@dataclass(frozen=True)
class Rounds:
    """Of a run that has so many in all."""

    spans: tuple[tuple[int, int], ...]  # first and last round of every stretch of training, counted from 1
    all: int

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Rounds:
        """A round counts where its algorithm moves the model, since training last began afresh.

        A warm-up that training goes on from counts: it trained the model that is evaluated.
        """
        since, spans = turns[-1].since if turns else 0, []
        for round, turn in enumerate(turns, 1):
            if round <= since or not turn.stage.algorithm.updates_model:
                continue
            first = spans.pop()[0] if spans and spans[-1][1] == round - 1 else round
            spans.append((first, round))
        return cls(tuple(spans), len(turns))

    @classmethod
    def stored(cls, value: Any) -> Rounds:
        """As `plain` wrote it; refuses anything else."""
        try:
            spans = tuple((first, last) for first, last in value["training"])
            ends = [0, *(end for span in spans for end in span), value["all"]]
            if any(type(end) is not int for end in ends) or ends != sorted(ends) or ends[1] == 0:
                raise ValueError
        except (TypeError, ValueError, KeyError):
            raise BadInput("passport.json is damaged: rounds should say which of them train") from None
        return cls(spans, value["all"])

    def plain(self) -> dict[str, Any]:
        return {"all": self.all, "training": [list(span) for span in self.spans]}

    def trained(self, round: int) -> int:
        """How many rounds of training are done when so many rounds of the run are."""
        at = bisect_right(self._begins, round)  # stretches that have begun
        if not at:
            return 0
        first, last = self.spans[at - 1]
        more = max(0, round - self.all)  # of a run that goes on beyond what was planned
        return self._before[at - 1] + min(round, last) - first + 1 + more

    @property
    def total(self) -> int:
        return self._before[-1]

    @property
    def preparation(self) -> int:
        """Rounds before the first one that counts."""
        return self.spans[0][0] - 1 if self.spans else 0

    def counted(self, points: Mapping[int, T]) -> dict[int, tuple[int, T]]:
        """{rounds of training: (round of the run, what was measured after it)}, each model once; nothing before."""
        found: dict[int, tuple[int, T]] = {}
        for round in sorted(points):
            if trained := self.trained(round):
                found.setdefault(trained, (round, points[round]))
        return found

    @cached_property
    def _begins(self) -> list[int]:
        return [first for first, _ in self.spans]

    @cached_property
    def _before(self) -> list[int]:
        """Rounds of training before each stretch, and in all."""
        return [*accumulate((last - first + 1 for first, last in self.spans), initial=0)]
