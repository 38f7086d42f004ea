"""Carry out the runs of a comparison: one after another, or side by side in processes of their own.

Four runs of FedAvg and SCAFFOLD (cnn_small, 10 rounds, 20 clients of mnist5k) on two CPU cores: 28.4 and 29.8 s one
after another with two workers each, 18.0 and 18.5 s side by side. Either way the bits are the same. On a GPU `crew`
finds out how many pay, unless --processes says it; they share it by NVIDIA's MPS where that works. A process goes on
with recorded steps of the run before.
"""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, TextIO

import torch

from .. import config
from ..engines.lanes import recordings_kept
from ..engines.mps import shared_gpu
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


class Supply:
    """Tasks in the order in which they begin; a subclass may have others when some have ended."""

    grows = False  # whether tasks that end can bring others
    until = math.inf  # by time.monotonic(): what is under way then is given up

    def __init__(self, tasks: Sequence[Task] = ()):
        self.tasks = deque(tasks)

    def take(self) -> Task | None:
        """The next; None: there is none, or none yet."""
        return self.tasks.popleft() if self.tasks else None

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until


def carry_out(tasks: Sequence[Task], crew: Crew, board: Board, after: Callable[[], None]) -> dict[str, str]:
    """Run them all, calling `after` each; why some failed, by name."""
    failures: dict[str, str] = {}

    def ended(task: Task, why: str) -> None:
        if why:
            failures[task.name] = why
        after()

    size = Crew(min(crew.first, len(tasks)), min(crew.most, len(tasks)))
    supplied(Supply(tasks), size, board, ended)
    return failures


def supplied(supply: Supply, crew: Crew, board: Board, ended: Callable[[Task, str], None]) -> None:
    """Run what is supplied, and tell of each task that it ended, and why it failed if it did."""
    if crew.most <= 1:
        return _in_turn(supply, board, ended)
    with ExitStack() as ends:
        _at_once(supply, crew, board, ended, ends)


def _at_once(supply: Supply, crew: Crew, board: Board, ended: Callable[[Task, str], None], ends: ExitStack) -> None:
    """In processes of their own; what these need on a GPU goes when `ends` is closed."""
    slots: list[_Slot] = []
    ways: dict[str, str] = {}
    news: queue.SimpleQueue[tuple[_Slot, str] | BaseException] = queue.SimpleQueue()
    growth, first = Growth(crew), None

    def hand_out() -> bool:
        """Whether anybody has something to do; slots that are too many end after the run that they are in."""
        nonlocal first
        for slot in slots[growth.count :]:
            slot.retired = True
        slots.extend(_Slot(board, news, ways) for _ in range(growth.count - len(slots)))
        for slot in slots:
            if slot.task is None and not slot.retired and (task := supply.take()) is not None:
                if first is None:
                    first = task
                    ways.update(ends.enter_context(shared_gpu(not _is_on_cpu(task.experiment))))
                slot.begin(task)
            elif slot.task is None and (slot.retired or not supply.grows):
                slot.close()
        return any(slot.task for slot in slots)

    try:
        while hand_out():
            while (heard := _soon(news)) is None and not supply.over:
                lines = board.lines.values()
                busy = sum(line.state == "runs" and line.round > 0 for line in lines)
                before = growth.count
                if growth.look(board.rounds, busy) > before:
                    hand_out()
            if isinstance(heard, BaseException):
                raise heard
            if heard is None:
                return
            slot, why = heard
            task, slot.task = slot.task, None
            assert task is not None
            ended(task, why)
    finally:
        for slot in slots:
            slot.close()
    if first is not None and crew.first < crew.most and len(growth.rates) > 1:
        remember(first.experiment, growth.best)


def _in_turn(supply: Supply, board: Board, ended: Callable[[Task, str], None]) -> None:
    with recordings_kept():
        while (task := supply.take()) is not None:
            watcher, why = board.watch(task.name), ""
            try:
                finish(task.experiment, task.where, watcher, task.out.parents[1])
            except GOES_WRONG as error:
                why = reason(error)
            watcher.end(why)
            ended(task, why)


def _soon(ended: queue.SimpleQueue[Any]) -> Any:
    """A wait without an end would not hear Ctrl-C on every system."""
    with suppress(queue.Empty):
        return ended.get(timeout=1)


class _Slot:
    """A thread that gives orders to one process, and starts another when that one dies."""

    def __init__(self, board: Board, news: queue.SimpleQueue[Any], ways: Mapping[str, str]) -> None:
        self.board, self.news, self.ways = board, news, ways
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[bytes] | None = None
        self.task: Task | None = None  # what it is at
        self.closed = self.retired = False
        self.orders: queue.SimpleQueue[Task | None] = queue.SimpleQueue()  # None: no more
        threading.Thread(target=self._work, daemon=True).start()

    def begin(self, task: Task) -> None:
        self.task = task
        self.orders.put(task)

    def _work(self) -> None:
        while (task := self.orders.get()) is not None:
            watcher = self.board.watch(task.name)
            try:
                why = self._carry_out(task, watcher)
            except BaseException as error:  # raised again where the comparison waits
                self.news.put(error)
                return
            if self.closed:
                return
            watcher.end(why)
            self.news.put((self, why))

    def _carry_out(self, task: Task, watcher: OneRun) -> str:
        if self.process is None:
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedlens.compare.parallel"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env={**os.environ, **self.ways},
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
                if kind == "failed" and not _is_on_cpu(task.experiment):
                    self._end()  # a GPU may be lost to a process in which something went wrong
                return news.get("why", "")
        self.process = None
        return f"its process ended with code {process.wait()}{self._last_words()}"

    def _last_words(self) -> str:
        assert self.errors
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        self.closed = True
        self.orders.put(None)
        self._end()


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
