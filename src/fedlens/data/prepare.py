"""From stored bytes to network input, on whatever device they are."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.rng import fold, uniform
from .randaugment import randaugment


@functools.lru_cache(maxsize=64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """x * scale + shift, kept on the device: a copy from the host inside a step could not be recorded."""
    scale = torch.tensor([1 / (255 * s) for s in std], dtype=dtype, device=device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=dtype, device=device)
    return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)


@dataclass(frozen=True)
class Prepare:
    """What is random where a key is given, then normalisation; recordable, as nothing is read back."""

    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    crop: int = 0  # pixels of black border to cut from; 0: no crop
    flip: bool = False
    dtype: torch.dtype = torch.float32
    randaugment: bool = False  # after crop and flip

    def __call__(self, x: Tensor, key: Tensor | None) -> Tensor:
        if key is not None and (self.crop or self.flip):
            x = self._moved(x, key)
        if key is not None and self.randaugment:
            x = randaugment(x, key)
        if x.is_cuda:
            scale, shift = _constants(self.mean, self.std, self.dtype, x.device)
            return torch.addcmul(shift, x.to(self.dtype, memory_format=torch.channels_last), scale)
        out = x.to(self.dtype, copy=True)
        # Scalars in place: on a CPU this is the cheapest, and it needs no tensors of constants.
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            out[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
        return out

    def _moved(self, x: Tensor, key: Tensor) -> Tensor:
        """Crop and flip as one gather."""
        count, channels, height, width = x.shape
        down, right = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        drawn = uniform(fold(key, "move"), count, 3)  # at once: drawing is a dozen small kernels on a GPU
        if self.flip:
            right = torch.where(drawn[:, :1] < 0.5, width - 1 - right, right)
        if self.crop:
            offsets = (drawn[:, 1:] * (2 * self.crop + 1)).long()
            down, right = down + offsets[:, :1], right + offsets[:, 1:]
            # Black before normalisation, as RandomCrop of torchvision pads.
            x = F.pad(x, (self.crop,) * 4)
        where = down.view(-1, height, 1) * x.shape[3] + right.view(-1, 1, width)
        where = where.view(-1, 1, height * width).expand(count, channels, -1)
        return x.flatten(2).gather(2, where).view(count, channels, height, width)
