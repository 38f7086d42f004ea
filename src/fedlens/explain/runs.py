"""The same images through the eyes of several runs: where the models of one client look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..attribution import attribute
from ..attribution.figures import as_picture, overlay
from ..core.batches import Shard
from ..core.errors import BadInput
from ..report.client_figures import looks
from ..runs.opened import OpenedRun, named, same_split
from .run import some_images


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
    """Maps ask about the true class; below each is what the model takes the image for, in red when it is wrong."""
    same_split(runs)
    images = next(iter(runs.values())).images
    models = {name: (run, run.model(client)) for name, run in runs.items()}
    for name, run in runs.items():
        if (whole := run.global_model()) is not None:
            models = {f"global\n({name})": (run, whole), **models}
            break
    pictures, truth = images.x[index].float() / 255, images.y[index]
    columns = {}
    for name, (run, weights) in models.items():
        x = Shard(run.federation.data, index.to(run.federation.pool.device)).x
        with run.at_work():
            maps = attribute(method, run.net, weights, x, truth.to(x.device)).cpu()
        taken_for = run.predictions(weights, index)
        labels = [images.classes[label] for label in taken_for.tolist()]
        columns[name] = as_picture(overlay(pictures, maps)), labels, (taken_for == truth).tolist()
    return looks(as_picture(pictures), columns, [images.classes[label] for label in truth.tolist()], path)
