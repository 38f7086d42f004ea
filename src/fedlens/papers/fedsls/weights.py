"""How much the clients of a FedSLS or FedSL run count, drawn, and whether their models look at the same places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.fedsls import MeasureSaliency
from ...attribution.figures import as_picture, coloured
from ...attribution.similarity import rank_correlation
from ...core.batches import Shard
from ...core.errors import BadInput
from ...core.files import write_json
from ...experiment import Experiment
from ...explain.run import some_images
from ...plots.style import caption, pyplot, save
from ...runs.folder import RunFolder
from ...runs.opened import OpenedRun
from ...runs.places import opened
from ...runs.read import rounds_of
from .latents import saliency_maps
from .saliency import agreement_matrix, client_weights, pictures
from .weighing import copies, some_clients, weights_of

_ROUNDS = 5  # kept checkpoints at most that are compared
_SHARES = (
    "left: how much each client counts in an average of all, by its number of images and as the method used it; "
    "then the saliency of one of its images, on average"
)
_AGREEMENT = "; then whether two models look at the same places: 1 the same, 0 unrelated (rank correlation of maps)"
_MAPS = (
    "black to yellow: how much a place speaks for the true class in the first layer, each map scaled by its own "
    "largest values; at first: before any training; a client: its copy that trained before the first round"
)


def explain_weights(
    path: str | Path, out: Path | None = None, *, clients: Sequence[int] = (), count: int = 6
) -> list[Path]:
    """Pictures of the weights and, for FedSLS, of the maps they come from; nothing for a run without such weights.

    A map is that of the first layer, by the copy that a client trained before the first round, made again here.
    """
    folder = RunFolder.open(path)
    experiment = opened(folder).with_execution(device="cpu", precision="fp32")
    checkpoint, _ = folder.load()
    weights = weights_of(folder.client_memories(checkpoint.round), experiment.algorithm) if checkpoint else None
    if weights is None:
        return []
    where = (out or folder.figures / "explain").with_suffix("")
    chart, grid = (where.with_name(f"{where.name}-{kind}") for kind in ("weights", "saliency"))
    drawn, compared = [], {}
    if isinstance(experiment.timetable()[0][0].algorithm, MeasureSaliency):
        compared, columns, titles = _looked(folder, experiment, clients, count)
        drawn = [pictures(columns, grid, titles, _MAPS)]
    figure, axes = pyplot().subplots(1, 2 + len(compared), figsize=(4.6 * (2 + len(compared)), 3.9))
    client_weights(axes[:2], weights, folder.names())
    numbers: dict[str, Any] = {**vars(weights), "per_image": weights.per_image}
    for (name, maps), axis in zip(compared.items(), axes[2:], strict=True):
        matrix = agreement(maps)
        agreement_matrix(axis, list(maps), matrix)
        axis.set_title(f"agreement of {name}")
        numbers[f"agreement of {name}"] = {"names": list(maps), "rank_correlation": matrix.tolist()}
    figure.tight_layout()
    caption(figure, legends(bool(compared))[0])
    drawn.insert(0, save(figure, chart))
    write_json(chart.with_suffix(".json"), numbers)
    return drawn


def legends(maps: bool) -> list[str]:
    """How to read the pictures: of the weights and, where there are some, of the maps."""
    return [_SHARES + _AGREEMENT, _MAPS] if maps else [_SHARES]


def _looked(
    folder: RunFolder, experiment: Experiment, clients: Sequence[int], count: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], list[str]]:
    """Maps of the same test images by several models: clients' copies, the global model; pictures of the former."""
    images = experiment.data.load()
    net, (federation, _) = experiment.network(images), experiment.federation(images)
    shown = some_images(images, federation.pool, count)
    shard = Shard(federation.data, shown)
    first = {"at first": net.initial_weights()}
    own = copies(experiment, net, federation, clients or some_clients(federation))
    try:
        trained = rounds_of(folder).counted({round: round for round in folder.rounds()})
        over_rounds = first | OpenedRun(folder, experiment, images, net, federation).models(
            rounds=_some([round for round, _ in trained.values()])
        )
    except BadInput:  # clients keep a part: there is no global model to look with
        over_rounds = {}
    names = folder.names()
    compared = {"clients' copies": first | {names.title(number): model for number, model in own.items()}}
    compared |= {"the global model over rounds": over_rounds} if over_rounds else {}
    maps = {
        name: {label: saliency_maps(net, model, shard.x, shard.y) for label, model in by.items()}
        for name, by in compared.items()
    }
    heat = {label: coloured(found) for label, found in maps["clients' copies"].items()}
    titles = [images.classes[label] for label in images.y[shown].tolist()]
    return maps, {"image": as_picture(images.x[shown] / 255), **heat}, titles


def agreement(maps: Mapping[str, Tensor]) -> Tensor:
    """[models, models]: rank correlation of two models' maps of an image, the mean over images."""
    return torch.stack([torch.stack([rank_correlation(a, b).mean() for b in maps.values()]) for a in maps.values()])


def _some(rounds: Sequence[int]) -> list[int]:
    """At most so many, evenly, the last among them."""
    return sorted({rounds[len(rounds) * part // _ROUNDS - 1] for part in range(1, _ROUNDS + 1) if rounds})
