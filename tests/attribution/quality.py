"""Whether maps can be trusted: do marked pixels matter, do maps depend on the weights, do they add up and agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens.attribution.attribute import Method, attribute
from fedlens.attribution.inputs import Score, Target, prepare
from fedlens.attribution.masks import normalised
from fedlens.attribution.similarity import cosine, rank_correlation, ssim
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import generator, key
from fedlens.core.tree import Tree


def deletion(net: Network, weights: Tree, x: Tensor, maps: Tensor, y: Tensor | int | None = None, **how: Any) -> Tensor:
    """[images, steps + 1] scores while the most relevant pixels are taken away first (Petsiuk et al., 2018).

    The lower the curve, the better the map; `area` says how low.
    """
    return _curve(net, weights, x, maps, y, **{"fill": "zero", **how}, insert=False)


def insertion(
    net: Network, weights: Tree, x: Tensor, maps: Tensor, y: Tensor | int | None = None, **how: Any
) -> Tensor:
    """[images, steps + 1] scores while the most relevant pixels come first into a blurred image; higher is better."""
    return _curve(net, weights, x, maps, y, **{"fill": "blur", **how}, insert=True)


def area(curve: Tensor) -> Tensor:
    """[images] mean height of the curves, by trapezoids."""
    return (curve[:, 1:] + curve[:, :-1]).mean(1) / 2


def _curve(
    net: Network,
    weights: Tree,
    x: Tensor,
    maps: Tensor,
    y: Tensor | int | None,
    *,
    insert: bool,
    steps: int = 20,
    fill: Literal["zero", "blur"] = "zero",
    target: Target = "true",
    score: Score = "prob",
    chunk: int | None = None,
) -> Tensor:
    if steps < 1:
        raise BadInput(f"steps={steps} gives no curve; give 1 or more")
    if maps.shape[0] != len(x) or maps.shape[-2:] != x.shape[-2:]:
        raise BadInput(f"maps {list(maps.shape)} do not lie on the images {list(x.shape)}")
    inputs = prepare(net, weights, x, y, target, score, chunk, differentiable=False)
    pixels = x.shape[-2] * x.shape[-1]
    # Step s is over when floor(pixels * s / steps) of them have changed.
    due = torch.tensor([pixels * s // steps for s in range(steps + 1)])
    curves = []
    with torch.no_grad():
        for part, images, wanted in inputs.pieces():
            wanted = inputs.predicted(images) if wanted is None else wanted
            relevance = maps[part].to(images)
            relevance = relevance.sum(1) if relevance.dim() == 4 else relevance
            order = relevance.flatten(1).sort(dim=1, descending=True, stable=True)[1]
            rank = torch.empty_like(order).scatter_(1, order, torch.arange(pixels, device=x.device).expand_as(order))
            rank = rank.view(len(images), 1, *x.shape[-2:])
            other = torch.zeros_like(images) if fill == "zero" else blurred(images)
            before, after = (other, images) if insert else (images, other)
            heights = [
                inputs.each(inputs.logits(torch.where(rank < count, after, before)), wanted) for count in due.tolist()
            ]
            curves.append(torch.stack(heights, 1).to(x.device))
    return torch.cat(curves) if curves else x.new_zeros(0, steps + 1)


def blurred(x: Tensor, sigma: float = 5.0) -> Tensor:
    """Images [n, c, h, w] under a Gaussian, with borders mirrored."""
    radius = min(int(3 * sigma), min(x.shape[-2:]) - 1)
    weights = torch.exp(-(torch.arange(-radius, radius + 1, dtype=x.dtype, device=x.device) ** 2) / (2 * sigma**2))
    weights = weights / weights.sum()
    padded = F.pad(x, (radius,) * 4, mode="reflect").flatten(0, 1)[:, None]
    rows = F.conv2d(padded, weights.view(1, 1, -1, 1))
    return F.conv2d(rows, weights.view(1, 1, 1, -1)).view_as(x)


def completeness_error(relevance: Tensor, change: Tensor) -> Tensor:
    """[images] |sum of relevance - change| / |change|: LRP and input x gradient add up to the logit, integrated
    gradients to how much the score rose from the baseline."""
    total = relevance.flatten(1).sum(1)
    return (total - change).abs() / change.abs().clamp(min=torch.finfo(change.dtype).tiny)


def agreement(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """[images] each: ssim of the maps brought to 0..1, cosine and rank correlation of the maps as they are."""
    alike = {"cosine": cosine(a, b), "rank": rank_correlation(a, b)}
    pictures = [normalised(m if m.dim() == 4 else m[:, None]) for m in (a, b)]
    side = min(pictures[0].shape[-2:])
    if side >= 7:
        alike["ssim"] = ssim(pictures[0], pictures[1], 1.0, "gaussian" if side >= 11 else "uniform")
    return alike


def randomised(weights: Tree, names: set[str], seed: int = 0) -> Tree:
    """The same weights with the named ones shuffled: other values in other places, of the same distribution."""

    def shuffle(name: str, value: Tensor) -> Tensor:
        order = torch.randperm(value.numel(), generator=generator(key(seed, "randomised", name)))
        return value.flatten()[order.to(value.device)].view_as(value)

    return weights | Tree(params=Tree({n: shuffle(n, v) for n, v in weights.params.items() if n in names}))


def randomisation(
    method: str | Method,
    net: Network,
    weights: Tree,
    x: Tensor,
    y: Tensor | int | None = None,
    *,
    measure: Callable[[Tensor, Tensor], Tensor] = rank_correlation,
    seed: int = 0,
    **options: Any,
) -> dict[str, Tensor]:
    """Adebayo et al., 2018: agreement of maps with those after shuffling the last layer, the last two, and so on.

    {layer: [images]} from the head down. A method whose maps stay alike does not show what the network learnt.
    """
    before = attribute(method, net, weights, x, y, **options)
    layers = [name for name, value in weights.params.items() if value.dim() > 1]
    alike: dict[str, Tensor] = {}
    for count, name in enumerate(reversed(layers), 1):
        other = randomised(weights, set(layers[-count:]), seed)
        alike[name.removesuffix(".weight")] = measure(before, attribute(method, net, other, x, y, **options))
    return alike
