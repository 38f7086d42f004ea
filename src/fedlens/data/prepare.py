"""From stored bytes to network input, on whatever device they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.rng import fold, uniform


@dataclass(frozen=True)
class Prepare:
    """Random crop and flip where a key is given, then normalisation."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int = 0  # pixels of black border to cut from; 0: no crop
    flip: bool = False
    dtype: torch.dtype = torch.float32

    def __call__(self, x: Tensor, key: Tensor | None) -> Tensor:
        if key is not None and self.crop:
            x = self._cropped(x, fold(key, "crop"))
        if key is not None and self.flip:
            mirrored = uniform(fold(key, "flip"), len(x)) < 0.5
            x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
        return torch.addcmul(self._per_channel(x, self.shift), x.to(self.dtype), self._per_channel(x, self.scale))

    def _cropped(self, x: Tensor, key: Tensor) -> Tensor:
        height, width = x.shape[2:]
        # Black before normalisation, as torchvision's RandomCrop pads.
        windows = F.pad(x, (self.crop,) * 4).unfold(2, height, 1).unfold(3, width, 1)
        down, right = (uniform(key, 2, len(x)) * (2 * self.crop + 1)).long()
        return windows[torch.arange(len(x), device=x.device), :, down, right]

    @property
    def scale(self) -> tuple[float, ...]:
        return tuple(1 / (255 * std) for std in self.std)

    @property
    def shift(self) -> tuple[float, ...]:
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))

    def _per_channel(self, x: Tensor, values: tuple[float, ...]) -> Tensor:
        # Filled on the device: a copy from the host could not be recorded.
        filled = torch.empty(len(values), 1, 1, dtype=self.dtype, device=x.device)
        for row, value in zip(filled, values, strict=True):
            row.fill_(value)
        return filled
