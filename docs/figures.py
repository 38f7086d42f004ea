"""Draws figures of results pages: `python docs/figures.py [NAME ...]`, without a name all.

Those whose runs are not kept are drawn from results/data/figures.json; `pse_views` needs Fashion-MNIST and BSDS500.
Where each other picture comes from: results/figures.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedlens import config
from fedlens.papers.registry import reproducible
from fedlens.plots.style import COLOURS, caption, pyplot, save
from fedlens.runs.grid import Grid

RESULTS = Path(__file__).resolve().parents[1] / "results"
GREY = "#666666"
Numbers = dict[str, dict[str, list[float]]]  # panel -> row -> one value a seed


def numbers(figure: str) -> Numbers:
    found: Numbers = {}
    for row in json.loads((RESULTS / "data" / "figures.json").read_text("utf-8"))["rows"]:
        if row["figure"] == figure:
            found.setdefault(row["panel"], {}).setdefault(row["row"], []).append(row["accuracy"])
    return found


def paper(table: str) -> Grid:
    grid = reproducible()[table]
    assert isinstance(grid, Grid)
    return grid


def settings() -> Any:
    """Methods alone and under FedXDS, a panel for each setting."""
    ours = numbers("compose_settings")
    methods = list(max(ours.values(), key=len))
    figure, axes = pyplot().subplots(1, len(ours), figsize=(10.5, 3.2), sharey=True)
    for axis, (panel, by) in zip(axes, ours.items(), strict=True):
        for at, method in enumerate(methods):
            if method in by:
                axis.barh(at, by[method][0], color=COLOURS[0] if "FedXDS" in method else "#9aa4b1", height=0.7)
            said = f" {by[method][0]:.1f}" if method in by else " not run"
            axis.text(by.get(method, [0])[0], at, said, va="center", fontsize=8)
        axis.set_title(panel.replace(", ", "\n", 1), fontsize=9)
        axis.set(xlabel="accuracy, mean of last 10, %", label=panel, xlim=(0, 1.15 * max(max(v) for v in by.values())))
        axis.set_yticks(range(len(methods)), methods)
        axis.grid(axis="y", visible=False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    return figure


def evidence(table: str) -> Numbers:
    """Runs at a paper's own protocol."""
    found: Numbers = {}
    for row in json.loads((RESULTS / "data" / "evidence.json").read_text("utf-8")):
        if row["table"] == table and not row["over"]:
            found.setdefault(row["column"], {}).setdefault(row["row"], []).append(row["value"])
    return found


def labels() -> Any:
    """PSE's table 2: a dot a seed beside the paper's numbers."""
    ours, grid = evidence("pse/table2"), paper("pse/table2")
    rows = [row for row in grid.rows if any(row in by for by in ours.values())]
    wide = 3.0 + 3.5 * len(ours)
    figure, [axes] = pyplot().subplots(1, len(ours), figsize=(wide, 4), sharey=True, squeeze=False)
    for axis, (panel, by) in zip(axes, ours.items(), strict=True):
        for at, row in enumerate(rows):
            if (theirs := grid.paper.get((row, panel))) is not None:
                axis.plot(theirs.mean, at, "D", color=GREY, markerfacecolor="white", markersize=5)
            values = by.get(row, [])
            axis.plot(values, [at] * len(values), "o", color=COLOURS[0], alpha=0.75)
            if values:
                middle = sum(values) / len(values)
                axis.annotate(
                    f"{middle:.1f}", (middle, at), (0, 6), textcoords="offset points", ha="center", fontsize=8
                )
        axis.set(title=panel, label=panel, xlabel="accuracy, %")
        axis.set_yticks(range(len(rows)), rows)
    axes[0].invert_yaxis()
    figure.tight_layout()
    caption(
        figure,
        "pse/table2: mean over clients of the accuracy on their test images.\n"
        "Dots: our runs, one a seed; numbers: their means. Diamonds: the paper's.",
    )
    return figure


def views() -> Any:
    """The first image of each class as clients of PSE's table 1 see it: a row for each view."""
    words = "data=modalities", "data.base=fashion_mnist", f"data.views={','.join(VIEWS)}", "partition=domains"
    images = config.read(None, [*words, "clients=12"]).images()
    figure, axes = pyplot().subplots(len(VIEWS), len(images.classes), figsize=(10, 3.2), layout="constrained")
    for row, view in zip(axes, VIEWS, strict=True):
        seen = images.domains == images.owner_names.index(view)
        for label, (axis, name) in enumerate(zip(row, images.classes, strict=True)):
            one = images.x[int((seen & (images.y == label)).nonzero()[0])]
            axis.imshow(one.permute(1, 2, 0).numpy())
            axis.set(xticks=[], yticks=[], title=name if view == VIEWS[0] else "")
            axis.title.set_fontsize(9)
            axis.spines[:].set_visible(False)
        row[0].set_ylabel(view)
    return figure


VIEWS = "gray", "colour", "edge"
FIGURES = {"compose_settings": settings, "pse_table2": labels, "pse_views": views}


def main() -> None:
    wanted = sys.argv[1:] or list(FIGURES)
    if unknown := [name for name in wanted if name not in FIGURES]:
        print(f"there is no figure {', '.join(unknown)}; those of this script: {', '.join(FIGURES)}", file=sys.stderr)
        sys.exit(2)
    for name in wanted:
        print(save(FIGURES[name](), RESULTS / name, metadata={".png": None}))


if __name__ == "__main__":
    main()
