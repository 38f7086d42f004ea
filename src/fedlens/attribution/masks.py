"""From scores to masks, and maps made comparable: exact counts under ties, no division by zero."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import BadInput


def kept(count: int, *, keep: float | None = None, drop: float | None = None) -> int:
    """How many of `count` stay when the share `keep` (0 to 1) stays, or all but floor(count * drop / 100).

    In integers, from the number as it is written: 0.3 means three tenths, not the nearest double.
    """
    if (keep is None) == (drop is None):
        raise BadInput("give either keep, a share between 0 and 1, or drop, a percentage")
    name, value, most = ("keep", keep, 1) if keep is not None else ("drop", drop, 100)
    assert value is not None
    if not 0 <= value <= most:
        raise BadInput(f"{name}={value} must lie between 0 and {most}")
    part = Fraction(str(value)) / most
    return count - math.floor(count * (1 - part if name == "keep" else part))


def top_share(scores: Tensor, *, keep: float | None = None, drop: float | None = None) -> Tensor:
    """True at the largest scores of each row [rows, ...]: exactly `kept` of them, among equals the lower index."""
    flat = scores.flatten(1)
    count = kept(flat.shape[1], keep=keep, drop=drop)
    order = flat.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).sort(dim=1, descending=True, stable=True)[
        1
    ]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order[:, :count], True).view_as(scores)


def normalised(maps: Tensor, to: Literal["unit", "signed"] = "unit") -> Tensor:
    """Each map to 0..1 by its smallest and largest value, or to -1..1 by its largest size; constant maps to 0."""
    flat = maps.flatten(1)
    if to == "signed":
        low, span = torch.zeros_like(flat[:, :1]), flat.abs().amax(1, keepdim=True)
    else:
        low = flat.amin(1, keepdim=True)
        span = flat.amax(1, keepdim=True) - low
    return ((flat - low) / torch.where(span > 0, span, 1)).view_as(maps)
