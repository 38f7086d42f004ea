"""Draws what FedXDS releases of two images, for docs/privacy-fedxds.md: `python docs/releases.py` (CIFAR-10).

images/released.png: the mechanism at three epsilons and several sparsities. images/sensitivity.png: how far releases
move, before noise, while one image turns into another.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens import config
from fedlens.algorithms import FedXDS
from fedlens.audit.attack import LabelledImages, trained
from fedlens.core.batches import Shard
from fedlens.core.rng import key
from fedlens.plots.style import COLOURS, pyplot, save

IMAGES = Path(__file__).parent / "images"
KINDS = {".png": None}
WORDS = ("data=cifar10", "model=cnn_small", "clients=10", "augment=none")
TRAINED, EPOCHS = 4000, 5
EPSILONS, SPARSITIES = (1, 5, 20), (0, 60, 65, 70, 75, 80, 85)
STEPS = 400  # of the way from one image to the other


def main() -> None:
    torch.set_num_threads(1)
    experiment = config.read(None, list(WORDS))
    loaded = experiment.images()
    federation, _ = experiment.federation(loaded)
    net = experiment.network(loaded)
    some = Shard(federation.data, torch.arange(TRAINED))
    images = LabelledImages(some.x, some.y)
    weights = trained(net, images, key("releases"), epochs=EPOCHS)
    with torch.no_grad():
        right = float((net(weights, images.x).argmax(1) == images.y).float().mean())
    print(f"the network is right on {100 * right:.1f} % of the {TRAINED} images that it was trained on")
    chosen = [int((images.y == loaded.classes.index(name)).nonzero()[0]) for name in ("ship", "horse")]
    two = images[torch.tensor(chosen)]
    scale, shift = (torch.tensor(values).view(-1, 1, 1) for values in (loaded.std, loaded.mean))
    print(released(net, weights, two, lambda x: (x * scale + shift).clamp(0, 1)))
    print(sensitivity(net, weights, two))


def released(net: Any, weights: Any, two: LabelledImages, pixels: Any) -> Path:
    """Rows: image and epsilon; columns: sparsity. The same draws of noise everywhere."""
    seed = torch.tensor(key("releases", 0))
    high, wide = len(two) * len(EPSILONS), 1 + len(SPARSITIES)
    figure, axes = pyplot().subplots(high, wide, figsize=(1.15 * wide, 1.2 * high))
    for number in range(len(two)):
        one = two[slice(number, number + 1)]
        for at, epsilon in enumerate(EPSILONS):
            row, by = axes[number * len(EPSILONS) + at], FedXDS(epsilon=epsilon)
            show(row[0], pixels(one.x[0]))
            row[0].set_ylabel(f"ε = {epsilon}\nσ = {by.noise:.2f}", rotation=0, ha="right", va="center", fontsize=9)
            for axis, sparsity in zip(row[1:], SPARSITIES, strict=True):
                sent = replace(by, sparsity=sparsity).released(net, weights, one.x, one.y, seed)
                show(axis, pixels(sent["x"].view_as(one.x)[0].float()))
    for axis, name in zip(axes[0], ("image", *(f"s = {s}" for s in SPARSITIES)), strict=True):
        axis.set_title(name, fontsize=9)
    figure.subplots_adjust(wspace=0.04, hspace=0.06)
    return save(figure, IMAGES / "released", whole=True, metadata=KINDS)


def show(axis: Any, picture: Tensor) -> None:
    axis.imshow(picture.permute(1, 2, 0).numpy(), interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.grid(False)
    axis.spines[:].set_visible(False)


def sensitivity(net: Any, weights: Any, two: LabelledImages) -> Path:
    """Distance of what is released from what the first image releases, over the distance of the images."""
    figure, axes = pyplot().subplots(1, 2, figsize=(9.5, 3.4))
    ends = {"from one image to another": 1.0, "the first fiftieth of the way": 0.02}
    for axis, (title, end) in zip(axes, ends.items(), strict=True):
        share = torch.linspace(0, end, STEPS).view(-1, 1, 1, 1)
        x = two.x[:1] + share * (two.x[1:] - two.x[:1])
        apart = distance(x)
        for source, told, colour in (("image", "mask of the image (paper)", 1), ("class", "mask of the class", 0)):
            by = FedXDS(mask_source=source, clip_norm=None, accounting="paper")
            y, seed = two.y[:1].expand(len(x)), torch.tensor(key("releases", 0))
            kept, _ = by.masked(x, by.pixel_scores(net, weights, x, y, len(x), seed), seed)
            axis.plot(apart, distance(kept), color=COLOURS[colour], label=told, linewidth=1.4)
        axis.plot(apart, apart, "--", color="#888888", linewidth=1, label="the paper's bound")
        axis.set(xlabel="distance of the images", title=title, label=title)
        axis.set_ylabel("distance of what is released,\nbefore noise")
    axes[0].legend(fontsize=9)
    figure.tight_layout()
    return save(figure, IMAGES / "sensitivity", metadata=KINDS)


def distance(x: Tensor) -> Tensor:
    return (x - x[:1]).flatten(1).norm(dim=1).detach()


if __name__ == "__main__":
    main()
