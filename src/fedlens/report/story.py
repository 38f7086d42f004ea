"""The answer in words: which method was best, by how much, at what cost; and what must be said beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..analysis import LOOKS
from .groups import compared, differing, outermost

MODELS = {
    "global": "the global model, pooled test images",
    "fine-tuned": "clients' fine-tuned models, their own test images",
    "personal after": "clients' models after local training, their own test images",
    "personal before": "clients' models before local training, their own test images",
}


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"  # which no line ends before


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g}\u00a0{unit}"
        count /= 1000
    return f"{count:.3g}\u00a0TB"


def duration(seconds: float) -> str:
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f}\u00a0s" if seconds < 10 else f"{seconds:.0f}\u00a0s"


def measure_for(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """The model that all of these are judged by: the global one, or else clients' own."""
    measures = [m for m in ("global", *LOOKS) if all(g["accuracy"].get(m, {}).get("mean") is not None for g in groups)]
    return measures[0] if groups and measures else None


def _value(group: Mapping[str, Any], measure: str) -> float:
    return group["accuracy"][measure]["mean"]


def told(
    runs: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], arenas: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """headline and sentences: the answer of the only arena, or one line for each of several."""
    fields = {n: [groups[m] for m in arena if groups[m]["complete"]] for n, arena in enumerate(arenas)}
    fields = {letter(n): field for n, field in fields.items() if field}
    if not fields:
        return {"headline": "No run is complete yet", "sentences": []}
    answers = {name: _answer(field) for name, field in fields.items()}
    if len(fields) == 1:
        [(headline, sentences)], [field] = answers.values(), fields.values()
        return {"headline": headline, "sentences": sentences + _more_differs(runs, field)}
    lines = [
        " ".join([f"{name}: {headline}.", *sentences[:1], *_more_differs(runs, fields[name])])
        for name, (headline, sentences) in answers.items()
    ]
    return {
        "headline": f"{len(fields)} settings with data or a split of their own, to be read one by one",
        "sentences": lines,
    }


def _answer(groups: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """(headline, more sentences, of which the first says by what was judged)."""
    measure = measure_for(groups)
    if len(groups) == 1:
        return _single(groups[0], measure), [_judge(measure)] if measure else []
    if measure is None:
        return f"{len(groups)} methods without a measure in common", [_single(g, measure_for([g])) for g in groups]
    best, second, *_ = sorted(groups, key=lambda group: -_value(group, measure))
    lead = _value(best, measure) - _value(second, measure)
    if lead < max(group["accuracy"][measure]["std"] or 0.0 for group in (best, second)):
        numbers = f"{_number(best, measure)} and {_number(second, measure)}"
        headline = f"{best['label']} and {second['label']} are too close to call: {numbers}"
    else:
        points = f"{100 * lead:.1f} points above {second['label']}"
        headline = f"{best['label']} was best with {percent(_value(best, measure))}, {points}"
    sentences = [_judge(measure), _costs(best, second), *_thrift(groups, best, measure), *_own_models(groups, measure)]
    if all(group["complete"] == 1 for group in groups):
        sentences.append(
            "There is one run of each, which cannot tell a difference from chance: repeat with other seeds."
        )
    return headline, sentences


def _judge(measure: str) -> str:
    return f"Judged by {MODELS[measure].replace(',', ' on', 1)}, after the last round."


def _single(group: Mapping[str, Any], measure: str | None) -> str:
    traffic, time = size(group["bytes"]["mean"]), duration(group["seconds"]["mean"])
    cost = f"{group['rounds']['mean']:.0f} rounds, {traffic} and {time}"
    if measure is None:
        return f"{group['label']} ended without an accuracy, after {cost}"
    return f"{group['label']} reached {_number(group, measure)} in {cost}"


def _number(group: Mapping[str, Any], measure: str) -> str:
    found = group["accuracy"][measure]
    return percent(found["mean"]) + (f" ± {100 * found['std']:.1f}" if found["std"] is not None else "")


def _costs(best: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    def beside(name: str) -> str:
        ours, theirs = best[name]["mean"], second[name]["mean"]
        if not theirs or abs(ours / theirs - 1) < 0.05:
            return f"as {second['label']}"
        return f"{ours / theirs:.2g} times {second['label']}'s"

    traffic, time = size(best["bytes"]["mean"]), duration(best["seconds"]["mean"])
    return f"{best['label']} cost {traffic} of traffic ({beside('bytes')}) and {time} ({beside('seconds')})."


def _thrift(groups: Sequence[Mapping[str, Any]], best: Mapping[str, Any], measure: str) -> list[str]:
    """Who sent least, where that is somebody else."""
    least = min(groups, key=lambda group: group["bytes"]["mean"])
    share = least["bytes"]["mean"] / max(best["bytes"]["mean"], 1)
    if share > 0.95:
        return []
    return [f"The least was sent by {least['label']}, {size(least['bytes']['mean'])} for {_number(least, measure)}."]


def _own_models(groups: Sequence[Mapping[str, Any]], measure: str) -> list[str]:
    """Who serves single clients best, when the measure was another one."""
    look = next((look for look in LOOKS if all(look in group["fairness"] for group in groups)), None)
    if look is None or look == measure:
        return []
    best, kindest = (
        max(groups, key=lambda group: group["fairness"][look][name]["mean"]) for name in ("mean", "worst_decile")
    )
    mean, tenth = (percent(g["fairness"][look][n]["mean"]) for g, n in ((best, "mean"), (kindest, "worst_decile")))
    said = f"Of {MODELS[look].partition(',')[0]}, {best['label']}'s are best: {mean} on average"
    if kindest is best:
        return [f"{said}, {tenth} for the worst tenth of clients."]
    return [f"{said}; the worst tenth of clients does best with {kindest['label']}'s, {tenth}."]


def _more_differs(runs: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """A comparison of methods where other settings differ, too, must say so."""
    keys = outermost(differing([compared(runs[group["runs"][0]]) for group in groups]))
    others = [key for key in keys if not key.startswith("algorithm")]
    return [f"Not only the method differs, but also {', '.join(others)}."] if others else []


def warnings(
    runs: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], arenas: Sequence[Any]
) -> list[str]:
    """What must not be overlooked."""
    said = []
    if len({data for group in groups for data in group["data"]}) > 1:
        said.append(f"These runs have different data, and numbers compare only within one. {_parted(groups, arenas)}.")
    elif len(arenas) > 1:
        keys = [key for key in differing([runs[group["runs"][0]]["settings"] for group in groups]) if _deals(key)]
        why = f" ({', '.join(keys)} differ)" if keys else ""
        said.append(f"These runs have different splits{why}, and compare only within one. {_parted(groups, arenas)}.")
    for state, words in (("corrupt", "corrupt and left out"), ("unfinished", "not finished and not ranked")):
        if named := [run["name"] for run in runs if run["state"] == state]:
            verb = "is" if len(named) == 1 else "are"
            said.append(f"{len(named)} of {len(runs)} runs {verb} {words}: {_some(named)}.")
    return said


def _deals(key: str) -> bool:
    """Whether a setting has a say in who owns what."""
    return key.startswith("partition") or key in ("clients", "seed")


def _parted(groups: Sequence[Mapping[str, Any]], arenas: Sequence[Sequence[int]]) -> str:
    named = [f"{letter(n)}: {_some([groups[m]['label'] for m in arena])}" for n, arena in enumerate(arenas)]
    return _some(named, "; ")


def letter(number: int) -> str:
    """A, B, ..., Z, A2, ..."""
    return chr(65 + number % 26) + (str(number // 26 + 1) if number >= 26 else "")


def _some(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
