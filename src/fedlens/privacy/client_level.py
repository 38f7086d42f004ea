"""Client-level differential privacy: clip and noise on every update, an account of it, and a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from ..core.algorithm import Stage
from ..core.errors import BadInput
from ..core.fields import Open, Positive
from ..core.objective import uniformly
from ..core.transform import Clip, GaussianNoise, Transform
from ..core.tree import Tree, dot
from .accounting import Accountant, Release, total_epsilon
from .statement import SEEDED, Statement

_WEAKER = (
    "single uploads, from whoever adds them up",
    "clients of a cohort that give away their own noise: the sum then has less of it",
)


@dataclass(frozen=True)
class ClientPrivacy(Transform):
    """Clip, then noise: all that a client's data say through its updates is differentially private.

    With trust=nobody every update is protected, from the server too. With trust=aggregator the mean of a round is, from
    those who see models alone: whoever adds up (a trusted server, secure aggregation) must forget single uploads.
    """

    name: ClassVar = "dp"
    norm: Positive = 1.0  # length that every update is clipped to (C)
    multiplier: Positive = 1.0  # standard deviation on each upload, in units of norm
    delta: Open = 1e-5  # of the promise
    trust: Literal["nobody", "aggregator"] = "nobody"  # who may see single uploads
    accountant: Accountant = "own"  # who adds up what was spent
    # The run stops before epsilon exceeds it. No part of what a round is: a resumed run may have a higher one.
    budget: Positive | None = field(default=None, compare=False)

    def encode(self, client, upload):
        if more := sorted(upload.keys() - {"delta", "weight", "examples"}):
            raise BadInput(f"uplink dp protects delta alone, but this method also uploads {', '.join(more)}")
        if upload.get("delta", Tree()).get("buffers"):
            raise BadInput("uplink dp: running statistics would leave as they are; use buffers=local, or no BatchNorm")
        return super().encode(client, upload)

    def pack(self, client, update):
        # Of a client whose training diverged, noise alone: a value that is not finite would tell that it did.
        finite = dot(update, update).isfinite()
        clipped = Clip(self.norm).pack(client, update.map(lambda t: torch.where(finite, t, torch.zeros_like(t))))
        return GaussianNoise(self.multiplier * self.norm).pack(client, clipped)

    # ---- what it costs ----
    def epsilon(self, rounds: Iterable[tuple[Stage, list[int]]], population: int) -> float:
        """After these rounds, each with its stage and cohort."""
        mine = [(stage, cohort) for stage, cohort in rounds if self in stage.uplink and cohort]
        if self.trust == "nobody":  # who took part is known: the client that did most often has spent most
            busiest = max(Counter(i for _, cohort in mine for i in cohort).values(), default=0)
            return total_epsilon({Release(self.multiplier / 2): busiest}, self.delta)
        for stage, _ in mine:
            if stage.weighting is not uniformly:
                raise BadInput(
                    "uplink dp with trust=aggregator needs weighting=uniform: others let one client dominate"
                )
        # Another client in the place of one moves the sum by 2 C; the noises of a cohort add up to sqrt(m) of one.
        spent = Counter(Release(self.multiplier * len(c) ** 0.5 / 2, len(c) / population) for _, c in mine)
        return total_epsilon(spent, self.delta, self.accountant)

    def statement(self, epsilon: float, beside: Iterable[str] = ()) -> Statement:
        """`beside`: what else left the same clients, in words."""
        seen = "every model update" if self.trust == "nobody" else "the mean of every round's model updates"
        sampling = (
            "" if self.trust == "nobody" else "; cohorts of a fixed size, drawn anew each round, hide who took part"
        )
        return Statement(
            release=f"{seen}, all rounds together",
            mechanism=f"Gaussian: clipped to norm {self.norm:g}, noise {self.multiplier * self.norm:g} on each entry",
            unit="a client, with all of its data",
            adjacency="one client's data are replaced by any others",
            sensitivity=f"2 C = {2 * self.norm:g}: both updates lie in a ball of radius C{sampling}",
            epsilon=epsilon,
            delta=self.delta,
            holds=True,
            randomness=SEEDED,
            not_covered=(
                "the number of a client's examples, where weighting=samples sends it",
                *(_WEAKER if self.trust == "aggregator" else ()),
                *beside,
            ),
            details={"budget": self.budget, "noise_multiplier": self.multiplier, "trust": self.trust},
        )
