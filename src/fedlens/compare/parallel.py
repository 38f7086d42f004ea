"""Carry out the runs of a comparison: one after another, or side by side in processes of their own.

Four runs of FedAvg and SCAFFOLD (cnn_small, 10 rounds, 20 clients of mnist5k) on two CPU cores: 28.4 and 29.8 s one
after another with two workers each, 18.0 and 18.5 s side by side. Either way the bits are the same. On a GPU `crew`
finds out how many pay, unless --processes says it. A process goes on with recorded steps of the run before.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, TextIO

import torch

from .. import config
from ..engines.lanes import recordings_kept
from ..experiment import Experiment
from ..simulate.finish import GOES_WRONG, finish, reason
from ..simulate.recorder import Nobody, Progress
from ..simulate.settle import with_decision
from .board import Board, OneRun
from .crew import MOST, Crew, Growth, known, remember


@dataclass(frozen=True)
class Task:
    """A run that is missing, or to be gone on with."""

    name: str
    experiment: Experiment
    words: tuple[str, ...]  # the same, for another process
    where: tuple[str, ...]  # those words that say where it runs alone

    @property
    def out(self) -> Path:
        return Path(self.experiment.execution.out)

    @property
    def rounds(self) -> int:
        return len(self.experiment.timetable())

    def settled(self, decided: Mapping[Path, bool]) -> Task:
        """With compile as all runs of its network have it."""
        experiment = with_decision(self.experiment, decided)
        told = [f"compile={str(decided[self.out]).lower()}"] if self.out in decided else []
        return replace(self, experiment=experiment, words=(*self.words, *told))


def side_by_side(tasks: Sequence[Task]) -> Crew:
    """How many runs at a time pay: one on each core, where there are enough of them and the engine is not chosen."""
    if not tasks:
        return Crew(1, 1)
    asked = tasks[0].experiment
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not _is_on_cpu(asked):
        most = max(1, min(MOST, cores, len(tasks) // 2))
        best = known(asked)
        return Crew(1, most) if best is None else Crew(min(best, len(tasks)), min(best, len(tasks)))
    packs = asked.execution.engine in ("auto", "sequential")
    count = cores if packs and len(tasks) >= cores else 1
    return Crew(count, count)


def _is_on_cpu(asked: Experiment) -> bool:
    """Not by resolved(), which refuses what cannot be run: that is said of the run, and the others go on."""
    return asked.execution.device == "cpu" or (asked.execution.device == "auto" and not torch.cuda.is_available())


def carry_out(tasks: Sequence[Task], crew: Crew, board: Board, after: Callable[[], None]) -> dict[str, str]:
    """Run them all, calling `after` each; why some failed, by name."""
    if crew.most <= 1:
        return _in_turn(tasks, board, after)
    failures: dict[str, str] = {}
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[Task, str] | BaseException] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    slots: list[_Slot] = []
    growth = Growth(Crew(min(crew.first, len(tasks)), min(crew.most, len(tasks))))

    def fill(count: int) -> None:
        """As many slots as this; some that are too many end after the run that they are in."""
        for slot in slots[count:]:
            slot.retired = True
        while len(slots) < count and not waiting.empty():
            slots.append(_Slot())
            threading.Thread(target=slots[-1].work, args=(waiting, ended, board), daemon=True).start()

    fill(growth.count)
    try:
        for _ in tasks:
            while (news := _soon(ended)) is None:
                lines = board.lines.values()
                busy = sum(line.state == "runs" and line.round > 0 for line in lines)
                fill(growth.look(sum(line.round for line in lines), busy))
            if isinstance(news, BaseException):
                raise news
            task, why = news
            if why:
                failures[task.name] = why
            after()
    finally:
        for slot in slots:
            slot.close()
    if crew.first < crew.most and len(growth.rates) > 1:
        remember(tasks[0].experiment, growth.best)
    return failures


def _in_turn(tasks: Sequence[Task], board: Board, after: Callable[[], None]) -> dict[str, str]:
    failures: dict[str, str] = {}
    with recordings_kept():
        for task in tasks:
            watcher = board.watch(task.name)
            try:
                finish(task.experiment, task.where, watcher, task.out.parents[1])
            except GOES_WRONG as error:
                failures[task.name] = reason(error)
            watcher.end(failures.get(task.name, ""))
            after()
    return failures


def _soon(ended: queue.SimpleQueue[Any]) -> Any:
    """A wait without an end would not hear Ctrl-C on every system."""
    with suppress(queue.Empty):
        return ended.get(timeout=1)


class _Slot:
    """A thread that gives orders to one process, and starts another when that one dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[bytes] | None = None
        self.closed = self.retired = False

    def work(self, waiting: queue.SimpleQueue[Task], ended: queue.SimpleQueue[Any], board: Board) -> None:
        while not self.closed and not self.retired:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                break
            watcher = board.watch(task.name)
            try:
                why = self._carry_out(task, watcher)
            except BaseException as error:  # raised again where the comparison waits
                ended.put(error)
                return
            if not self.closed:
                watcher.end(why)
                ended.put((task, why))
        self.close()

    def _carry_out(self, task: Task, watcher: OneRun) -> str:
        if self.process is None:
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedlens.compare.parallel"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for the one who gives orders
            )
        process = self.process
        assert process.stdin and process.stdout
        # A core for each run; a GPU has lanes of its own.
        engine = ["engine=sequential"] if _is_on_cpu(task.experiment) else []
        order = {"words": [*task.words, *engine], "where": [*task.where, *engine], "out": str(task.out)}
        with suppress(BrokenPipeError):
            print(json.dumps(order), file=process.stdin, flush=True)
        for line in process.stdout:
            news = json.loads(line)
            kind = news.pop("kind")
            if kind == "begin":
                watcher.begin(None, None, [], news["round"], news["rounds"])
            elif kind == "round":
                watcher.round(Progress(**news))
            elif kind == "clients":
                watcher.clients(**news)
            elif kind == "phase":
                watcher.phase(**news)
            elif kind in ("done", "failed"):
                return news.get("why", "")
        self.process = None
        return f"its process ended with code {process.wait()}{self._last_words()}"

    def _last_words(self) -> str:
        assert self.errors
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    def close(self) -> None:
        self.closed = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()


# ---- in a process of its own: python -m fedlens.compare.parallel ----------------------------------------------------
class Told(Nobody):
    """A watcher that passes on as lines of JSON what a line of many has room for."""

    def __init__(self, out: TextIO):
        self.out, self.said = out, ("", 0.0)

    def say(self, kind: str, **values: Any) -> None:
        print(json.dumps({"kind": kind, **values}), file=self.out, flush=True)

    def begin(self, experiment, folder, notes, round, rounds):
        self.say("begin", round=round, rounds=rounds)

    def round(self, progress):
        self.say("round", **asdict(progress))

    def note(self, text):
        self.say("note", text=text)

    def clients(self, answered, asked):
        if self._is_due("clients"):
            self.say("clients", answered=answered, asked=asked)

    def phase(self, name, done, total):
        if self._is_due(name):
            self.say("phase", name=name, done=done, total=total)

    def _is_due(self, what: str) -> bool:
        """A few times a second at most, unless it is something new."""
        due = what != self.said[0] or time.monotonic() - self.said[1] > 0.25
        self.said = (what, time.monotonic()) if due else self.said
        return due


def main() -> None:
    """One process: carries out the runs it is told of, one after another; orders and news are lines of JSON."""
    told = Told(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # a method of the user's own may print
    keeping = recordings_kept()
    keeping.__enter__()  # until this process ends
    for order in _orders():
        try:
            experiment = config.read(None, order["words"]).with_execution(out=order["out"])
            finish(experiment, order["where"], told, among=Path(order["out"]).parents[1])
        except GOES_WRONG as error:
            told.say("failed", why=reason(error))
        else:
            told.say("done")


def _orders() -> Any:
    """Until there are no more. When whoever gives them is gone, so is this process, in the middle of a round."""
    waiting: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield waiting.get()


if __name__ == "__main__":
    main()
