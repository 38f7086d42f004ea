"""RandAugment(2, 10) with a cutout, as code that follows FixMatch has it; recordable, and in integers alone.

Two of fourteen changes are drawn for every image, with replacement, each of a strength from 1 to 9, and each happens
every other time. A gray square of half the side follows. Results are Pillow's, but for levels that its floats round to
the next: shares are exact here, so that every device and every engine has the same bits.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.rng import fold, uniform

CHANGES = (
    *("autocontrast", "brightness", "color", "contrast", "equalize", "identity", "posterize"),
    *("rotate", "sharpness", "solarize", "shear_x", "shear_y", "translate_x", "translate_y"),
)
STRENGTHS = 9
_TWICE = 2
_GRAY = 127
_LUMA = (19595, 38470, 7471)  # of red, green and blue, in 65536ths


class Drawn(NamedTuple):
    """One number for each image."""

    change: Tensor  # of CHANGES
    strength: Tensor  # from 1 to STRENGTHS
    turned: Tensor  # 1: to the other side

    def is_(self, name: str) -> Tensor:
        return (self.change == CHANGES.index(name)).view(-1, 1, 1)


def randaugment(x: Tensor, key: Tensor) -> Tensor:
    """uint8 [n, 1 or 3, h, w]: what an image gets depends on the key and its place in the batch alone."""
    drawn = uniform(fold(key, "randaugment"), len(x), 4 * _TWICE + 2).double()
    image = x.int()
    for at in range(0, 4 * _TWICE, 4):
        change, strength, happens, turned = drawn[:, at : at + 4].unbind(1)
        which = torch.where(happens < 0.5, (change * len(CHANGES)).long(), CHANGES.index("identity"))
        image = changed(image, Drawn(which, (strength * STRENGTHS).long() + 1, (turned < 0.5).long()))
    return cut_out(image, drawn[:, -2], drawn[:, -1]).to(torch.uint8)


def changed(x: Tensor, drawn: Drawn) -> Tensor:
    """int32 [n, c, h, w]: every image by its own change, which is one of colours, of levels or of places."""
    return _moved(_relevelled(_recoloured(x, drawn), drawn), drawn)


def cut_out(x: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Without a square around a place in [0, 1); one pixel more than half the side, as Pillow draws rectangles."""
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for share, axis in ((right, 3), (down, 2)):
        side = x.shape[axis]
        first = (share * side - side // 2 / 2).clamp(min=0).long().view(-1, *[1] * 3)
        place = torch.arange(side, device=x.device).view([-1 if axis == at else 1 for at in range(4)])
        inside = inside & (place >= first) & (place <= first + side // 2)
    return torch.where(inside, _GRAY, x)


def _share(drawn: Drawn) -> Tensor:
    """How much of an image stays, in per cent: 14 to 86."""
    return (9 * drawn.strength + 5).int().view(-1, 1, 1)


def _blend(x: Tensor, other: Tensor, share: Tensor) -> Tensor:
    return (100 * other + share * (x - other)) // 100


def _luma(x: Tensor) -> Tensor:
    """[n, h, w]"""
    if x.shape[1] == 1:
        return x[:, 0]
    red, green, blue = (part * weight for part, weight in zip(x.unbind(1), _LUMA, strict=True))
    return (red + green + blue + (1 << 15)) >> 16


# ---- colours: towards gray, or towards a smooth image ----
def _recoloured(x: Tensor, drawn: Drawn) -> Tensor:
    gray, sharp = (drawn.is_(name).unsqueeze(1) for name in ("color", "sharpness"))
    other = torch.where(gray, _luma(x).unsqueeze(1), _smooth(x))
    return torch.where(gray | sharp, _blend(x, other, _share(drawn).unsqueeze(1)), x)


def _smooth(x: Tensor) -> Tensor:
    """A pixel counts as five, each of its eight neighbours as one; the border stays."""
    height, width = x.shape[2:]
    if min(height, width) < 3:
        return x
    window = [x[:, :, i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)]
    out = x.clone()
    out[:, :, 1:-1, 1:-1] = (2 * (sum(window) + 4 * window[4]) + 13) // 26
    return out


# ---- levels: a table of 256 for every image and colour ----
def _relevelled(x: Tensor, drawn: Drawn) -> Tensor:
    level = torch.arange(256, dtype=torch.int32, device=x.device).expand(*x.shape[:2], -1)
    share, strength = _share(drawn), drawn.strength.int().view(-1, 1, 1)
    mean = _luma(x).flatten(1).sum(1).view(-1, 1, 1)
    pixels = x.shape[2] * x.shape[3]
    mean = ((2 * mean + pixels) // (2 * pixels)).int()
    bits = 4 - strength * 4 // 10
    tables = {
        "autocontrast": _stretched(x, level),
        "brightness": share * level // 100,
        "contrast": _blend(level, mean, share),
        "equalize": _equalized(x, level),
        "posterize": (level >> bits) << bits,
        "solarize": torch.where(level < 256 - strength * 256 // 10, level, 255 - level),
    }
    table = level
    for name, its in tables.items():
        table = torch.where(drawn.is_(name), its.int(), table)
    return table.gather(2, x.flatten(2).long()).view(x.shape)


def _stretched(x: Tensor, level: Tensor) -> Tensor:
    least, most = x.flatten(2).aminmax(dim=2, keepdim=True)
    table = ((level - least) * 255 // (most - least).clamp(min=1)).clamp(0, 255)
    return torch.where(most > least, table, level)


def _equalized(x: Tensor, level: Tensor) -> Tensor:
    """As many pixels in each level, as far as that goes."""
    flat = x.flatten(2)
    counts = torch.zeros(level.shape, dtype=torch.int32, device=x.device)
    counts = counts.scatter_add(2, flat.long(), torch.ones_like(flat))
    brightest = (flat == flat.amax(2, keepdim=True)).sum(2, keepdim=True)
    step = (flat.shape[2] - brightest) // 255
    below = counts.cumsum(2) - counts
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table, level)


# ---- places: every pixel comes from where a matrix says, in 65536ths of a pixel ----
def _moved(x: Tensor, drawn: Drawn) -> Tensor:
    height, width = x.shape[2:]
    matrix = _matrices(height, width, x.device)[drawn.change, drawn.strength, drawn.turned].view(-1, 2, 3, 1, 1)
    right, down = torch.arange(width, device=x.device), torch.arange(height, device=x.device).view(-1, 1)
    column, row = ((m[:, 0] * right + m[:, 1] * down + m[:, 2]) >> 16 for m in matrix.unbind(1))
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    where = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).view(-1, 1, height * width)
    found = x.flatten(2).gather(2, where.expand(-1, x.shape[1], -1)).view(x.shape)
    return torch.where(inside.unsqueeze(1), found, 0)


@functools.lru_cache(maxsize=16)
def _matrices(height: int, width: int, device: torch.device) -> Tensor:
    """[changes, strengths from 0, sides, 6], kept on the device: a copy inside a step could not be recorded."""
    every = [
        [[_fixed(_matrix(name, v, sign, height, width)) for sign in (1, -1)] for v in range(STRENGTHS + 1)]
        for name in CHANGES
    ]
    return torch.tensor(every, device=device)


def _matrix(name: str, v: int, sign: int, height: int, width: int) -> tuple[float, ...]:
    """Where the pixel at (x, y) comes from: (a x + b y + c, d x + e y + f)."""
    part = sign * v * 0.3 / 10
    if name == "shear_x":
        return 1, part, 0, 0, 1, 0
    if name == "shear_y":
        return 1, 0, 0, part, 1, 0
    if name == "translate_x":
        return 1, 0, int(part * width), 0, 1, 0
    if name == "translate_y":
        return 1, 0, 0, 0, 1, int(part * height)
    if name == "rotate":  # about the middle
        angle, x, y = -math.radians(sign * 3 * v % 360), width / 2, height / 2
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y
    return 1, 0, 0, 0, 1, 0


def _fixed(matrix: tuple[float, ...]) -> list[int]:
    """From the middle of a pixel."""
    a, b, c, d, e, f = matrix
    return [math.floor(value * 65536 + 0.5) for value in (a, b, c + a / 2 + b / 2, d, e, f + d / 2 + e / 2)]
