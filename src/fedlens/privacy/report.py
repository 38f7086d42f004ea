"""What a run has let out so far: privacy.json, and the stop before a budget is exceeded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.algorithm import Errand, Stage, disclosures
from ..core.cohort import Cohort
from ..core.engine import Job, Reply
from ..core.errors import BadInput, RunFailed
from ..core.evaluate import Evaluate
from ..core.files import read_json
from ..core.rng import key
from ..core.run import Turn
from ..core.transform import Clip, GaussianNoise
from .client_level import ClientPrivacy
from .statement import OWN_NOISE, SEEDED, Statement

_ANSWERS = {Evaluate.__name__: "numbers about personal models"}


class Disclosure:
    """Follows a run round by round. All but errands' answers is known from the configuration and the seed."""

    def __init__(
        self, path: Path, timetable: Sequence[Turn], population: int, seed: int, own_noise: Collection[int] = ()
    ):
        """`own_noise`: clients that draw for themselves; a node with a limit lets nothing else out."""
        self.path, self.population, self.seed, self.own_noise = path, population, seed, own_noise
        self.stages = [turn.stage for turn in timetable]
        self.answers: dict[str, list[str]] = {}  # errand -> what clients answered, as it is

    def take_up(self, answers: Mapping[str, list[str]] | None) -> None:
        """As a checkpoint has them; None: it is of a run from before, which has them in privacy.json alone."""
        if answers is not None:
            self.answers = dict(answers)
        elif self.path.exists():
            try:
                self.answers = read_json(self.path)["answers_as_they_are"]
            except (ValueError, KeyError):
                raise BadInput(f"{self.path} is damaged; remove it, and it is written anew") from None

    def book(self, job: Job, replies: Sequence[Reply]) -> None:
        """Take note of answers that are neither a model's update nor under a mechanism of their own."""
        algorithm = job.stage.algorithm
        if (isinstance(algorithm, Errand) or algorithm.discloses) and not hasattr(algorithm, "statement"):
            found = {name for reply in replies for name in reply.upload if "delta" not in reply.upload}
            if found:
                self.answers[type(algorithm).__name__] = sorted(found)

    @property
    def is_silent(self) -> bool:
        """Whether nothing but plain model updates leaves, and how well personal models do."""
        stated = any(hasattr(s.algorithm, "statement") for s in self.stages)
        noisy = any(isinstance(t, ClientPrivacy | GaussianNoise) for s in self.stages for t in s.uplink)
        told = stated or noisy or any(disclosures(s.algorithm) for s in self.stages)
        return not (told or self.answers.keys() - {Evaluate.__name__})

    def write(self, round: int, save: Callable[[str, Any], None]) -> None:
        """privacy.json as of so many rounds, unless there is nothing to say."""
        if self.is_silent:
            return
        done = [stage.algorithm for stage in self.stages[:round]]
        statements = [a.statement() for a in done if hasattr(a, "statement")]  # one for each round that releases
        disclosed = {name: said for a in done for name, said in disclosures(a).items()}
        beside = [f"what the same clients let out besides: {each.release}" for each in statements]
        beside += disclosed.values()
        beside += [f"{_ANSWERS.get(name, name)}, as they are: {', '.join(of)}" for name, of in self.answers.items()]
        statements += [dp.statement(self.spent(dp, round), beside) for dp in self.private]
        statements += [_noise_alone(t) for t in self.noises]
        unprotected = {type(stage.algorithm).__name__ for stage in self.stages[:round] if _is_plain(stage)}
        save(
            self.path.name,
            {
                "rounds": round,
                "statements": [{**one.plain(), "randomness": self._randomness(one.randomness)} for one in statements],
                "updates_as_they_are": sorted(unprotected - self.answers.keys()),
                "answers_as_they_are": self.answers,
                "discloses": disclosed,
            },
        )

    def _randomness(self, seeded: str) -> str:
        if not self.own_noise:
            return seeded
        if len(self.own_noise) == self.population:
            return OWN_NOISE
        return f"of clients {', '.join(map(str, sorted(self.own_noise)))}: {OWN_NOISE}. Of all others: {seeded}"

    # ---- the budget ----
    def overspends(self, rounds: int) -> ClientPrivacy | None:
        """The mechanism whose budget so many rounds would exceed."""
        limits = ((dp, dp.budget) for dp in self.private)
        return next((dp for dp, limit in limits if limit is not None and self.spent(dp, rounds) > limit), None)

    def refuse(self, round: int) -> None:
        """Stop here when the next round would exceed the budget."""
        if round < len(self.stages) and (dp := self.overspends(round + 1)) is not None:
            spent, more, whole = (self.spent(dp, count) for count in (round, round + 1, len(self.stages)))
            raise RunFailed(
                f"the privacy budget is spent after {round} of {len(self.stages)} rounds: epsilon is {spent:.4g}, and "
                f"one more would make it {more:.4g}; uplink.dp.budget={math.ceil(100 * whole) / 100:g} is enough"
            )

    def spent(self, dp: ClientPrivacy, rounds: int) -> float:
        return dp.epsilon(zip(self.stages[:rounds], self.cohorts, strict=False), self.population)

    @cached_property
    def cohorts(self) -> list[list[int]]:
        """Who takes part in each round: the round loop's own draw."""

        def drawn(cohort: Cohort, round: int) -> list[int]:
            return list(cohort(self.population, key(self.seed, "cohort", round)))

        return [drawn(stage.cohort, round) for round, stage in enumerate(self.stages)]

    @cached_property
    def private(self) -> list[ClientPrivacy]:
        return list(dict.fromkeys(t for s in self.stages for t in s.uplink if isinstance(t, ClientPrivacy)))

    @cached_property
    def noises(self) -> list[tuple[float | None, float]]:
        """(clip, standard deviation) of noise that nobody accounts for."""
        found = {
            (next((c.norm for c in s.uplink if isinstance(c, Clip)), None), t.std)
            for s in self.stages
            for t in s.uplink
            if isinstance(t, GaussianNoise)
        }
        return sorted(found, key=str)


def _is_plain(stage: Stage) -> bool:
    """Whether model updates leave unprotected; an errand that moves no model sends none."""
    private = any(isinstance(transform, ClientPrivacy) for transform in stage.uplink)
    return stage.algorithm.updates_model and not private and not hasattr(stage.algorithm, "statement")


def _noise_alone(found: tuple[float | None, float]) -> Statement:
    clip, std = found
    clipped = "not clipped" if clip is None else f"clipped to norm {clip:g}"
    return Statement(
        release="every upload",
        mechanism=f"Gaussian noise of standard deviation {std:g} on updates that are {clipped}",
        unit="none is stated",
        adjacency="none is stated",
        sensitivity="unbounded" if clip is None else f"{2 * clip:g}, of one upload",
        epsilon=None,
        delta=None,
        holds=False,
        because="nobody keeps an account of uplink=noise; uplink=dp clips, adds noise and counts",
        randomness=SEEDED,
        not_covered=("weights, running statistics and whatever else a method uploads",),
    )
