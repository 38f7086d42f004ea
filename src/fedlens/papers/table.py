"""A paper's table beside our runs: what is missing is run, what is done is read."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..compare.board import Board
from ..compare.crew import Crew
from ..compare.parallel import Supply, Task, side_by_side, supplied
from ..core.errors import BadInput
from ..core.files import write_atomic, write_json
from ..engines.lanes import recordings_kept
from ..runs.grid import Cell, Grid, Reported, deviation, mean, placement, protocol_name, runs_of, stored
from ..runs.rounds import Rounds
from ..simulate.finish import GOES_WRONG, check_start, finish, reason
from ..simulate.recorder import Watcher
from ..simulate.settle import settled_alike
from .needs import is_part, lacking, standing_in

Name = tuple[str, str, int]  # of a run: its row, column and seed
NOT_HERE = "not run here: needs"


@dataclass(frozen=True)
class Done:
    """A finished run of a cell."""

    value: float
    rounds: int
    images: int
    place: str  # device and precision
    run: str
    part: bool = False  # of the published images


def reproduce(
    grid: Grid,
    out: Path,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    words: Sequence[str] = (),
    watch: Callable[[], AbstractContextManager[Watcher]],
    say: Callable[[str], None] = lambda text: None,
    board: Callable[[], Board] | None = None,
    processes: int = 0,
) -> PaperTable:
    """Run what is missing, the first seed of all cells first; the table after each run.

    With a `board` to show them on, as many runs go side by side as pay, or as `processes` says. Interrupted, it goes on
    where it stopped when it is called again.
    """
    cells = grid.cells(rows, columns, words)
    table = gather(grid, out, words, cells)
    asked = [(cell, seed) for seed in seeds for cell in cells]
    failures = _refused([(cell, seed) for cell, seed in asked if seed not in table.done[cell.row, cell.column]], out)
    if failures and len(failures) == len(asked):  # nothing is written where nothing can begin
        raise BadInput(next(iter(failures.values())))
    table.write()
    decided = settled_alike(cell.at(out, seed) for cell, seed in asked)
    tasks = {
        (cell.row, cell.column, seed): _task(cell, seed, out, words).settled(decided)
        for cell, seed in asked
        if seed not in table.done[cell.row, cell.column] and (cell.row, cell.column, seed) not in failures
    }

    def after(name: Name, why: str) -> None:
        nonlocal table
        if why:
            failures[name] = why
        table = replace(table.read(), failures=failures)
        table.write()
        say(table.numbers())

    crew = Crew(processes, processes) if processes else side_by_side([*tasks.values()])
    if board is not None and crew.most > 1:
        _at_once(tasks, crew, board(), after)
    else:
        _in_turn(tasks, watch, out, after)
    if failures != table.failures:
        table = replace(table, failures=failures)
        table.write()
    return table


def _task(cell: Cell, seed: int, out: Path, words: Sequence[str]) -> Task:
    name = f"{cell.row} {cell.column} seed {seed}"
    return Task(name, cell.at(out, seed), (*cell.words, f"seed={seed}"), tuple(placement(words)))


def _in_turn(tasks: Mapping[Name, Task], watch: Callable, out: Path, after: Callable[[Name, str], None]) -> None:
    with recordings_kept():
        for name, task in tasks.items():
            why = ""
            try:
                with watch() as watcher:
                    finish(task.experiment, task.where, watcher, among=out)
            except GOES_WRONG as error:
                why = reason(error)
            after(name, why)


def _at_once(tasks: Mapping[Name, Task], crew: Crew, board: Board, after: Callable[[Name, str], None]) -> None:
    whose = {task.name: name for name, task in tasks.items()}
    board.expect({task.name: task.rounds for task in tasks.values()}, 0)
    with board:
        supplied(Supply([*tasks.values()]), crew, board, lambda task, why: after(whose[task.name], why))


def _refused(missing: Sequence[tuple[Cell, int]], out: Path) -> dict[Name, str]:
    """Runs that cannot begin, and why. A row and a column that each began elsewhere are not tried once more."""
    failures: dict[Name, str] = {}
    rows, columns = set(), set()
    for cell, seed in missing:
        if cell.row in rows and cell.column in columns:
            continue
        try:
            check_start(cell.at(out, seed))
        except GOES_WRONG as error:
            lacks = (
                lacking(cell.experiment) if cell.experiment.data.known else []
            )  # of a file its own sentence says more
            failures[cell.row, cell.column, seed] = f"{NOT_HERE} {', '.join(lacks)}" if lacks else reason(error)
        else:
            rows.add(cell.row)
            columns.add(cell.column)
    return failures


def gather(grid: Grid, out: Path, words: Sequence[str], asked: Sequence[Cell] = ()) -> PaperTable:
    """All that is finished under this protocol, whoever ran it."""
    cells = grid.fitting(words)
    changed = {change for cell in cells for change in cell.changes if change not in cell.instead}
    return PaperTable(grid, out, protocol_name(grid.name, sorted(changed)), cells, asked).read()


@dataclass(frozen=True)
class PaperTable:
    """What is known: {(row, column): {seed: Done}}."""

    grid: Grid
    out: Path
    name: str  # the grid's, and its protocol
    cells: Sequence[Cell]
    asked: Sequence[Cell] = ()  # shown although nothing is done
    done: Mapping[tuple[str, str], Mapping[int, Done]] = field(default_factory=dict)
    begun: Mapping[tuple[str, str, int], str] = field(default_factory=dict)
    failures: Mapping[tuple[str, str, int], str] = field(default_factory=dict)

    def read(self) -> PaperTable:
        """With what the runs' folders hold now."""
        done: dict[tuple[str, str], dict[int, Done]] = {}
        begun: dict[tuple[str, str, int], str] = {}
        for cell in self.cells:
            found = done.setdefault((cell.row, cell.column), {})
            for seed, folder in runs_of(cell, self.out):
                result = folder.result()
                if result is None:
                    counts = Rounds.of(cell.experiment.timetable())
                    saved = counts.trained(max(folder.rounds(), default=0))
                    begun[cell.row, cell.column, seed] = f"{saved} of {counts.total} rounds are saved"
                    continue
                try:
                    experiment = stored(folder, cell.at(self.out, seed))
                except BadInput:  # said when this cell is asked for
                    continue
                if (value := self.grid.measure({**result, "clients": experiment.clients})) is not None:
                    card, path = folder.passport(), str(folder.path.relative_to(self.out))
                    place, data = f"{card['device_name']}, {card['precision']}", card["data"]
                    part = is_part(data["origin"])
                    found[seed] = Done(value, experiment.rounds, data["images"], place, path, part)
        return replace(self, done=done, begun=begun)

    @property
    def shown(self) -> Sequence[Cell]:
        """Cells that are done or asked for; all, where none is."""
        return [cell for cell in self.cells if self.done[cell.row, cell.column] or cell in self.asked] or self.cells

    def paper(self, row: str, column: str) -> Reported | None:
        """What the paper reports; not beside runs on what stands in for its data or weights."""
        return None if column in self.standing_in else self.grid.paper.get((row, column))

    @cached_property
    def standing_in(self) -> set[str]:
        """Columns that run, or ran, on what stands in for the paper's data or weights, asked for or not."""
        others = [cell for cell in self.cells if set(cell.instead) & set(cell.changes) or standing_in(cell.experiment)]
        here = {cell.column for cell in others}
        return here | {column for (_, column), done in self.done.items() if any(one.part for one in done.values())}

    def write(self) -> None:
        """As Markdown, CSV and JSON."""
        path = self.out / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = self.entries()
        lines = io.StringIO()
        table = csv.DictWriter(lines, [key for key in entries[0] if key != "runs"], extrasaction="ignore")
        table.writeheader()
        table.writerows(entries)
        whole = {
            "table": self.grid.name,
            "about": self.grid.about,
            "measured": self.grid.measured,
            "protocol": list(self.grid.words),
            "paper_says": list(self.grid.says),
            "paper_leaves_open": list(self.grid.leaves_open),
            "cells": entries,
            "failures": [
                {"row": row, "column": column, "seed": seed, "why": why} for (row, column, seed), why in self._failed()
            ],
        }
        write_json(path.with_name(f"{path.name}.json"), whole)
        for ending, text in ((".md", self.markdown()), (".csv", lines.getvalue())):
            write_atomic(path.with_name(path.name + ending), text.encode())

    def entries(self) -> list[dict[str, Any]]:
        """One for each cell, run or not."""
        found = []
        for cell in self.shown:
            done = self.done[cell.row, cell.column]
            paper = self.paper(cell.row, cell.column)
            found.append(
                {
                    "row": cell.row,
                    "column": cell.column,
                    "mean": mean([one.value for one in done.values()]),
                    "std": deviation([one.value for one in done.values()]),
                    "seeds": len(done),
                    "rounds": max((one.rounds for one in done.values()), default=None),
                    "paper": paper and paper.mean,
                    "paper_std": paper and paper.std,
                    "initial_weights": _weights(cell),
                    "changed": " ".join(cell.changes),
                    "runs": {seed: vars(one) for seed, one in done.items()},
                }
            )
        return found

    def markdown(self) -> str:
        head = [f"# {self.grid.name}: {self.grid.about}", "", self.numbers()]
        return "\n".join([*head, *self._notes(), *self._protocol()]) + "\n"

    def numbers(self) -> str:
        """Ours and the paper's, in Markdown."""
        rows, columns = (list(dict.fromkeys(getattr(cell, of) for cell in self.shown)) for of in ("row", "column"))
        papers = [column for column in columns if any(self.paper(row, column) for row in rows)]
        titles = {column: self.grid.titles.get(column, column) for column in columns}
        head = ["", *(name for at in columns for name in ([titles[at], "paper"] if at in papers else [titles[at]]))]
        lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
        for row in rows:
            numbers = []
            for column in columns:
                numbers.append(_ours(self.done.get((row, column), {})))
                if column in papers:
                    numbers.append(_theirs(self.paper(row, column)))
            lines.append("| " + " | ".join([row, *numbers]) + " |")
        return "\n".join(lines) + "\n"

    def _notes(self) -> Iterator[str]:
        yield f"- {self.grid.measured}; mean ± standard deviation over seeds (n - 1), then seeds x rounds."
        yield f"- Each cell: `fedlens run {shlex.join(self.grid.words)} ...`; empty: not run."
        for said, columns in self._by_column(lambda cell: " ".join(cell.changes)):
            yield f"- Protocol of {columns}: " + (f"changed from the paper's by `{said}`." if said else "the paper's.")
        for said, columns in self._by_column(_weights):
            yield f"- Initial weights of {columns}: {said}."
        for said, columns in self._by_column(lambda cell: self._said_of(cell, lambda one: f"{one.images:,} images")):
            yield from [f"- Data of {columns}: {said}."] if said else []
        for said, columns in self._by_column(lambda cell: self._said_of(cell, lambda one: one.place)):
            yield from [f"- Ran on ({columns}): {said}."] if said else []
        others = dict.fromkeys(cell.column for cell in self.shown if cell.column in self.standing_in)
        if self.grid.paper and others:
            yield f"- Without the paper's numbers, as other data or weights stand in for its own: {', '.join(others)}."
        yield from (f"- {note}" for note in self.grid.notes)
        yield from (
            f"- Begun: {row}, {column}, seed {seed}: {said}." for (row, column, seed), said in self.begun.items()
        )
        yield from self._not_run()

    def _not_run(self) -> Iterator[str]:
        """Cells that failed, and columns whose data or weights are not here."""
        absent: dict[str, dict[str, None]] = {}
        for (row, column, seed), why in self._failed():
            if why.startswith(NOT_HERE):
                absent.setdefault(why, {})[column] = None
            else:
                yield f"- Failed: {row}, {column}, seed {seed}: {why}."
        yield from (f"- {', '.join(columns)}: {why}." for why, columns in absent.items())

    def _protocol(self) -> Iterator[str]:
        for heading, lines in self.grid.protocol.items():
            yield from ("", f"## {heading}", "", *(f"- {line}" for line in lines))

    def _by_column(self, said: Callable[[Cell], str]) -> Iterator[tuple[str, str]]:
        """What is said of cells, once, with the columns it holds for."""
        columns: dict[str, dict[str, None]] = {}
        for cell in self.shown:
            columns.setdefault(said(cell), {})[cell.column] = None
        for text, names in columns.items():
            yield text, ", ".join(names)

    def _said_of(self, cell: Cell, what: Callable[[Done], str]) -> str:
        return "; ".join(dict.fromkeys(what(one) for one in self.done[cell.row, cell.column].values()))

    def _failed(self) -> list[tuple[tuple[str, str, int], str]]:
        return [(where, why.removesuffix(".")) for where, why in self.failures.items()]


def _weights(cell: Cell) -> str:
    named = getattr(cell.experiment.model, "weights", "")
    return {"": "drawn at random"}.get(named, Path(named).name if named.endswith(".safetensors") else named)


def _ours(done: Mapping[int, Done]) -> str:
    values = [one.value for one in done.values()]
    middle, spread = mean(values), deviation(values)
    if middle is None:
        return ""
    rounds = "/".join(map(str, sorted({one.rounds for one in done.values()})))
    return f"{middle:.2f}" + ("" if spread is None else f" ± {spread:.2f}") + f" ({len(values)} x {rounds})"


def _theirs(paper: Reported | None) -> str:
    if paper is None:
        return ""
    return f"{paper.mean:g}" + ("" if paper.std is None else f" ± {paper.std:g}")
