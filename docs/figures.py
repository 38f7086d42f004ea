"""Draws figures of results pages: `python docs/figures.py [NAME ...]`, without a name all.

Those whose runs are not kept are drawn from results/data/figures.json; `pse_views` needs Fashion-MNIST and BSDS500.
Where each other picture comes from: results/figures.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import pstdev
from typing import Any

from fedlens import config
from fedlens.papers.pse.tables import FAIRNESS
from fedlens.papers.registry import reproducible
from fedlens.plots.style import COLOURS, caption, colour_of, dash_of, pyplot, save
from fedlens.report.client_figures import loss_lines
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


def cells(table: str) -> list[dict[str, Any]]:
    """Runs at a paper's own protocol."""
    every = json.loads((RESULTS / "data" / "evidence.json").read_text("utf-8"))
    return [cell for cell in every if cell["table"] == table and not cell["over"]]


def evidence(table: str) -> Numbers:
    found: Numbers = {}
    for cell in cells(table):
        found.setdefault(cell["column"], {}).setdefault(cell["row"], []).append(cell["value"])
    return found


def protocol() -> Any:
    """FedXDS's table 1 at its own protocol: the curve of each row's seed 0, and where the paper's ends."""
    grid, column = paper("fedxds/table1"), "cifar10/K10/0.1"
    found = {one["row"]: one for one in cells("fedxds/table1") if one["column"] == column and not one["seed"]}
    ends = {row: 100 * one["accuracy_last"] for row, one in found.items()}
    figure, axis = pyplot().subplots(figsize=(7.5, 3.8))
    for row in sorted(found, key=ends.__getitem__, reverse=True):
        name, method = ROWS.get(row, (row, row))
        colour, values = colour_of(method), [100 * value for _, value in found[row]["curve"]]
        rounds = [at for at, _ in found[row]["curve"]]
        means = [sum(values[at - SMOOTH : at]) / SMOOTH for at in range(SMOOTH, len(values) + 1)]
        axis.plot(rounds, values, color=colour, linewidth=0.6, alpha=0.3)
        line = {"color": colour, "linestyle": dash_of(method)}
        axis.plot(rounds[SMOOTH - 1 :], means, linewidth=2, label=f"{name}: {ends[row]:.1f}", **line)
        axis.plot(rounds[-1] + 5, grid.paper[row, column].mean, "D", color=colour, markerfacecolor="white")
    axis.set(xlabel="rounds of training", ylabel="accuracy, %", ylim=(0, 90), xlim=(0, None))
    axis.legend(loc="lower right", title=f"mean of the last {SMOOTH} rounds, %")
    caption(figure, f"Thick: mean of {SMOOTH} rounds. Diamonds: the end of each row in the paper's table 1.")
    return figure


def searches() -> Any:
    """SPATL's agent at the paper's cadence: the mean reward of the episodes between two updates, a line a search."""
    rows = json.loads((RESULTS / "data" / "submodels.json").read_text("utf-8"))
    networks = {"resnet20": "ResNet-20, CIFAR-10", "resnet18 stand-in": "ResNet-18, stand-in weights, Tiny-ImageNet"}
    figure, axes = pyplot().subplots(1, len(networks), figsize=(10, 3.6))
    for axis, (network, name) in zip(axes, networks.items(), strict=True):
        lines = [row for row in rows if (row["model"], row["choice"]) == (network, "agent")]
        for row, colour in zip(lines, COLOURS, strict=False):
            updates = range(1, len(row["rewards"]) + 1)
            axis.plot(updates, row["rewards"], "o-", color=colour, markersize=3, label=f"seed {row['seed']}")
        axis.axvline(40, color="0.7", linestyle=":", linewidth=1.2)
        axis.set(xlabel="updates of the agent, 20 episodes each", xlim=(0, None))
        axis.set_title(name, fontsize=10)
        axis.legend(loc="lower right", fontsize=8)
    axes[0].set_ylabel("reward, mean of 20 episodes")
    caption(figure, "Reward: accuracy of sub-models on 1,000 images, %. Dotted: where the paper's begins to converge.")
    return figure


def by_client() -> Any:
    """PSE's figure 3a: a dot for each client's accuracy, and the deviation beside the paper's."""
    column, order = "fashion_mnist/4", ("fedavg+ft", "fedrep", "pse")
    runs = [one for row in order for one in cells("pse/table2") if (one["row"], one["column"]) == (row, column)]
    figure, axis = pyplot().subplots(figsize=(7.5, 0.9 + 0.6 * len(runs)))
    for at, one in enumerate(runs):
        row, colour = one["row"], COLOURS[order.index(one["row"])]
        model = EVALUATED.get(row, "personal after")
        values = [100 * value for value in one["each_client"][model].values()]
        axis.plot(values, [at] * len(values), "|", color=colour, markersize=14, alpha=0.6)
        axis.plot(sum(values) / len(values), at, "D", color=colour, markerfacecolor="white", zorder=3)
        worst = 100 * one["personal"][model.removeprefix("personal ")]["worst_decile"]
        said = f"std {pstdev(values):.1f} (paper {FAIRNESS[row]:.1f}), worst tenth {worst:.1f}"
        axis.text(101, at, said, va="center", fontsize=8)
        axis.axhline(at, color="#e6e6e6", linewidth=0.8, zorder=0)
    axis.set_yticks(range(len(runs)), [f"{one['row']}, seed {one['seed']}" for one in runs])
    axis.set_ylim(-0.5, len(runs) - 0.5)
    axis.set(xlabel="accuracy of a client's model on its own test images, %", xlim=(None, 100.5))
    axis.invert_yaxis()
    caption(figure, "Fashion-MNIST, 100 clients of 4 classes each: a mark for each client, diamonds are means.")
    return figure


def losses() -> Any:
    """PSE's figure 3b: the loss on training images after rounds whose checkpoints were kept, a line a seed."""
    figure, axis = pyplot().subplots(figsize=(7.5, 3.2))
    kept = [one for one in cells("pse/table2") if one["row"] == "pse" and one.get("losses")]
    by = {f"{one['column']}, seed {one['seed']}": {int(at): loss for at, loss in one["losses"].items()} for one in kept}
    loss_lines(axis, by)
    axis.set(title="", xlabel="rounds", ylabel="cross-entropy on training images")
    caption(figure, "PSE: mean over clients that have taken part, before they train again.")
    return figure


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
SMOOTH = 10  # rounds that FedXDS's tables average
ROWS = {"fedx_lrp": ("FedXDS, LRP", "fedxds"), "fedavg": ("FedAvg", "fedavg"), "feddyn": ("FedDyn", "feddyn")}
ROWS |= {"scaffold": ("SCAFFOLD", "scaffold")}
EVALUATED = {"fedavg+ft": "fine-tuned"}
FIGURES = {"compose_settings": settings, "fedxds_protocol": protocol, "pse_fairness": by_client}
FIGURES |= {"pse_convergence": losses, "pse_table2": labels, "pse_views": views, "spatl_search": searches}


def main() -> None:
    wanted = sys.argv[1:] or list(FIGURES)
    if unknown := [name for name in wanted if name not in FIGURES]:
        print(f"there is no figure {', '.join(unknown)}; those of this script: {', '.join(FIGURES)}", file=sys.stderr)
        sys.exit(2)
    for name in wanted:
        print(save(FIGURES[name](), RESULTS / name, metadata={".png": None}))


if __name__ == "__main__":
    main()
