"""What leaves clients, what is proven about it, and what attacks made of it: the part of the answer about privacy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.format import joined
from ..privacy.statement import SEEDED
from ..runs.read import DAMAGE
from ..simulate.describe import keeps_models, privacy_class

DATA = "shares data"
_LEAKS = "leaks"
_OPEN = 0.95  # of the way from guessing to no defence, from which on a defence does nothing
WEAK = 10.0  # an epsilon above which a proof promises next to nothing: odds change by a factor of exp(10)


def sharing(method: str, sent: Mapping[str, Any], privacy: Mapping[str, Any] | None) -> str:
    """In a few words: whom a run showed what. Its ledger knows of data that all clients got; its method of the rest."""
    if sum(sent.get("shared", {}).values()):
        return DATA
    return privacy_class(method, list(((privacy or {}).get("discloses") or {}).values()))


def shares_data(group: Mapping[str, Any]) -> bool:
    return group["shares"] == DATA


def told(groups: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sentences {text, alarm}: alarms, then what is true of some, then of all; each is said once."""
    whose: dict[tuple[bool, str], list[str]] = {}
    for group in groups:
        for alarm, text in dict.fromkeys(_said(group, [runs[number] for number in group["runs"]])):
            whose.setdefault((alarm, text), []).append(group["label"])
    order = sorted(whose, key=lambda said: (not said[0], len(whose[said]) == len(groups)))
    who = {said: "All" if len(whose[said]) == len(groups) > 2 else joined(whose[said]) for said in order}
    return [{"alarm": alarm, "text": text.format(who=who[alarm, text])} for alarm, text in order]


def _said(group: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    try:
        yield from _of_audits(runs)
        yield from _of_statements(group, runs)
    except DAMAGE:
        yield True, "{who}: a file about privacy is damaged."


def _of_audits(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    verdicts = [verdict for run in runs for verdict in (run["audit"] or {}).get("verdicts", ())]
    for verdict in verdicts:
        if leaks(verdict):
            yield True, _plain(f"{{who}}, attack {verdict['attack']}: {_found(verdict)}")
    if quiet := [verdict["attack"] for verdict in verdicts if not leaks(verdict)]:
        yield False, _plain(f"{{who}}: at chance in the audit: {joined(quiet)}.")


def _found(verdict: Mapping[str, Any]) -> str:
    """What an attack found beside guessing and no defence; of an audit without these its own words."""
    measure = verdict["decisive"]
    if "undefended" not in verdict:
        return verdict["verdict"]
    found, chance, undefended = (verdict[name][measure]["value"] for name in ("found", "chance", "undefended"))
    samples = verdict.get("samples", 0) if measure == "recognised" and verdict.get("seeds") == 1 else 0
    span = undefended - chance
    is_open = span <= 0 or (found - chance) / span >= _OPEN
    if samples:
        words = f"{found * samples:.0f} of {samples} images recognised (guessing: {chance * samples:.0f})"
        return f"{words}: as bad as no defence." if is_open else f"{words}; without defence {undefended * samples:.0f}."
    words = f"{measure} {found:.2f} (guessing: {chance:.2f})"
    return f"{words}: as bad as no defence." if is_open else f"{words}; without defence {undefended:.2f}."


def leaks(verdict: Mapping[str, Any]) -> bool:
    """Whether an attack finds more than chance does: intervals that do not meet."""
    found, chance = (verdict[name][verdict["decisive"]] for name in ("found", "chance"))
    return bool(verdict.get("above_chance", found["low"] > chance["high"]))


def leaking(audit: Mapping[str, Any] | None) -> list[str]:
    """Attacks that found more than chance; none in a file that is not what it should be."""
    try:
        return [verdict["attack"] for verdict in (audit or {})["verdicts"] if leaks(verdict)]
    except DAMAGE:
        return []


def _attacks(audit: Mapping[str, Any] | None) -> list[str]:
    """Those that were tried; none in a file that is not what it should be."""
    try:
        return [verdict["attack"] for verdict in (audit or {})["verdicts"]]
    except DAMAGE:
        return []


def status(groups: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """The worst that is known of each of these, in a few words; those who have these in common are named together."""
    whose: dict[tuple[str, ...], list[str]] = {}
    for group in groups:
        whose.setdefault(_worst(group, [runs[n] for n in group["runs"]]), []).append(group["label"])
    attacked = _attacked(groups, runs)
    if len(groups) == 1:
        (words,) = whose
        said = ", ".join(filter(None, (*words, attacked)))
        return said[0].upper() + said[1:] if said[0] != "ε" else said
    order = sorted(whose, key=lambda words: (not words[0].startswith(_LEAKS), words[0] != DATA))
    return "; ".join(filter(None, (*(_of_whom(whose[words], words) for words in order), attacked)))


def _of_whom(names: Sequence[str], words: Sequence[str]) -> str:
    """b leaks, shares data; a and b share data; a, b: unprotected updates"""
    if words[0] != DATA and not words[0].startswith(_LEAKS):
        return f"{', '.join(names)}: {', '.join(words)}"
    said = ", ".join(words)
    if len(names) > 1:
        said = said.replace(_LEAKS, "leak").replace(DATA, "share data")
    return f"{joined(names)} {said}"


def _worst(group: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Whether a method leaks, shares data, and what is promised; of one without these what leaves its clients."""
    words = []
    if any(leaking(run["audit"]) for run in runs):
        tried = sum(bool(run["audit"]) for run in runs)
        words.append(
            f"{_LEAKS} ({tried} of {len(runs)} runs attacked)" if tried < len(runs) else f"{_LEAKS} in an audit"
        )
    if shares_data(group):
        words.append(DATA)
    try:
        stated = [one for run in runs for one in (run["privacy"] or {}).get("statements", ())]
        if any(not one["holds"] for one in stated):
            words.append("not proven as stated")
        elif stated and all(run["privacy"] for run in runs):
            words.append(_promise(stated))
    except DAMAGE:
        words.append("unknown")
    return tuple(words) or ("no model leaves clients" if keeps_models(group["method"]) else "unprotected updates",)


def _promise(stated: Sequence[Mapping[str, Any]]) -> str:
    most = max(one["epsilon"] or 0.0 for one in stated)
    if any(one["randomness"] == SEEDED for one in stated):
        return "no protection in this run" + ("" if most > WEAK else f" (ε = {_epsilon(most)} with secret noise)")
    return f"ε = {_epsilon(most)} promises little" if most > WEAK else f"ε = {_epsilon(most)}, proven"


def _attacked(groups: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """Who was not attacked, and whether attacks on the others found nothing; empty where all were and one did."""
    mine = [runs[number] for group in groups for number in group["runs"]]
    untested = [group["label"] for group in groups if not any(runs[number]["audit"] for number in group["runs"])]
    if len(untested) == len(groups):
        return "not tested by attack" if len(groups) == 1 else "none attacked"
    tried = {name for run in mine for name in _attacks(run["audit"])}
    quiet = tried and not any(leaking(run["audit"]) for run in mine)
    words = [f"no leak found by {len(tried)} attack{'' if len(tried) == 1 else 's'}"] if quiet else []
    return ", ".join(words + [f"{joined(untested)} not attacked"] * bool(untested))


def _epsilon(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of_statements(group: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    stated = [run["privacy"] for run in runs if run["privacy"]]
    statements = [one for said in stated for one in said["statements"]]
    if shares_data(group):
        what = joined(list(dict.fromkeys(_whose_images(one["release"]) for one in statements)))
        yield True, _plain("{who} shares data" + (f": {what}." if what else "."))
    for one in statements:
        yield from _of_promise(one)
    for said in dict.fromkeys(words for each in stated for words in (each.get("discloses") or {}).values()):
        yield False, _plain(f"{{who}}: {said}.")
    if keeps_models(group["method"]):
        yield False, "{who}: no model leaves its clients."
    elif not stated or any(said.get("updates_as_they_are") for said in stated):
        yield False, "{who}: model updates leave unprotected."
    if not any(run["audit"] for run in runs):
        yield False, "{who}: privacy was not tested by attack; fedlens audit RUN does."


def _of_promise(one: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """What a statement promises, and whether its noise protects anybody."""
    promise = "No privacy is stated" if one["epsilon"] is None else f"ε = {_epsilon(one['epsilon'])}"
    why = f": {one['because']}" if one["because"] else ""
    known = "the noise can be recomputed from the seed"
    is_seeded = one["randomness"] == SEEDED
    if not one["holds"]:
        yield True, _plain(f"{{who}}: {promise}, not proven as stated{why}.")
        if is_seeded:
            yield False, f"{{who}}: no protection in this run: {known}."
    elif one["epsilon"] is not None:
        delta = "" if one["delta"] is None else f", δ = {one['delta']:g}"
        promise += f"{delta} for {one['unit'].partition(';')[0]}"
        if is_seeded:
            worth = "which promises little" if one["epsilon"] > WEAK else "proven"
            said = f"no protection in this run: {known}. With secret noise {promise}, {worth}"
        else:
            worth = "proven, but so large that it promises little" if one["epsilon"] > WEAK else "proven"
            said = f"{promise}: {worth}"
        yield False, _plain(f"{{who}}: {said}{why}.")
    elif is_seeded:
        yield False, f"{{who}}: no protection in this run: {known}."


def _whose_images(release: str) -> str:
    """A statement is about one image; a sharing method releases such of every client."""
    rest = release.removeprefix("one image, ")
    return release if rest == release else f"images of every client, {rest.replace('its label', 'their labels')}"


def _plain(text: str) -> str:
    """Braces of a run's own words are no places for names; the one at the front is."""
    start, rest = text[:5], text[5:]
    return start + rest.replace("{", "{{").replace("}", "}}")
