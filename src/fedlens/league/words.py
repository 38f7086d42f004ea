"""A league in words: the table, what to try first, and one paragraph a finding; right for any part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .standings import MEASURES, REFERENCE, Standings
from .statistics import ALPHA, Pair, Ranking

MODELS = {"global": "One model for all", "personal": "A model for each client"}
_LOCAL = " Its personal models are those after one more local training."


def table(found: Standings) -> list[dict[str, str]]:
    """Ranked methods and those that will be, the best of the global ranking first."""
    ranks = {measure: found.ranking(measure) for measure in MEASURES}
    worlds = {measure: [*found.ranked(measure)] for measure in MEASURES}
    over = {measure: {one.a: one for one in found.beside(measure)} for measure in MEASURES}
    _, methods = found.played
    rows = []
    for method in methods:
        row = {"method": method}
        for measure in MEASURES:
            placed, one = ranks[measure], over[measure].get(method)
            row[f"{measure} rank"] = f"{placed.ranks[method]:.1f}" if placed and method in placed.ranks else "–"
            row[measure] = percent(found.average(method, measure, worlds[measure]))
            row[f"{measure}, over {REFERENCE}"] = interval(one)
        row["personal before"] = percent(found.average(method, "before", worlds["personal"]))
        row["worst tenth"] = percent(found.average(method, "worst_tenth", worlds["personal"]))
        sent, hit, runs = found.to_target(method)
        row["MB to target"] = f"{sent / 1e6:.0f} ({hit} of {runs})" if sent is not None else f"– (0 of {runs})"
        seconds = found.average(method, "seconds", worlds["personal"])
        row["seconds"] = "–" if seconds is None else f"{seconds:.0f}"
        row["privacy"] = found.privacy(method)
        rows.append(row)
    return sorted(rows, key=lambda row: _place(row["global rank"]))


def narrow(found: Standings) -> dict[str, list[dict[str, str]]]:
    """The same table for a terminal, in parts of at most 80 columns: a part for each kind of model, and the cost."""
    rows, parts = table(found), {}
    for measure in MEASURES:
        more = {"personal before": "before", "worst tenth": "worst tenth"} if measure == "personal" else {}
        columns = {"method": "method", f"{measure} rank": "rank", measure: "accuracy, %"}
        columns |= {f"{measure}, over {REFERENCE}": f"over {REFERENCE}, points", **more}
        order = sorted(rows, key=lambda row: _place(row[f"{measure} rank"]))
        parts[MODELS[measure]] = [_taken(row, columns) for row in order if row[measure] != "–"]
    cost = {name: name for name in ("method", "MB to target", "seconds", "privacy")}
    return parts | {"Cost and privacy": [_taken(row, cost) for row in rows]}


def _taken(row: dict[str, str], columns: dict[str, str]) -> dict[str, str]:
    return {title: row[name] for name, title in columns.items()}


def extent(found: Standings) -> str:
    """How much of the league is played by every ranked method; worlds that lack some are named."""
    ranked = [name for name, about in found.methods.items() if about["everywhere"]]
    done = {world: {row["method"] for row in found.counted if row["world"] == world} for world in found.worlds}
    lacking = {world: [name for name in ranked if name not in methods] for world, methods in done.items()}
    whole = sum(not names for names in lacking.values())
    count = f"All {_worlds(whole)}" if whole == len(found.worlds) else f"{whole} of {_worlds(len(found.worlds))}"
    told = [f"**{count} {'is' if len(found.worlds) == 1 else 'are'} played by all {len(ranked)} ranked methods.**"]
    begun = {world: names for world, names in lacking.items() if names and done[world] & {*ranked}}
    told += [f"{world} lacks {', '.join(names)}." for world, names in begun.items()]
    if untouched := [world for world, names in lacking.items() if names and world not in begun]:
        told += [f"Not played yet: {'; '.join(untouched)}."]
    return " ".join(told)


# ---- what to try first -----------------------------------------------------------------------------------------------
def first(found: Standings) -> Iterator[str]:
    """A paragraph for each kind of model: what to try first, and why."""
    for measure in MEASURES:
        ranking = found.ranking(measure)
        if ranking is None or REFERENCE not in ranking.ranks:
            yield f"**{MODELS[measure]}: nothing can be said yet.** Too few worlds are finished."
            continue
        able, other = _able(found, measure, ranking)
        against = found.against(measure)
        sure = [name for name in able if against[name].differs and against[name].difference > 0]
        local = _LOCAL if measure == "personal" else ""
        if sure:
            why = f"It is {_ahead(against[sure[0]])}, beyond chance ({_p(against[sure[0]])})."
            told = [f"**{MODELS[measure]}: try {sure[0]} first.** {why}", *_practical(found, sure[0])]
            told += [f"Also ahead of {REFERENCE} beyond chance: {', '.join(sure[1:])}."] if sure[1:] else []
        else:
            none = f"No method is ahead of it beyond chance in {len(ranking.worlds)} worlds."
            told = [f"**{MODELS[measure]}: begin with {REFERENCE}.** {none}{local}"]
            if better := [name for name in able if against[name].difference > 0]:
                told += [f"Then try {better[0]}: {_ahead(against[better[0]])}.", *_practical(found, better[0])]
        yield " ".join([*told, *other])


def _able(found: Standings, measure: str, ranking: Ranking) -> tuple[list[str], list[str]]:
    """(Methods that may be proposed, the best first, and what is said of those ahead of FedAvg that may not)."""
    fell, said, able = found.fell(measure), [], []
    for name in ranking.ranks:
        if name == REFERENCE:
            continue
        elif name in fell:
            if ranking.ranks[name] < ranking.ranks[REFERENCE]:
                said.append(f"{name} ranks higher, but fell below half of {REFERENCE} in {_worlds(len(fell[name]))}.")
        elif found.privacy(name) == "updates only":
            able.append(name)
        elif ranking.ranks[name] < ranking.ranks[REFERENCE]:
            said.append(f"{name} ranks higher than {REFERENCE}, but: {found.privacy(name)}.")
    return able, said


def _practical(found: Standings, method: str) -> Iterator[str]:
    """What it costs, and which rate it had."""
    if (ratio := found.cost_ratio(method)) is not None:
        yield f"A run sends {ratio[0]:.1f} times the bytes of {REFERENCE} and takes {ratio[1]:.1f} times its seconds."
    rates = Counter(rate for rate, _ in found.rates()[method].values())
    rate, times = rates.most_common(1)[0]
    yield f"Its learning rate was {rate:g} in {times} of the {_worlds(rates.total())} that it ran in: search yours."
    values = Counter(value for _, value in found.rates()[method].values())
    value, times = values.most_common(1)[0]
    if value:
        main = f"`{found.methods[method]['main']}` was {value} in {times} of {_worlds(values.total())}"
        yield f"Its {main}, which is not the default: search it, too."


# ---- findings --------------------------------------------------------------------------------------------------------
def findings(found: Standings) -> Iterator[str]:
    """A paragraph each; what cannot be told apart is said so."""
    for measure in MEASURES:
        yield " ".join(_about(found, measure))
    kinds = [" ".join(parts) for kind in found.kinds if kind != "all" and (parts := [*_kind(found, kind)])]
    if kinds:
        yield " ".join(["**By kind of world.**", *kinds])
    for measure in MEASURES:
        if fell := found.fell(measure):
            told = ", ".join(f"{name} ({_worlds(len(worlds))})" for name, worlds in fell.items())
            yield f"**{measure.capitalize()} models that failed.** A run ended below half of {REFERENCE}: {told}."
    yield " ".join(_search(found))
    if told := " ".join(_chosen_by(found, ranked=True)):
        yield f"**By what rates are chosen.** {told}"


def _about(found: Standings, measure: str) -> Iterator[str]:
    ranking, name = found.ranking(measure), f"{measure.capitalize()} models"
    if ranking is None:
        yield f"**{name}.** Not enough finished worlds to rank anything."
        return
    best, chance = next(iter(ranking.ranks)), ranking.friedman if ranking.friedman is not None else 1.0
    yield f"**{name}.** Ranked: {len(ranking.ranks)} methods over {len(ranking.worlds)} worlds."
    if lacking := found.unranked(measure):
        yield f"Not ranked, for lack of worlds: {', '.join(f'{one} ({count})' for one, count in lacking.items())}."
    if chance >= ALPHA:
        yield f"No method differs from another beyond chance (Friedman, p = {chance:.2g})."
        return
    yield f"They differ (Friedman, p = {chance:.2g}); {best} has the best mean rank, {ranking.ranks[best]:.1f}."
    alike = next((group for group in ranking.groups if best in group), (best,))
    if len(alike) == len(ranking.ranks):
        yield "By ranks (Nemenyi) it cannot be told from any other."
    elif len(alike) > 1:
        yield f"By ranks (Nemenyi) it cannot be told from {', '.join(one for one in alike if one != best)}."
    else:
        yield "By ranks (Nemenyi) it is ahead of all others."
    against = found.against(measure)
    least = 2 ** (1 - len(ranking.worlds)) * len(against)
    if least >= ALPHA:
        yield f"For a test against {REFERENCE} these worlds are too few: p is {min(least, 1):.2g} at best."
        return
    for word, sign in (("better", 1), ("worse", -1)):
        names = [one for one, pair in against.items() if pair.differs and pair.difference * sign > 0]
        yield f"Beyond chance (Wilcoxon, Holm) {word} than {REFERENCE}: {', '.join(names) or 'none'}."


def _kind(found: Standings, kind: str) -> Iterator[str]:
    """The best of a kind of world, and how many cannot be told from it: a sentence for each kind of model."""
    for measure in MEASURES:
        ranking = found.ranking(measure, found.kinds[kind])
        if ranking is not None:
            best = next(iter(ranking.ranks))
            alike = next((group for group in ranking.groups if best in group), (best,))
            many = f"{len(alike) - 1} of {len(ranking.ranks) - 1} others" if len(alike) > 1 else "none"
            worlds = _worlds(len(ranking.worlds))
            told = f"{best} (rank {ranking.ranks[best]:.1f}, {worlds}; cannot be told from {many})"
            yield f"{kind.capitalize()}, {measure} models: {told}."


def _search(found: Standings) -> Iterator[str]:
    cost, edge = found.cost(), found.at_the_edge()
    hours, final = cost["search_seconds"] / 3600, cost["seconds"] / 3600
    yield f"**The search.** It took {cost['search_runs']:.0f} runs, whose seconds add up to {hours:.1f} hours;"
    yield f"those of {cost['runs']:.0f} final runs to {final:.1f}. Where runs went side by side, less time passed."
    if lost := found.collapsed:
        yield f"Rates given up after the search, because longer runs collapsed at them: {len(lost)}."
    yield f"Best rates at the edge of what was tried: {len(edge)} of {sum(map(len, found.rates().values()))}."


def others_chosen_by(found: Standings) -> str:
    """By what the rates of methods in some worlds alone are chosen."""
    return " ".join(_chosen_by(found, ranked=False))


def _chosen_by(found: Standings, ranked: bool) -> Iterator[str]:
    """Whose rates are not chosen by the global model, and what follows."""
    done = {row["method"] for row in found.counted}
    by: dict[str, list[str]] = {}
    for name, about in found.methods.items():
        if name in done and about["everywhere"] is ranked:
            by.setdefault(about["measure"], []).append(name)
    if not by.keys() - {"global"}:
        return
    if "global" in by:
        yield "Rates and main parameters are chosen by the accuracy of the global model in the search."
    for measure, models in (("personal", "personal models"), ("both", "the mean of both")):
        if measure in by:
            yield f"By {models}: {', '.join(by[measure])}."
    if "global" in by:
        yield "So global numbers of these may be too low, and personal numbers of the others."


# ---- small words -----------------------------------------------------------------------------------------------------
def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}"


def interval(one: Pair | None) -> str:
    """The difference in points; an interval where there are worlds to draw from."""
    if one is None:
        return "–"
    between = f" [{100 * one.low:+.1f}, {100 * one.high:+.1f}]" if one.worlds > 1 else " (one world)"
    return f"{100 * one.difference:+.1f}{between}"


def _ahead(one: Pair) -> str:
    return f"{interval(one)} points over {REFERENCE} and ahead in {100 * one.wins:.0f} % of {_worlds(one.worlds)}"


def _p(one: Pair) -> str:
    return f"p = {one.p:.2g}"


def _worlds(count: int) -> str:
    return f"{count} world{'s' * (count != 1)}"


def _place(text: str) -> float:
    return float(text) if text != "–" else float("inf")
