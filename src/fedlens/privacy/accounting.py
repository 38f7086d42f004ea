"""What many noisy sums cost together: Renyi differential privacy, added up round by round.

noise: standard deviation on the sum, divided by how far one unit can move it. rate: the share of units in a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from ..core.errors import BadInput
from .gaussian import gaussian_epsilon

ORDERS = (*range(2, 65), 72, 80, 96, 112, 128, 160, 192, 224, 256)
Accountant = Literal["own", "dp_accounting"]


class Release(NamedTuple):
    """One noisy sum over a sample of the units."""

    noise: float
    rate: float = 1.0
    sampling: Literal["fixed", "poisson"] = (
        "fixed"  # a fixed number, one replaced; or each by its own coin, one removed
    )


def total_epsilon(releases: Mapping[Release, int], delta: float, accountant: Accountant = "own") -> float:
    """Epsilon of all releases together, each so many times."""
    spent = {release: times for release, times in releases.items() if times}
    if not spent:
        return 0.0
    if any(release.noise == 0 for release in spent):
        return math.inf
    # Without what sampling hides, many Gaussian releases are one: exact, and the better bound for large rates.
    plain = gaussian_epsilon(sum(times / release.noise**2 for release, times in spent.items()) ** -0.5, delta)
    if all(release.rate == 1 for release in spent):
        return plain
    return min(plain, _by_dp_accounting(spent, delta) if accountant == "dp_accounting" else rdp_epsilon(spent, delta))


def rdp_epsilon(releases: Mapping[Release, int], delta: float) -> float:
    """By our own accountant; orders are integers up to 256."""
    spent = {order: sum(times * rdp(each, order) for each, times in releases.items()) for order in ORDERS}
    return min(_converted(order, value, delta) for order, value in spent.items())


def rdp(release: Release, order: int) -> float:
    """Renyi divergence of this order between a release with and without a unit, or with another in its place."""
    noise, rate, sampling = release
    if rate == 1:
        return order / (2 * noise**2)
    if sampling == "poisson":  # Mironov, Talwar & Zhang, 2019, section 3.3
        terms = [
            _log_binomial(order, k)
            + (order - k) * math.log1p(-rate)
            + (k * math.log(rate) if k else 0.0)
            + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
        ]
    else:  # Wang, Balle & Kasiviswanathan, 2019, theorem 9
        second = min(math.log(4) + _log_expm1(1 / noise**2), math.log(2) + 1 / noise**2)
        terms = [0.0, 2 * math.log(rate) + _log_binomial(order, 2) + second]
        terms += [
            j * math.log(rate) + _log_binomial(order, j) + math.log(2) + (j - 1) * j / (2 * noise**2)
            for j in range(3, order + 1)
        ]
    largest = max(terms)
    value = (largest + math.log(math.fsum(math.exp(term - largest) for term in terms))) / (order - 1)
    return min(value, order / (2 * noise**2))


def _converted(order: int, value: float, delta: float) -> float:
    """Epsilon from Renyi divergence (Canonne, Kamath & Steinke, 2020, proposition 12)."""
    return max(0.0, value + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def _by_dp_accounting(releases: Mapping[Release, int], delta: float) -> float:
    try:
        from dp_accounting import dp_event, privacy_accountant  # pyright: ignore[reportMissingImports]
        from dp_accounting.pld import PLDAccountant  # pyright: ignore[reportMissingImports]
        from dp_accounting.rdp import RdpAccountant  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise BadInput(
            "accountant=dp_accounting needs a package of that name: pip install 'fedlens[privacy]'"
        ) from None
    poisson = {release.sampling == "poisson" for release in releases}
    if len(poisson) > 1:
        raise BadInput("rounds sampled in two ways have two meanings of neighbour, and no common epsilon")
    neighbours = privacy_accountant.NeighboringRelation
    # Its tighter accountant by privacy loss distributions has no rule for samples of a fixed size.
    book = PLDAccountant() if True in poisson else RdpAccountant(neighboring_relation=neighbours.REPLACE_ONE)
    for (noise, rate, sampling), times in releases.items():
        event = dp_event.GaussianDpEvent(noise)
        if rate < 1 and sampling == "poisson":
            event = dp_event.PoissonSampledDpEvent(rate, event)
        elif rate < 1:
            whole = 1 << 30  # it takes two counts and reads their ratio
            event = dp_event.SampledWithoutReplacementDpEvent(whole, round(rate * whole), event)
        book.compose(event, times)
    return float(book.get_epsilon(delta))


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_expm1(x: float) -> float:
    return math.log(math.expm1(x)) if x < 30 else x
