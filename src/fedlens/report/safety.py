"""What leaves clients, what is proven about it, and what attacks made of it: the part of the answer about privacy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.format import joined
from ..privacy.statement import SEEDED
from ..runs.read import DAMAGE
from ..simulate.describe import keeps_models, privacy_class

DATA = "shares data"
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
            yield True, _plain(f"{{who}}, attack {verdict['attack']}: {verdict['verdict']}")
    if quiet := [verdict["attack"] for verdict in verdicts if not leaks(verdict)]:
        yield False, _plain(f"{{who}}: at chance in the audit: {joined(quiet)}.")


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
    """The worst that is known of any of these, in a few words."""
    mine = [runs[number] for group in groups for number in group["runs"]]
    words = []
    leaky = [group["label"] for group in groups if any(leaking(runs[number]["audit"]) for number in group["runs"])]
    givers = [group["label"] for group in groups if shares_data(group)]
    if leaky:
        named = "" if len(groups) == 1 else f"{joined(leaky)} "
        words.append(f"{named}{'leak' if len(leaky) > 1 else 'leaks'} in an audit")
    if givers:
        named = "" if len(groups) == 1 or givers == leaky else f"{joined(givers)} "  # of those just named
        words.append(f"{named}{DATA if len(givers) == 1 else 'share data'}")
    try:
        stated = [one for run in mine for one in (run["privacy"] or {}).get("statements", ())]
        if any(not one["holds"] for one in stated):
            words.append("not proven as stated")
        elif stated and all(run["privacy"] for run in mine):
            most = max(one["epsilon"] or 0.0 for one in stated)
            words.append(f"ε = {_epsilon(most)} promises little" if most > WEAK else f"ε = {_epsilon(most)}, proven")
    except DAMAGE:
        words.append("unknown")
    if not words:
        silent = all(keeps_models(group["method"]) for group in groups)
        words.append("no model leaves clients" if silent else "unprotected updates")
    untested = [group["label"] for group in groups if not any(runs[number]["audit"] for number in group["runs"])]
    if not leaky and (tried := {name for run in mine for name in _attacks(run["audit"])}):
        words.append(f"no leak found by {len(tried)} attack{'' if len(tried) == 1 else 's'}")
    if len(untested) == len(groups):
        words.append("not tested by attack" if len(groups) == 1 else "none tested by attack")
    elif untested:
        words.append(f"{joined(untested)} not tested by attack")
    said = ", ".join(words)
    return said[0].upper() + said[1:] if len(groups) == 1 and said[0] != "ε" else said


def _epsilon(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of_statements(group: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    stated = [run["privacy"] for run in runs if run["privacy"]]
    statements = [one for said in stated for one in said["statements"]]
    if shares_data(group):
        what = joined(list(dict.fromkeys(one["release"] for one in statements)))
        yield True, _plain("{who} shares data" + (f": {what}." if what else "."))
    for one in statements:
        promise = "No privacy is stated" if one["epsilon"] is None else f"ε = {_epsilon(one['epsilon'])}"
        why = f": {one['because']}" if one["because"] else ""
        if not one["holds"]:
            yield True, _plain(f"{{who}}: {promise}, not proven as stated{why}.")
        elif one["epsilon"] is not None:
            delta = "" if one["delta"] is None else f", δ = {one['delta']:g}"
            unit = one["unit"].partition(";")[0]
            proven = "proven, but so large that it promises little" if one["epsilon"] > WEAK else "proven"
            yield False, _plain(f"{{who}}: {promise}{delta} for {unit}: {proven}{why}.")
    if any(one["randomness"] == SEEDED for one in statements):
        yield False, "{who}: noise comes from the run's seed, which simulates protection and gives none."
    for said in dict.fromkeys(words for each in stated for words in (each.get("discloses") or {}).values()):
        yield False, _plain(f"{{who}}: {said}.")
    if keeps_models(group["method"]):
        yield False, "{who}: no model leaves its clients."
    elif not stated or any(said.get("updates_as_they_are") for said in stated):
        yield False, "{who}: model updates leave unprotected."
    if not any(run["audit"] for run in runs):
        yield False, "{who}: privacy was not tested by attack; fedlens audit RUN does."


def _plain(text: str) -> str:
    """Braces of a run's own words are no places for names; the one at the front is."""
    start, rest = text[:5], text[5:]
    return start + rest.replace("{", "{{").replace("}", "}}")
