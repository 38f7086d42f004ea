"""What a person sees while a comparison goes on: all its runs in one live panel, or a line for each in a file."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from ..core.format import duration, percent
from ..simulate.progress import for_people, sparkline
from ..simulate.recorder import Nobody
from ..simulate.recorder import Progress as RunProgress

_SHOWN = 12  # runs that ended, at most: the panel must fit a screen


@dataclass
class Line:
    """One run."""

    name: str
    state: str = "waits"  # runs, done, failed
    round: int = 0
    rounds: int = 0
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


class OneRun(Nobody):
    """The watcher of one line, which has no room for clients; notes are kept in the run's log."""

    def __init__(self, board: Board, line: Line):
        self.board, self.line = board, line
        with board.lock:
            line.state, line.began = "runs", time.perf_counter()
        board.changed(line)

    def begin(self, experiment: Any, folder: Any, notes: list[str], round: int, rounds: int) -> None:
        self.line.round, self.line.rounds = round, rounds
        self.board.changed(self.line)

    def round(self, progress: RunProgress) -> None:
        line = self.line
        line.round, line.rounds, line.accuracy = progress.round, progress.rounds, progress.accuracy
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
    """A line for each run when it ends."""

    def __init__(self, stream: TextIO):
        self.stream, self.lock, self.lines, self.there = stream, threading.RLock(), {}, 0

    def expect(self, names: list[str], there: int) -> None:
        """These runs are to come; so many were there before."""
        self.lines, self.there = {name: Line(name) for name in names}, there
        if there:
            self.say(f"{there} of {there + len(names)} runs were there already")

    def watch(self, name: str) -> OneRun:
        return OneRun(self, self.lines[name])

    def changed(self, line: Line) -> None:
        if line.state in ("done", "failed"):
            self.say(f"[{self.ended} of {len(self.lines)}] {line.said}")

    @property
    def ended(self) -> int:
        return sum(line.state in ("done", "failed") for line in self.lines.values())

    def say(self, text: str) -> None:
        with self.lock:
            print(text, file=self.stream, flush=True)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class LiveBoard(Board):
    """Every run that goes on, with its curve; those that ended; how many are left."""

    def __init__(self, console: Any):
        from rich.live import Live
        from rich.text import Text

        super().__init__(sys.stdout)
        self.console, self.live = console, Live(Text("loading"), console=console, refresh_per_second=4)

    def changed(self, line: Line) -> None:
        with self.lock:
            self.live.update(self.shown())

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def shown(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "right", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        over = [line for line in self.lines.values() if line.state in ("done", "failed")]
        for line in [*over[-_SHOWN:], *(line for line in self.lines.values() if line.state == "runs")]:
            style = {"done": "green", "failed": "red"}.get(line.state, "")
            seconds = line.seconds or time.perf_counter() - line.began
            table.add_row(
                line.name,
                Text(f"{line.round}/{line.rounds}" if line.rounds else line.state, style=style),
                "" if line.accuracy is None else percent(line.accuracy, 2),
                duration(seconds),
                line.trouble or Text(sparkline(line.curve, max(self.console.width - 60, 8)), style="cyan"),
            )
        left = len(self.lines) - len(over)
        title = f"{len(over) + self.there} of {len(self.lines) + self.there} runs done, {left} to go"
        return Panel(table, title=title, title_align="left")

    def __enter__(self) -> LiveBoard:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()


def board(json: bool) -> Board:
    return for_people(json, LiveBoard, Board)
