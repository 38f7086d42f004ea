"""PSE's figures 1 to 4, drawn from our own runs: those of the tables, run first where they are missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...explain.runs import chosen, side_by_side
from ...plots.style import pyplot, save
from ...report.client_figures import accuracy_bars, confusion_matrices, grouped_bars, loss_curves
from ...runs.folder import RunFolder
from ...runs.opened import OpenedRun
from ...runs.read import client_evaluation, fairness
from ..figure_runs import SEED, Figure, finished, note, out_of, table_named
from ..table import gather
from .tables import FAIRNESS, tables

CLIENT = 0  # the paper does not say which client it shows: ours is the first
TASKS = ("cifar10/2", "cifar10/4", "fashion_mnist/3")  # of figure 2; nor which three tasks
CONVERGENCE = ("cifar10/2", "cifar100/5", "fashion_mnist/4")  # of figure 3


def attention_maps(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 1: Grad-CAM of the global model and of one client's models by four methods."""
    runs = opened("pse/table2", ("fedavg+ft", "ditto", "fedrep", "pse"), "cifar10/4", words, path)
    return [side_by_side(runs, CLIENT, chosen(runs["pse"], CLIENT, images), path)]


def ablation(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 2: accuracy of PSE without its parts in three tasks, and what its models look at."""
    rows = ("v1", "v2", "v3", "pse")
    grid = table_named(tables(), "pse/ablations")
    for task in TASKS:
        finished(grid, rows, task, words, path)
    done = gather(grid, out_of(path), words).done
    numbers = {task: {row: done[row, task][SEED].value for row in rows} for task in TASKS}
    figure, axis = pyplot().subplots(figsize=(7.5, 3.4))
    grouped_bars(axis, numbers)
    axis.set_ylabel("mean accuracy of clients, % (axis cut)")
    bars = save(figure, path.with_name(f"{path.name}a"))
    runs = opened(grid.name, ("v2", "pse"), TASKS[1], words, path)
    maps = side_by_side(runs, CLIENT, chosen(runs["pse"], CLIENT, images), path.with_name(f"{path.name}b"))
    return [bars, maps, note(path, words, {"accuracy": numbers})]


def fairness_and_convergence(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 3: accuracy of every client by three methods, and the training loss of PSE in three cases."""
    grid = table_named(tables(), "pse/table2")
    runs = finished(grid, tuple(FAIRNESS), "fashion_mnist/4", words, path)
    accuracies = {name: client_evaluation(RunFolder(run))[1] for name, run in runs.items()}
    fair = {name: fairness(list(by.values())) for name, by in accuracies.items()}
    bars = accuracy_bars(accuracies, fair, path.with_name(f"{path.name}a"))
    losses = {}
    for case in CONVERGENCE:
        run = finished(grid, ("pse",), case, words, path)["pse"]
        losses[case] = OpenedRun.open(run).training_losses()
    curves = loss_curves(losses, path.with_name(f"{path.name}b"))
    paper = {name: {"std": value / 100} for name, value in FAIRNESS.items()}
    return [bars, curves, note(path, words, {"fairness": fair, "paper": paper, "training loss": losses})]


def client_confusion(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 4: what one client's models take its test images for, trained alone and by PSE."""
    runs = opened("pse/table2", ("local", "pse"), "cifar100/15", words, path)
    counts = {name: run.confusion(CLIENT) for name, run in runs.items()}
    of = runs["pse"].images
    drawn = confusion_matrices(counts, of.classes, path, f"client {CLIENT}, {of.name}, % of each class")
    numbers = {name: matrix.tolist() for name, matrix in counts.items()}
    return [drawn, note(path, words, {"client": CLIENT, "classes": list(of.classes), "confusion": numbers})]


FIGURES = [
    Figure("pse/figure1", "where the global and one client's models look, by four methods", 6, attention_maps),
    Figure("pse/figure2", "PSE without its parts: accuracy, and where its models look", 4, ablation),
    Figure("pse/figure3", "accuracy of every client and its fairness; training loss", 0, fairness_and_convergence),
    Figure("pse/figure4", "confusions of one client, trained alone and by PSE", 0, client_confusion),
]


def opened(table: str, rows: Sequence[str], column: str, words: Sequence[str], path: Path) -> dict[str, OpenedRun]:
    runs = finished(table_named(tables(), table), rows, column, words, path)
    return {name: OpenedRun.open(run) for name, run in runs.items()}
