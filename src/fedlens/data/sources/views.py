"""The same image in another modality: grey, on a coloured background, as edges; and generic corruptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.fields import Count, NonNegative, Positive
from ..partition.counts import Generator
from .backgrounds import patches


@dataclass(frozen=True)
class View:
    """A function of bytes [N, C, H, W] to bytes [N, 1 or 3, H, W]; all that is random comes from `draw`."""

    name: ClassVar[str]

    def __call__(self, x: np.ndarray, draw: Generator) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} does not say what an image looks like")


def grey(x: np.ndarray) -> np.ndarray:
    """Luminance of Rec. 601, [N, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return np.round(np.einsum("nchw,c->nhw", x, np.array([0.299, 0.587, 0.114], np.float32)))[:, None].astype(np.uint8)


@dataclass(frozen=True)
class AsItIs(View):
    name = "original"

    def __call__(self, x, draw):
        return x


@dataclass(frozen=True)
class Gray(View):
    name = "gray"

    def __call__(self, x, draw):
        return grey(x)


@dataclass(frozen=True)
class Colour(View):
    """On a random piece of a natural photograph, as MNIST-M (Ganin et al., 2016) does with BSDS500."""

    mix: Literal["difference", "sum"] = "difference"
    name = "colour"

    def __call__(self, x, draw):
        behind, before = patches(len(x), x.shape[2:], draw).astype(np.int16), grey(x).astype(np.int16)
        mixed = np.abs(behind - before) if self.mix == "difference" else np.minimum(behind + before, 255)
        return mixed.astype(np.uint8)


@dataclass(frozen=True)
class Edge(View):
    """Canny's edges (1986), white on black."""

    low: Positive = 100.0  # thresholds of the gradient's size |dx| + |dy| on bytes
    high: Positive = 200.0
    name = "edge"

    def __call__(self, x, draw):
        parts = np.array_split(grey(x), max(1, len(x) // 2048))
        return np.concatenate([canny(torch.from_numpy(part), self.low, self.high).numpy() for part in parts])


@dataclass(frozen=True)
class Inverted(View):
    name = "inverted"

    def __call__(self, x, draw):
        return 255 - x


@dataclass(frozen=True)
class Rotated(View):
    quarters: Count = 1  # turns of 90 degrees, against the clock
    name = "rotated"

    def __call__(self, x, draw):
        return np.ascontiguousarray(np.rot90(x, self.quarters, (2, 3)))


@dataclass(frozen=True)
class Noisy(View):
    sigma: NonNegative = 25.0  # of Gaussian noise, in grey levels of 255
    name = "noisy"

    def __call__(self, x, draw):
        noise = draw.standard_normal(x.shape, np.float32) * self.sigma
        return np.clip(np.round(x + noise), 0, 255).astype(np.uint8)


VIEWS: dict[str, type[View]] = {view.name: view for view in (AsItIs, Gray, Colour, Edge, Inverted, Rotated, Noisy)}


def canny(x: Tensor, low: float, high: float) -> Tensor:
    """Edges of grey bytes [N, 1, H, W] as 0 and 255: Sobel, thinning across the edge, hysteresis."""
    smooth, slope = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])
    kernels = torch.stack([torch.outer(smooth, slope), torch.outer(slope, smooth)])[:, None]
    dx, dy = F.conv2d(F.pad(x.float(), (1, 1, 1, 1), mode="replicate"), kernels).split(1, dim=1)
    size = dx.abs() + dy.abs()
    edge = _thinned(size, dx, dy) & (size > low)
    strong = edge & (size > high)
    while True:  # ends: every turn but the last adds a pixel
        grown = edge & (F.max_pool2d(strong.float(), 3, stride=1, padding=1) > 0)
        if torch.equal(grown, strong):
            return strong.to(torch.uint8) * 255
        strong = grown


def _thinned(size: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Where the gradient is a maximum along its own direction, rounded to one of four."""
    around = F.pad(size, (1, 1, 1, 1))

    def beside(down: int, right: int) -> Tensor:
        return around[:, :, 1 + down : around.shape[2] - 1 + down, 1 + right : around.shape[3] - 1 + right]

    flat, steep = dy.abs() < dx.abs() * (2**0.5 - 1), dy.abs() > dx.abs() * (2**0.5 + 1)  # tan of 22.5 and 67.5 degrees
    # Of two equal neighbours the later one goes; on diagonals both do.
    across = (size > beside(0, -1)) & (size >= beside(0, 1))
    upright = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    slanted = torch.where(dx * dy < 0, rising, falling)
    return torch.where(flat, across, torch.where(steep, upright, slanted))
