"""SPATL's section 4.5: what its encoder is worth on images that no client had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ...core.errors import BadInput
from ...core.rng import generator, key
from ...core.tree import Tree
from ...plots.style import pyplot, save
from ...report.client_figures import grouped_bars
from ...runs.grid import Cell
from ...runs.opened import OpenedRun
from ...runs.read import client_evaluation, fairness
from ..figure_runs import Wanted, finished, note
from .shown import listed
from .tables import LEAVES_OPEN, SAYS, TRANSFER, judged_alone, tables

EPOCHS = 50  # on new images
FEW = 2  # of quick mode
PROTOCOL: dict[str, Any] = {
    "says": (
        *SAYS,
        "Section 4.5 has VGG-11, 100 rounds, and ten clients of 4,000 images to train on and 1,000 to judge. Then a "
        "predictor meets 10,000 other images, 9,000 to train on and 1,000 to judge: 50 epochs, batch 64.",
    ),
    "leaves_open": (
        *LEAVES_OPEN,
        "Whether the encoder trains on: not in `spatl/transfer`, but in `spatl/transfer_whole`. Which epoch counts: "
        "the last.",
    ),
}

Part = Literal["head", "all"]


def transfer_runs(wanted: Wanted) -> list[Cell]:
    grid = wanted.table(tables(), "spatl/encoders")
    return grid.cells((), wanted.chosen([*grid.columns], [next(iter(grid.columns))])[:1], wanted.words)


def transfer(wanted: Wanted, *, part: Part = "head") -> list[Path]:
    """Section 4.5: encoders meet images that no client had, with a new predictor; `part` of the network trains."""
    grid, epochs = wanted.table(tables(), "spatl/encoders"), FEW if wanted.quick else EPOCHS
    model = wanted.chosen([*grid.columns], [next(iter(grid.columns))])[0]
    runs = {row: OpenedRun.open(run) for row, run in finished(wanted, grid, tuple(grid.rows), model).items()}
    before = {row: 100 * fairness([*client_evaluation(run.folder)[1].values()])["mean"] for row, run in runs.items()}
    new = {row: 100 * transferred(run, wanted.images, part, epochs) for row, run in runs.items()}
    new["scratch"] = 100 * transferred(runs["spatl"], wanted.images, "all", epochs, encoder=Tree())
    trained = "the predictor" if part == "head" else "everything"
    figure, axis = pyplot().subplots(figsize=(7, 3.4))
    groups = {"clients, on their own test images": before, f"new images, {trained} trained": new}
    grouped_bars(axis, groups, "accuracy, %")
    counts = dict(zip(("training", "test"), map(len, new_images(runs["spatl"], wanted.images)), strict=True))
    numbers = {"images": counts, "epochs": epochs, "part": part, "clients": before, "new images": new}
    lines = [[row, *(f"{by[row]:.2f}" if row in by else "" for by in (before, new))] for row in new]
    if not wanted.quick:
        numbers["paper"] = dict(zip(("clients", "new images"), TRANSFER, strict=True))
        lines.append(["paper, spatl", *(f"{value:g}" for value in TRANSFER)])
    notes = [
        f"New images: no client's; {counts['training']:,} to train on, {counts['test']:,} to judge, {epochs} epochs of "
        f"{trained} by the clients' own rule. The last epoch counts.",
        "scratch: the whole network, trained on the new images alone.",
    ]
    table = listed(wanted, "encoders on new images, accuracy in %", ["", "clients", "new images"], lines, notes)
    return [save(figure, wanted.path), note(wanted, numbers), table]


def transferred(run: OpenedRun, images: int, part: Part, epochs: int, *, encoder: Tree | None = None) -> float:
    """Accuracy on new images of a run's encoder under a predictor that nothing has seen before."""
    experiment, net = run.experiment, run.net
    train, test = new_images(run, images)
    # Another draw than the clients' first weights: an encoder that was trained beside those has grown towards them.
    device = experiment.execution.device
    fresh = replace(experiment, seed=key(experiment.seed, "transfer")).network(run.images).to(device)
    shared = run.newest().state.model if encoder is None else encoder
    body = shared.select(lambda name: name not in net.head).map(lambda leaf: leaf.to(device))
    seed = key(experiment.seed, "transfer")
    return judged_alone(run, net, fresh.initial_weights() | body, (train, test), seed, epochs, part)


def new_images(run: OpenedRun, images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nine tenths and one tenth of so many test images, none of which any client has."""
    federation = run.federation
    pool = federation.pool
    theirs = torch.cat([*federation.train.values(), *federation.test.values()])
    if torch.isin(pool, theirs).any():
        raise BadInput("spatl/transfer needs images that no client has: leave partition.test=holdout")
    order = torch.randperm(len(pool), generator=generator(key(run.experiment.seed, "new images")))[:images]
    if len(order) < 10:
        raise BadInput(f"spatl/transfer needs 10 new images or more, but has {len(order)}: raise --images")
    new = pool[order.to(pool.device)]
    return new[: 9 * len(new) // 10], new[9 * len(new) // 10 :]
