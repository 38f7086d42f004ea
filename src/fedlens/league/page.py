"""results/league.md and its details, written anew from league.json; with the checks that lie beside it.

Pages, pictures and pairs are named after the book.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..core.files import write_atomic
from .again import AGAIN, TWINS, check_of, checks
from .figure import draw, draw_rates
from .standings import MEASURES, REFERENCE, Standings
from .statistics import Pair, Ranking, turned
from .words import extent, findings, first, interval, others_chosen_by, percent, table

NAME = "league"  # where there is no book
UNCORRECTED = (
    "p of these checks: Wilcoxon's over worlds, of one pair that was chosen beforehand, not corrected. "
    "Those of the findings are corrected by Holm, so they are larger."
)


def write(found: Standings, folder: Path, book: Path | None = None) -> list[Path]:
    """Both pages, pictures and all pairs; with the checks, where their books lie beside the league's."""
    book = book or folder / f"{NAME}.json"
    name, pairs = book.stem, book.with_name(f"{book.stem}_pairs.csv")
    pictures = [path for path in (draw(found, folder / name), draw_rates(found, folder / f"{name}_rates")) if path]
    page, details = folder / f"{name}.md", folder / f"{name}_details.md"
    made = f"<!-- made by `fedlens league --page` from {os.path.relpath(book, folder)}: change that -->"
    write_atomic(page, text(found, pictures, beside(book), name, made).encode())
    write_atomic(pairs, pairs_csv(found).encode())
    write_atomic(details, details_text(found, pictures, os.path.relpath(pairs, folder), name, made).encode())
    return [page, details, *pictures, pairs]


def beside(book: Path) -> list[Standings]:
    """The checks by hand whose books lie beside the league's."""
    return [Standings.read(path) for kind in (AGAIN, TWINS) if (path := check_of(book, kind)).is_file()]


def text(
    found: Standings, pictures: Sequence[Path], again: Sequence[Standings] = (), name: str = NAME, made: str = ""
) -> str:
    """The page: what to try first, the picture, the table and the findings."""
    details = f"{name}_details.md"
    parts = [
        f"# {found.content['title']}",
        made,
        extent(found),
        "Every method trains on the same number of images at each client: warm-up, exchanges and second batches count. "
        "Splits and first weights are the same for all. Rates are searched on another seed, in fewer rounds. "
        "[How it compares](../docs/league.md) says more, and what the names of worlds mean. "
        f"[Details]({details}): accuracy by world, rates, pairs and settings.",
        "## What to try first",
        *first(found),
        *_shown(pictures, name, "Mean ranks; a bar joins methods that cannot be told apart"),
        "## Table",
        _table(table(found)),
        f"Accuracies in percent, means over the worlds that are ranked. Over {REFERENCE}: points, with a 95 % "
        "bootstrap interval over all worlds that both have; the sentences above take ranked worlds alone. "
        "Intervals are not corrected for many comparisons: one without zero is not yet beyond chance. "
        "–: the method has no global model, or not all of these worlds. "
        "Personal: each client's model after local training, or fine-tuned, on its own test images; before: without "
        "that training. Worst tenth: the mean over the tenth of the clients that are worst off.",
        "MB to target: sent until the global model reached the target accuracy of its world (`evaluate.targets`, at "
        f"the end of the [details]({details})). It is a mean over the runs that reached it, which brackets count. "
        "Seconds: of a run.",
        "## Findings",
        f"Nemenyi's test compares all methods by their ranks. Wilcoxon's compares each with {REFERENCE} by the "
        "differences themselves: it can find one that Nemenyi's does not. Holm corrects here for the comparisons with "
        f"{REFERENCE}; in the details for all pairs, so that fewer differ.",
        *findings(found),
    ]
    if others := _others(found):
        about = f"Points over {REFERENCE} with paired intervals; these methods have no ranks."
        parts += ["## In some worlds alone", _table(others), about, others_chosen_by(found)]
    if checked := [line for one in again for line in checks(found, one)]:
        parts += ["## Checks by hand", *checked, UNCORRECTED]
    return "\n\n".join(part for part in parts if part) + "\n"


def details_text(found: Standings, pictures: Sequence[Path], pairs: str, name: str = NAME, made: str = "") -> str:
    """The second page: numbers by world, rates, pairs, and what each world is."""
    accuracies, rates = _by_world(found), _rates(found)
    both = {
        world: {name: f"{cell} at {rates[world][name]}" for name, cell in by.items()}
        for world, by in accuracies.items()
    }
    parts = [
        f"# {found.content['title']}: details",
        made,
        f"The [page of the league]({name}.md) says what follows from these numbers.",
        "## Accuracy by world",
        "In percent: the global model / personal models.",
        _ranked_rows(found, accuracies),
        "## Rates",
        *_shown(pictures, f"{name}_rates", "Accuracy over rates, a panel for each world"),
        "Each method's rate, and the value of its main parameter where it is not the default.",
        _ranked_rows(found, rates),
    ]
    if others := _other_rows(found, both):
        parts += ["## Methods in some worlds alone", "Global / personal accuracy, and the rate.", others]
    parts += ["## Pairs", *_pairs(found, pairs), "## Worlds"]
    budgets = {row["world"]: row["budget"] for row in found.finals}
    worlds = [
        {"world": name, "kind": about["kind"], "images": f"{budgets[name]:.1f}" if name in budgets else "–"}
        | {"settings": f"`{' '.join(about['words'])}`"}
        for name, about in found.worlds.items()
    ]
    parts += ["Images: how often a client trains on each of its images, at most."]
    parts += [_table(worlds), "`fedlens league` runs it, or what is left of it."]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(pictures: Sequence[Path], name: str, about: str) -> list[str]:
    """One that could be drawn; without two finished worlds there are no ranks to draw."""
    return [f"![{about}]({path.name})" for path in pictures if path.stem == name]


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


Cells = dict[str, dict[str, str]]  # world -> method -> what is shown


def _by_world(found: Standings) -> Cells:
    scores, shown = {measure: found.scores(measure) for measure in MEASURES}, {}
    for world in found.worlds:
        by = {measure: scores[measure].get(world, {}) for measure in MEASURES}
        names = [name for name in found.methods if any(name in one for one in by.values())]
        if names:
            shown[world] = {
                name: " / ".join(percent(by[measure].get(name), 2) for measure in MEASURES) for name in names
            }
    return shown


def _rates(found: Standings) -> Cells:
    shown: Cells = {world: {} for world in found.worlds}
    for method, by in found.rates().items():
        for world, (rate, value) in by.items():
            shown[world][method] = f"{rate:g}{f' ({value})' if value else ''}"
    return {world: by for world, by in shown.items() if by}


def _ranked_rows(found: Standings, cells: Cells) -> str:
    """Worlds by ranked methods, whose names are short."""
    names = _named(found, cells, True)
    worlds = [world for world, by in cells.items() if any(name in by for name in names)]
    return _table([{"world": one, **{name: cells[one].get(name, "–") for name in names}} for one in worlds])


def _other_rows(found: Standings, cells: Cells) -> str:
    """All others by the few worlds that they have."""
    names = _named(found, cells, False)
    worlds = [world for world, by in cells.items() if any(name in by for name in names)]
    return _table([{"method": name, **{one: cells[one].get(name, "–") for one in worlds}} for name in names])


def _named(found: Standings, cells: Cells, everywhere: bool) -> list[str]:
    names = [name for name, about in found.methods.items() if about["everywhere"] is everywhere]
    return [name for name in names if any(name in by for by in cells.values())]


# ---- pairs -----------------------------------------------------------------------------------------------------------
def _pairs(found: Standings, file: str) -> list[str]:
    """A matrix for each kind of model, the best first."""
    lines = []
    for measure in MEASURES:
        if (ranking := found.ranking(measure)) is None:
            continue
        sure = sum(one.differs for one in ranking.pairs)
        alike = len(ranking.pairs) - sure
        told = f"{sure} of {len(ranking.pairs)} pairs differ beyond chance, {alike} cannot be told apart."
        lines += [f"### {measure.capitalize()} models", told, _table(_matrix(ranking))]
    if not lines:
        return ["Nothing is ranked yet."]
    return [
        *lines,
        "A cell: by how many points the row is ahead of the column, a mean over worlds, and in how many percent of "
        "them. Bold: beyond chance (Wilcoxon's p over worlds, corrected by Holm for all pairs, below 0.05). "
        f"Intervals and p: [{Path(file).name}]({file}).",
    ]


def _matrix(ranking: Ranking) -> list[dict[str, str]]:
    """Each pair once, where the row is of the better rank."""
    names, known = [*ranking.ranks], {frozenset((one.a, one.b)): one for one in ranking.pairs}
    return [
        {"": row, **{name: _cell(turned(known[frozenset((row, name))], row)) for name in names[place + 1 :]}}
        for place, row in enumerate(names[:-1])
    ]


def _cell(one: Pair) -> str:
    mark = "**" if one.differs else ""
    return f"{mark}{100 * one.difference:+.1f}{mark} ({100 * one.wins:.0f} %)"


def pairs_csv(found: Standings) -> str:
    """Every pair with its interval, wins and p; the better of two comes first."""
    lines = ["model,ahead,behind,worlds,points,low,high,wins,p,told_apart"]
    for measure in MEASURES:
        ranking = found.ranking(measure)
        ahead = [turned(one, one.a if one.difference >= 0 else one.b) for one in (ranking.pairs if ranking else ())]
        for one in sorted(ahead, key=lambda one: (not one.differs, -one.difference)):
            numbers = [f"{100 * number:.2f}" for number in (one.difference, one.low, one.high)]
            chance = "" if one.p is None else f"{one.p:.3g}"
            told = (*numbers, f"{one.wins:.3f}", chance, "yes" if one.differs else "no")
            lines.append(",".join((measure, one.a, one.b, str(one.worlds), *told)))
    return "\n".join(lines) + "\n"
