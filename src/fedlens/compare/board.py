"""What a person sees while a comparison goes on: all its runs in one live panel, or a line for each in a file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from ..core.format import duration, percent
from ..simulate.progress import PATIENCE, Doing, for_people, sparkline
from ..simulate.recorder import Nobody
from ..simulate.recorder import Progress as RunProgress

_SHOWN = 12  # runs that ended, at most: the panel must fit a screen


@dataclass
class Line:
    """One run."""

    name: str
    rounds: int = 0
    state: str = "waits"  # runs, done, failed
    round: int = 0
    first: int = 0  # the round it went on from
    share: float = 0.0  # of the round under way: clients that have answered
    doing: Doing = field(default_factory=Doing)
    trained: int = 0  # rounds of training among them
    accuracy: float | None = None
    curve: list[float] = field(default_factory=list)
    began: float = 0.0
    seconds: float = 0.0
    trouble: str = ""

    @property
    def said(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {percent(self.accuracy, 2)}"
        trouble = f": {self.trouble}" if self.trouble else ""
        return f"{self.name}: {self.state}{trouble or accuracy} ({duration(self.seconds)})"

    @property
    def at(self) -> str:
        """Where it is: a round, or what comes before one."""
        if self.doing.name and not self.share:
            return self.doing.where
        return f"round {self.round}/{self.rounds}" if self.round else "round 1 under way" if self.share else "begins"


class OneRun(Nobody):
    """The watcher of one line, which has no room for clients; notes are kept in the run's log."""

    def __init__(self, board: Board, line: Line):
        self.board, self.line = board, line
        with board.lock:
            line.state, line.began = "runs", time.perf_counter()
        board.changed(line)

    def begin(self, experiment: Any, folder: Any, notes: list[str], round: int, rounds: int) -> None:
        self.line.round, self.line.rounds, self.line.first = round, rounds, round
        self.board.began = self.board.began or time.perf_counter()
        self.board.changed(self.line)

    def clients(self, answered: int, asked: int) -> None:
        self.line.share = min(answered / (asked + 1), 1.0)
        self.board.changed(self.line)

    def phase(self, name: str, done: int, total: int) -> None:
        self.line.doing.heard(name, done, total)
        self.line.share = 0.0
        self.board.changed(self.line)

    def round(self, progress: RunProgress) -> None:
        line = self.line
        line.round, line.rounds, line.accuracy = progress.round, progress.rounds, progress.accuracy
        line.share, line.doing = 0.0, Doing()
        if progress.accuracy is not None and progress.trained > line.trained:
            line.curve.append(progress.accuracy)
        line.trained = progress.trained
        self.board.changed(line)

    def end(self, trouble: str = "") -> None:
        with self.board.lock:
            self.line.state, self.line.trouble = ("failed" if trouble else "done"), trouble
            self.line.seconds = time.perf_counter() - self.line.began
        self.board.changed(self.line)


class Board:
    """A line for each run when it begins and when it ends, and in between now and then where all of them are."""

    def __init__(self, stream: TextIO):
        self.stream, self.lock, self.there = stream, threading.RLock(), 0
        self.lines: dict[str, Line] = {}
        self.doing, self.began, self.told = Doing(), 0.0, 0.0  # began: the first run's first round
        self.known: set[str] = set()  # runs whose beginning was said
        self.past, self.rounds_past = 0, 0  # runs that are no longer shown, and their rounds
        self.to_come = 0  # runs that are not shown yet
        self._left_said = False

    def expect(self, rounds: Mapping[str, int], there: int) -> None:
        """These runs are to come, of so many rounds each; so many were there before."""
        self.lines, self.there = {name: Line(name, count) for name, count in rounds.items()}, there
        self.began, self.known, self._left_said = 0.0, set(), False
        if there:
            self.say(f"{there} of {there + len(rounds)} runs are complete already")

    def add(self, name: str, rounds: int) -> None:
        """One more, where not all were known at first."""
        with self.lock:
            self.lines[name] = Line(name, rounds)

    def forget(self, name: str) -> None:
        """One that has ended, where there are too many to show."""
        with self.lock:
            self.past, self.rounds_past = self.past + 1, self.rounds_past + self.lines.pop(name).round
            self.known.discard(name)

    @property
    def rounds(self) -> int:
        """That were done in all."""
        with self.lock:
            return self.rounds_past + sum(line.round for line in self.lines.values())

    def phase(self, name: str, done: int, total: int) -> None:
        """What is under way before the runs."""
        if self.doing.heard(name, done, total) or self._is_silent:
            self.say(str(self.doing))

    def watch(self, name: str) -> OneRun:
        return OneRun(self, self.lines[name])

    def changed(self, line: Line) -> None:
        with self.lock:
            count = f"[{self.ended + self.past} of {len(self.lines) + self.past + self.to_come}]"
            if line.state in ("done", "failed"):
                self.say(f"{count} {line.said}")
            elif line.name not in self.known:
                self.known.add(line.name)
                self.say(f"{count} {line.name}: begins")
            elif self._is_silent or (not self._left_said and self.left):
                self._left_said = True
                runs = [f"{each.name}: {each.at}" for each in self.lines.values() if each.state == "runs"]
                self.say(f"{count} {'; '.join(runs)}{self.left}")

    @property
    def _is_silent(self) -> bool:
        return time.perf_counter() - self.told > PATIENCE

    @property
    def left(self) -> str:
        """How long the rest takes, by the rounds so far; nothing where none has begun."""
        done = sum(line.round - line.first + line.share for line in self.lines.values())
        ahead = sum(line.rounds - line.round - line.share for line in self.lines.values() if line.state != "failed")
        seconds = time.perf_counter() - self.began
        return f", about {duration(seconds * ahead / done)} left" if done > 0 and ahead > 0 else ""

    @property
    def ended(self) -> int:
        return sum(line.state in ("done", "failed") for line in self.lines.values())

    def say(self, text: str) -> None:
        with self.lock:
            self.told = time.perf_counter()
            print(text, file=self.stream, flush=True)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class LiveBoard(Board):
    """Every run that goes on, with its curve; those that ended; how many are left."""

    def __init__(self, console: Any):
        from rich.live import Live

        super().__init__(sys.stdout)
        self.console = console
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self.shown)

    def changed(self, line: Line) -> None:
        """The panel is drawn anew a few times a second."""

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def phase(self, name: str, done: int, total: int) -> None:
        self.doing.heard(name, done, total)

    def shown(self) -> Any:
        with self.lock:
            return self._shown()

    def _shown(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        if not self.lines:
            return Text(str(self.doing) or "loading")
        table = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "right", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        over = [line for line in self.lines.values() if line.state in ("done", "failed")]
        for line in [*over[-_SHOWN:], *(line for line in self.lines.values() if line.state == "runs")]:
            style = {"done": "green", "failed": "red"}.get(line.state, "")
            seconds = line.seconds or time.perf_counter() - line.began
            table.add_row(
                Text(line.name),
                Text(f"{line.round}/{line.rounds}" if line.rounds else line.state, style=style),
                "" if line.accuracy is None else percent(line.accuracy, 2),
                duration(seconds),
                self._last(line, max(self.console.width - 60, 8)),
            )
        left, before = len(self.lines) - len(over) + self.to_come, self.there + self.past
        title = f"{len(over) + before} of {len(over) + before + left} runs done, {left} to go{self.left}"
        return Panel(table, title=title, title_align="left")

    def _last(self, line: Line, width: int) -> Any:
        """What went wrong, what is under way, or the curve."""
        from rich.text import Text

        is_early = not line.round or (line.doing.name and not line.share)
        doing = line.at if line.state == "runs" and is_early else ""
        if line.trouble or doing:
            return Text(line.trouble or doing, style="" if line.trouble else "dim")
        return Text(sparkline(line.curve, width), style="cyan")

    def __enter__(self) -> LiveBoard:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.transient = not self.lines  # nothing to look back at
        self.live.stop()


def board(json: bool) -> Board:
    return for_people(json, LiveBoard, Board)
