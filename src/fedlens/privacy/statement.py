"""What is promised about a release, and what is not: one entry of privacy.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.files import finite

SEEDED = (
    "drawn from the run's seed, so that runs repeat: whoever knows the seed can take the noise off again, so this is a "
    "simulation of the mechanism and protects nobody; a deployment must draw from the operating system. Noise is made "
    "of 24-bit numbers and ends at 5.8 standard deviations; attacks on floating-point noise are not prevented"
)
OWN_NOISE = (
    "drawn by the nodes themselves, as they say: anew for every upload from their operating system's randomness, so "
    "that no seed brings it back. Uniform numbers have 53 bits; attacks on floating-point noise are not prevented"
)


@dataclass(frozen=True)
class Statement:
    release: str  # what leaves
    mechanism: str
    unit: str  # of protection
    adjacency: str  # which two inputs should not be told apart
    sensitivity: str  # the argument, in words
    epsilon: float | None  # None: nothing is promised
    delta: float | None
    holds: bool  # whether epsilon and delta are proven as stated
    randomness: str
    because: str = ""  # why it does not hold, or on what condition it does
    not_covered: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """For JSON, which has no word for infinity but null."""
        return finite(asdict(self))
