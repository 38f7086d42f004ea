"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import BadInput
from .fields import Count, Positive
from .rng import generator


@dataclass(frozen=True)
class Cohort:
    """A function of (population, key); the same key draws the same clients."""

    def __call__(self, population: int, key: int) -> Sequence[int]:
        return sorted(torch.randperm(population, generator=generator(key))[: self.size(population)].tolist())

    def size(self, population: int) -> int:
        """How many clients a round needs."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many clients take part")


@dataclass(frozen=True)
class Everyone(Cohort):
    def size(self, population):
        return population


@dataclass(frozen=True)
class Uniform(Cohort):
    """`count` different clients, all equally likely."""

    count: Count = 10  # clients of a round

    def size(self, population):
        if self.count > population:
            raise BadInput(f"cohort.count is {self.count}, but there are only {population} clients: lower cohort")
        return self.count


@dataclass(frozen=True)
class Fraction(Cohort):
    """This share of the population, at least one client, all equally likely."""

    share: Positive = 0.1  # of all clients, in a round

    def size(self, population):
        if self.share > 1:
            raise BadInput(f"cohort.share is {self.share}, but at most everyone (1.0) can take part")
        return max(1, round(self.share * population))


COHORTS = {"everyone": Everyone, "uniform": Uniform, "fraction": Fraction}
