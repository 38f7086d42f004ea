"""Whom a round asks, how long it waits, and how many replies make it count: one rule for simulation and deployment."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from .fields import Count, NonNegative, Number, Open, Positive
from .rng import generator
from .tree import Tree


@dataclass(frozen=True)
class RoundPolicy:
    """The defaults ask the cohort once and take every reply that comes."""

    oversample: NonNegative = 0.0  # clients asked beyond the cohort, as a share of it; all that reply in time count
    deadline: Positive | None = None  # seconds; a simulation's clock knows injected delays alone
    min_replies: Count = 1  # replies; with fewer, the round leaves the server's state as it was
    retries: Number = 0  # times that those who are silent are asked again while there are fewer replies than that
    max_failures: Number = 0  # rounds in a row without a usable reply, after which a client rests; 0: never
    cooldown: Count = 10  # rounds that it rests
    max_reply_mib: Positive = 1024.0  # MiB; a larger reply is refused
    max_weight_share: Open | None = None  # the largest share of a round that one client's weight may have

    def asked(self, cohort: Sequence[int], population: int, client_status: Tree, round: int, key: int) -> Sequence[int]:
        """The cohort, others in the place of those who rest, and some more where that is wished."""
        more = math.ceil(Fraction(str(self.oversample)) * len(cohort))  # in floats 0.07 of 100 would be 8
        resting = self.resting(client_status, round)
        if not more and resting.isdisjoint(cohort):
            return cohort
        here, taken = [i for i in cohort if i not in resting], resting.union(cohort)
        others = [i for i in torch.randperm(population, generator=generator(key)).tolist() if i not in taken]
        return sorted(here + others[: len(cohort) - len(here) + more])

    # ---- client_status: failures in a row, and until when a client rests ----
    def first_status(self, population: int) -> Tree:
        """Part of the server's state, so that it is in every checkpoint; nothing where nobody ever rests."""
        zeros = torch.zeros(population, dtype=torch.int32)
        return Tree(failed=zeros, until=zeros.clone()) if self.max_failures else Tree()

    def resting(self, client_status: Tree, round: int) -> set[int]:
        return set((client_status.until > round).nonzero().flatten().tolist()) if client_status else set()

    def next_status(self, client_status: Tree, round: int, asked: Sequence[int], usable: Collection[int]) -> Tree:
        if not client_status:
            return client_status
        failed, until = client_status.failed.clone(), client_status.until.clone()
        for client in asked:
            failed[client] = 0 if client in usable else failed[client] + 1
            if failed[client] >= self.max_failures:
                failed[client], until[client] = 0, round + 1 + self.cooldown
        return Tree(failed=failed, until=until)


EVERY_REPLY = RoundPolicy()
