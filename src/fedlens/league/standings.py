"""A league's numbers as tables and sentences, from league.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from ..core.errors import BadInput
from ..simulate.describe import privacy_class
from .run import read_book
from .statistics import ALPHA, Pair, Ranking, pair, pairs, ranking

MEASURES = ("global", "personal")
REFERENCE = "fedavg"


@dataclass(frozen=True)
class Standings:
    """What is known at the moment; worlds that some ranked method lacks are not ranked yet."""

    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Standings:
        if not path.is_file():
            raise BadInput(f"there is no {path}: `fedlens league` writes it")
        return cls(read_book(path))

    @property
    def worlds(self) -> Mapping[str, Any]:
        return self.content["worlds"]

    @property
    def methods(self) -> Mapping[str, Any]:
        return self.content["methods"]

    @cached_property
    def finals(self) -> list[Mapping[str, Any]]:
        """Of the smallest rate: a larger one that was played before had collapsed."""
        rows = [row for row in self.content["cells"] if row["part"] == "final" and row["state"] == "complete"]
        least: dict[tuple[str, str], float] = {}
        for row in rows:
            pair = row["world"], row["method"]
            least[pair] = min(row["rate"], least.get(pair, row["rate"]))
        return [row for row in rows if row["rate"] == least[row["world"], row["method"]]]

    @property
    def collapsed(self) -> list[tuple[str, str]]:
        """(method, world) of which a rate was given up after the search, since longer runs collapsed at it."""
        kept = {id(row) for row in self.finals}
        rows = [row for row in self.content["cells"] if row["part"] == "final" and id(row) not in kept]
        return sorted({(row["method"], row["world"]) for row in rows})

    @property
    def played(self) -> tuple[list[str], list[str]]:
        """(worlds, ranked methods) of which a run that counts is done."""
        worlds, methods = ({row[name] for row in self.finals} for name in ("world", "method"))
        ranked = [name for name, about in self.methods.items() if about["everywhere"] and name in methods]
        return [name for name in self.worlds if name in worlds], ranked

    @property
    def kinds(self) -> dict[str, list[str]]:
        """all, and every kind of which there are several worlds."""
        found: dict[str, list[str]] = {"all": list(self.worlds)}
        for name, world in self.worlds.items():
            found.setdefault(world["kind"], []).append(name)
        return {kind: names for kind, names in found.items() if kind == "all" or 1 < len(names) < len(self.worlds)}

    def scores(self, measure: str, worlds: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """world -> method -> accuracy, the mean over seeds."""
        found: dict[str, dict[str, list[float]]] = {}
        for row in self.finals:
            if row.get(measure) is not None and (not worlds or row["world"] in worlds):
                found.setdefault(row["world"], {}).setdefault(row["method"], []).append(row[measure])
        return {world: {name: fmean(values) for name, values in by.items()} for world, by in found.items()}

    def ranking(self, measure: str, worlds: Sequence[str] = ()) -> Ranking | None:
        """Of the methods that are everywhere, over worlds in which all are done; nothing without two of each."""
        whole = self.ranked(measure, worlds)
        return ranking(whole) if len(whole) > 1 and len(next(iter(whole.values()))) > 1 else None

    def ranked(self, measure: str, worlds: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """What is ranked: world -> method -> accuracy."""
        scores = self.scores(measure, worlds)
        everyone = {name for by in scores.values() for name in by if self.methods[name]["everywhere"]}
        return {w: {name: by[name] for name in everyone} for w, by in scores.items() if everyone <= by.keys()}

    def beside(self, measure: str) -> list[Pair]:
        """Every other method against the reference, over the worlds that both have."""
        scores = self.scores(measure)
        names = sorted({name for by in scores.values() for name in by} - {REFERENCE})
        found = [pair(scores, name, REFERENCE) for name in names]
        return sorted((one for one in found if one.worlds), key=lambda one: -one.difference)

    def average(self, method: str, name: str) -> float | None:
        values = [row[name] for row in self.finals if row["method"] == method and row.get(name) is not None]
        return fmean(values) if values else None

    def to_target(self, method: str) -> tuple[float | None, int, int]:
        """(mean bytes a run sent until its target, runs that reached it, runs)."""
        mine = [row for row in self.finals if row["method"] == method]
        hit = [row["target"]["bytes"] for row in mine if row.get("target")]
        return (fmean(hit) if hit else None), len(hit), len(mine)

    # ---- the search ----
    def rates(self) -> dict[str, dict[str, tuple[float, str]]]:
        """method -> world -> (rate, value) that the runs that count had."""
        found: dict[str, dict[str, tuple[float, str]]] = {}
        for row in self.finals:
            found.setdefault(row["method"], {})[row["world"]] = row["rate"], row["value"]
        return found

    def curve(self, method: str, world: str, measure: str) -> list[tuple[float, float]]:
        """(rate, accuracy) of the search."""
        rows = [
            row
            for row in self.content["cells"]
            if (row["part"], row["method"], row["world"]) == ("rate", method, world) and row["state"] == "complete"
        ]
        return sorted((row["rate"], row[measure]) for row in rows if row.get(measure) is not None)

    def cost(self) -> dict[str, float]:
        """Runs and seconds of the search and of what counts."""
        done = [row for row in self.content["cells"] if row["state"] == "complete"]
        search = [row for row in done if row["part"] != "final"]
        return {
            "search_runs": len(search),
            "search_seconds": sum(row["seconds"] for row in search),
            "runs": len(self.finals),
            "seconds": sum(row["seconds"] for row in self.finals),
        }

    def at_the_edge(self) -> list[tuple[str, str]]:
        """(method, world) whose best rate is the smallest or largest that was tried."""
        found = []
        for method, by in self.rates().items():
            measure = self.methods[method]["measure"]
            for world, (rate, _) in by.items():
                tried = self.curve(method, world, "personal" if measure == "personal" else "global")
                if len(tried) > 1 and rate in (tried[0][0], tried[-1][0]):
                    found.append((method, world))
        return found

    def privacy(self, method: str) -> str:
        return privacy_class(self.methods[method]["algorithm"], self.methods[method]["discloses"])

    # ---- in words ----
    def table(self) -> list[dict[str, str]]:
        ranks = {measure: self.ranking(measure) for measure in MEASURES}
        over = {measure: {one.a: one for one in self.beside(measure)} for measure in MEASURES}
        rows = []
        for method, about in self.methods.items():
            if about["everywhere"] and any(row["method"] == method for row in self.finals):
                row = {"method": method}
                for measure in MEASURES:
                    placed, one = ranks[measure], over[measure].get(method)
                    row[f"{measure} rank"] = f"{placed.ranks[method]:.1f}" if placed and method in placed.ranks else "–"
                    row[measure] = _percent(self.average(method, measure))
                    row[f"{measure}, over {REFERENCE}"] = _interval(one)
                row["worst tenth"] = _percent(self.average(method, "worst_tenth"))
                sent, hit, runs = self.to_target(method)
                row["MB to target"] = f"{sent / 1e6:.0f} ({hit} of {runs})" if sent is not None else f"– (0 of {runs})"
                row["seconds"] = f"{self.average(method, 'seconds') or 0:.0f}"
                row["privacy"] = self.privacy(method)
                rows.append(row)
        return sorted(rows, key=lambda row: _place(row["global rank"]))

    def findings(self) -> Iterator[str]:
        """A sentence or two each; what cannot be told apart is said so."""
        for measure in MEASURES:
            found, name = self.ranking(measure), f"{measure.capitalize()} models"
            if found is None:
                yield f"{name}: not enough finished worlds to rank anything."
                continue
            over = f"{len(found.worlds)} worlds, Friedman p = {found.friedman:.2g}"
            if (found.friedman or 0) >= ALPHA:
                yield f"{name}: no method differs from another beyond chance ({over})."
                continue
            first = next(iter(found.ranks))
            best = next((group for group in found.groups if first in group), (first,))
            apart = f"cannot be told apart: {', '.join(best)}" if len(best) > 1 else f"is {first}, ahead of all others"
            if len(best) == len(found.ranks):
                apart = f"of {len(best)} methods, {first}, cannot be told from any other"
            yield f"{name}: the best {apart} ({over})."
            sure = [one for one in pairs(self.ranked(measure), REFERENCE) if one.differs]
            better = ", ".join(one.a if one.b == REFERENCE else one.b for one in sure if not _wins(one)) or "none"
            worse = ", ".join(one.a if one.b == REFERENCE else one.b for one in sure if _wins(one)) or "none"
            yield f"Beyond chance (Wilcoxon, Holm), better than {REFERENCE}: {better}; worse: {worse}."
        cost = self.cost()
        yield (
            f"The search took {cost['search_runs']:.0f} runs and {cost['search_seconds'] / 3600:.1f} hours, "
            f"what counts {cost['runs']:.0f} runs and {cost['seconds'] / 3600:.1f}."
        )
        if lost := self.collapsed:
            yield f"Rates given up after the search, because longer runs collapsed at them: {len(lost)}."
        edge = self.at_the_edge()
        yield f"Best rates at the edge of what was tried: {len(edge)} of {sum(map(len, self.rates().values()))}."


def _wins(one: Pair) -> bool:
    """Whether the reference is ahead."""
    return (one.difference > 0) == (one.a == REFERENCE)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _interval(one: Pair | None) -> str:
    """The difference in points; an interval where there are worlds to draw from."""
    if one is None:
        return "–"
    between = f" [{100 * one.low:+.1f}, {100 * one.high:+.1f}]" if one.worlds > 1 else " (one world)"
    return f"{100 * one.difference:+.1f}{between}"


def _place(text: str) -> float:
    return float(text) if text != "–" else float("inf")
