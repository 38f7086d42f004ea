"""Pictures: images beside the maps of what a network looks at."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import BadInput
from ..core.network import Network
from ..core.tree import Tree
from ..plots import paper, style
from .attribute import attribute
from .inputs import Score, Target
from .masks import normalised

USUAL = ("gradient", "integrated_gradients", "smoothgrad", "guided_backprop", "lrp", "grad_cam")
# The flat rule spreads relevance over the first layer's window: right for masks, hard to read on small images.
READABLE: dict[str, dict[str, Any]] = {"lrp": {"composite": "epsilon_plus"}}
CELL = 1.1  # inches a side
_LETTER, _LINE = 0.05, 0.115  # inches of the smallest letters: how wide one is, and a line's height
WRONG = "✗ in bold: the model is wrong"
ASKED: dict[Target, str] = {
    "true": "the true class",
    "predicted": "the class that the model predicts",
    "given": "the class asked about",
    "all": "the classes",
}


def explain(
    net: Network,
    weights: Tree | Mapping[str, Tree],
    x: Tensor,
    y: Tensor | int | None,
    path: str | Path,
    *,
    methods: Iterable[str] = USUAL,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    pictures: Tensor | None = None,
    titles: Sequence[str] | None = None,
    target: Target = "true",
    score: Score = "logit",
    classes: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Maps of each image by each method, drawn as a grid of images x methods and returned.

    `weights` by name (clients, rounds) give one column for each of them and method. `pictures` are the images as people
    see them, 0 to 1; without them the network's input is stretched to that. `options` are by method, over READABLE.
    With the names of `classes`, it is said what each model takes an image for, with a cross where y is another.
    """
    models = {"": weights} if isinstance(weights, Tree) else dict(weights)
    maps: dict[str, Tensor] = {}
    taken: dict[str, list[tuple[str, bool]]] = {}
    for method in methods:
        for name, model in models.items():
            own = {**READABLE.get(method, {}), **(options or {}).get(method, {})}
            column = f"{name}\n{readable(method)}" if name else readable(method)
            maps[column] = attribute(method, net, model, x, y, target=target, score=score, **own)
            if classes is not None and len(taken) < len(models):  # of one model below the image, of several below a map
                labels = [(f"taken for {classes[label]}", good) for label, good in predicted(net, model, x, y)]
                taken[column if name else ""] = labels
    seen = normalised(x) if pictures is None else pictures
    draw_grid(seen, maps, path, titles, asked=ASKED[target], taken_for=taken)
    return maps


def predicted(net: Network, weights: Tree, x: Tensor, y: Tensor | int | None) -> list[tuple[int, bool]]:
    """(class, whether it is y) that a model takes each image for."""
    with torch.no_grad():
        found = net(weights, x).argmax(1).cpu()
    truth = found if y is None else torch.as_tensor(y).cpu().expand_as(found)
    return list(zip(found.tolist(), (found == truth).tolist(), strict=True))


def legend(asked: str, *, signed: bool = True, heat: bool = True) -> str:
    """How to read maps of these kinds."""
    kinds = [f"red speaks for {asked}, blue against it"] if signed else []
    kinds += [f"black to yellow: how much a place speaks for {'it' if signed else asked}"] if heat else []
    return "; ".join([*kinds, "each map is scaled by its own largest values"])


def draw_grid(
    images: Tensor,
    maps: Mapping[str, Tensor],
    path: str | Path,
    titles: Sequence[str] | None = None,
    *,
    asked: str = ASKED["given"],
    taken_for: Mapping[str, Sequence[tuple[str, bool]]] | None = None,
) -> Path:
    """Images [n, c, h, w] (0 to 1) row by row, one column per set of maps; PNG, SVG or PDF by the name of the file.

    Maps with colours are summed over them. Signed ones are red and blue, others go from black to yellow; the line below
    says so, and what the maps were `asked` about. Below a column's pictures stands what they are `taken_for`.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"{path.name}: pictures are saved as .png, .svg or .pdf")
    if not len(images):
        raise BadInput("there are no images to draw")
    for name, column in maps.items():
        if len(column) != len(images):
            raise BadInput(f"{name} has {len(column)} maps for {len(images)} images")
    if titles is not None and len(titles) != len(images):
        raise BadInput(f"{len(titles)} titles do not fit {len(images)} images")
    # Columns of one method are there to be compared: where one of them needs both signs, all show them.
    signed = {_method(name) for name, column in maps.items() if is_signed(column)}
    shown = {name: coloured(column, signed=_method(name) in signed) for name, column in maps.items()}
    columns = {"": as_picture(images), **shown}
    kinds = {_method(name) in signed for name in maps}
    said = legend(asked, signed=True in kinds, heat=False in kinds) if maps else ""
    told = f"{said}; {WRONG}" if taken_for else said
    path.parent.mkdir(parents=True, exist_ok=True)
    style.write(_grid(columns, titles or (), taken_for or {}, told), path)
    return path


def _grid(
    columns: Mapping[str, Any], titles: Sequence[str], taken_for: Mapping[str, Sequence[tuple[str, bool]]], told: str
) -> Any:
    """The figure: a column of pictures under each name, row by row, and a line below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    high, wide = len(columns[""]), len(columns)
    width, margin, gap = CELL * wide + 0.45, 0.45, 0.15 if taken_for else 0.04  # of a cell, between rows
    lines = textwrap.wrap(told, int(width / _LETTER))
    below = 0.05 + _LINE * (len(lines) + bool(taken_for))
    height = CELL * (high + gap * (high - 1)) + margin + below
    figure = Figure((width, height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(high, wide, squeeze=False)
    for (name, pictures), line in zip(columns.items(), axes.T, strict=True):
        line[0].set_title(name, fontsize=7)
        for picture, axis in zip(pictures, line, strict=True):
            axis.imshow(picture, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        for (label, is_right), axis in zip(taken_for.get(name, ()), line, strict=False):
            write_below(axis, label, is_right, fontsize=6, labelpad=1)
    for title, axis in zip(titles, axes[:, 0], strict=False):
        axis.set_ylabel(title, fontsize=6)
    figure.text(0.5, _LINE / 4 / height, "\n".join(lines), ha="center", va="bottom", fontsize=6, gid=paper.CAPTION)
    figure.subplots_adjust(0.35 / width, below / height, 0.995, 1 - 0.3 / height, 0.04, gap)
    return figure


def write_below(axis: Any, label: str, is_right: bool, **how: Any) -> None:
    """What a model takes a picture for; where it is wrong, as WRONG says. Colours belong to the maps."""
    axis.set_xlabel(label if is_right else f"✗ {label}", fontweight="normal" if is_right else "bold", **how)


def readable(method: str) -> str:
    return {"lrp": "LRP", "grad_cam_pp": "grad-CAM++"}.get(method, method.replace("_cam", "-CAM").replace("_", " "))


def as_picture(images: Tensor):
    """[n, h, w, 3] in 0..1, gray images in all three colours."""
    images = images.detach().cpu().float().clamp(0, 1)
    return (images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images[:, :3]).movedim(1, -1).numpy()


def _method(column: str) -> str:
    """The last line of a column's title; above it is whose model it is, and of which round."""
    return column.rpartition("\n")[2]


def scaled(maps: Tensor, share: float = 0.995) -> Tensor:
    """[n, h, w] in -1..1: each by its own largest values, the `share` quantile: one pixel must not hide the rest."""
    flat = maps.detach().cpu().float()
    flat = flat.sum(1) if flat.dim() == 4 else flat
    size = flat.abs().flatten(1).quantile(share, dim=1).view(-1, 1, 1)
    return (flat / torch.where(size > 0, size, 1)).clamp(-1, 1)


def is_signed(maps: Tensor) -> bool:
    """Whether some of them speak against, too."""
    return bool((scaled(maps) < -0.05).any())


def coloured(maps: Tensor, share: float = 0.995, *, signed: bool | None = None):
    """[n, h, w, 3]: red for and blue against on white if any of them has both signs, else black to yellow.

    The second has no red on its way, which would be read as that of the first."""
    value = scaled(maps, share)
    up, down = value.clamp(min=0), (-value).clamp(min=0)
    both = torch.stack([1 - down, 1 - up - down, 1 - up], -1)
    heat = torch.stack([1.1 * up, up, 2 * up - 1.3], -1)
    return (both if (is_signed(maps) if signed is None else signed) else heat).clamp(0, 1).numpy()


def overlay(images: Tensor, maps: Tensor, strength: float = 0.6) -> Tensor:
    """[n, 3, h, w]: the positive part of each map as heat over the image in gray."""
    gray = images.detach().cpu().float().clamp(0, 1).mean(1, keepdim=True).expand(-1, 3, -1, -1)
    summed = maps.sum(1) if maps.dim() == 4 else maps
    positive = summed.detach().cpu().float().clamp(min=0)
    up = scaled(positive)
    heat = torch.stack([2 * up, 2 * up - 0.8, 4 * up - 3.2], 1).clamp(0, 1)  # by red: yellow alone is lost on white
    alpha = strength * normalised(positive)[:, None]
    return (1 - alpha) * gray + alpha * heat
