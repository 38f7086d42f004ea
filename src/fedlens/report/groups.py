"""Runs that differ in their seed alone, taken together; and which of them may be compared."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import affects_results
from ..plots.style import place_of
from ..runs.read import differing
from .measures import together

_REPEATED = {"devices", "seed"}  # what no result depends on, and what is drawn anew for a repetition
_SAID = 3  # settings at most in a label; where more differ, the folder's name tells more
_FAIR = ("mean", "std", "worst_decile", "jain")


def grouped(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method and setting, with mean and deviation over its complete runs; in the order they came."""
    found: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        if run["state"] != "corrupt":
            found.setdefault(repr(sorted(compared(run).items())), []).append(number)
    groups = [_group([runs[number] for number in numbers], numbers) for numbers in found.values()]
    _label(groups, [runs[numbers[0]] for numbers in found.values()])
    return groups


def compared(run: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a run another one than a repetition."""
    parts = {part for key in run["settings"] if affects_results(part := key.split(".")[0])} - _REPEATED
    kept = {k: v for k, v in run["settings"].items() if k != "partition.seed" and k.split(".")[0] in parts}
    return kept | {"over": "Flower" if run["flower"] else "simulation"}


def _group(runs: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> dict[str, Any]:
    complete = [run for run in runs if run["state"] == "complete"]
    shown = complete or list(runs)
    colour, dash = place_of(runs[0]["method"])
    models = [model for model in shown[0]["curves"] if all(model in run["curves"] for run in shown)]
    personal = [model for model in shown[0]["evaluations"] if all(model in run["evaluations"] for run in shown)]
    return {
        "method": runs[0]["method"],
        "colour": colour,
        "dash": dash,
        "runs": list(numbers),
        "complete": len(complete),
        "splits": sorted({run["split"] or "" for run in shown}),
        "data": sorted({run["data"] for run in shown}),
        "personal": next(iter(personal), None),  # the best trained of the models that clients were evaluated on
        "curves": {model: _mean_curve([run["curves"][model] for run in shown]) for model in models},
        "accuracy": {model: spread([_last(run["curves"][model]) for run in shown]) for model in models},
        "fairness": {
            model: {name: spread([run["evaluations"][model][name] for run in shown]) for name in _FAIR}
            for model in personal
        },
        "kinds": {kind: spread([_total(run, kind) for run in shown]) for kind in _kinds(shown)},
        "headers": spread([sum(parts["header"] for parts in run["bytes"].values()) for run in shown]),
        "bytes": spread([own_bytes(run) for run in shown]),
        "seconds": spread([run["seconds"] for run in shown]),
        "rounds": spread([run["rounds"] for run in shown]),
        "preparation": {
            name: statistics.fmean(run["preparation"][name] for run in shown) for name in shown[0]["preparation"]
        },
        "shares": shown[0]["shares"],
        "classes": next((len(run["owned"]["classes"]) for run in shown if run["owned"]), None),
        "detailed": together(complete),
    }


def _kinds(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({kind for run in runs for kind in run["bytes"]})


def _total(run: Mapping[str, Any], kind: str) -> int:
    return sum(run["bytes"].get(kind, {}).values())


def own_bytes(run: Mapping[str, Any]) -> int:
    """Of the method itself, up and down."""
    return sum(_total(run, kind) for kind in run["bytes"] if not kind.startswith("evaluation"))


def _last(curve: Mapping[str, list[Any]]) -> float | None:
    return curve["accuracy"][-1]


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and, of several, the sample deviation over seeds; none of both where a run diverged."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "std": None, "count": len(values)}
    std = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "std": std, "count": len(known)}


def _mean_curve(curves: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Over the rounds that all have: means, and the lowest and the highest accuracy."""
    at = [dict(zip(curve["round"], range(len(curve["round"])), strict=True)) for curve in curves]
    rounds = [round for round in curves[0]["round"] if all(round in places for places in at)]

    def each(name: str, round: int) -> list[Any]:
        return [curve[name][places[round]] for curve, places in zip(curves, at, strict=True)]

    found: dict[str, list[Any]] = {"round": rounds}
    for name in ("accuracy", "loss", "bytes", "seconds"):
        found[name] = [spread(each(name, round))["mean"] for round in rounds]
    if len(curves) > 1:
        known = [[value for value in each("accuracy", round) if value is not None] for round in rounds]
        found["low"], found["high"] = ([end(values, default=None) for values in known] for end in (min, max))
    return found


def outermost(keys: Sequence[str]) -> list[str]:
    """Without the fields of a part that is itself another one: model, not model.width."""
    return [key for key in keys if not any(key.startswith(f"{other}.") for other in keys)]


def _label(groups: list[dict[str, Any]], firsts: Sequence[Mapping[str, Any]]) -> None:
    """By the method, and where several are of one method by what else they differ in."""
    settings = [compared(run) for run in firsts]
    for number, group in enumerate(groups):
        alike = [other for other, one in enumerate(groups) if one["method"] == group["method"]]
        keys = outermost(differing([settings[other] for other in alike]))
        more = [f"{key.removeprefix('algorithm.')}={settings[number].get(key, '–')}" for key in keys]
        if len(more) > _SAID:
            more = [f"({firsts[number]['name']})"]
        group["label"], group["variant"] = " ".join([group["method"], *more]), alike.index(number)


# ---- what may be compared --------------------------------------------------------------------------------------------
def arenas(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Groups that have the same data and the same splits, by number."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for number, group in enumerate(groups):
        found.setdefault((tuple(group["data"]), tuple(group["splits"])), []).append(number)
    return list(found.values())
