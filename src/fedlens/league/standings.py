"""A league's numbers as tables and sentences, from league.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from ..core.errors import BadInput
from ..simulate.describe import privacy_class
from .book import read_book
from .statistics import Pair, Ranking, pair, pairs, ranking

MEASURES = ("global", "personal")
REFERENCE = "fedavg"


@dataclass(frozen=True)
class Standings:
    """What is known at the moment. Ranked are the worlds and methods that leave no gap between them."""

    content: Mapping[str, Any]
    keep: tuple[str, ...] = ()  # methods that are ranked whatever it costs in worlds: those of the user

    @classmethod
    def read(cls, path: Path, keep: Sequence[str] = ()) -> Standings:
        if not path.is_file():
            raise BadInput(f"there is no {path}: `fedlens league` writes it")
        return cls(read_book(path), tuple(keep))

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

    @cached_property
    def counted(self) -> list[Mapping[str, Any]]:
        """Finals of methods that have every seed of their world: other seeds are other splits and first weights."""
        seeds: dict[tuple[str, str], set[int]] = {}
        for row in self.finals:
            seeds.setdefault((row["world"], row["method"]), set()).add(row["seed"])
        whole: dict[str, set[int]] = {}
        for (world, _), mine in seeds.items():
            whole[world] = max(whole.get(world, set()), mine, key=len)
        return [row for row in self.finals if seeds[row["world"], row["method"]] >= whole[row["world"]]]

    @property
    def played(self) -> tuple[list[str], list[str]]:
        """(worlds, ranked methods) of which a run that counts is done."""
        worlds, methods = ({row[name] for row in self.counted} for name in ("world", "method"))
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
        for row in self.counted:
            if row.get(measure) is not None and (not worlds or row["world"] in worlds):
                found.setdefault(row["world"], {}).setdefault(row["method"], []).append(row[measure])
        return {world: {name: fmean(values) for name, values in by.items()} for world, by in found.items()}

    def ranking(self, measure: str, worlds: Sequence[str] = ()) -> Ranking | None:
        """Over what is ranked; nothing without two worlds and two methods."""
        asked = measure, tuple(worlds)
        if asked not in self._rankings:
            whole = self.ranked(measure, worlds)
            enough = len(whole) > 1 and len(next(iter(whole.values()))) > 1
            self._rankings[asked] = ranking(whole) if enough else None
        return self._rankings[asked]

    @cached_property
    def _rankings(self) -> dict[tuple[str, tuple[str, ...]], Ranking | None]:
        """A page asks for the same again and again, and intervals take a while."""
        return {}

    def ranked(self, measure: str, worlds: Sequence[str] = ()) -> dict[str, dict[str, float]]:
        """What is ranked: world -> method -> accuracy, without gaps.

        The method or the world that lacks the largest share goes first, a method before a world where they are alike.
        """
        scores = self.scores(measure, worlds)
        names = {name for by in scores.values() for name in by if self.methods[name]["everywhere"]}
        must = {REFERENCE, *self.keep} & names
        kept = set(scores)
        while gaps := [(world, name) for world in kept for name in names if name not in scores[world]]:
            lacking = {
                **{(True, name): sum(one == name for _, one in gaps) / len(kept) for name in names - must},
                **{(False, world): sum(one == world for one, _ in gaps) / len(names) for world in kept},
            }
            is_method, worst = max(lacking, key=lambda one: (lacking[one], one))
            (names if is_method else kept).discard(worst)
        return {world: {name: scores[world][name] for name in sorted(names)} for world in scores if world in kept}

    def unranked(self, measure: str) -> dict[str, int]:
        """Methods that lack worlds of the ranking, with the number of worlds that they have."""
        scores, ranked = self.scores(measure), self.ranked(measure)
        inside = {name for by in ranked.values() for name in by}
        names = [name for name, about in self.methods.items() if about["everywhere"] and name not in inside]
        counts = {name: sum(name in by for by in scores.values()) for name in names}
        return {name: count for name, count in counts.items() if count}

    def beside(self, measure: str) -> list[Pair]:
        """Every other method against the reference, over the worlds that both have."""
        scores = self.scores(measure)
        names = sorted({name for by in scores.values() for name in by} - {REFERENCE})
        found = [pair(scores, name, REFERENCE) for name in names]
        return sorted((one for one in found if one.worlds), key=lambda one: -one.difference)

    def against(self, measure: str, worlds: Sequence[str] = ()) -> dict[str, Pair]:
        """Ranked methods less the reference, tested; p is corrected for the number of methods."""
        ranked, found = self.ranked(measure, worlds), {}
        for one in pairs(ranked, REFERENCE):
            method = one.a if one.b == REFERENCE else one.b
            found[method] = replace(pair(ranked, method, REFERENCE), p=one.p)
        return found

    def fell(self, measure: str) -> dict[str, list[str]]:
        """Worlds in which a run of a method ended below half of the reference's accuracy."""
        scores, found = self.scores(measure), {}
        for row in self.counted:
            usual = scores.get(row["world"], {}).get(REFERENCE)
            if usual is not None and row.get(measure) is not None and row[measure] < usual / 2:
                found.setdefault(row["method"], {})[row["world"]] = None
        return {method: [*worlds] for method, worlds in found.items()}

    def cost_ratio(self, method: str) -> tuple[float, float] | None:
        """(bytes, seconds) of a run, as multiples of the reference's in the same worlds."""
        sums: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for row in self.counted:
            if row["method"] in (method, REFERENCE):
                both = row["bytes_up"] + row["bytes_down"], row["seconds"]
                sums.setdefault(row["world"], {}).setdefault(row["method"], []).append(both)
        shared = [by for by in sums.values() if {method, REFERENCE} <= by.keys()]
        if not shared:
            return None
        sent, taken = (
            fmean(fmean(one[i] for one in by[method]) / fmean(one[i] for one in by[REFERENCE]) for by in shared)
            for i in (0, 1)
        )
        return sent, taken

    def average(self, method: str, name: str, worlds: Sequence[str] = ()) -> float | None:
        """Over worlds and seeds; nothing where one of these worlds is not done."""
        mine = [row for row in self.counted if row["method"] == method and (not worlds or row["world"] in worlds)]
        values = [row[name] for row in mine if row.get(name) is not None]
        return fmean(values) if values and {row["world"] for row in mine} >= set(worlds) else None

    def to_target(self, method: str) -> tuple[float | None, int, int]:
        """(mean bytes a run sent until its target, runs that reached it, runs)."""
        mine = [row for row in self.counted if row["method"] == method]
        hit = [row["target"]["bytes"] for row in mine if row.get("target")]
        return (fmean(hit) if hit else None), len(hit), len(mine)

    # ---- the search ----
    def rates(self) -> dict[str, dict[str, tuple[float, str]]]:
        """method -> world -> (rate, value) that the runs that count had."""
        found: dict[str, dict[str, tuple[float, str]]] = {}
        for row in self.counted:
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
