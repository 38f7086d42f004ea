"""Pictures of a league: critical differences per kind of world, and accuracy over rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plots.style import caption, colour_of, dash_of, pyplot, save
from .standings import MEASURES, Standings
from .statistics import Ranking

_GREY: dict[str, Any] = {"color": "#b0b0b0", "linewidth": 0.7, "zorder": 1}


def draw(found: Standings, path: Path) -> Path | None:
    """Mean ranks of all methods, one panel for each kind of world and model; a bar joins what cannot be told apart."""
    kinds = found.kinds
    panels = [
        (f"{kind if kind != 'all' else 'all worlds'}, {measure} model", ranking)
        for kind, worlds in kinds.items()
        for measure in MEASURES
        if (ranking := found.ranking(measure, worlds)) is not None
    ]
    if not panels:
        return None
    tall = max(len(ranking.ranks) for _, ranking in panels)
    rows = (len(panels) + 1) // 2
    size = (13, rows * (0.9 + 0.17 * tall))
    figure, axes = pyplot().subplots(rows, 2, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, ranking) in zip(axes.flat, panels, strict=False):
        critical(axis, ranking, title)
    figure.draw_without_rendering()  # laid out before it is measured
    caption(
        figure,
        "Mean rank over worlds, the best on the left. A bar joins what cannot be told apart at 5 % (Nemenyi).",
    )
    return save(figure, path)


def critical(axis: Any, ranking: Ranking, title: str) -> None:
    """One diagram: names left and right of a scale of ranks, bars below it."""
    names, count = list(ranking.ranks), len(ranking.ranks)
    half, bars = (count + 1) // 2, ranking.groups
    room = 0.35 * len(bars) + 0.5
    axis.set(xlim=(1 - 0.45 * count, count + 0.45 * count), ylim=(-(room + half + 0.5), 1.6))
    axis.axis("off")
    axis.hlines(0, 1, count, color="#333333", linewidth=1)
    for rank in range(1, count + 1):
        axis.vlines(rank, 0, 0.15, color="#333333", linewidth=1)
        axis.text(rank, 0.25, str(rank), ha="center", va="bottom", fontsize=8)
    chance = "" if ranking.friedman is None else f", Friedman p = {ranking.friedman:.2g}"
    axis.set_title(f"{title} ({len(ranking.worlds)} worlds{chance})", fontsize=10)
    axis.hlines(1.2, 1, 1 + ranking.critical, color="#666666", linewidth=2)
    axis.text(1 + ranking.critical, 1.2, f"  critical difference {ranking.critical:.1f}", fontsize=8, va="center")
    for place, name in enumerate(names):
        is_left = place < half
        depth = -(room + (place if is_left else count - 1 - place) + 0.3)
        rank, edge = ranking.ranks[name], 1 - 0.08 * count if is_left else count + 0.08 * count
        axis.plot([rank, rank, edge], [0, depth, depth], color=colour_of(name), linewidth=1.2)
        words = f"{name} {rank:.1f} " if is_left else f" {rank:.1f} {name}"
        axis.text(edge, depth, words, ha="right" if is_left else "left", va="center", fontsize=8.5)
    for number, group in enumerate(bars):
        ends = [ranking.ranks[name] for name in group]
        axis.hlines(-(0.3 + 0.35 * number), min(ends) - 0.1, max(ends) + 0.1, color="#111111", linewidth=3)


def draw_rates(found: Standings, path: Path) -> Path | None:
    """Accuracy of the search over rates: a panel for each world, a line for each method, a dot at the chosen rate."""
    worlds = [world for world in found.worlds if any(_curve(found, method, world) for method in found.methods)]
    if not worlds:
        return None
    columns = min(4, len(worlds))
    rows = (len(worlds) + columns - 1) // columns
    size = (3.4 * columns, 2.6 * rows)
    figure, axes = pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", sharey=True)
    for axis in axes.flat[len(worlds) :]:
        axis.set_visible(False)
    chosen, drawn = found.rates(), {}
    for axis, world in zip(axes.flat, worlds, strict=False):
        for method in found.methods:
            if not (curve := _curve(found, method, world)):
                continue
            rates, accuracies = zip(*curve, strict=True)
            is_named = found.methods[method]["everywhere"]
            look = {"color": colour_of(method), "linestyle": dash_of(method)} if is_named else _GREY
            line = axis.plot(rates, [100 * a for a in accuracies], **look)
            drawn[method if is_named else "methods without a rank"] = line[0]
            rate = chosen.get(method, {}).get(world, (None, ""))[0]
            axis.plot(*_dot(curve, rate), "o", color=look["color"], markersize=4 if is_named else 2.5)
        axis.set(xscale="log", title=world)
        axis.title.set_fontsize(9)
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=8, fontsize=8)
    figure.draw_without_rendering()  # laid out before it is measured
    caption(
        figure,
        "Accuracy in % over local rates, of the model that a method is about: a part of the rounds, on another seed. "
        "A dot is the rate that was chosen; below the top of a line: longer runs collapsed there, or personal accuracy "
        "counted, too.",
    )
    return save(figure, path)


def _curve(found: Standings, method: str, world: str) -> list[tuple[float, float]]:
    return found.curve(method, world, "personal" if found.methods[method]["measure"] == "personal" else "global")


def _dot(curve: Sequence[tuple[float, float]], rate: float | None) -> tuple[list[float], list[float]]:
    at = [(x, 100 * y) for x, y in curve if x == rate]
    return [x for x, _ in at], [y for _, y in at]
