"""PSE's figures 1 to 4, drawn from our own runs: those of the tables, run first where they are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...explain.runs import chosen, side_by_side
from ...plots.style import caption, pyplot, save
from ...report.client_figures import accuracy_bars, confusion_matrices, grouped_bars, loss_curves
from ...runs.folder import RunFolder
from ...runs.grid import Cell
from ...runs.opened import OpenedRun
from ...runs.read import client_evaluation, fairness
from ..figure_runs import SEED, Figure, Wanted, at_hand, finished, note
from ..table import gather
from .tables import FAIRNESS, LEAVES_OPEN, SAYS, tables

CLIENT = 0  # the paper does not say which client it shows: ours is the first
TASKS = ("cifar10/2", "cifar10/4", "fashion_mnist/3")  # of figure 2; nor which three tasks
CONVERGENCE = ("cifar10/2", "cifar100/5", "fashion_mnist/4")  # of figure 3
VARIANTS = ("v1", "v2", "v3", "pse")
LOOKS = ("fedavg+ft", "ditto", "fedrep", "pse")  # of figure 1
CONFUSED = ("local", "pse")  # of figure 4


def attention_maps(wanted: Wanted) -> list[Path]:
    """Figure 1: Grad-CAM of the global model and of one client's models by four methods."""
    runs = opened(wanted, "pse/table2", LOOKS, "cifar10/4")
    return [side_by_side(runs, CLIENT, chosen(runs["pse"], CLIENT, wanted.images), wanted.path)]


def ablation(wanted: Wanted) -> list[Path]:
    """Figure 2: accuracy of PSE without its parts in three tasks, and where the models of each variant look."""
    grid, path = wanted.table(tables(), "pse/ablations"), wanted.path
    tasks, told = at_hand(wanted, grid, VARIANTS, TASKS)
    for task in tasks:
        finished(wanted, grid, VARIANTS, task)
    done = gather(grid, wanted.out, wanted.words).done
    numbers = {task: {row: done[row, task][SEED].value for row in VARIANTS} for task in tasks}
    figure, axis = pyplot().subplots(figsize=(7.5, 3.4))
    grouped_bars(axis, numbers, "mean accuracy of clients, %")
    said = "v1: no channel excitation; v2: no cross-model attention; v3: no position. The paper names no tasks."
    caption(figure, " ".join([said, *told]))
    bars = save(figure, path.with_name(f"{path.name}a"))
    runs = opened(wanted, grid.name, VARIANTS, tasks[min(1, len(tasks) - 1)])
    maps = side_by_side(runs, CLIENT, chosen(runs["pse"], CLIENT, wanted.images), path.with_name(f"{path.name}b"))
    return [bars, maps, note(wanted, {"accuracy": numbers, "not run": told})]


def fairness_and_convergence(wanted: Wanted) -> list[Path]:
    """Figure 3: accuracy of every client by three methods, and the training loss of PSE in three cases."""
    grid, path = wanted.table(tables(), "pse/table2"), wanted.path
    runs = finished(wanted, grid, tuple(FAIRNESS), "fashion_mnist/4")
    accuracies = {name: client_evaluation(RunFolder(run))[1] for name, run in runs.items()}
    fair = {name: fairness(list(by.values())) for name, by in accuracies.items()}
    bars = accuracy_bars(accuracies, fair, path.with_name(f"{path.name}a"))
    cases, told = at_hand(wanted, grid, ("pse",), CONVERGENCE)
    losses = {}
    for case in cases:
        run = finished(wanted, grid, ("pse",), case)["pse"]
        losses[case] = OpenedRun.open(run).training_losses()
    curves = loss_curves(losses, path.with_name(f"{path.name}b"))
    paper = {} if wanted.quick else {name: {"std": value / 100} for name, value in FAIRNESS.items()}
    numbers = {"fairness": fair, "paper": paper, "training loss": losses, "not run": told}
    return [bars, curves, note(wanted, numbers)]


def client_confusion(wanted: Wanted) -> list[Path]:
    """Figure 4: what one client's models take its test images for, trained alone and by PSE."""
    column = "cifar100/15"
    runs, titles = opened(wanted, "pse/table2", CONFUSED, column), wanted.table(tables(), "pse/table2").titles
    counts = {name: run.confusion(CLIENT) for name, run in runs.items()}
    of = runs["pse"].images
    about = f"client {CLIENT}, {titles.get(column, column)}, % of each class"
    drawn = confusion_matrices(counts, of.classes, wanted.path, about)
    numbers = {name: matrix.tolist() for name, matrix in counts.items()}
    told = {"client": CLIENT, "classes": list(of.classes), "confusion": numbers}
    return [drawn, note(wanted, told)]


def opened(wanted: Wanted, table: str, rows: Sequence[str], column: str) -> dict[str, OpenedRun]:
    runs = finished(wanted, wanted.table(tables(), table), rows, column)
    return {name: OpenedRun.open(run) for name, run in runs.items()}


def _runs(*parts: tuple[str, Sequence[str], Sequence[str]]) -> Callable[[Wanted], list[Cell]]:
    """(table, rows, columns) that a figure is drawn from."""
    return lambda wanted: [
        cell
        for table, rows, columns in parts
        for cell in wanted.table(tables(), table).cells(rows, columns, wanted.words)
    ]


FIGURES = [
    Figure(
        "pse/figure1",
        "where the global and one client's models look, by four methods",
        6,
        attention_maps,
        runs=_runs(("pse/table2", LOOKS, ["cifar10/4"])),
        says=SAYS,
        leaves_open=(
            *LEAVES_OPEN,
            "Task and client: CIFAR-10 with 4 classes, the first one.",
        ),
    ),
    Figure(
        "pse/figure2",
        "PSE without its parts: accuracy, and where its models look",
        4,
        ablation,
        runs=_runs(("pse/ablations", VARIANTS, TASKS)),
        says=SAYS,
        leaves_open=(*LEAVES_OPEN, "The three tasks: CIFAR-10 with 2 and 4 classes, Fashion-MNIST with 3."),
    ),
    Figure(
        "pse/figure3",
        "accuracy of every client and its fairness; training loss",
        0,
        fairness_and_convergence,
        runs=_runs(
            ("pse/table2", tuple(FAIRNESS), ["fashion_mnist/4"]),
            ("pse/table2", ("pse",), [case for case in CONVERGENCE if case != "fashion_mnist/4"]),
        ),
        says=SAYS,
        leaves_open=(
            *LEAVES_OPEN,
            "The three cases of (b): CIFAR-10 with 2 classes, CIFAR-100 with 5, Fashion-MNIST with 4. The loss is that "
            "of every tenth round, over clients that have taken part.",
        ),
    ),
    Figure(
        "pse/figure4",
        "confusions of one client, trained alone and by PSE",
        0,
        client_confusion,
        runs=_runs(("pse/table2", CONFUSED, ["cifar100/15"])),
        says=SAYS,
        leaves_open=(*LEAVES_OPEN, "Which client: the first."),
    ),
]
