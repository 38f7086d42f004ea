"""Pictures of what FedXDS would release, and of where its promise breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..algorithms.fedxds import PAPER, FedXDS
from ..core.network import Network
from ..core.rng import key
from ..core.tree import Tree
from ..plots.style import COLOURS, pyplot, save

EPSILONS = (1.0, 5.0, 20.0)
SPARSITIES = (60, 65, 70, 75, 80, 85)


def released_images(
    net: Network,
    weights: Tree,
    x: Tensor,
    y: Tensor,
    path: Path,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    by: FedXDS = PAPER,
    epsilons: Sequence[float] = EPSILONS,
    sparsities: Sequence[float] = SPARSITIES,
) -> Path:
    """Normalised images x, and below each what leaves of it: a row for each epsilon, a column for each sparsity."""
    plt = pyplot()
    wide = len(sparsities) + 2
    figure, axes = plt.subplots(
        len(x) * len(epsilons), wide, figsize=(1.15 * wide, 1.2 * len(x) * len(epsilons)), squeeze=False
    )
    seed = torch.tensor(key("picture"), device=x.device)
    for number in range(len(x)):
        image, label = x[number : number + 1], y[number : number + 1]
        for line, epsilon in enumerate(epsilons):
            row = axes[number * len(epsilons) + line]
            shown = {"image": image}
            for sparsity in (0, *sparsities):
                how = replace(by, epsilon=epsilon, sparsity=sparsity)
                shown[f"s = {sparsity}"] = how.released(net, weights, image, label, seed).x.to(image)
            noise = replace(by, epsilon=epsilon).noise
            row[0].set_ylabel(f"ε = {epsilon:g}\nσ = {noise:.2f}", rotation=0, labelpad=26, va="center", fontsize=9)
            for axis, (name, found) in zip(row, shown.items(), strict=True):
                axis.imshow(_seen(found[0], mean, std), interpolation="nearest")
                axis.set(xticks=[], yticks=[])
                axis.grid(False)
                axis.spines[:].set_visible(False)
                if number == line == 0:
                    axis.set_title(name, fontsize=9)
    figure.tight_layout(pad=0.3)
    return save(figure, path)


def _seen(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Back to pixels in [0, 1]; what noise carries beyond is cut off."""
    scale, shift = (image.new_tensor(values).view(-1, 1, 1) for values in (std, mean))
    return (image * scale + shift).clamp(0, 1).permute(1, 2, 0).cpu().numpy()


def sensitivity(net: Network, weights: Tree, here: Tensor, there: Tensor, y: Tensor, path: Path) -> Path:
    """How far releases move as an image [1, c, h, w] turns into another: under its own mask, and under its class's."""
    plt = pyplot()
    figure, (whole, close) = plt.subplots(1, 2, figsize=(10, 3.8))
    kinds: dict[str, Literal["image", "class"]] = {"mask of the image (paper)": "image", "mask of the class": "class"}
    seed = torch.tensor(key("picture"), device=here.device)
    for (name, source), colour in zip(kinds.items(), COLOURS[1::-1], strict=True):
        by = FedXDS(mask_source=source, clip_norm=None)
        for axis, end in ((whole, 1.0), (close, 0.02)):
            places = torch.linspace(0, end, 401, device=here.device).to(here)
            path_of = here + places.view(-1, 1, 1, 1) * (there - here)
            labels = y.expand(len(places))
            masked, _ = by.masked(path_of, by.pixel_scores(net, weights, path_of, labels, 64, seed), seed)
            moved = (masked - masked[:1]).flatten(1).norm(dim=1)
            distance = (path_of - path_of[:1]).flatten(1).norm(dim=1)
            axis.plot(distance.cpu().numpy(), moved.cpu().numpy(), color=colour, label=name, linewidth=1.4)
    for axis, end in ((whole, 1.0), (close, 0.02)):
        far = float((there - here).norm()) * end
        axis.plot([0, far], [0, far], color="#888888", linestyle="--", linewidth=1, label="the paper's bound")
        axis.set(xlabel="distance of the images", ylabel="distance of what is released, before noise", xlim=(0, far))
    whole.set_title("from one image to another")
    close.set_title("the first fiftieth of the way")
    whole.legend(loc="upper left")
    figure.tight_layout()
    return save(figure, path)
