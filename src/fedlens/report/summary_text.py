"""The answer in words: which method was best, by how much, at what cost; and what must be said beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..compare.significance import FEWEST
from ..compare.verdict import LEVEL
from ..core import format
from ..core.format import joined
from ..runs.measures import window
from ..runs.read import PERSONAL, differing, measure_of
from . import safety
from .groups import compared, outermost

MODELS = {
    "global": "the global model, pooled test images",
    "personal": "personal models, each client's test images",
    "fine-tuned": "fine-tuned personal models, each client's test images",
    "personal after": "personal models after local training, each client's test images",
    "personal before": "personal models before local training, each client's test images",
}
_TESTS = {
    "seeds": "by a paired t-test over seeds, after Holm",
    "clients": "by Wilcoxon's test over clients, which says nothing about other seeds",
}
_NAMED = 8  # methods in a headline
_FEW = 4  # methods whose costs and privacy are told by name
_LEARNED = 1.1  # times the accuracy of guessing, up to which nothing was learned
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
    """The model that these are evaluated on: the global one where that is each one's, or else personal ones.

    What all have comes before what some have; of what a single one has nothing is compared.
    """
    own = personal_measure(groups) or ("personal" if any(group["personal"] for group in groups) else None)
    measures = [measure for measure in ("global", own) if measure]
    if any(measure_of(group["accuracy"]) != "global" for group in groups):
        measures.reverse()
    having = {measure: sum(has_measure(group, measure) for group in groups) for measure in measures}
    all_have = [measure for measure, count in having.items() if groups and count == len(groups)]
    return next(iter([*all_have, *(measure for measure, count in having.items() if count > 1)]), None)


def has_measure(group: Mapping[str, Any], measure: str) -> bool:
    return group["accuracy"].get(model_of(group, measure), {}).get("mean") is not None


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


def _score(group: Mapping[str, Any], measure: str) -> Mapping[str, Any]:
    """Mean and deviation: those it is ranked by, or of a group without rivals those after the last round."""
    return group["rank"] or group["accuracy"][model_of(group, measure)]


def told(
    runs: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], arenas: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """headline, sentences about the result, costs and privacy: of the only arena, or a line for each of several;
    `listed` where sentences are about different things, and no text; `brief` has their headlines alone."""
    fields = {n: [groups[m] for m in arena if groups[m]["complete"]] for n, arena in enumerate(arenas)}
    fields = {letter(n): field for n, field in fields.items() if field}
    if not fields:
        return {
            "headline": "No run is complete yet",
            "sentences": [],
            "brief": [],
            "costs": [],
            "privacy": [],
            "listed": False,
            "tiles": {},
        }
    order = sorted((group for field in fields.values() for group in field), key=lambda group: -_known(group))
    privacy = safety.told(order, runs)
    answers = {name: _answer(field) for name, field in fields.items()}
    if len(fields) == 1:
        [(headline, result, costs)], [field] = answers.values(), fields.values()
        listed = len(field) > 1 and measure_for(field) is None
        sentences = result + _more_differs(runs, field)
        told = {"headline": headline, "sentences": sentences, "costs": costs, "privacy": privacy, "listed": listed}
        return told | {"brief": result, "tiles": _tiles(field, runs)}
    lines = [
        " ".join([f"{name}: {headline}.", *result, *_more_differs(runs, fields[name])])
        for name, (headline, result, _) in answers.items()
    ]
    headline = f"{len(fields)} settings with data or a split of their own, to be read one by one"
    brief = [f"{name}: {headline}." for name, (headline, *_) in answers.items()]
    told = {"headline": headline, "sentences": lines, "brief": brief, "costs": [], "privacy": privacy, "listed": True}
    return told | {"tiles": {"privacy": safety.status(order, runs)}}


def _tiles(groups: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What can be read at a glance: the result, costs of all, privacy of all or of very many of the best."""
    measure, ranked = measure_for(groups), sorted((g for g in groups if g["rank"]), key=lambda group: -_known(group))
    first = [group for group in ranked if group["rank"]["is_best"] or group["rank"]["is_close"]] or list(groups)
    best = first[0]
    if measure and (chance := _guessing(groups, measure)):
        nobody = "Nothing was" if len(groups) == 1 else "Neither" if len(groups) == 2 else "None"
        result = f"{nobody} learned: guessing gives {chance}"
    elif len(first) == 1:
        ahead = (
            ""
            if not ranked
            else f"{best['label']} was best: "
            if best["rank"]["tested"]
            else f"{best['label']} is ahead: "
        )
        result = ahead + _number(best, measure) if measure else ""
    else:
        result = "No clear winner" if ranked else ""
    told = safety.status(groups if len(groups) <= _FEW else first, runs)
    return {"result": result, "cost": _cost_range(groups), "privacy": told}


def _cost_range(groups: Sequence[Mapping[str, Any]]) -> str:
    """Traffic and time from the least to the most; of few methods whose they are, once where these are the same."""
    ends: dict[str, list[Mapping[str, Any]]] = {}
    for name in ("bytes", "seconds"):
        order = sorted(groups, key=lambda group: group[name]["mean"])
        ends[name] = [order[0], order[-1]]
    sent, took = (
        [(end["label"], write(end[name]["mean"])) for end in ends[name]]
        for name, write in (("bytes", size), ("seconds", duration))
    )
    least, most = (end["seconds"]["mean"] for end in ends["seconds"])
    whose = [label for label, _ in sent] if sent[0][1] != sent[1][1] else []
    names_time = least < 0.95 * most and [label for label, _ in took] != whose

    def written(pair: Sequence[tuple[str, str]], is_named: bool) -> str:
        if pair[0][1] == pair[1][1]:
            return pair[0][1]
        return " to ".join(f"{label} {value}" if is_named else value for label, value in pair)

    few = len(groups) <= _FEW
    return f"{written(sent, few)}, {written(took, few and names_time)}"


def _guessing(groups: Sequence[Mapping[str, Any]], measure: str) -> str:
    """What guessing gives, where the best global model gives no more; empty where it does, or nobody knows."""
    classes = min((group.get("classes") or 0 for group in groups), default=0)
    if measure != "global" or classes < 2:
        return ""
    chance = 1 / classes
    best = max((_score(group, measure)["mean"] or 0.0 for group in groups if has_measure(group, measure)), default=1.0)
    return "" if best > _LEARNED * chance else _together(f"{100 * chance:.3g} %")


def _from_to(values: Sequence[float], write: Callable[[float], str]) -> str:
    """The first and the last of these in order, once where they read alike."""
    return " to ".join(dict.fromkeys([write(values[0]), write(values[-1])]))


def _known(group: Mapping[str, Any]) -> float:
    return group["rank"]["mean"] if group["rank"] else -1.0


def _answer(groups: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], list[str]]:
    """(headline, sentences about the result, about costs)."""
    measure = measure_for(groups)
    costs = [cost for group in groups for cost in _preparation(group)]
    if len(groups) == 1:
        which = [_evaluated(groups, measure)] if measure else []
        return _single(groups[0], measure), which, [_spent(groups[0]), *costs]
    if measure is None:
        return f"{len(groups)} methods without a measure in common", [_alone(group) for group in groups], costs
    ranked = sorted((group for group in groups if group["rank"]), key=lambda group: -_known(group))
    best, second = ranked[0], next((group for group in ranked if group["rank"]["is_close"]), ranked[1])
    costs = [_costs(best, second), *_thrift(ranked, best, measure), *costs]
    result = [
        _evaluated(ranked, measure),
        *_ends(best, second, measure),
        *_tests(ranked),
        *_lacking(groups, measure),
        *_own_models(groups, measure),
    ]
    if not best["rank"]["tested"] and any(group["complete"] < FEWEST for group in ranked):
        result.append(f"Repeat with other seeds: {FEWEST} of them make a test.")
    return _winner(ranked, measure), result, costs


def _winner(ranked: Sequence[Mapping[str, Any]], measure: str) -> str:
    """Who was best; where others cannot be told from it, all of them."""
    best, second = ranked[:2]
    close = _close(ranked)
    if chance := _guessing(ranked, measure):
        labels = [group["label"] for group in ranked]
        nobody = f"Neither {' nor '.join(labels)}" if len(labels) == 2 else f"None of {len(labels)} methods"
        return f"{nobody} learned: {percent(_known(best))} at best, guessing gives {chance}"
    over = f" ({averaged(ranked)})" if best["rank"]["last"] > 1 else "" if measure == "global" else " (personal models)"
    if not close:
        ours, theirs = (round(100 * _known(group), 1) for group in (best, second))  # as both are shown
        lead = f"{ours - theirs:.1f} points above {_named(second)}"
        if best["rank"]["tested"]:
            return f"{_who(best)} was best with {percent(_known(best))}{over}, {lead}"
        seeds = f"{best['complete']} seed{'' if best['complete'] == 1 else 's'}"
        luck = f"{seeds} cannot show that this is more than luck"
        return f"{_who(best)} is ahead with {percent(_known(best))}{over}, {lead}; {luck}"
    every = [_named(group) for group in (best, *close)]
    names = joined(every) if len(every) <= _NAMED else _some(every)  # of very many, the table marks the rest
    if len(close) == 1:
        return f"{names} cannot be told apart: {_number(best, measure)} and {_number(close[0], measure)}{over}"
    return f"{names} cannot be told apart: {_from_to([*map(_known, (best, *close))], percent)}{over}"


def _ends(best: Mapping[str, Any], second: Mapping[str, Any], measure: str) -> list[str]:
    """Where curves end, which is not the mean that ranks."""
    if best["rank"]["last"] == 1:
        return []
    each = [f"{group['label']} {percent(group['accuracy'][measure]['mean'])}" for group in (best, second)]
    return [f"After the last round alone, where curves end: {joined(each)}."]


def _named(group: Mapping[str, Any]) -> str:
    return group["label"] + (f" ({safety.DATA})" if safety.shares_data(group) else "")


def _who(group: Mapping[str, Any]) -> str:
    return group["label"] + (f", which {safety.DATA}," if safety.shares_data(group) else "")


def _tests(ranked: Sequence[Mapping[str, Any]]) -> list[str]:
    """p of each method against the best: over seeds, or where these are too few over clients."""
    best, *others = ranked
    for over, test in _TESTS.items():
        if tested := [group for group in others if group["rank"][f"p_{over}"] is not None]:
            each = [f"{group['label']} {_p(group['rank']['p_words'][over])}" for group in tested]
            rule = f" Only p below {LEVEL} tells methods apart." if over == "seeds" and _close(ranked) else ""
            return [f"Against {best['label']}, {test}: {', '.join(each)}.{rule}"]
    if all(group["complete"] == 1 for group in ranked):
        return []
    if all(group["complete"] >= FEWEST for group in ranked):
        return ["No test was possible: methods differ by the same amount in every seed."]
    return [f"No test was possible: one needs {FEWEST} seeds, or accuracies of single clients."]


def _p(words: str) -> str:
    """p as a sentence has it: p = 0.051, p < 0.001."""
    return f"p\u00a0<\u00a0{words[1:]}" if words.startswith("<") else f"p\u00a0=\u00a0{words}"


def _close(ranked: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that cannot be told from the best."""
    return [group for group in ranked if group["rank"]["is_close"]]


def _lacking(groups: Sequence[Mapping[str, Any]], measure: str) -> list[str]:
    """Methods that the others cannot be compared with, and what they have."""
    return [
        f"{group['label']} is not ranked: it lacks {_short(measure)}. It is drawn with what it has: {_alone(group)}"
        for group in groups
        if not group["rank"]
    ]


def model_words(groups: Sequence[Mapping[str, Any]]) -> str:
    """What the personal models of these are, in a few words."""
    return _short(personal_measure(groups) or "personal")


def _short(measure: str) -> str:
    return MODELS[measure].partition(",")[0]


def _evaluated(groups: Sequence[Mapping[str, Any]], measure: str) -> str:
    which = f": {personal_models(groups)}" if measure == "personal" and personal_models(groups) else ""
    return f"Accuracy is that of {MODELS[measure].replace(',', ' on', 1)}, {averaged(groups)}{which}."


def averaged(groups: Sequence[Mapping[str, Any]]) -> str:
    """What the means that rank are over; without rounds where these differ."""
    ranks = [group["rank"] for group in groups if group["rank"]]
    alike = len({tuple(rank["last_rounds"]) for rank in ranks}) == 1
    return window(max((rank["last"] for rank in ranks), default=1), ranks[0]["last_rounds"] if alike else [])


def _alone(group: Mapping[str, Any]) -> str:
    measure = measure_of(group["accuracy"])
    by = f" ({_short(measure)})" if measure else ""
    return f"{_single(group, measure)}{by}."


def _single(group: Mapping[str, Any], measure: str | None) -> str:
    traffic, time = size(group["bytes"]["mean"]), duration(group["seconds"]["mean"])
    cost = f"{group['rounds']['mean']:.0f} rounds, {traffic} and {time}"
    if measure is None:
        return f"{_who(group)} ended without an accuracy, after {cost}"
    chance = _guessing([group], measure)
    return f"{_who(group)} reached {_number(group, measure)} in {cost}" + (f"; guessing gives {chance}" * bool(chance))


def _number(group: Mapping[str, Any], measure: str) -> str:
    found = _score(group, measure)
    return percent(found["mean"]) + (f"\u00a0±\u00a0{100 * found['std']:.1f}" if found["std"] is not None else "")


def _spent(group: Mapping[str, Any]) -> str:
    sent = {way: group["kinds"].get(way, {"mean": 0})["mean"] for way in ("upload", "download", "shared")}
    down = size(sent["download"] + sent["shared"])
    return f"{size(sent['upload'])} up, {down} down, {duration(group['seconds']['mean'])} on this machine."


def _preparation(group: Mapping[str, Any]) -> list[str]:
    rounds = group["preparation"]["rounds"]
    if not rounds:
        return []
    many = f"{rounds:.0f} preparatory round{'' if rounds == 1 else 's'}"
    return [f"{many} of {group['label']} cost traffic and time, but do not count as rounds."]


def _costs(best: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    def beside(name: str) -> str:
        ours, theirs = best[name]["mean"], second[name]["mean"]
        if not theirs or abs(ours / theirs - 1) < 0.05:
            return f"same as {second['label']}"
        times = float(f"{ours / theirs:.2g}")  # two digits; 16,000 and not 1.6e+04
        return f"{times:,.0f} times {second['label']}'s" if times >= 10 else f"{times:g} times {second['label']}'s"

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
