"""The Gaussian mechanism: how much noise, and what it is worth.

`sensitivity` is the Euclidean distance that two neighbouring inputs can put between two outputs; sigma is the standard
deviation of the noise on every coordinate. Several releases about the same unit are one of sensitivity times the square
root of their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..core.errors import BadInput


def classic_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """Dwork & Roth, 2014, theorem A.1. Proven for epsilon < 1 alone: beyond, `gaussian_delta` of it exceeds delta."""
    _check(epsilon=epsilon, delta=delta, sensitivity=sensitivity)
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def analytic_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """Balle & Wang, 2018: the least noise that is (epsilon, delta)-private, for any epsilon."""
    _check(epsilon=epsilon, delta=delta, sensitivity=sensitivity)
    return sensitivity * _boundary(lambda sigma: gaussian_delta(sigma, epsilon) > delta)


def metric_sigma(epsilon: float, delta: float, farthest: float) -> float:
    """The least noise with `metric_delta` <= delta for all pairs up to this distance; epsilon is per unit of distance.

    metric_delta grows with the distance, so that the farthest pair decides.
    """
    _check(epsilon=epsilon, delta=delta, farthest=farthest)
    return analytic_sigma(epsilon * farthest, delta, farthest)


def gaussian_delta(sigma: float, epsilon: float, sensitivity: float = 1.0) -> float:
    """The smallest delta that holds with this epsilon, exactly (Balle & Wang, 2018, theorem 8)."""
    if sigma == 0 or sensitivity == 0:
        return float(sensitivity > 0)
    half, shift = sensitivity / (2 * sigma), epsilon * sigma / sensitivity
    kept, lost = log_normal_cdf(half - shift), epsilon + log_normal_cdf(-half - shift)
    return max(0.0, -math.exp(kept) * math.expm1(min(0.0, lost - kept)))


def gaussian_epsilon(sigma: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest epsilon that holds with this delta; infinite without noise."""
    _check(delta=delta)
    if sigma == 0 or gaussian_delta(sigma, 0.0, sensitivity) <= delta:
        return 0.0 if sigma else math.inf
    return _boundary(lambda epsilon: gaussian_delta(sigma, epsilon, sensitivity) > delta)


def metric_delta(sigma: float, epsilon: float, distance: float) -> float:
    """delta(d) of metric privacy (Chatzikokolakis et al., 2013): for inputs d apart the budget is epsilon times d.

    It holds for a release that moves no farther than its input does, such as an image under a mask fixed beforehand.
    """
    return gaussian_delta(sigma, epsilon * distance, distance)


def log_normal_cdf(x: float) -> float:
    if x > -30:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    tail = 1 - x**-2 + 3 * x**-4 - 15 * x**-6  # erfc itself would be zero from -38 on
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(tail)


def _boundary(too_small: Callable[[float], bool]) -> float:
    """The smallest positive number that is not too small, from its safe side."""
    low, high = 0.0, 1.0
    while too_small(high):
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return high


def _check(**values: float) -> None:
    for name, value in values.items():
        if name == "delta" and not 0 < value < 1:
            raise BadInput(f"delta is {value}, but it should lie between 0 and 1, far below one in the number of units")
        if not 0 < value < math.inf:
            raise BadInput(f"{name} is {value}, but it should be a finite number above 0")
