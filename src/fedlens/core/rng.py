"""The only source of randomness: numbers that depend on named parts alone."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor


def key(*parts: object) -> int:
    """A seed that depends on its parts alone, e.g. key(seed, "batches", round, client)."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numpy_generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """For code that insists on torch's global generator (modules drawing their first weights); restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:  # without GPUs torch would keep every seed, and where it came from, for the day there is one
            torch.default_generator.manual_seed(seed)
        yield


def fold(seed: Tensor, purpose: str) -> Tensor:
    """Another key for another purpose, so that two draws of one step share no numbers."""
    return _mix(seed ^ key(purpose))


def uniform(seed: Tensor, *shape: int) -> Tensor:
    """Numbers in [0, 1): splitmix64 of the key, so the same on every device and inside a recorded step."""
    counter = torch.arange(1, math.prod(shape) + 1, device=seed.device)
    return ((_mix(seed + counter * -7046029254386353131) >> 40) & 0xFFFFFF).float().view(shape) / 2**24


def normal(seed: Tensor, *shape: int) -> Tensor:
    radius = (-2 * torch.log1p(-uniform(fold(seed, "radius"), *shape))).sqrt()
    return radius * torch.cos(2 * math.pi * uniform(fold(seed, "angle"), *shape))


# ---- noise that protects somebody ----
_SYSTEM: ContextVar[bool] = ContextVar("noise comes from the operating system", default=False)


@contextmanager
def system_noise() -> Iterator[None]:
    """Within it privacy_noise and privacy_coins come from the operating system, and no seed brings them back.

    For data that are really somebody's. A simulation repeats, so that its noise protects nobody.
    """
    token = _SYSTEM.set(True)
    try:
        yield
    finally:
        _SYSTEM.reset(token)


def privacy_noise(seed: Tensor, *shape: int) -> Tensor:
    """Standard normal noise of a privacy mechanism."""
    if not _SYSTEM.get():
        return normal(seed, *shape)
    radius = np.sqrt(-2 * np.log1p(-_from_system(*shape)))
    return torch.from_numpy(radius * np.cos(2 * math.pi * _from_system(*shape))).to(seed.device)


def privacy_coins(seed: Tensor, *shape: int) -> Tensor:
    """Numbers in [0, 1) by which a privacy mechanism decides."""
    return torch.from_numpy(_from_system(*shape)).to(seed.device) if _SYSTEM.get() else uniform(seed, *shape)


def _from_system(*shape: int) -> np.ndarray:
    """Numbers in [0, 1) with 53 random bits each."""
    drawn = np.frombuffer(os.urandom(8 * math.prod(shape)), np.uint64) >> np.uint64(11)
    return drawn.astype(np.float64).reshape(shape) / 2**53


def _mix(x: Tensor) -> Tensor:
    for shift, multiplier in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (1 << 64 - shift) - 1)) * multiplier
    return x ^ ((x >> 31) & (1 << 33) - 1)
