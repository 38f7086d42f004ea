"""Play a league: search rates, then run what counts. A finished run is a line of league.json and never runs again."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import config
from ..compare.board import Board
from ..compare.crew import Crew
from ..compare.parallel import Supply, Task, side_by_side, supplied
from ..core.errors import BadInput
from ..core.files import read_json, write_json
from ..core.format import duration
from ..runs.folder import RunFolder
from ..runs.grid import placement
from ..runs.read import client_accuracies, fairness
from ..simulate.finish import GOES_WRONG, reason
from .book import Book, Match
from .budget import rounds_within
from .schedule import left_out, missing, still
from .spec import League

_PATIENCE = 10.0  # seconds between two lines that say how far it is
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
        self.began, self.counted = time.monotonic(), 0
        self.board: Board | None = None
        self.under_way: dict[str, Match] = {}
        self._said = -math.inf
        self._done: set[tuple[str, str]] = set()
        self._cannot: set[tuple[str, str, str]] = set()
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

    def rounds(self, world: str, method: str, value: str) -> int | None:
        """Within the budget. None where its rehearsal fails: that is said once, and the others go on."""
        if (world, method, value) in self._cannot:
            return None
        try:
            return self.budget(world, method, value)[0]
        except GOES_WRONG as error:
            self._cannot.add((world, method, value))
            with_value = f" with {self.league.entries[method].key}={value}" if value else ""
            self.say(f"{method}{with_value} is left out in {world}: {reason(error)}")
            return None

    def missing(self) -> Iterator[Match]:
        return missing(self.league, self.book, self.rounds, self._done)

    def say(self, text: str) -> None:
        if self.board is not None:
            self.board.say(text)

    @property
    def left(self) -> int:
        return still(self.league, self.book)

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

    def ready(self) -> tuple[Match, Task] | None:
        """The first run that can begin; none while all that is left waits for runs under way."""
        while (cell := next((one for one in self.missing() if one.name not in self.under_way), None)) is not None:
            try:
                task = self.task(cell)
                assert task.rounds
                return cell, task
            except BadInput as error:  # a rate that this method refuses
                self.book.add(cell, {"state": "failed", "error": str(error)})
        return None

    def take(self) -> Task | None:
        """The next run; none when the time is up."""
        found = None if self.over else self.ready()
        if found is None:
            return None
        cell, task = found
        self.under_way[cell.name] = cell
        if self.board is not None:
            self.board.add(task.name, task.rounds)
            self.board.to_come = max(0, self.left - len(self.under_way))
        return task

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
    for sentence in left_out(season.league):
        board.say(sentence)
    first = season.ready()
    if first is not None:
        crew = Crew(processes, processes) if processes else side_by_side([first[1]] * max(season.left, 1))
        with board:
            supplied(season, crew, board, season.ended)
    for sentence in failures(season.book):
        board.say(sentence)
    return season.complete


def failures(book: Book) -> list[str]:
    """Of each method in a world: how many of its runs failed this time, why, and whether it is left out for that."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell, row in book.rows.items():
        if row["state"] == "failed":
            found.setdefault((cell.world, cell.method), []).append(row["error"])
    said = []
    for (world, method), errors in found.items():
        is_out = book.best(world, method, "rate") is None
        runs = f"{len(errors)} run{'s' * (len(errors) > 1)} without a result"
        told = f"is left out in {world}, where all of its search failed" if is_out else f"in {world}: {runs}"
        said.append(f"{method} {told} ({errors[0]}); the same command tries again")
    return said


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
