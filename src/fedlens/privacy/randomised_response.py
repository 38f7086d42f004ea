"""Randomised response: every bit of a mask tells the truth but for a coin."""

from __future__ import annotations

import math

from torch import Tensor

from ..core.errors import BadInput
from ..core.rng import privacy_coins


def flip_rate(epsilon: float) -> float:
    """How often a bit is turned over so that its answer is epsilon-private (Warner, 1965)."""
    if not epsilon > 0:
        raise BadInput(f"epsilon is {epsilon}, but it should be above 0")
    return 1 / (1 + math.exp(epsilon)) if epsilon < 700 else 0.0


def randomised_response(mask: Tensor, epsilon: float, seed: Tensor) -> Tensor:
    """The mask with every bit turned over at `flip_rate`."""
    return mask ^ (privacy_coins(seed, *mask.shape) < flip_rate(epsilon))


def whole_mask_epsilon(epsilon: float, kept: int, bits: int) -> float:
    """Of a whole mask that keeps `kept` bits: two such masks differ in at most twice the smaller part."""
    return 2 * min(kept, bits - kept) * epsilon
