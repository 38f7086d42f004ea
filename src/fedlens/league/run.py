"""Play a league: search rates, then run what counts. A finished run is a line of league.json and never runs again."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from .. import config
from ..algorithms import name_of
from ..compare.board import Board
from ..compare.crew import Crew
from ..compare.parallel import Supply, Task, side_by_side, supplied
from ..core.errors import BadInput
from ..core.files import read_json, write_atomic, write_json
from ..core.format import duration
from ..runs.folder import RunFolder
from ..runs.grid import mean, placement
from ..runs.read import client_accuracies, fairness
from .budget import rounds_within
from .spec import League, extended

Part = Literal["rate", "main", "final"]
FORMAT = 1
_PATIENCE = 10.0  # seconds between two lines that say how far it is
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


# ---- what is to be done ----------------------------------------------------------------------------------------------
Rounds = Callable[[str, str, str], int]  # world, method, value -> rounds within the budget


def missing(league: League, book: Book, rounds: Rounds, done: set[tuple[str, str]] | None = None) -> Iterator[Match]:
    """What can be run now, a world after the other; asked again when some of it is done, until nothing is left.

    Rates first, a step beyond the grid where the best lies at its edge; then values of the main parameter at the best
    rate; then the seeds that count, under the best of both. Where one of these collapses, all of them are played at a
    smaller rate: the search is shorter, and cannot know. `done` keeps the pairs that need not be looked at again.
    """
    done = set() if done is None else done
    for world, method in league.pairs():
        if (world, method) in done:
            continue
        searched = _searched(league, book, world, method, rounds)
        todo = searched if isinstance(searched, list) else []
        if isinstance(searched, Match):
            searched = book.steady(searched)
            whole = rounds(world, method, searched.value)
            finals = (replace(searched, part="final", seed=seed, rounds=whole) for seed in league.seeds)
            todo = [cell for cell in finals if cell not in book.rows]
        if not todo:
            done.add((world, method))
        yield from todo


def _searched(league: League, book: Book, world: str, method: str, rounds: Rounds) -> list[Match] | Match | None:
    """Cells of the search that are missing, or its best; nothing where all of it failed."""
    entry = league.entries[method]

    def cell(part: Part, rate: float, value: str = "") -> Match:
        short = max(1, round(rounds(world, method, value) * league.search_share))
        return Match(part, world, method, rate, value, league.search_seed, short)

    tried = [known.rate for known in book.of(world, method) if known.part == "rate"]
    todo = [one for rate in league.rates if (one := cell("rate", rate)) not in book.rows]
    if todo:
        return todo
    best = book.best(world, method, "rate")
    if best is None:
        return None
    further = extended(tried, best.rate, league.rates)
    if further is not None:
        return [cell("rate", further)]
    todo = [
        one for value in values_of(league, world, method) if (one := cell("main", best.rate, value)) not in book.rows
    ]
    if todo:
        return todo
    other = book.best(world, method, "main")
    scores = {one: score_of(book.rows[one], entry.measure) or 0.0 for one in (best, other) if one is not None}
    return max(scores, key=lambda one: scores[one])


def _default(league: League, world: str, method: str) -> str:
    """What the main parameter is without a word; asked for often, and reading settings takes a while."""
    if (world, method) not in league.defaults:
        league.defaults[world, method] = _read_default(league, world, method)
    return league.defaults[world, method]


def _read_default(league: League, world: str, method: str) -> str:
    entry = league.entries[method]
    if not entry.key.startswith("algorithm."):
        return ""
    part: Any = league.experiment(world, method).algorithm
    for name in entry.key.split(".")[1:]:
        part = getattr(part, name, None)
    return f"{part:g}" if isinstance(part, float) else str(part)


def values_of(league: League, world: str, method: str) -> list[str]:
    """Of the main parameter, but its default, which the search of rates has."""
    usual = _default(league, world, method)
    return [value for value in league.entries[method].values if value != usual]


def all_runs(league: League) -> int:
    """Of a whole league, without steps beyond the grid."""
    each = len(league.rates) + len(league.seeds)
    return sum(each + len(values_of(league, world, method)) for world, method in league.pairs())


def still(league: League, book: Book, total: int) -> int:
    """About how many of them are left."""
    mine = set(league.pairs())
    done = (cell for cell in book.rows if (cell.world, cell.method) in mine)
    return max(0, total - sum(cell.rate in league.rates or cell.part != "rate" for cell in done))


def to_come(league: League, book: Book) -> list[str]:
    """How many runs there are, how many are left, and how long that takes at the speed of those that are known."""
    entries, pairs = league.entries, league.pairs()
    total = all_runs(league)
    search = total - len(pairs) * len(league.seeds)
    images = sum(league.experiment(world, method).rounds for world, method in pairs)
    share, counts = search * league.search_share / len(pairs), len(pairs) * len(league.seeds)
    lines = [
        f"{len(league.worlds)} worlds, {len(entries)} methods: {search} runs of the search, {counts} that count.",
        f"{len(book.rows)} are done; about {still(league, book, total)} are left, and some beyond the grid of rates.",
        f"What counts has {images * len(league.seeds)} rounds, as FedAvg's are; the search {share * images:.0f}.",
    ]
    known = [row["seconds"] / row["rounds"] for row in book.rows.values() if row["state"] == "complete"]
    if known:
        each = math.fsum(known) / len(known)
        lines.append(f"At {each:.2f} s a round, as so far: {duration(each * (share + len(league.seeds)) * images)}.")
    return lines


# ---- doing it --------------------------------------------------------------------------------------------------------
BUDGETS = "budgets.json"


def _kept(file: Path) -> dict[str, tuple[int, float, float]]:
    """Budgets by settings; none where there is no file, or one that is not ours."""
    try:
        return {
            what: (int(rounds), float(images), float(most)) for what, (rounds, images, most) in read_json(file).items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


class Season(Supply):
    """A league that is played: where its runs lie, what is under way, and what the budgets are."""

    grows = True

    def __init__(self, league: League, book: Book, runs: Path, where: Sequence[str] = ()):
        super().__init__()
        self.league, self.book, self.runs, self.where = league, book, runs, tuple(where)
        self.began, self.counted, self.total = time.monotonic(), 0, all_runs(league)
        self.board: Board | None = None
        self.under_way: dict[str, Match] = {}
        self._said = -math.inf
        self._done: set[tuple[str, str]] = set()
        self._budgets: dict[str, tuple[int, float, float]] = _kept(runs / BUDGETS)

    def budget(self, world: str, method: str, value: str) -> tuple[int, float, float]:
        """Rounds, what is trained in them, and what may be; kept beside the runs, as finding it out takes a second."""
        words = self.league.words_of(world, method, *self._value(method, value))
        what = " ".join(words)
        if what not in self._budgets:
            self._budgets[what] = rounds_within(config.read(None, words))
            self.runs.mkdir(parents=True, exist_ok=True)
            write_json(self.runs / BUDGETS, self._budgets)
        return self._budgets[what]

    def missing(self) -> Iterator[Match]:
        return missing(self.league, self.book, lambda *what: self.budget(*what)[0], self._done)

    @property
    def left(self) -> int:
        return still(self.league, self.book, self.total)

    @property
    def complete(self) -> bool:
        return next(self.missing(), None) is None

    def task(self, cell: Match) -> Task:
        place = runs_folder(cell)
        more = (*self._value(cell.method, cell.value), f"local.lr={cell.rate:g}", f"rounds={cell.rounds}", *self.where)
        more = (*more, "picture=false")  # the folder goes when its numbers are known
        words = (*self.league.words_of(cell.world, cell.method, *more), f"seed={cell.seed}")
        experiment = config.read(None, [*words, f"out={self.runs / place / 'run'}"])
        return Task(cell.name, experiment, words, tuple(placement(words)))

    def _value(self, method: str, value: str) -> tuple[str, ...]:
        return (f"{self.league.entries[method].key}={value}",) if value else ()

    def take(self) -> Task | None:
        """The first run that can begin; none when the time is up."""
        while not self.over:
            cell = next((one for one in self.missing() if one.name not in self.under_way), None)
            if cell is None:
                return None
            try:
                task = self.task(cell)
                rounds = task.rounds
            except BadInput as error:  # a rate that this method refuses
                self.book.add(cell, {"state": "failed", "error": str(error)})
                continue
            self.under_way[cell.name] = cell
            if self.board is not None:
                self.board.add(task.name, rounds)
                self.board.to_come = max(0, self.left - len(self.under_way))
            return task
        return None

    def ended(self, task: Task, why: str) -> None:
        """A line of the book, and the run's folder goes; what failed is written down with its sentence."""
        cell = self.under_way.pop(task.name)
        row = measured(task.out)
        if row is None:
            self.book.add(cell, {"state": "failed", "error": why or "it ended without a result"})
        else:
            _, images, most = self.budget(cell.world, cell.method, cell.value)
            self.book.add(cell, row | {"images": images, "budget": most})
            shutil.rmtree(task.out.parent, ignore_errors=True)
            self.counted += 1
        if self.board is not None:
            self.board.forget(task.name)
            if time.monotonic() - self._said > _PATIENCE or not self.left:
                self._said = time.monotonic()
                self.board.say(self.progress())

    def progress(self) -> str:
        seconds = (time.monotonic() - self.began) / max(self.counted, 1) * self.left
        return f"{len(self.book.rows)} runs are done, about {self.left} are left: {duration(seconds)}"


def play(season: Season, board: Board, *, processes: int = 0, seconds: float = 0) -> bool:
    """Whether all is done; otherwise the same call goes on. What is under way when `seconds` are over is given up."""
    season.board = board
    if seconds:
        season.until = time.monotonic() + seconds
    first = next(season.missing(), None)
    if first is None:
        return True
    many = [season.task(first)] * max(season.left, 1)
    with board:
        supplied(season, Crew(processes, processes) if processes else side_by_side(many), board, season.ended)
    return season.complete


def runs_folder(cell: Match) -> str:
    parts = (cell.part, cell.world, cell.method, f"{cell.rate:g}", cell.value, str(cell.seed), f"{cell.rounds}rounds")
    return "-".join("".join(c if c.isalnum() or c in "._+" else "_" for c in part) for part in parts if part)


def measured(path: Path) -> dict[str, Any] | None:
    """The numbers of a finished run; nothing where it is not finished."""
    folder = RunFolder(path)
    if not folder.config.exists() or (result := folder.result()) is None:
        return None
    clients = next(iter(client_accuracies(folder.metrics()).values()), {})
    personal, card = result["personal"], folder.passport()
    before = personal.get("before", {}).get("mean")
    after = next((personal[name]["mean"] for name in ("fine-tuned", "after", "before") if name in personal), None)
    return {
        "state": "complete",
        "global": result["accuracy_last"],
        "personal": after,
        "before": before,
        "worst_tenth": fairness(list(clients.values()))["worst_decile"] if clients else None,
        "bytes_up": result["bytes_up"],
        "bytes_down": result["bytes_down"],
        "target": next(iter((result.get("targets") or {}).values()), None),
        "seconds": result["seconds"],
        "machine": f"{card['device_name']}, {card['precision']}",
    }
