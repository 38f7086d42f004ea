"""The answer in words: which method was best, by how much, at what cost; and what must be said beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core import format
from ..runs.read import PERSONAL, differing, measure_of
from .groups import compared, outermost

MODELS = {
    "global": "the global model, pooled test images",
    "personal": "personal models, each client's test images",
    "fine-tuned": "fine-tuned personal models, each client's test images",
    "personal after": "personal models after local training, each client's test images",
    "personal before": "personal models before local training, each client's test images",
}
_WHICH = {
    "fine-tuned": "fine-tuned",
    "personal after": "after local training",
    "personal before": "before local training",
}


def percent(share: float) -> str:
    return _together(format.percent(share))


def size(count: float) -> str:
    return _together(format.size(count))


def duration(seconds: float) -> str:
    return _together(format.duration(seconds))


def _together(text: str) -> str:
    """A number and its unit, between which no line ends."""
    return text.replace(" ", "\u00a0")


def measure_for(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """The model that all of these are evaluated on: the global one where that is each one's, or else personal ones."""

    def known(measure: str) -> bool:
        return all(group["accuracy"].get(model_of(group, measure), {}).get("mean") is not None for group in groups)

    measures = ["global", personal_measure(groups)]
    if any(measure_of(group["accuracy"]) != "global" for group in groups):
        measures.reverse()
    return next((m for m in measures if m and known(m)), None) if groups else None


def personal_measure(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """The personal model that all of these have; "personal" where it has another name for some."""
    models = {group["personal"] for group in groups}
    if len(models) > 1:
        return "personal" if None not in models else None
    return models.pop() if models else None


def model_of(group: Mapping[str, Any], measure: str) -> str | None:
    """What a group calls the model that it is evaluated on."""
    return group["personal"] if measure == "personal" else measure


def personal_models(groups: Sequence[Mapping[str, Any]]) -> str:
    """What a personal model is, where that differs: fine-tuned for A, after local training for the others."""
    by = {model: [g["label"] for g in groups if g["personal"] == model] for model in PERSONAL}
    by = dict(sorted(((model, named) for model, named in by.items() if named), key=lambda one: len(one[1])))
    if len(by) < 2:
        return ""
    *_, most = by
    named = {
        model: "the others" if model == most and len(labels) > 1 else _some(labels) for model, labels in by.items()
    }
    return ", ".join(f"{_WHICH[model]} for {who}" for model, who in named.items())


def _accuracy(group: Mapping[str, Any], measure: str) -> Mapping[str, Any]:
    return group["accuracy"][model_of(group, measure)]


def _value(group: Mapping[str, Any], measure: str) -> float:
    return _accuracy(group, measure)["mean"]


def told(
    runs: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], arenas: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """headline and sentences: the answer of the only arena, or one line for each of several; `listed` where sentences
    are about different things, and no text."""
    fields = {n: [groups[m] for m in arena if groups[m]["complete"]] for n, arena in enumerate(arenas)}
    fields = {letter(n): field for n, field in fields.items() if field}
    if not fields:
        return {"headline": "No run is complete yet", "sentences": [], "listed": False}
    answers = {name: _answer(field) for name, field in fields.items()}
    if len(fields) == 1:
        [(headline, which, more)], [field] = answers.values(), fields.values()
        listed = len(field) > 1 and measure_for(field) is None
        return {"headline": headline, "sentences": which + more + _more_differs(runs, field), "listed": listed}
    lines = [
        " ".join([f"{name}: {headline}.", *which, *_more_differs(runs, fields[name])])
        for name, (headline, which, _) in answers.items()
    ]
    return {
        "headline": f"{len(fields)} settings with data or a split of their own, to be read one by one",
        "sentences": lines,
        "listed": True,
    }


def _answer(groups: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], list[str]]:
    """(headline, of which model, more sentences)."""
    measure = measure_for(groups)
    if len(groups) == 1:
        return _single(groups[0], measure), [_evaluated(groups, measure)] if measure else [], []
    if measure is None:
        return f"{len(groups)} methods without a measure in common", [_alone(group) for group in groups], []
    best, second, *_ = sorted(groups, key=lambda group: -_value(group, measure))
    lead = _value(best, measure) - _value(second, measure)
    if lead < max(_accuracy(group, measure)["std"] or 0.0 for group in (best, second)):
        numbers = f"{_number(best, measure)} and {_number(second, measure)}"
        headline = f"{best['label']} and {second['label']} are too close to call: {numbers}"
    else:
        points = f"{100 * lead:.1f} points above {second['label']}"
        headline = f"{best['label']} was best with {percent(_value(best, measure))}, {points}"
    more = [_costs(best, second), *_thrift(groups, best, measure), *_own_models(groups, measure)]
    if all(group["complete"] == 1 for group in groups):
        more.append("There is one run of each, which cannot tell a difference from chance: repeat with other seeds.")
    return headline, [_evaluated(groups, measure)], more


def _evaluated(groups: Sequence[Mapping[str, Any]], measure: str) -> str:
    which = f": {personal_models(groups)}" if measure == "personal" else ""
    return f"Accuracy is that of {MODELS[measure].replace(',', ' on', 1)}, after the last round{which}."


def _alone(group: Mapping[str, Any]) -> str:
    measure = measure_for([group])
    by = f" ({MODELS[measure].partition(',')[0]})" if measure else ""
    return f"{_single(group, measure)}{by}."


def _single(group: Mapping[str, Any], measure: str | None) -> str:
    traffic, time = size(group["bytes"]["mean"]), duration(group["seconds"]["mean"])
    cost = f"{group['rounds']['mean']:.0f} rounds, {traffic} and {time}"
    if measure is None:
        return f"{group['label']} ended without an accuracy, after {cost}"
    return f"{group['label']} reached {_number(group, measure)} in {cost}"


def _number(group: Mapping[str, Any], measure: str) -> str:
    found = _accuracy(group, measure)
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
    model = personal_measure(groups)
    if model is None or model == measure:
        return []

    def fair(group: Mapping[str, Any], name: str) -> float:
        return group["fairness"][group["personal"]][name]["mean"]

    best, kindest = (max(groups, key=lambda group: fair(group, name)) for name in ("mean", "worst_decile"))
    mean, tenth = percent(fair(best, "mean")), percent(fair(kindest, "worst_decile"))
    models = MODELS[model].partition(",")[0] + (f" ({personal_models(groups)})" if model == "personal" else "")
    said = f"Of {models}, {best['label']}'s are best: {mean} on average"
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
