"""The same images through the eyes of several runs: where the models of one client look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attribution import attribute
from ..attribution.figures import WRONG, as_picture, overlay, write_below
from ..core.batches import Shard
from ..core.errors import BadInput
from ..plots.style import caption, pyplot, save
from ..runs.opened import OpenedRun, named, same_split
from .run import some_images

LEGEND = (
    "red to yellow: where a model finds what speaks for the true class, each map scaled by its own largest values; "
    f"below the image its class, below a map what the model takes it for; {WRONG}"
)


def explain_runs(
    paths: Sequence[str | Path],
    out: Path | None = None,
    *,
    client: int = 0,
    count: int = 6,
    which: Sequence[int] = (),
    method: str = "grad_cam",
) -> Path:
    """The models that these runs left at one client, and the first whole global model, on the client's test images."""
    runs = {name: OpenedRun.open(path) for name, path in named(paths).items()}
    first = next(iter(runs.values()))
    shown = chosen(first, client, count, which)
    return side_by_side(runs, client, shown, out or first.folder.figures / "explain-runs", method=method)


def chosen(run: OpenedRun, client: int, count: int, which: Sequence[int] = ()) -> Tensor:
    """Test images of a client: those at these places of its shard, or the first ones of each class."""
    run.check(client)
    index = run.federation.test[client].cpu()
    if not len(index):
        raise BadInput(f"client {client} has no test images; name another one")
    if wrong := [place for place in which if place >= len(index)]:
        raise BadInput(f"--which {wrong[0]}: client {client} has {len(index)} test images, counted from 0")
    return index[torch.tensor(which)] if which else some_images(run.images, index, count)


def side_by_side(
    runs: Mapping[str, OpenedRun], client: int, index: Tensor, path: Path, *, method: str = "grad_cam"
) -> Path:
    """Maps ask about the true class; below each is what the model takes the image for, with a cross if wrong."""
    same_split(runs)
    images = next(iter(runs.values())).images
    models = {name: (run, run.model(client)) for name, run in runs.items()}
    for name, run in runs.items():
        if (whole := run.global_model()) is not None:
            models = {f"global\n({name})": (run, whole), **models}
            break
    pictures, truth = images.pictures(index), images.y[index]
    columns = {}
    for name, (run, weights) in models.items():
        x = Shard(run.federation.data, index.to(run.federation.pool.device)).x
        with run.at_work():
            maps = attribute(method, run.net, weights, x, truth.to(x.device)).cpu()
        taken_for = run.predictions(weights, index)
        labels = [images.classes[label] for label in taken_for.tolist()]
        columns[name] = as_picture(overlay(pictures, maps)), labels, (taken_for == truth).tolist()
    return draw_maps(as_picture(pictures), columns, [images.classes[label] for label in truth.tolist()], path)


def draw_maps(
    pictures: Any, columns: Mapping[str, tuple[Any, Sequence[str], Sequence[bool]]], titles: Sequence[str], path: Path
) -> Path:
    """Images in the first column, then for each model the image under its map, with what the model takes it for."""
    high, wide = len(pictures), 1 + len(columns)
    figure, axes = pyplot().subplots(high, wide, figsize=(1.35 * wide, 1.5 * high + 0.3), squeeze=False)
    for row, title in enumerate(titles):
        axes[row, 0].imshow(pictures[row], interpolation="nearest")
        axes[row, 0].set_xlabel(title, fontsize=7, labelpad=2)
    for (name, (shown, taken_for, right)), line in zip(columns.items(), axes.T[1:], strict=True):
        line[0].set_title(name, fontsize=8)
        for picture, label, is_right, axis in zip(shown, taken_for, right, line, strict=True):
            axis.imshow(picture, interpolation="nearest")
            write_below(axis, label, is_right, fontsize=7, labelpad=2)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.grid(False)
        axis.spines[:].set_visible(False)
    figure.subplots_adjust(wspace=0.06, hspace=0.22)
    caption(figure, LEGEND)
    return save(figure, path, whole=True)
