"""FedSLS's latents, maps of saliency and smaller images, and how like the images they are (figures 3 and 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...algorithms.fedsl import average_pool
from ...attribution.attribute import attribute
from ...attribution.channels import tapped
from ...attribution.inputs import prepare
from ...attribution.operations import CONVOLUTIONS, RELUS, SMOOTH, Operation, Rewriting
from ...attribution.rules import guided
from ...attribution.similarity import cosine, ssim
from ...core.errors import BadInput
from ...core.network import Network
from ...core.tree import Tree

FACTORS = (2, 4, 8)
SIDE = 64  # pixels, to which the paper brings all images and maps
_AT_A_TIME = 250


@dataclass(frozen=True)
class Eye:
    """A network that looks at colour images in [0, 1], and the scale it knows them in."""

    net: Network
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def scaled(self, images: Tensor) -> Tensor:
        mean, std = (images.new_tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return (images.expand(-1, 3, -1, -1) - mean) / std

    def outputs(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self.net(self.net.initial_weights(), self.scaled(images))


def saliency_maps(net: Network, weights: Tree, x: Tensor, y: Tensor | None = None) -> Tensor:
    """[images, h, w] at the first convolution: the channel mean of guided gradient times positive activation.

    Of the true class's logit, or without y of the predicted one's.
    """
    inputs = prepare(net, weights, x, y, "predicted" if y is None else "true", "logit")
    if not inputs.kinds & CONVOLUTIONS:
        raise BadInput("saliency maps need a convolution, and the network has none")

    def first(step: Operation, out: Tensor) -> Tensor:
        if leaves:
            return out
        leaves.append(out.new_zeros(len(out), *out.shape[2:], requires_grad=True))
        return tapped(out, leaves[0], lambda gradient, out: (gradient * out.clamp(min=0)).mean(1))

    found = []
    for _, images, wanted in inputs.pieces():
        leaves: list[Tensor] = []
        with torch.enable_grad(), Rewriting(inputs.net, [(RELUS | SMOOTH, guided), (CONVOLUTIONS, first)]):
            total = inputs.each(inputs.logits(images), wanted).sum()
        found.append(torch.autograd.grad(total, leaves, materialize_grads=True)[0].to(x))
    return torch.cat(found)


def latents(eye: Eye, images: Tensor) -> dict[str, Tensor]:
    """[images, h, w] each, channels averaged: saliency, the same gradient at the pixels, images f times smaller.

    The paper takes "the output image of the first layer of BackPropagation", which may mean either of the first two.
    """
    weights, x = eye.net.initial_weights(), eye.scaled(images)
    pixels = attribute("guided_backprop", eye.net, weights, x, target="predicted").mean(1)
    smaller = {f"f = {f}": average_pool(f)(images).mean(1) for f in FACTORS}
    return {"saliency": saliency_maps(eye.net, weights, x), "at pixels": pixels, **smaller}


def comparable(maps: Tensor, side: int = SIDE) -> Tensor:
    """[images, 1, side, side] in [0, 1]: one size, brightness 1/2, contrast (standard deviation) 1/4."""
    maps = F.interpolate(maps[:, None], (side, side), mode="bilinear", align_corners=False)
    middle, spread = maps.mean((2, 3), keepdim=True), maps.std((2, 3), keepdim=True)
    flat = spread <= 1e-6 * middle.abs()  # rounding is no contrast
    return (0.5 + 0.25 * ((maps - middle) / spread).masked_fill(flat, 0)).clamp(0, 1)


def likeness(eye: Eye, images: Tensor, judge: Eye | None = None) -> dict[str, dict[str, Tensor]]:
    """{measure: {latent: [images]}}: of each latent with its image, both gray, of one size, brightness and contrast.

    `judge` is the network whose outputs the cosine compares, when it is another than that of the latents.
    """
    pieces = [_likeness(eye, piece, judge or eye) for piece in images.split(_AT_A_TIME)]
    return {
        measure: {name: torch.cat([piece[measure][name] for piece in pieces]) for name in of}
        for measure, of in pieces[0].items()
    }


def _likeness(eye: Eye, images: Tensor, judge: Eye) -> dict[str, dict[str, Tensor]]:
    image = comparable(images.mean(1))
    maps = {name: comparable(latent) for name, latent in latents(eye, images).items()}
    seen = judge.outputs(image)
    return {
        "SSIM": {name: ssim(image, latent, 1.0) for name, latent in maps.items()},
        "cosine of outputs": {name: cosine(seen, judge.outputs(latent)) for name, latent in maps.items()},
        "Euclidean distance": {name: (image - latent).flatten(1).norm(dim=1) for name, latent in maps.items()},
    }


def quartiles(scores: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, dict[str, float]]]:
    """What a box plot shows of each."""
    marks = {"lower quartile": 0.25, "median": 0.5, "upper quartile": 0.75}
    return {
        measure: {
            name: {"mean": float(values.double().mean())}
            | {mark: float(values.double().quantile(share)) for mark, share in marks.items()}
            for name, values in of.items()
        }
        for measure, of in scores.items()
    }
