"""Robust rules in place of the mean, and bounds on what one client can do to it.

Memory: beside the uploads, which the round loop holds anyway, one result and blocks of a few million values; where
leaves are not contiguous, also a copy of the largest one for each client. ClipUploads holds a copy of what it shortens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from ..core.errors import BadInput, RunFailed
from ..core.fields import Count, Positive
from ..core.tree import Tree, dot, mean
from .defence import Defence, coordinatewise, part_by_part, products

Minority = Annotated[float, Ge(0), Lt(0.5)]

_TURNS = 1000  # of Weiszfeld's iteration at most: each is a product of a small matrix and a vector
_STILL = 1e-10  # of a client's share: less than this is no movement


# ---- bounds on each upload -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ClipUploads(Defence):
    """Sun et al., 2019: an update longer than the bound is shortened to it; one that is not finite is nothing."""

    name: ClassVar = "clip"
    norm: Positive | None = None  # of the parameters' update; None, and for all other parts: the round's median norm

    def __call__(self, server, uploads):
        return part_by_part(uploads, self.shortened)

    def shortened(self, name: str, parts: Sequence[Tree]) -> list[Tree]:
        lengths = torch.stack([dot(part, part) for part in parts]).double().sqrt().nan_to_num(math.inf).tolist()
        bound = self.norm if self.norm is not None and name == "delta/params" else statistics.median(lengths)
        return [
            part if length <= bound else part * (bound / length) if length < math.inf else part.zeros()
            for part, length in zip(parts, lengths, strict=True)
        ]


@dataclass(frozen=True)
class Claims(Defence):
    """What clients say they count (FedSLS, FedAU, examples) or did (FedNova's reach) is bounded by what others say.

    A number above so many times the round's median becomes that; one that is negative or not finite becomes zero.
    """

    name: ClassVar = "claims"
    most: Annotated[float, Ge(1)] = 3.0  # times the median of the round

    def __call__(self, server, uploads):
        for name, value in uploads[0].items():
            if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
                told = [float(upload[name]) for upload in uploads]
                uploads = [
                    upload if number == said else upload.replace(**{name: torch.full_like(upload[name], number)})
                    for upload, said, number in zip(uploads, told, self.bounded(told), strict=True)
                ]
        return uploads

    def bounded(self, told: Sequence[float]) -> list[float]:
        sound = [number for number in told if 0 <= number < math.inf]
        bound = self.most * statistics.median(sound) if sound else 0.0
        return [min(number, bound) if 0 <= number < math.inf else 0.0 for number in told]


# ---- rules in place of the mean --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rule(Defence):
    """Every upload is given the same centre: whatever weighted mean follows yields it. All clients count alike."""

    def __call__(self, server, uploads):
        return part_by_part(uploads, lambda name, parts: [self.centre(parts)] * len(parts))

    def centre(self, parts: Sequence[Tree]) -> Tree:
        raise NotImplementedError(f"{type(self).__name__} does not say what its centre is")


@dataclass(frozen=True)
class Median(Rule):
    """Yin et al., 2018: of every coordinate the median. Tolerates less than half of the clients."""

    name: ClassVar = "median"

    def centre(self, parts):
        low, high = (len(parts) - 1) // 2, len(parts) // 2

        def middle(block: Tensor) -> Tensor:
            ordered = block.sort(0).values  # what is no number comes last, like the largest
            return ordered[low] if low == high else (ordered[low] + ordered[high]) / 2

        return coordinatewise(parts, middle)


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """Yin et al., 2018: of every coordinate the mean without extremes. Tolerates as many clients as a side loses."""

    name: ClassVar = "trimmed_mean"
    trim: Minority = 0.2  # the share of clients that is left out on each side, rounded down

    def centre(self, parts):
        out = assumed(self.trim, len(parts))
        return coordinatewise(parts, lambda block: block.sort(0).values[out : len(parts) - out].mean(0))


@dataclass(frozen=True)
class Combination(Rule):
    """A centre that is a weighted mean of the uploads, whose weights follow from scalar products alone."""

    def centre(self, parts):
        between = products(parts)
        finite = between.diagonal().isfinite().nonzero().flatten()
        if not len(finite):
            raise RunFailed(f"defences.{self.name}: no upload of this round is finite; a lower local.lr may mend it")
        shares = self.shares(between[finite][:, finite], len(parts)).tolist()
        used = [(parts[at], share) for at, share in zip(finite.tolist(), shares, strict=True) if share > 0]
        return mean([part for part, _ in used], [share for _, share in used])

    def shares(self, between: Tensor, uploads: int) -> Tensor:
        """From scalar products of the finite ones among so many uploads."""
        raise NotImplementedError(f"{type(self).__name__} does not say what uploads count")


@dataclass(frozen=True)
class MultiKrum(Combination):
    """Blanchard et al., 2017: the mean of the uploads that are nearest to their n - f - 2 nearest others.

    Tolerates f clients where n > 2 f + 2.
    """

    name: ClassVar = "multikrum"
    hostile: Minority = 0.2  # f, as a share of a round's uploads, rounded down
    keep: Count | None = None  # m, how many uploads count; None: n - f - 2, as Damaskinos et al., 2019

    def shares(self, between, uploads):
        near = max(1, uploads - assumed(self.hostile, uploads) - 2)
        lengths = between.diagonal()
        apart = (lengths[:, None] + lengths - 2 * between).clamp(min=0).fill_diagonal_(math.inf)
        scores = apart.sort(1).values[:, : min(near, max(1, len(apart) - 1))].sum(1)
        best = scores.argsort(stable=True)[: near if self.keep is None else self.keep]
        return torch.zeros(len(apart), dtype=torch.float64).index_fill(0, best, 1.0)

    def check(self, uploads):
        hostile = assumed(self.hostile, uploads)
        if uploads <= 2 * hostile + 2:
            raise BadInput(
                f"defences.{self.name} cannot tolerate {hostile} hostile of {uploads} clients a round, only "
                f"{max(0, (uploads - 3) // 2)}: raise cohort, or lower defences.{self.name}.hostile"
            )


@dataclass(frozen=True)
class Krum(MultiKrum):
    """Blanchard et al., 2017: the one upload that is nearest to its n - f - 2 nearest others."""

    name: ClassVar = "krum"
    keep: Count | None = 1


@dataclass(frozen=True)
class GeometricMedian(Combination):
    """Pillutla et al., 2022 (RFA): the point with the smallest sum of distances to all uploads, by Weiszfeld's method.

    Tolerates less than half of the clients. Every point on the way is a mean of the uploads, so that shares say it all.
    """

    name: ClassVar = "geometric_median"
    smoothing: Positive = 1e-6  # nu: a distance below it counts as this

    def shares(self, between, uploads):
        # From nothing moved, not from the mean, which one huge upload takes far away.
        shares = self.closeness(between.diagonal())
        for _ in range(_TURNS):
            ahead = between @ shares
            moved = self.closeness(between.diagonal() - 2 * ahead + shares @ ahead)
            still = (moved - shares).abs().max() < _STILL
            shares = moved
            if still:
                break
        return shares

    def closeness(self, squares: Tensor) -> Tensor:
        near = 1 / squares.clamp(min=0).sqrt().clamp(min=self.smoothing)
        return near / near.sum()


def assumed(share: float, uploads: int) -> int:
    """How many clients a share of them is, rounded down: 0.29 of 100 is 29, in floats 28."""
    return int(Fraction(str(share)) * uploads)


DEFENCES = {
    defence.name: defence for defence in (Claims, ClipUploads, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean)
}
