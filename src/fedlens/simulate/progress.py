"""What a person sees while a run goes on: one live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, track
from rich.table import Table
from rich.text import Text

from ..core.format import duration, percent, size
from ..experiment import Experiment
from .recorder import Progress as RunProgress
from .recorder import progress_line

T = TypeVar("T")
L = TypeVar("L")
P = TypeVar("P")
_BARS = "▁▂▃▄▅▆▇█"


PATIENCE = 10  # seconds without a line


@dataclass
class Doing:
    """What is under way besides clients' work."""

    name: str = ""
    done: int = 0
    total: int = 0  # 0: nobody knows
    began: float = 0.0

    def heard(self, name: str, done: int, total: int) -> bool:
        """Whether it is something new."""
        new = name != self.name or done < self.done
        self.began = time.monotonic() if new else self.began
        self.name, self.done, self.total = name, done, total
        return new

    @property
    def where(self) -> str:
        return f"{self.name}: {self.done:,} of {self.total:,}" if self.total else self.name

    def __str__(self) -> str:
        left = (time.monotonic() - self.began) * (self.total - self.done) / self.done if self.done else 0
        return self.where + (f", about {duration(left)} left" if left > 0 else "")


class TimeLeft:
    """How long the rest takes, from the rounds since the first one seen: that one also paid for starting up."""

    def __init__(self) -> None:
        self.first: RunProgress | None = None

    def left(self, progress: RunProgress) -> str:
        """Nothing where nobody knows it."""
        self.first = self.first or progress
        done, ahead = progress.round - self.first.round, progress.rounds - progress.round
        return duration((progress.seconds - self.first.seconds) / done * ahead) if done and ahead else ""


class Lines:
    """One line a round, and more where it takes long."""

    folder: Path | None  # of the run, once it has begun

    def __init__(self, stream: TextIO):
        self.stream, self.folder, self.at, self.said = stream, None, 0, time.monotonic()
        self.doing, self.pace, self.trains = Doing(), TimeLeft(), False

    def begin(self, experiment: Experiment, folder: Path, notes: list[str], round: int, rounds: int) -> None:
        self.folder, self.at = folder, round
        self.say(headline(experiment, folder, round))
        self.say(settings_line([experiment]))
        for note in notes:
            self.note(note)

    def clients(self, answered: int, asked: int) -> None:
        if time.monotonic() - self.said > PATIENCE:
            self.say(f"round {self.at + 1}: {answered} of {asked} clients")

    def round(self, progress: RunProgress) -> None:
        self.at, self.trains = progress.round, progress.trained > 0
        left = self.pace.left(progress)
        self.say(progress_line(progress) + (f", about {left} left" if left else ""))

    def note(self, text: str) -> None:
        self.say(f"note: {text}")

    def phase(self, name: str, done: int, total: int) -> None:
        """Before training each is named when it begins; then a line now and then is enough."""
        new = self.doing.heard(name, done, total) and not self.trains
        if new or time.monotonic() - self.said > PATIENCE:
            self.say(str(self.doing))

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, text: str) -> None:
        self.said = time.monotonic()
        print(text, file=self.stream, flush=True)


class LivePanel:
    """Round, accuracy, loss, bytes, seconds, time left, and the curve so far."""

    folder: Path | None  # of the run, once it has begun

    def __init__(self, console: Console):
        self.console, self.folder = console, None
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.percentage:>3.0f} %")
        )
        self.task = self.bar.add_task("round", total=1)
        self.live = Live(Text("loading"), console=console, refresh_per_second=8)
        self.title, self.curve, self.trained = Text("fedlens"), [], 0
        self.doing, self.pace = Doing(), TimeLeft()

    def begin(self, experiment: Experiment, folder: Path, notes: list[str], round: int, rounds: int) -> None:
        self.folder, self.title = folder, Text(headline(experiment, folder, round))
        self.bar.update(self.task, total=rounds, completed=round, description=f"round {round}/{rounds}")
        self.say(settings_line([experiment]))
        for note in notes:
            self.note(note)
        self.live.update(self._shown(None))

    def clients(self, answered: int, asked: int) -> None:
        task = self.bar.tasks[self.task]
        done = int(task.completed)
        said = f"round {done + 1}/{task.total:.0f}, {answered} of {asked} clients"
        self.bar.update(self.task, completed=done + answered / (asked + 1), description=said)

    def round(self, progress: RunProgress) -> None:
        self.bar.update(self.task, completed=progress.round, description=f"round {progress.round}/{progress.rounds}")
        if progress.accuracy is not None and progress.trained > self.trained:
            self.curve.append(progress.accuracy)
        self.trained = progress.trained
        self.live.update(self._shown(progress))

    def note(self, text: str) -> None:
        self.live.console.print(Text.assemble(("note ", "yellow"), text))

    def say(self, text: str) -> None:
        self.live.console.print(Text(text, style="dim"))

    def phase(self, name: str, done: int, total: int) -> None:
        self.doing.heard(name, done, total)
        if self.folder is None:
            self.live.update(Text(str(self.doing)))
            return
        task = self.bar.tasks[self.task]
        self.bar.update(self.task, description=f"round {int(task.completed) + 1}/{task.total:.0f}, {self.doing}")

    def __enter__(self) -> LivePanel:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.transient = self.folder is None  # nothing to look back at
        self.live.stop()

    def _shown(self, progress: RunProgress | None) -> Panel:
        if progress is None:
            return Panel(
                Group(self.bar, Text("first round under way", style="dim")), title=self.title, title_align="left"
            )
        numbers = Table.grid(padding=(0, 3))
        cells = {
            "accuracy": "" if progress.accuracy is None else percent(progress.accuracy, 2),
            "loss": "" if progress.loss is None else f"{progress.loss:.4f}",
            "up": size(progress.bytes_up),
            "down": size(progress.bytes_down),
            "time": duration(progress.seconds),
            "left": self.pace.left(progress),
        }
        for _ in cells:
            numbers.add_column(justify="right")
        numbers.add_row(*(f"[dim]{name}[/]" for name in cells))
        numbers.add_row(*(f"[bold]{value}[/]" for value in cells.values()))
        curve = Text(sparkline(self.curve, self.console.width - 8), style="cyan")
        return Panel(Group(self.bar, numbers, curve), title=self.title, title_align="left")


def counted(items: Collection[T], what: str) -> Iterator[T]:
    """The same items; how many are done on standard error: a bar in a terminal, else a line after half a minute."""
    if sys.stderr.isatty():
        yield from track(items, what, console=Console(stderr=True), transient=True)
        return
    said = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - said > PATIENCE:
            said = time.monotonic()
            print(f"{what}: {done} of {len(items)}", file=sys.stderr, flush=True)
        yield item


def headline(experiment: Experiment, folder: Path, round: int) -> str:
    from ..config import to_dict

    names = {part: to_dict(getattr(experiment, part))["is"] for part in ("algorithm", "data", "model", "partition")}
    place = experiment.execution
    engine = place.engine + (f" x{place.workers}" if place.engine == "workers" else "")
    where = f"{place.device} {place.precision}, {engine}" + ", compiled" * (place.compile is True)
    again = f", from round {round}" if round else ""
    return (
        f"{names['algorithm']} on {names['data']} ({names['partition']}, {experiment.clients} clients), "
        f"{names['model']}, {where} -> {folder}{again}"
    )


def settings_line(experiments: Sequence[Experiment]) -> str:
    """What decides most on a result, as it is typed; of experiments that differ in it, all values."""
    from ..config import to_dict

    def words(experiment: Experiment) -> dict[str, object]:
        cohort = {name: value for name, value in to_dict(experiment.cohort).items() if name != "is"}
        chosen = next(iter(cohort.values())) if len(cohort) == 1 else to_dict(experiment.cohort)["is"]
        local = experiment.local
        rate = {"local.epochs": local.epochs} if local.steps is None else {"local.steps": local.steps}
        return {
            "model": to_dict(experiment.model)["is"],
            "rounds": experiment.rounds,
            "clients": experiment.clients,
            "cohort": chosen,
            **rate,
            "local.lr": local.lr,
        }

    found: dict[str, dict[object, None]] = {}
    for experiment in experiments:
        for name, value in words(experiment).items():
            found.setdefault(name, {})[value] = None
    return " ".join(f"{name}={','.join(map(str, values))}" for name, values in found.items())


def sparkline(values: list[float], width: int) -> str:
    """The newest values as small bars from 0 to 1."""
    return "".join(_BARS[min(int(v * len(_BARS)), len(_BARS) - 1)] for v in values[-max(width, 1) :])


def watcher(json: bool) -> LivePanel | Lines:
    return for_people(json, LivePanel, Lines)


def for_people(json: bool, panel: Callable[[Console], L], lines: Callable[[TextIO], P]) -> L | P:
    """The panel in a terminal; lines in a file; lines beside the one line of JSON."""
    if json:
        return lines(sys.stderr)
    console = Console()
    # Not console.is_terminal: FORCE_COLOR would send a panel into a file.
    return panel(console) if sys.stdout.isatty() and not console.is_dumb_terminal else lines(sys.stdout)
