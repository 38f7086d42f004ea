"""The book of a league: every run that is known, one line of league.json each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..algorithms import name_of
from ..core.errors import BadInput
from ..core.files import read_json, write_atomic
from ..runs.grid import mean
from .spec import League

Part = Literal["rate", "main", "final"]
FORMAT = 1
_COLLAPSE = 0.1  # accuracy that a longer run may lose to its own search before its rate counts as too large


@dataclass(frozen=True)
class Match:
    """One run of a league."""

    part: Part
    world: str
    method: str
    rate: float
    value: str  # of the method's main parameter; empty: its default
    seed: int
    rounds: int

    @property
    def name(self) -> str:
        value = f" {self.value}" if self.value else ""
        return f"{self.part}: {self.method}{value} lr {self.rate:g}, {self.world}, seed {self.seed}"


class Book:
    """What is known: rows by cell, and a file with one line for each."""

    def __init__(self, path: Path, league: League):
        self.path, self.league = path, league
        self.rows: dict[Match, dict[str, Any]] = {}
        self._pairs: dict[tuple[str, str], dict[Match, dict[str, Any]]] = {}
        self.before: dict[str, Any] = {"worlds": {}, "methods": {}}  # of leagues that were played into this file
        if path.is_file():
            content = read_book(path)
            played = {kind: {row[kind] for row in content["cells"]} for kind in ("world", "method")}
            for kind, names in played.items():  # settings that nothing was run with may change
                self.before[f"{kind}s"] = {name: it for name, it in content[f"{kind}s"].items() if name in names}
            self._check_same()
            for row in content["cells"]:
                known = Match(**{name: row[name] for name in Match.__dataclass_fields__})
                if row["state"] == "complete":  # failed ones are tried again
                    self._take(known, row)

    def _check_same(self) -> None:
        """A name stands for the same settings as before: numbers of others would be mixed with these."""
        for kind, now in (("worlds", self.worlds), ("methods", self.methods)):
            for name, about in self.before[kind].items():
                if any(now[name].get(key) != about.get(key) for key in ("words", "common")):
                    raise BadInput(
                        f"{name} has other settings in {self.path}: give it another name, or choose another --book"
                    )

    def add(self, cell: Match, row: Mapping[str, Any]) -> None:
        self._take(cell, {**asdict(cell), **row})
        self.write()

    def _take(self, cell: Match, row: dict[str, Any]) -> None:
        self.rows[cell] = self._pairs.setdefault((cell.world, cell.method), {})[cell] = row

    def of(self, world: str, method: str) -> Mapping[Match, dict[str, Any]]:
        """What is known of a method in a world."""
        return self._pairs.get((world, method), {})

    def rounds(self, world: str, method: str, value: str, counts: bool) -> int | None:
        """Of a run that is known, one that counts or one of the search: finding out a budget takes a second."""
        known = (cell for cell in self.of(world, method) if cell.value == value and (cell.part == "final") is counts)
        return next((cell.rounds for cell in known), None)

    def write(self) -> None:
        about = {"format": FORMAT, "title": self.league.title, "worlds": self.worlds, "methods": self.methods}
        lines = ",\n".join("  " + json.dumps(row) for row in self.rows.values())
        head = json.dumps(about, indent=1)[:-2]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, f'{head},\n "cells": [\n{lines}\n ]\n}}\n'.encode())

    @cached_property
    def worlds(self) -> dict[str, Any]:
        common = list(self.league.words)
        new = {
            name: {"kind": world.kind, "words": list(world.words), "common": common}
            for name, world in self.league.worlds.items()
        }
        return self.before["worlds"] | new

    @cached_property
    def methods(self) -> dict[str, Any]:
        league, first = self.league, next(iter(self.league.worlds))
        found = dict(self.before["methods"])
        for name, entry in league.entries.items():
            experiment = league.experiment(first, name)
            about = {"words": list(entry.words), "main": entry.key, "everywhere": entry.everywhere}
            about |= {"measure": entry.measure, "algorithm": name_of(experiment.algorithm)}
            found[name] = about | {"discloses": list(experiment.discloses.values())}
        return found

    def best(self, world: str, method: str, part: Part) -> Match | None:
        """The best of a search; of equal ones the smaller rate."""
        score = self.league.entries[method].measure
        some = [
            (accuracy, -cell.rate, cell)
            for cell, row in self.of(world, method).items()
            if cell.part == part and row["state"] == "complete" and (accuracy := score_of(row, score)) is not None
        ]
        return max(some, key=lambda one: one[:2])[2] if some else None

    def steady(self, setting: Match) -> Match:
        """The setting, or the best of a smaller rate, where a run that counts ended far below the shorter search."""
        searched, measure = self.of(setting.world, setting.method), self.league.entries[setting.method].measure
        scores = {cell: score_of(row, measure) for cell, row in searched.items() if row["state"] == "complete"}
        while True:
            mine = [cell for cell in scores if (cell.rate, cell.value) == (setting.rate, setting.value)]
            finals = [scores[cell] or 0.0 for cell in mine if cell.part == "final"]
            if all(score >= (scores[setting] or 0.0) - _COLLAPSE for score in finals):
                return setting
            smaller = [
                (score, -cell.rate, cell.part, cell)
                for cell, score in scores.items()
                if cell.part != "final" and cell.rate < setting.rate and score is not None
            ]
            if not smaller:
                return setting
            setting = max(smaller, key=lambda one: one[:3])[3]


def read_book(path: Path) -> dict[str, Any]:
    """What `Book` wrote; refuses anything else."""
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise BadInput(f"{path} is of another version: move it away, or choose another --book")
        return {name: content[name] for name in ("title", "worlds", "methods", "cells")}
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{path} is damaged: it is no book of a league") from None


def score_of(row: Mapping[str, Any], measure: str) -> float | None:
    """The accuracy that counts: of the global model, of personal ones, or the mean of both where a method has both."""
    one, own = row.get("global"), row.get("personal")
    if measure == "both":
        return mean([value for value in (one, own) if value is not None])
    return one if measure == "global" else own
