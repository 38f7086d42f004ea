"""Figures about single clients: accuracy and fairness, confusions, training loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data.client_names import NUMBERS, Names
from ..plots.style import COLOURS, name_ticks, pyplot, save

NUMBERED = 40  # clients at most whose names or numbers fit below a chart
BETTER, WORSE = "#c00000", "#0050c0"


def accuracy_bars(
    accuracies: Mapping[str, Mapping[int, float]],
    fairness: Mapping[str, Mapping[str, float]],
    path: Path,
    names: Names = NUMBERS,
) -> Path:
    """A row for each run, a bar for each client in the same order: the first run's, worst first."""
    first, by = next(iter(accuracies.items()))
    order = sorted(by, key=lambda client: (by[client], client))
    called = [names.tick(client) for client in order]
    plt = pyplot()
    wide, below = min(12, max(6, 0.12 * len(order) + 2)), 0.06 * max(map(len, called))  # inches
    high = 1.75 * len(accuracies) + 0.5 + below
    figure, axes = plt.subplots(len(accuracies), 1, figsize=(wide, high), squeeze=False)
    for (name, values), axis, colour in zip(accuracies.items(), axes[:, 0], _cycle(len(accuracies)), strict=True):
        numbers = fairness[name]
        axis.bar(range(len(order)), [100 * values.get(c, math.nan) for c in order], color=colour, alpha=0.8, width=0.8)
        axis.axhline(100 * numbers["mean"], color="black", linewidth=1)
        axis.axhline(100 * numbers["worst_decile"], color="black", linewidth=1, linestyle=":")
        said = f"mean {100 * numbers['mean']:.1f} %, std {100 * numbers['std']:.2f}, "
        said += f"worst tenth {100 * numbers['worst_decile']:.1f} % (dotted), Jain {numbers['jain']:.3f}"
        axis.set_title(f"{name}: {said}", fontsize=9, loc="left")
        axis.set(ylim=(0, 101), xlim=(-0.7, len(order) - 0.3), ylabel="accuracy, %", label=name)
        name_ticks(axis, called if len(order) <= NUMBERED else [], 7)
        axis.tick_params(labelbottom=axis is axes[-1, 0] or not names.clients)  # once is enough for words
        axis.grid(axis="x", visible=False)
    axes[-1, 0].set_xlabel(f"clients, worst of {first} first")
    figure.tight_layout()
    return save(figure, path)


def confusion_matrices(counts: Mapping[str, Tensor], classes: Sequence[str], path: Path, title: str = "") -> Path:
    """Shares of each true class, in %, side by side; where others do better than the first on a class, its diagonal is
    framed in red, where worse in blue, and the change is told at its end. Classes without images are left out."""
    first = next(iter(counts.values()))
    own = [label for label in range(len(classes)) if first[label].sum()]
    names = [classes[label] for label in own]
    strays = any(int(matrix[own].sum() - matrix[own][:, own].sum()) for matrix in counts.values())
    side = 0.34 * (len(own) + strays) + 1.2
    figure, axes = pyplot().subplots(1, len(counts), figsize=(1.5 + (side + 0.9) * len(counts), side + 1), sharey=True)
    before: list[float] = []
    for (name, matrix), axis in zip(counts.items(), axes if len(counts) > 1 else [axes], strict=True):
        sizes = matrix[own].sum(1).double()
        shares = (100 * matrix[own][:, own] / sizes[:, None]).tolist()
        if strays:
            shares = [[*row, 100 - sum(row)] for row in shares]
        axis.imshow(shares, cmap="Greys", vmin=0, vmax=100)
        for y, row in enumerate(shares):
            for x, share in enumerate(row):
                if share >= 0.5:
                    colour = "white" if share > 55 else "black"
                    axis.text(x, y, f"{share:.0f}", ha="center", va="center", fontsize=7, color=colour)
        right = [row[at] for at, row in enumerate(shares)]
        for at, change in enumerate(now - was for now, was in zip(right, before, strict=False)):
            if abs(change) >= 0.5:
                colour = BETTER if change > 0 else WORSE
                axis.add_patch(_frame(at, colour))
                axis.text(len(shares[0]) - 0.3, at, f"{change:+.0f}", color=colour, va="center", fontsize=7)
        before = before or right
        accuracy = 100 * int(matrix.diagonal().sum()) / int(matrix.sum())
        axis.set_title(f"{name}: {accuracy:.1f} %", fontsize=9)
        columns = [*names, "others"] if strays else names
        axis.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set(xlabel="taken for", label=name)
        axis.grid(False)
    axis = axes[0] if len(counts) > 1 else axes
    axis.set_ylabel("true class")
    if title:
        figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return save(figure, path)


def _frame(at: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((at - 0.5, at - 0.5), 1, 1, fill=False, edgecolor=colour, linewidth=1.8)


def loss_curves(losses: Mapping[str, Mapping[int, float]], path: Path) -> Path:
    figure, axis = pyplot().subplots(figsize=(5.5, 3.4))
    loss_lines(axis, losses)
    return save(figure, path)


def loss_lines(axis: Any, losses: Mapping[str, Mapping[int, float]]) -> None:
    """Over rounds, one line for each run."""
    for (name, by), colour in zip(losses.items(), _cycle(len(losses)), strict=True):
        axis.plot([*by], [*by.values()], "o-", color=colour, markersize=3, linewidth=1.6, label=name)
    axis.set(xlabel="rounds", ylabel="cross-entropy", title="training loss, mean over clients")
    axis.set_ylim(bottom=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend()


def grouped_bars(axis: Any, groups: Mapping[str, Mapping[str, float | None]], ylabel: str) -> None:
    """{group: {bar: value}}, with the values above; None is a gap. The label says where bars do not begin at zero."""
    bars = list(dict.fromkeys(bar for values in groups.values() for bar in values))
    width = 0.8 / len(bars)
    for at, (bar, colour) in enumerate(zip(bars, _cycle(len(bars)), strict=True)):
        for place, values in enumerate(groups.values()):
            if (value := values.get(bar)) is not None:
                x = place + (at - (len(bars) - 1) / 2) * width
                axis.bar(x, value, width, color=colour, alpha=0.85)
                axis.text(x, value, f"{value:.1f}", ha="center", va="bottom", fontsize=7)
        axis.bar(0, 0, 0, color=colour, alpha=0.85, label=bar)
    known = [value for values in groups.values() for value in values.values() if value is not None]
    axis.set_xticks(range(len(groups)), list(groups))
    axis.grid(axis="x", visible=False)
    if known:
        room = max(max(known) - min(known), 4)
        bottom = max(0, min(known) - room)
        axis.set_ylim(bottom, max(known) + 0.35 * room)
        axis.set_ylabel(f"{ylabel} (axis cut)" if bottom else ylabel)
    axis.legend(ncols=len(bars), loc="upper center", fontsize=8)


def _cycle(count: int) -> list[str]:
    return [COLOURS[at % len(COLOURS)] for at in range(count)]
