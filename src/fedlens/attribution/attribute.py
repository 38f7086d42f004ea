"""Maps of what a network looks at: one verb, every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..core.errors import BadInput, nearest
from ..core.network import Network
from ..core.rng import key, normal
from ..core.tree import Tree
from .cam import GradCam, GradCamPlusPlus, ScoreCam
from .inputs import Inputs, Score, Target, prepare
from .lrp import Lrp
from .operations import RELUS, SMOOTH
from .rules import guided


class Method(Protocol):
    """Maps of images that fit in one pass; `wanted` says how much each class counts, None: the predicted one."""

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor: ...


def attribute(
    method: str | Method,
    net: Network,
    weights: Tree,
    x: Tensor,
    y: Tensor | int | None = None,
    *,
    target: Target = "true",
    score: Score = "logit",
    chunk: int | None = None,
    most: int | None = None,
    **options: Any,
) -> Tensor:
    """One map for each image, like x; from the CAMs [images, height, width].

    `target`: the class asked about is y (true, given), the predicted one, or all together. `given` also takes
    [images, classes]: how much each class counts. Images are taken `chunk` at a time, by default what memory bears, and
    `most` of them; maps do not depend on it, nor on what else is in the batch. They lie where x lies, in its dtype.
    """
    how = chosen(method, options)
    differentiable = not isinstance(how, ScoreCam)
    inputs = prepare(net, weights, x, y, target, score, chunk, most=most, differentiable=differentiable)
    maps = None
    for part, images, wanted in inputs.pieces():
        found = how(inputs, images, wanted)
        if maps is None:  # one block for all, filled as it goes: pieces joined at the end would need twice the room
            maps = torch.empty(len(x), *found.shape[1:], dtype=x.dtype, device=x.device)
        maps[part] = found
    return torch.empty_like(x) if maps is None else maps


@dataclass(frozen=True)
class Gradient:
    """Simonyan et al., 2014, with its sign."""

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor:
        return inputs.gradient(x, wanted)


@dataclass(frozen=True)
class InputTimesGradient:
    """Shrikumar et al., 2016."""

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor:
        return x * inputs.gradient(x, wanted)


@dataclass(frozen=True)
class GuidedBackprop:
    """Springenberg et al., 2015."""

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor:
        if "relu" not in inputs.kinds:
            raise BadInput(
                "the network has no ReLU, so that guided backpropagation is the gradient; use method=gradient"
            )
        return inputs.gradient(x, wanted, [(RELUS | SMOOTH, guided)])


@dataclass(frozen=True)
class IntegratedGradients:
    """Sundararajan et al., 2017. Sums to the change of the score from the baseline to the image."""

    steps: int = 20
    baseline: float | Tensor = 0.0  # of a pixel, or like one image; zero is the mean colour of normalised images
    rule: Literal["midpoint", "right", "legendre"] = "midpoint"

    def __post_init__(self):
        if self.steps < 1:
            raise BadInput(f"steps={self.steps} is no path from the baseline to the image; give 1 or more")
        if self.rule not in _PATHS:
            raise BadInput(f"rule={self.rule} is not known; {nearest(self.rule, _PATHS)}")

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor:
        places, shares = _PATHS[self.rule](self.steps)
        start = torch.as_tensor(self.baseline).to(x)
        if start.dim() and start.shape != x.shape[1:]:
            raise BadInput(f"the baseline is {list(start.shape)}, an image {list(x.shape[1:])}; give one like an image")

        def points(images: Tensor, part: range) -> Tensor:
            t = x.new_tensor([places[s] for s in part]).view(1, -1, *[1] * (x.dim() - 1))
            return start + t * (images - start)[:, None]

        return (x - start) * _mean_gradient(inputs, x, wanted, points, shares)


@dataclass(frozen=True)
class SmoothGrad:
    """Smilkov et al., 2017: the mean gradient of noisy copies. Every image meets the same draws."""

    samples: int = 20
    noise: float = 0.1  # standard deviation, as a part of the image's own range
    seed: int = 0

    def __post_init__(self):
        if self.samples < 1 or not self.noise >= 0:
            raise BadInput(f"samples={self.samples} and noise={self.noise} must be at least 1 and 0")

    def draw(self, sample: int, image: Tensor) -> Tensor:
        """Standard normal, like one image."""
        seed = torch.tensor(key(self.seed, "smoothgrad", sample), device=image.device)
        return normal(seed, *image.shape).to(image)

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor:
        def points(images: Tensor, part: range) -> Tensor:
            flat = images.flatten(1)
            spread = self.noise * (flat.amax(1) - flat.amin(1)).view(-1, 1, *[1] * (x.dim() - 1))
            return images[:, None] + spread * torch.stack([self.draw(s, x[0]) for s in part])

        return _mean_gradient(inputs, x, wanted, points, [1 / self.samples] * self.samples)


METHODS: dict[str, type[Method]] = {
    "gradient": Gradient,
    "input_x_gradient": InputTimesGradient,
    "integrated_gradients": IntegratedGradients,
    "smoothgrad": SmoothGrad,
    "guided_backprop": GuidedBackprop,
    "lrp": Lrp,
    "grad_cam": GradCam,
    "grad_cam_pp": GradCamPlusPlus,
    "score_cam": ScoreCam,
}


def chosen(method: str | Method, options: dict[str, Any]) -> Method:
    """The method of that name with these options."""
    if not isinstance(method, str):
        if options:
            raise BadInput(f"options {', '.join(options)} belong into the method, which is given as a value")
        return method
    if method not in METHODS:
        raise BadInput(f"method={method} is not known; {nearest(method, METHODS)}")
    known = [f.name for f in fields(METHODS[method])]  # pyright: ignore[reportArgumentType]
    for name in options:
        if name not in known:
            hint = nearest(name, known) if known else "it has none"
            raise BadInput(f"method={method} has no option {name}; {hint}")
    return METHODS[method](**options)


def _mean_gradient(
    inputs: Inputs,
    x: Tensor,
    wanted: Tensor | None,
    points: Callable[[Tensor, range], Tensor],
    shares: list[float],
) -> Tensor:
    """Weighted sum of the gradients at several points per image, `inputs.rows` points at a time."""
    wanted = inputs.predicted(x) if wanted is None else wanted  # one class along the whole path
    images_at_once, total = max(1, inputs.rows // len(shares)), torch.zeros_like(x)
    for images, aims, sums in zip(*(t.split(images_at_once) for t in (x, wanted, total)), strict=True):
        points_at_once = max(1, inputs.rows // len(images))
        for start in range(0, len(shares), points_at_once):
            part = range(start, min(start + points_at_once, len(shares)))
            rows = points(images, part).flatten(0, 1)
            found = inputs.gradient(rows, aims.repeat_interleave(len(part), 0)).unflatten(0, (-1, len(part)))
            sums += (found * x.new_tensor([shares[s] for s in part]).view(1, -1, *[1] * (x.dim() - 1))).sum(1)
    return total


def _midpoint(steps: int) -> tuple[list[float], list[float]]:
    return [(s + 0.5) / steps for s in range(steps)], [1 / steps] * steps


def _right(steps: int) -> tuple[list[float], list[float]]:
    return [(s + 1) / steps for s in range(steps)], [1 / steps] * steps


def _legendre(steps: int) -> tuple[list[float], list[float]]:
    from numpy.polynomial.legendre import leggauss

    places, shares = leggauss(steps)
    return [(1 + p) / 2 for p in places], [w / 2 for w in shares]


_PATHS = {"midpoint": _midpoint, "right": _right, "legendre": _legendre}
