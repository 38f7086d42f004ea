"""How good recovered pictures are, and whether they show this image or only its kind."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attribution.similarity import psnr, ssim
from .attack import LabelledImages, Prior
from .measures import Measure, mean, share

_WINDOW = 11  # SSIM's; smaller pictures are compared by PSNR alone


def likeness(recovered: Tensor, originals: LabelledImages, prior: Prior) -> dict[str, Measure]:
    """SSIM and PSNR in pixels from 0 to 1, and how often a picture is nearer to its own original than to any other
    image of the same class, auxiliary ones included: a prototype of the class is not."""
    made, true = prior.pixels(recovered), prior.pixels(originals.x)
    found: dict[str, Measure] = {}
    if min(true.shape[2:]) >= _WINDOW:
        found["SSIM"] = mean(ssim(made.double(), true.double(), 1.0))
    found["PSNR"] = mean(psnr(made.double(), true.double(), 1.0).clamp(max=100))
    others = prior.pixels(prior.auxiliary.x)
    everything, labels = torch.cat([true, others]).flatten(1), torch.cat([originals.y, prior.auxiliary.y])
    distance = torch.cdist(made.flatten(1).double(), everything.double())
    distance = distance.masked_fill(labels != originals.y[:, None], torch.inf)
    own = torch.arange(len(true), device=true.device)
    found["recognised"] = share(int((distance.argmin(1) == own).sum()), len(true))
    return found


def decisive(measures: dict[str, Measure]) -> str:
    return "SSIM" if "SSIM" in measures else "PSNR"


def matched(recovered: Tensor, originals: Tensor) -> Tensor:
    """The recovered pictures in the order of the originals, best pair first: a batch has no order of its own."""
    distance = torch.cdist(originals.flatten(1).double(), recovered.flatten(1).double())
    order = torch.zeros(len(originals), dtype=torch.long, device=recovered.device)
    for _ in range(len(originals)):
        place = int(distance.argmin())
        row, column = place // len(recovered), place % len(recovered)
        order[row] = column
        distance[row], distance[:, column] = torch.inf, torch.inf
    return recovered[order]
