"""Curves as a page draws them: as many points as can be seen, and means over runs that differ in their seed alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.files import finite

MEASURES = ("accuracy", "loss", "seconds", "bytes")
POINTS = 400  # of a curve, where nobody asks for fewer or more
Series = Mapping[int, tuple[float | None, ...]]  # round of training -> MEASURES
Curves = dict[str, dict[str, list[Any]]]  # model -> name -> values, all as long as those of `round`


def kept(values: Sequence[float | None], most: int) -> list[int]:
    """Places of at most so many, rising: the first, the last, and each stretch's lowest and highest value.

    Equal steps would miss a round in which a model broke down.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = max(1, (most - 2) // 2)
    found = {0, count - 1}
    for number in range(stretches):
        first, last = 1 + number * (count - 2) // stretches, 1 + (number + 1) * (count - 2) // stretches
        known = [(value, at) for at in range(first, last) if (value := values[at]) is not None]
        found |= {min(known)[1], max(known)[1]} if known else {first}
    return sorted(found)


def drawn(series: Mapping[str, Series], most: int = POINTS, window: tuple[int, int] | None = None) -> Curves:
    """What a page gets of a run: six digits of at most so many points of each model, in a window of rounds."""
    return {model: _columns(_within(each, window), MEASURES, most) for model, each in series.items()}


def means(runs: Sequence[Mapping[str, Series]], most: int = POINTS, window: tuple[int, int] | None = None) -> Curves:
    """Model -> means over runs in the rounds that all have, and the lowest and highest accuracy and loss.

    Runs that are less than half as far as the farthest are left out: one that begins would cut the others short.
    """
    found: Curves = {}
    for model in [model for model in runs[0] if all(model in run for run in runs)]:
        far = max(max(run[model]) for run in runs)
        used = [run[model] for run in runs if 2 * max(run[model]) >= far]
        rounds = [round for round in used[0] if all(round in run for run in used)]
        mean = {round: tuple(map(_mean, zip(*(run[round] for run in used), strict=True))) for round in rounds}
        mean = _within(mean, window)
        found[model] = _columns(mean, MEASURES, most)
        for place, name in enumerate(MEASURES[:2]):
            each = [[value for run in used if (value := run[at][place]) is not None] for at in found[model]["round"]]
            found[model] |= {f"{name}_low": [_six(min(values, default=None)) for values in each]}
            found[model] |= {f"{name}_high": [_six(max(values, default=None)) for values in each]}
        found[model]["runs"] = [len(used)] * len(found[model]["round"])
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    """None where a run has none: it diverged, or its bytes cannot be read."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _within(series: Series, window: tuple[int, int] | None) -> Series:
    """With one more on both sides, to which lines lead."""
    if window is None:
        return series
    rounds = list(series)
    inside = [at for at, round in enumerate(rounds) if window[0] <= round <= window[1]]
    return {round: series[round] for round in rounds[max(0, inside[0] - 1) : inside[-1] + 2]} if inside else {}


def _columns(series: Series, names: Sequence[str], most: int) -> dict[str, list[Any]]:
    rounds = list(series)
    rounds = [rounds[at] for at in kept([series[round][0] for round in rounds], most)]
    return {"round": rounds, **{name: [_six(series[r][at]) for r in rounds] for at, name in enumerate(names)}}


def _six(value: float | None) -> float | int | None:
    """Six digits: more are never shown, and would double what is sent. Whole numbers stay whole."""
    return finite(float(f"{value:.6g}")) if isinstance(value, float) else value
