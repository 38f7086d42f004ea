"""Pictures of audits: what attacks find beside their two references, and what they make of releases and uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plots.style import COLOURS, pyplot, save
from .attack import LEGEND, Gallery, Verdict
from .measures import Measure

WIDE = 12  # pictures beside each other


def overview(verdicts: Sequence[Verdict], path: Path) -> Path:
    """One line for each attack: where it ends between chance and no defence, with intervals."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(verdicts), 1, figsize=(7.2, 0.62 * len(verdicts) + 0.9), squeeze=False, layout="constrained"
    )
    marks = dict(zip(LEGEND, ((COLOURS[0], "o"), ("#888888", "|"), (COLOURS[1], "d")), strict=True))
    for axis, verdict in zip(axes[:, 0], verdicts, strict=True):
        for (name, (colour, mark)), one in zip(marks.items(), verdict.beside(verdict.decisive), strict=True):
            axis.plot([one.low, one.high], [0, 0], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
            axis.plot(one.value, 0, mark, color=colour, markersize=8, label=name, zorder=4 if name == "found" else 3)
        axis.set_ylabel(f"{verdict.attack}\n{verdict.decisive}", rotation=0, ha="right", va="center", fontsize=9)
        axis.set(yticks=[], ylim=(-0.5, 0.5))
        if verdict.decisive != "PSNR":
            axis.set_xlim(0, 1.01)
        axis.spines["left"].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0, 0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9)
    return save(figure, path, whole=True)


def side_by_side(gallery: Gallery, path: Path, title: str = "") -> Path:
    """Rows: the originals, what was released of them (where pictures were), what the attack recovered.

    Many go on below, WIDE at a time: in one line they would be too small to see.
    """
    kinds = {"original": gallery.original, "released": gallery.released, "recovered": gallery.recovered}
    known = {name: x for name, x in kinds.items() if x is not None}
    starts = range(0, len(gallery.original), WIDE)
    return _grid([(name, x[at : at + WIDE]) for at in starts for name, x in known.items()], path, title)


def grid_of(rows: Mapping[str, Any], path: Path, title: str = "") -> Path:
    """Named rows of pictures [n, c, h, w] in [0, 1], one column for each image."""
    return _grid([*rows.items()], path, title)


def _grid(rows: Sequence[tuple[str, Any]], path: Path, title: str) -> Path:
    plt = pyplot()
    wide = max(len(x) for _, x in rows)
    figure, axes = plt.subplots(
        len(rows), wide, figsize=(1.05 * wide + 1.3, 1.12 * len(rows) + 0.5), squeeze=False, layout="constrained"
    )
    for line, (name, pictures) in zip(axes, rows, strict=True):
        for column, axis in enumerate(line):
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
            axis.spines[:].set_visible(False)
            if column < len(pictures):
                picture = pictures[column].permute(1, 2, 0).numpy()
                axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=8, wrap=True)
    return save(figure, path, whole=True)


def over_epsilon(
    curves: Mapping[str, Mapping[float, Measure]],
    path: Path,
    *,
    ylabel: str,
    levels: Mapping[str, float] | None = None,
    xlabel: str = "ε",
) -> Path:
    """A curve with intervals for each defence, and dashed levels beside them."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        places, found = range(len(points)), list(points.values())
        axis.plot(places, [one.value for one in found], "o-", color=colour, label=name, linewidth=1.6, markersize=5)
        axis.fill_between(
            places, [m.low for m in found], [m.high for m in found], color=colour, alpha=0.15, linewidth=0
        )
    for (name, level), colour in zip((levels or {}).items(), ("#888888", "#000000"), strict=False):
        axis.axhline(level, color=colour, linestyle="--", linewidth=1, label=name)
    longest = max(curves.values(), key=len)
    axis.set(xlabel=xlabel, ylabel=ylabel, xticks=range(len(longest)))
    axis.set_xticklabels(["none" if x == float("inf") else f"{x:g}" for x in longest])
    how = {"fontsize": 8, "title": "bands: 95 % intervals", "title_fontsize": 8}
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), **how)  # bands leave no room inside
    return save(figure, path)
