"""Figures about saliency: grids of maps, box plots of their likeness, clients' weights, agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...data.client_names import Names
from ...plots.style import COLOURS, caption, name_ticks, pyplot, save

NUMBERED = 25  # clients at most whose names or numbers fit below a chart


def pictures(columns: Mapping[str, Any], path: Path, titles: Sequence[str] = (), about: str = "") -> Path:
    """Columns of pictures [n, h, w, 3] or [n, h, w] in 0..1, each under its name, row by row; below, what they are."""
    plt = pyplot()
    high = len(next(iter(columns.values())))
    figure, axes = plt.subplots(high, len(columns), figsize=(1.25 * len(columns), 1.25 * high + 0.3), squeeze=False)
    for (name, column), line in zip(columns.items(), axes.T, strict=True):
        line[0].set_title(name, fontsize=8)
        for picture, axis in zip(column, line, strict=True):
            axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
            axis.spines[:].set_visible(False)
    for title, axis in zip(titles, axes[:, 0], strict=False):
        axis.set_ylabel(title, fontsize=8)
    figure.subplots_adjust(wspace=0.05, hspace=0.05)
    if about:
        caption(figure, about)
    return save(figure, path, whole=True)


def boxes(scores: Mapping[str, Mapping[str, Tensor]], path: Path, title: str) -> Path:
    """A panel for each measure, a box for each latent: quartiles, 1.5 times their distance, mean as a triangle."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(scores), figsize=(4 * len(scores), 3.6), squeeze=False)
    for (measure, of), axis in zip(scores.items(), axes[0], strict=True):
        drawn = axis.boxplot(
            [values.double().numpy() for values in of.values()],
            tick_labels=list(of),
            showmeans=True,
            patch_artist=True,
            widths=0.6,
            medianprops={"color": "black"},
            meanprops={"markerfacecolor": "white", "markeredgecolor": "black", "markersize": 6},
            flierprops={"marker": ".", "markersize": 2, "markeredgecolor": "0.6"},
        )
        for box, colour in zip(drawn["boxes"], COLOURS, strict=False):
            box.set(facecolor=colour, alpha=0.75)
        axis.set_title(measure)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return save(figure, path)


def client_weights(axes: Sequence[Any], weights: Any, names: Names) -> None:
    """Two panels, clients by size: shares of the average, and saliency per image."""
    share, per_image = axes
    order = sorted(weights.examples, key=lambda client: -weights.examples[client])
    places = range(len(order))
    share.bar(places, [100 * weights.by_samples[c] for c in order], color="0.8", label="by samples, $n_k$")
    share.plot(places, [100 * weights.used[c] for c in order], "o", color=COLOURS[1], markersize=4, label="used")
    total = sum(weights.saliency.values())
    if total and any(abs(weights.saliency[c] / total - weights.used[c]) > 1e-9 for c in order):
        by_saliency = [100 * weights.saliency[c] / total for c in order]
        share.plot(places, by_saliency, "_", color=COLOURS[0], markersize=8, label="by saliency, $R_k$")
    share.set(title="share of an average over all clients, %")
    share.legend(loc="upper right")
    values = [weights.per_image[c] for c in order]
    per_image.bar(places, values, color=COLOURS[0], alpha=0.8)
    per_image.axhline(
        total / max(sum(weights.examples.values()), 1), color=COLOURS[1], linewidth=1.5, label="all images"
    )
    per_image.set(title="saliency per image, $R_k / n_k$")
    per_image.legend(loc="upper right")
    for axis in axes:
        axis.set_xlabel("clients, largest first")
        name_ticks(axis, [names.tick(client) for client in order] if len(order) <= NUMBERED else [], 8)
        axis.grid(axis="x", visible=False)


def agreement_matrix(axis: Any, names: Sequence[str], matrix: Tensor) -> None:
    """Mean rank correlation of maps, in words and colour."""
    axis.imshow(matrix.numpy(), cmap="Blues", vmin=0, vmax=1)
    for row in range(len(names)):
        for column in range(len(names)):
            value = float(matrix[row, column])
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black")
    name_ticks(axis, names, 10)
    axis.set_yticks(range(len(names)), names)
    axis.grid(False)
    axis.spines[:].set_visible(False)


def moved_weights(over_rounds: Mapping[int, Any], path: Path) -> Path:
    """Static against dynamic: each client's share at first and at last, and how far shares moved."""
    plt = pyplot()
    figure, (shares, distance) = plt.subplots(1, 2, figsize=(8.4, 3.6))
    first, last = over_rounds[min(over_rounds)], over_rounds[max(over_rounds)]
    xs, ys = ([100 * of.used[client] for client in first.used] for of in (first, last))
    top = 1.05 * max(*xs, *ys)
    shares.plot([0, top], [0, top], color="0.7", linewidth=1)
    shares.plot(xs, ys, "o", color=COLOURS[0], markersize=4, alpha=0.8)
    shares.set(xlabel="share before the first round, %", ylabel=f"share after {max(over_rounds)} rounds, %")
    shares.set_title("each client's share of an average")
    rounds = sorted(over_rounds)
    for against, name, colour in (
        (first.used, "the first weights", COLOURS[0]),
        (first.by_samples, "FedAvg's", COLOURS[1]),
    ):
        moved = [50 * sum(abs(over_rounds[r].used[c] - against[c]) for c in against) for r in rounds]
        distance.plot(rounds, moved, "o-", color=colour, markersize=4, label=f"from {name}")
    distance.set(xlabel="rounds of training", title="share of the total that moved, %")
    distance.set_ylim(bottom=0)
    distance.xaxis.get_major_locator().set_params(integer=True)
    distance.legend()
    figure.tight_layout()
    return save(figure, path)


def switched_weights(numbers: Mapping[str, Mapping[str, float]], marks: Mapping[str, float], path: Path) -> Path:
    """A line for each way to weigh, the most equal at the top; marks are what clients count as by two plain ways."""
    panels = {
        "counted": "as how many clients they count",
        "moved": "weight moved from FedAvg's",
        "grows": "saliency per image with size\n(rank correlation)",
    }
    order = sorted(numbers, key=lambda name: numbers[name]["counted"])
    figure, axes = pyplot().subplots(1, len(panels), figsize=(11, 0.27 * len(order) + 1.1), sharey=True)
    for (measure, title), axis in zip(panels.items(), axes, strict=True):
        axis.plot([numbers[name][measure] for name in order], range(len(order)), "o", color=COLOURS[0])
        axis.set_title(title, fontsize=10)
    for (name, value), colour in zip(marks.items(), COLOURS[1:], strict=False):
        axes[0].axvline(value, color=colour, linewidth=1.2, label=name)
    axes[0].legend(fontsize=8, loc="lower right")
    axes[1].set_xlim(left=0)
    axes[1].xaxis.set_major_formatter("{x:.0%}")
    axes[0].set_yticks(range(len(order)), order)
    figure.tight_layout()
    return save(figure, path)
