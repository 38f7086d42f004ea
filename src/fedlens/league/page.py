"""results/league.md, written anew from league.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core.files import write_atomic
from .figure import draw, draw_rates
from .standings import MEASURES, REFERENCE, Standings, _interval

MADE = "<!-- made by `fedlens league --page` from data/league.json: change that -->"


def write(found: Standings, folder: Path) -> list[Path]:
    """The page and its pictures."""
    pictures = [path for path in (draw(found, folder / "league"), draw_rates(found, folder / "league_rates")) if path]
    page = folder / "league.md"
    write_atomic(page, text(found, pictures).encode())
    return [page, *pictures]


def text(found: Standings, pictures: Sequence[Path]) -> str:
    budgets = {row["world"]: row["budget"] for row in found.finals}
    parts = [
        f"# {found.content['title']}",
        MADE,
        *_part(found),
        "Every method trains on the same number of images at each client: warm-up, exchanges and second batches count. "
        "Splits and first weights are the same for all. Rates are searched on another seed, in fewer rounds.",
        *(f"- {line}" for line in found.findings()),
        *_shown(pictures, "league"),
        "## Table",
        _table(found.table()),
        "Accuracies in percent, means over worlds and seeds. Brackets: a 95 % bootstrap interval over worlds, against "
        f"{REFERENCE}. Personal: each client's model after local training, or fine-tuned, on its own test images.",
    ]
    others = [one for one in MEASURES if any(not found.methods[pair.a]["everywhere"] for pair in found.beside(one))]
    if others:
        parts += ["## In some worlds alone", _table(_others(found)), "Paired intervals against fedavg; no ranks."]
    for measure in MEASURES:
        parts += [f"## Accuracy by world, {measure} model", _table(_by_world(found, measure))]
    parts += ["## Pairs", *_pairs(found), "## Rates", *_shown(pictures, "league_rates")]
    parts += [_table(_rates(found)), "## Worlds"]
    worlds = [
        {"world": name, "kind": about["kind"], "images": f"{budgets[name]:.1f}" if name in budgets else "–"}
        | {"settings": f"`{' '.join(about['words'])}`"}
        for name, about in found.worlds.items()
    ]
    parts += ["Images: how often a client trains on each of its own, at most."]
    parts += [_table(worlds), "`fedlens league` plays it on; [how it compares](../docs/league.md)."]
    return "\n\n".join(_joined(parts)) + "\n"


def _part(found: Standings) -> list[str]:
    """Which part of the league this is, where it is not played to its end."""
    (worlds, methods), all_ranked = found.played, [n for n, about in found.methods.items() if about["everywhere"]]
    if (len(worlds), len(methods)) == (len(found.worlds), len(all_ranked)):
        return []
    lacking = [name for name in all_ranked if name not in methods]
    told = f"**This is a part of the league: {len(worlds)} of {len(found.worlds)} worlds"
    told += f" and {len(methods)} of {len(all_ranked)} ranked methods. The whole league is not run.**"
    left = [f"Not played yet: {', '.join(lacking)}."] if lacking else []
    return [" ".join([told, *left]), "Played:", *(f"- {name}" for name in worlds or ["none"])]


def _shown(pictures: Sequence[Path], name: str) -> list[str]:
    """One that could be drawn; without two finished worlds there are no ranks to draw."""
    return [f"![{path.stem}]({path.name})" for path in pictures if path.stem == name]


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
    rows: dict[str, dict[str, str]] = {}
    for measure in MEASURES:
        for one in found.beside(measure):
            if not found.methods[one.a]["everywhere"]:
                row = rows.setdefault(one.a, {"method": one.a, "worlds": str(one.worlds)})
                row[measure] = _interval(one)
                row["privacy"] = found.privacy(one.a)
    return list(rows.values())


def _by_world(found: Standings, measure: str) -> list[dict[str, str]]:
    scores = found.scores(measure)
    names = [name for name in found.methods if any(name in by for by in scores.values())]
    numbers = {name: {w: f"{100 * by[name]:.2f}" for w, by in scores.items() if name in by} for name in names}
    return [{"method": name, **{world: by.get(world, "–") for world in scores}} for name, by in numbers.items()]


def _pairs(found: Standings) -> list[str]:
    lines = []
    for measure in MEASURES:
        if (ranking := found.ranking(measure)) is None:
            continue
        sure = [one for one in ranking.pairs if one.differs]
        alike = len(ranking.pairs) - len(sure)
        told = f"{len(sure)} of {len(ranking.pairs)} pairs differ beyond chance, {alike} cannot be told apart."
        said = f"{measure.capitalize()} models: {told}"
        rows = [
            {
                "ahead": one.a if one.difference > 0 else one.b,
                "behind": one.b if one.difference > 0 else one.a,
                "points": f"{100 * abs(one.difference):.1f}",
                "wins": f"{100 * max(one.wins, 1 - one.wins):.0f} %",
                "p": f"{one.p:.2g}",
            }
            for one in sorted(sure, key=lambda one: -abs(one.difference))
        ]
        lines += [said, _table(rows)]
    return lines or ["Nothing is ranked yet."]


def _rates(found: Standings) -> list[dict[str, str]]:
    rows = []
    for method, by in found.rates().items():
        shown = {world: f"{rate:g}{f' ({value})' if value else ''}" for world, (rate, value) in by.items()}
        rows.append({"method": method, **{world: shown.get(world, "–") for world in found.worlds}})
    return rows
