"""results/league.md, written anew from league.json; with the checks that lie beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..core.files import write_atomic
from .again import AGAIN, TWINS, checks
from .figure import draw, draw_rates
from .standings import MEASURES, REFERENCE, Standings
from .statistics import Pair
from .words import findings, first, interval, table

MADE = "<!-- made by `fedlens league --page` from data/league.json: change that -->"


def write(found: Standings, folder: Path, book: Path | None = None) -> list[Path]:
    """The page and its pictures; with the checks, where their books lie beside the league's."""
    pictures = [path for path in (draw(found, folder / "league"), draw_rates(found, folder / "league_rates")) if path]
    page, beside = folder / "league.md", [book.with_name(name) for name in (AGAIN, TWINS)] if book else []
    again = [Standings.read(path) for path in beside if path.is_file()]
    write_atomic(page, text(found, pictures, again).encode())
    return [page, *pictures]


def text(found: Standings, pictures: Sequence[Path], again: Sequence[Standings] = ()) -> str:
    parts = [
        f"# {found.content['title']}",
        MADE,
        *_part(found),
        "Every method trains on the same number of images at each client: warm-up, exchanges and second batches count. "
        "Splits and first weights are the same for all. Rates are searched on another seed, in fewer rounds. "
        "[How it compares](../docs/league.md) says more, and what the names of worlds mean.",
        "## What to try first",
        *first(found),
        *_shown(pictures, "league", "Mean ranks; a bar joins methods that cannot be told apart"),
        "## Table",
        _table(table(found)),
        f"Accuracies in percent, means over the worlds that are ranked. Over {REFERENCE}: points, with a 95 % "
        "bootstrap interval over all worlds that both have; the sentences above take ranked worlds alone. "
        "Personal: each client's model after local training, or fine-tuned, on its own test images; before: without "
        "that training. Worst tenth: the mean over the tenth of the clients that are worst off.",
        "MB to target: sent until the global model reached the target accuracy of its world (`evaluate.targets`, at "
        "the end of this page). It is a mean over the runs that reached it, which brackets count. Seconds: of a run.",
        "## Findings",
        f"Nemenyi's test compares all methods by their ranks. Wilcoxon's compares each with {REFERENCE} by the "
        "differences themselves: it can find one that Nemenyi's does not.",
        *findings(found),
    ]
    if others := _others(found):
        about = f"Points over {REFERENCE} with paired intervals; these methods have no ranks."
        parts += ["## In some worlds alone", _table(others), about]
    if checked := [line for one in again for line in checks(found, one)]:
        parts += ["## Checks by hand", *checked, "p: Wilcoxon's over worlds, of one pair that was chosen beforehand."]
    for measure in MEASURES:
        parts += [f"## Accuracy by world, {measure} model", *_by_world(found, measure)]
    parts += ["## Rates", *_shown(pictures, "league_rates", "Accuracy over rates, a panel for each world")]
    parts += ["Each method's rate, and the value of its main parameter where it is not the default.", *_rates(found)]
    parts += ["## Pairs", *_pairs(found), "## Worlds"]
    budgets = {row["world"]: row["budget"] for row in found.finals}
    worlds = [
        {"world": name, "kind": about["kind"], "images": f"{budgets[name]:.1f}" if name in budgets else "–"}
        | {"settings": f"`{' '.join(about['words'])}`"}
        for name, about in found.worlds.items()
    ]
    parts += ["Images: how often a client trains on each of its images, at most."]
    parts += [_table(worlds), "`fedlens league` runs it, or what is left of it."]
    return "\n\n".join(_joined(parts)) + "\n"


def _part(found: Standings) -> list[str]:
    """Which part of the league this is, where it is not played to its end."""
    (worlds, methods), all_ranked = found.played, [n for n, about in found.methods.items() if about["everywhere"]]
    done = len({(row["world"], row["method"]) for row in found.counted if row["method"] in all_ranked})
    if done == (whole := len(found.worlds) * len(all_ranked)):
        return []
    lacking = [name for name in all_ranked if name not in methods]
    told = f"**This is a part of the league: {len(worlds)} of {len(found.worlds)} worlds"
    told += f" and {len(methods)} of {len(all_ranked)} ranked methods. The whole league is not run.**"
    left = [f"Of {whole} pairs of a world and a method {done} are done."]
    left += [f"Not played yet: {', '.join(lacking)}."] if lacking else []
    return [" ".join([told, *left]), "Played:", *(f"- {name}" for name in worlds or ["none"])]


def _shown(pictures: Sequence[Path], name: str, about: str) -> list[str]:
    """One that could be drawn; without two finished worlds there are no ranks to draw."""
    return [f"![{about}]({path.name})" for path in pictures if path.stem == name]


def _joined(parts: Sequence[str]) -> list[str]:
    """Lines of one list stand together."""
    found: list[str] = []
    for part in parts:
        if found and part.startswith("- ") and found[-1].startswith("- "):
            found[-1] += f"\n{part}"
        elif part:
            found.append(part)
    return found


def _table(rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return ""
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [head, ["---"] * len(head), *([row.get(key, "–") for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _others(found: Standings) -> list[dict[str, str]]:
    """Methods beside the ranking, the best first."""
    rows: dict[str, dict[str, str]] = {}
    for measure in MEASURES:
        for one in found.beside(measure):
            if not found.methods[one.a]["everywhere"]:
                row = rows.setdefault(one.a, {"method": one.a, "worlds": str(one.worlds), "privacy": ""})
                row[measure] = interval(one)
                row["privacy"] = found.privacy(one.a)
    head = ("method", "worlds", *MEASURES, "privacy")
    return [{name: row.get(name, "–") for name in head} for row in rows.values()]


def _by_world(found: Standings, measure: str) -> Iterator[str]:
    numbers = {
        world: {name: f"{100 * value:.2f}" for name, value in by.items()} for world, by in found.scores(measure).items()
    }
    yield from _crossed(found, numbers)


def _rates(found: Standings) -> Iterator[str]:
    shown: dict[str, dict[str, str]] = {}
    for method, by in found.rates().items():
        for world, (rate, value) in by.items():
            shown.setdefault(world, {})[method] = f"{rate:g}{f' ({value})' if value else ''}"
    yield from _crossed(found, {world: shown[world] for world in found.worlds if world in shown})


def _crossed(found: Standings, cells: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Worlds by ranked methods, whose names are short; then all others by the few worlds that they have."""
    for everywhere in (True, False):
        names = [name for name, about in found.methods.items() if about["everywhere"] is everywhere]
        names = [name for name in names if any(name in by for by in cells.values())]
        worlds = [world for world, by in cells.items() if any(name in by for name in names)]
        if everywhere:
            yield _table([{"world": one, **{name: cells[one].get(name, "–") for name in names}} for one in worlds])
        else:
            yield _table([{"method": name, **{one: cells[one].get(name, "–") for one in worlds}} for name in names])


def _pairs(found: Standings) -> list[str]:
    """All of them: what differs beyond chance, then what cannot be told apart."""
    lines = []
    for measure in MEASURES:
        if (ranking := found.ranking(measure)) is None:
            continue
        sure = [one for one in ranking.pairs if one.differs]
        alike = len(ranking.pairs) - len(sure)
        told = f"{len(sure)} of {len(ranking.pairs)} pairs differ beyond chance, {alike} cannot be told apart."
        order = sorted(ranking.pairs, key=lambda one: (not one.differs, -abs(one.difference)))
        lines += [f"### {measure.capitalize()} models", told, _table([_pair(one) for one in order])]
    if not lines:
        return ["Nothing is ranked yet."]
    return [
        *lines,
        "Points: the mean difference over worlds, with a 95 % bootstrap interval. Wins: the share of worlds in which "
        "the first is ahead. p: Wilcoxon's, corrected by Holm for all pairs.",
    ]


def _pair(one: Pair) -> dict[str, str]:
    """The better one first."""
    sign = 1 if one.difference >= 0 else -1
    low, high = sorted((sign * one.low, sign * one.high))
    wins = one.wins if sign > 0 else 1 - one.wins
    return {
        "ahead": one.a if sign > 0 else one.b,
        "behind": one.b if sign > 0 else one.a,
        "points": f"{100 * abs(one.difference):.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
        "wins": f"{100 * wins:.0f} %",
        "p": "–" if one.p is None else f"{one.p:.2g}",
        "told apart": "yes" if one.differs else "no",
    }
