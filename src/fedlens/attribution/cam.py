"""Class activation maps: where in the last maps of a network the evidence for a class lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import BadInput, nearest
from .inputs import Inputs, best
from .operations import CONVOLUTIONS, RELUS, Operation, Rewriting, is_relu


@dataclass(frozen=True)
class GradCam:
    """Selvaraju et al., 2017: maps weighed by the mean of their gradient, positive part."""

    layer: str = ""  # a module; else the last ReLU (or convolution) that tells more than one place apart
    upsample: bool = True  # to the size of the image

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor:
        with torch.enable_grad():
            maps, logits = maps_of(inputs, x, self.layer)
            total = inputs.each(logits, wanted).sum()
        gradient = torch.autograd.grad(total, maps, materialize_grads=True)[0]
        maps = maps.detach()
        return shown((self.weigh(maps, gradient)[:, :, None, None] * maps).sum(1), x, self.upsample)

    def weigh(self, maps: Tensor, gradient: Tensor) -> Tensor:
        """[images, channels]."""
        return gradient.mean((2, 3))


@dataclass(frozen=True)
class GradCamPlusPlus(GradCam):
    """Chattopadhay et al., 2018: positive gradients, weighed so that every place of the evidence counts.

    As equation 19. The released code also divides the alphas of a channel by their sum, which no equation does.
    """

    def weigh(self, maps: Tensor, gradient: Tensor) -> Tensor:
        return plus_plus(maps, gradient).sum((2, 3))


@dataclass(frozen=True)
class ScoreCam:
    """Wang et al., 2020: a channel counts by the score of the image seen through its map. Needs no gradient."""

    layer: str = ""
    upsample: bool = True

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor:
        with torch.no_grad():
            maps, logits = maps_of(inputs, x, self.layer)
            wanted = best(logits) if wanted is None else wanted
            rows = [self._scores(inputs, *one) for one in zip(x, maps, wanted, strict=True)]
            weight = torch.stack(rows).softmax(1)
        return shown((weight[:, :, None, None] * maps).sum(1), x, self.upsample)

    def _scores(self, inputs: Inputs, image: Tensor, maps: Tensor, wanted: Tensor) -> Tensor:
        """[channels] how much the score rises from the empty image to what each channel lets through."""
        found = [inputs.each(inputs.logits(image.new_zeros(1, *image.shape)), wanted[None])]
        for part in maps.split(inputs.rows):
            masks = stretched(resized(part, image))
            found.append(inputs.each(inputs.logits(image * masks[:, None]), wanted.expand(len(part), -1)))
        return torch.cat(found[1:]) - found[0]


def plus_plus(maps: Tensor, gradient: Tensor, tiny: float = 1e-12) -> Tensor:
    """What each place adds to a channel's weight in Grad-CAM++: alpha times the positive gradient.

    Equation 19, alpha = g^2 / (2 g^2 + S g^3) with S the sum of the channel's map, divided by g^2: squares and cubes of
    small gradients vanish. Where g is not positive nothing is added.
    """
    positive = gradient.clamp(min=0)
    below = 2 + maps.sum((2, 3), keepdim=True) * positive  # of maps before their ReLU the sum may be negative
    return torch.where(below.abs() > tiny, positive / torch.where(below.abs() > tiny, below, 1), 0)


def maps_of(inputs: Inputs, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    """The maps [images, channels, h, w] of a layer as a leaf, and the logits computed from it.

    The pass is cut at every candidate, so that only what follows the last one is kept for the way back.
    """
    if not inputs.kinds & CONVOLUTIONS or x.dim() != 4:
        raise BadInput("a class activation map needs a convolution, and the network has none; use another method")
    found: list[Tensor] = []

    def cut(out: Tensor) -> Tensor:
        leaf = out.detach().requires_grad_(torch.is_grad_enabled())
        found.append(leaf)
        return leaf

    if layer:
        part = _named(inputs, layer)
        with inputs.net.replacing_outputs(lambda name, m, x, out: cut(out) if m is part else out, (type(part),)):
            logits = inputs.logits(x)
        if len(found) != 1 or found[0].dim() != 4:
            what = "gives no map" if found else "does not run"
            raise BadInput(f"layer={layer} {'runs more than once' if len(found) > 1 else what}; choose another one")
        return found[0], logits

    def last(step: Operation, out: Tensor) -> Tensor:
        is_candidate = step.name in CONVOLUTIONS or is_relu(step)
        if not is_candidate or out.dim() != 4 or out.shape[2] * out.shape[3] == 1:
            return out
        found.clear()
        return cut(out)

    with Rewriting(inputs.net, [(RELUS if "relu" in inputs.kinds else CONVOLUTIONS, last)]):
        logits = inputs.logits(x)
    if not found:
        raise BadInput(
            "no layer of the network tells places apart; give larger images, or the name of a layer, as in layer=layer2"
        )
    return found[0], logits


def resized(maps: Tensor, image: Tensor) -> Tensor:
    """[.., h, w] at the size of the image."""
    return F.interpolate(maps[:, None], image.shape[-2:], mode="bilinear", align_corners=False)[:, 0]


def stretched(maps: Tensor) -> Tensor:
    """[.., h, w] each from 0 to 1, at the size that they are used in; constant ones 0."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    return (maps - low) / (high - low).clamp(min=1e-12)


def shown(cam: Tensor, x: Tensor, upsample: bool) -> Tensor:
    cam = cam.clamp(min=0)
    return resized(cam, x) if upsample else cam


def _named(inputs: Inputs, layer: str) -> torch.nn.Module:
    parts = dict(inputs.net.module.named_modules())
    if layer not in parts or not layer:
        raise BadInput(f"layer={layer} is not in the network; {nearest(layer, [n for n in parts if n])}")
    return parts[layer]
