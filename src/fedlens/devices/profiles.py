"""Devices that clients may be, and the links between them and the server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from annotated_types import Gt, Le

from ..core.fields import NonNegative, Positive
from ..core.rng import key, numpy_generator


class Device(NamedTuple):
    """One client's own."""

    down: float  # bytes a second
    up: float
    speed: float  # FLOP/s


@dataclass(frozen=True)
class Devices:
    """A population: each client's rates are drawn once, from log-normal distributions around these medians."""

    down: Positive  # Mbit/s to a client
    up: Positive  # Mbit/s from a client
    latency: NonNegative  # seconds there and back
    speed: Positive  # GFLOP/s in training
    availability: Annotated[float, Gt(0), Le(1)]  # share of the times that a client answers
    spread: NonNegative = 0.5  # deviation of the rates' logarithms: two thirds of clients within a factor of 1.65
    retry: Positive = 10.0  # seconds until one that did not answer is asked again; an assumption

    def of(self, client: int, seed: int) -> Device:
        draw = numpy_generator(key(seed, "device", client)).standard_normal(3)
        down, up, speed = (math.exp(self.spread * z) for z in draw)
        return Device(self.down * 1e6 / 8 * down, self.up * 1e6 / 8 * up, self.speed * 1e9 * speed)

    def wait(self, client: int, round: int, seed: int) -> float:
        """Seconds until the client answers: it is asked, and asked again, and there `availability` of the times."""
        if self.availability == 1:
            return 0.0
        chance = numpy_generator(key(seed, "availability", round, client)).random()
        return self.retry * math.floor(math.log1p(-chance) / math.log1p(-self.availability))


@dataclass(frozen=True)
class Phone(Devices):
    """A smartphone on a mobile network."""

    down: Positive = 55.0  # Mbit/s; rounded from Ookla's Speedtest Global Index, worldwide, mobile, mid-2024
    up: Positive = 11.0  # Mbit/s; likewise, 2020 to 2024
    latency: NonNegative = 0.03  # seconds there and back; likewise, 28 ms in 2022
    speed: Positive = 5.0  # GFLOP/s in training: an assumption, a few per cent of what a phone's cores could do
    availability: Annotated[float, Gt(0), Le(1)] = 0.92  # Bonawitz et al., 2019: 6 to 10 % of phones drop out


@dataclass(frozen=True)
class Hospital(Devices):
    """A server with a GPU behind a firewall. All numbers are assumptions."""

    down: Positive = 500.0  # Mbit/s: half of a gigabit line
    up: Positive = 500.0
    latency: NonNegative = 0.02
    speed: Positive = 5_000.0  # GFLOP/s: a third of a workstation GPU's float32 peak
    availability: Annotated[float, Gt(0), Le(1)] = 0.99
    spread: NonNegative = 0.3


@dataclass(frozen=True)
class IoT(Devices):
    """A small board on a narrow radio link."""

    down: Positive = 0.5  # Mbit/s: an assumption, half of the 1 Mbit/s peak of LTE Cat-M1 (3GPP release 13)
    up: Positive = 0.5
    latency: NonNegative = 0.1  # an assumption
    speed: Positive = 1.0  # GFLOP/s: an assumption, a single-board computer's core
    availability: Annotated[float, Gt(0), Le(1)] = 0.8  # an assumption


DEVICES = {"phone": Phone, "hospital": Hospital, "iot": IoT}
