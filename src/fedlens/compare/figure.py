"""A comparison as one picture: accuracy over rounds, bytes and seconds, a row of panels for each kind of model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plots.style import colour_of, dash_of, pyplot, save
from .measured import Compared

_OVER = {"round": ("rounds", 1.0), "bytes": ("megabytes sent, up and down", 1e6), "seconds": ("seconds", 1.0)}
_MODELS = {
    "global": "global model,\npooled test set",
    "personal before": "personal, before\nlocal training",
    "personal after": "personal, after\nlocal training",
    "fine-tuned": "fine-tuned",
}


def draw(runs: Sequence[Compared], path: Path) -> Path | None:
    """Curves of one setting's runs, the mean over seeds with every seed behind it; nothing without a complete run."""
    done = [run for run in runs if run.state == "complete"]
    models = [model for model in _MODELS if any(model in run.curves for run in done)]
    if not models:
        return None
    plt = pyplot()
    figure, axes = plt.subplots(
        len(models), 3, figsize=(12, 0.7 + 2.9 * len(models)), sharey=True, squeeze=False, layout="constrained"
    )
    methods = list(dict.fromkeys(run.method for run in done))
    for model, panels in zip(models, axes, strict=True):
        for axis, (over, (title, unit)) in zip(panels, _OVER.items(), strict=True):
            for method in methods:
                mine = [run for run in done if run.method == method and model in run.curves]
                if mine:
                    _line(axis, mine, model, over, unit, alike=_variant(method, done))
            axis.set(xlabel=title, ylim=_range(done, models), xlim=(0, None), label=f"{model} {over}")
        panels[0].set_ylabel(f"accuracy, %\n{_MODELS[model]}")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        handles |= {label: line for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), 6), handlelength=3.5
    )
    return save(figure, path)


def _range(runs: Sequence[Compared], models: Sequence[str]) -> tuple[float, float]:
    """Of accuracy in %, the same in all panels: tens around all that is drawn, so that curves have the room."""
    drawn = [run.curves[model]["accuracy"] for run in runs for model in models if model in run.curves]
    values = [100 * value for curve in drawn for value in curve if value is not None and math.isfinite(value)]
    if not values:
        return 0, 100
    low, high = 10 * math.floor(min(values) / 10), 10 * math.ceil(max(values) / 10)
    return low, max(high, low + 10)


def _variant(method: str, runs: Sequence[Compared]) -> int:
    """Which of the rows of one algorithm this is: they have one colour, and differ in their marks."""
    algorithm = next(run.algorithm for run in runs if run.method == method)
    return list(dict.fromkeys(run.method for run in runs if run.algorithm == algorithm)).index(method)


def _line(axis: Any, runs: Sequence[Compared], model: str, over: str, unit: float, alike: int) -> None:
    method, algorithm = runs[0].method, runs[0].algorithm
    colour, dash = colour_of(algorithm), dash_of(algorithm)
    curves = [run.curves[model] for run in runs]
    rounds = [round for round in curves[0]["round"] if all(round in curve["round"] for curve in curves)]
    points = [[_at(curve, name, rounds) for curve in curves] for name in (over, "accuracy")]
    points[1] = [[100 * value for value in seed] for seed in points[1]]
    xs, ys = ([sum(each) / len(each) for each in zip(*values, strict=True)] for values in points)
    sparse = len(rounds) <= 12
    mark = ("o", "s", "^", "D", "v", "P")[alike % 6] if sparse or alike else None
    style = dict(color=colour, linestyle=dash, marker=mark, markersize=4, markevery=1 if sparse else 0.15)
    axis.plot([x / unit for x in xs], ys, label=method, linewidth=1.8, **style)
    if len(runs) > 1:
        for x, y in zip(*points, strict=True):
            axis.plot([value / unit for value in x], y, color=colour, linestyle=dash, linewidth=0.6, alpha=0.4)


def _at(curve: Any, name: str, rounds: Sequence[int]) -> list[float]:
    place = {round: number for number, round in enumerate(curve["round"])}
    return [float("nan") if (value := curve[name][place[round]]) is None else value for round in rounds]
