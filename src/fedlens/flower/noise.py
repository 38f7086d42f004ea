"""privacy.json of a deployed run: whose noise comes from the run's seed, and whose from its node."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ..privacy.report import Disclosure

_OWN = (
    "drawn by the nodes themselves, as they say: each from a secret that its operating system made and that never "
    "leaves it, its client's number, the round and what it was sent, so that the server cannot draw it again from the "
    "run's seed. The generator is not a cryptographic one and starts from 56 bits: whoever knows parts of the noise "
    "exactly, as where an update is zero for certain, could search for the rest. Noise is made of 24-bit numbers and "
    "ends at 5.8 standard deviations; attacks on floating-point noise are not prevented"
)


class DeployedDisclosure(Disclosure):
    """A node whose policy has an epsilon lets nothing out but under its own noise."""

    own_noise: Collection[int] = ()  # clients

    def write(self, round: int, save: Callable[[str, Any], None]) -> None:
        def said(name: str, value: dict[str, Any]) -> None:
            told = [{**one, "randomness": self._randomness(one["randomness"])} for one in value["statements"]]
            save(name, {**value, "statements": told})

        super().write(round, said)

    def _randomness(self, seeded: str) -> str:
        if not self.own_noise:
            return seeded
        if len(self.own_noise) == self.population:
            return _OWN
        return f"of clients {', '.join(map(str, sorted(self.own_noise)))}: {_OWN}. Of all others: {seeded}"
