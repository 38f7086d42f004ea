"""How alike two pictures or two maps are."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import BadInput, nearest

Window = Literal["gaussian", "uniform"]


def psnr(a: Tensor, b: Tensor, data_range: float) -> Tensor:
    """[images] peak signal to noise ratio in dB; infinite for equal images."""
    _same(a, b)
    return 10 * torch.log10(data_range**2 / (a - b).flatten(1).square().mean(1))


def ssim(a: Tensor, b: Tensor, data_range: float | Tensor, window: Window = "gaussian") -> Tensor:
    """[images] structural similarity of [images, channels, h, w] (Wang et al., 2004), mean over places and channels.

    gaussian: 11 x 11, sigma 1.5, as in the paper; uniform: 7 x 7 with sample covariances. Windows lie inside the image.
    `data_range` is the largest value minus the smallest that images can have, one number or one per image.
    """
    _same(a, b)
    if window not in _WINDOWS:
        raise BadInput(f"window={window} is not known; {nearest(window, _WINDOWS)}")
    weights = _WINDOWS[window].to(a)
    side = len(weights)
    if a.dim() != 4 or min(a.shape[2:]) < side:
        raise BadInput(f"SSIM with a {window} window needs images [n, c, h, w] of {side} x {side} or more")
    sample = side**2 / (side**2 - 1) if window == "uniform" else 1.0

    def local_mean(x: Tensor) -> Tensor:
        rows = F.conv2d(x.flatten(0, 1)[:, None], weights.view(1, 1, -1, 1))
        return F.conv2d(rows, weights.view(1, 1, 1, -1)).view(*x.shape[:2], x.shape[2] - side + 1, -1)

    mean_a, mean_b = local_mean(a), local_mean(b)
    var_a, var_b = (sample * (local_mean(x * x) - m * m) for x, m in ((a, mean_a), (b, mean_b)))
    covariance = sample * (local_mean(a * b) - mean_a * mean_b)
    span = torch.as_tensor(data_range).to(a).view(-1, 1, 1, 1)
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    alike = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return (alike / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean((1, 2, 3))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """[images] of the maps as vectors; 0 where one of them is zero."""
    _same(a, b)
    return F.cosine_similarity(a.flatten(1), b.flatten(1), eps=1e-30)


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """[images] Spearman's, equal values sharing their mean rank; 0 where a map is constant."""
    _same(a, b)
    ranks = [_ranks(x.flatten(1)) for x in (a, b)]
    return cosine(*(r - r.mean(1, keepdim=True) for r in ranks))


def _ranks(rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    ordered = rows.sort(1)[0]
    below, up_to = (torch.searchsorted(ordered, rows, right=right) for right in (False, True))
    return (below + up_to + 1).double() / 2


def _gaussian(radius: int, sigma: float) -> Tensor:
    weights = torch.exp(-(torch.arange(-radius, radius + 1, dtype=torch.float64) ** 2) / (2 * sigma**2))
    return weights / weights.sum()


_WINDOWS = {"gaussian": _gaussian(5, 1.5), "uniform": torch.full((7,), 1 / 7, dtype=torch.float64)}


def _same(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise BadInput(f"only pictures of one shape can be compared, not {list(a.shape)} with {list(b.shape)}")
