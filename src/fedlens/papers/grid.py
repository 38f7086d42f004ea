"""Tables of experiments, rows x columns x seeds: what is missing is run, what is done is read."""

from __future__ import annotations

import csv
import functools
import io
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from .. import config
from ..core.errors import BadInput, RunFailed, nearest
from ..core.files import write_atomic, write_json
from ..experiment import Experiment
from ..runs.folder import RunFolder, config_hash
from ..runs.reuse import begin_alike
from ..simulate import run as simulate

_LONGEST = 80  # characters of a protocol in a file's name
GOES_WRONG = (BadInput, RunFailed, MemoryError, OSError, RuntimeError)  # in one run, and the others can go on


@dataclass(frozen=True)
class Reported:
    """What a paper says."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Row:
    """What its experiments have in common, as `key=value` words."""

    words: tuple[str, ...]
    home: str = ""  # the table whose runs these are, when two tables share some


@dataclass(frozen=True)
class Column:
    """As a row. `instead` are words for what this machine lacks: a change of the paper's protocol, and said so."""

    words: tuple[str, ...]
    instead: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """A table of a paper as configuration: `paper` holds its numbers by (row, column)."""

    name: str  # paper/table
    about: str
    rows: Mapping[str, Row]
    columns: Mapping[str, Column]
    words: tuple[str, ...] = ()  # of every cell
    paper: Mapping[tuple[str, str], Reported] = field(default_factory=dict)
    measure: Callable[[Mapping[str, Any]], float | None] = lambda result: percent(result["accuracy_last"])
    measured: str = "accuracy of the global model on the pooled test set, mean of the last looks, %"
    notes: tuple[str, ...] = ()

    def cells(self, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> list[Cell]:
        """Those of these rows and columns, or all; `cifar10` stands for all columns `cifar10/...`."""
        families: dict[str, list[str]] = {}
        for column in self.columns:
            for name in {column, column.partition("/")[0]}:
                families.setdefault(name, []).append(column)
        for wanted, known, option in ((rows, self.rows, "--rows"), (columns, families, "--columns")):
            for name in wanted:
                if name not in known:
                    other = self._beside(name) if option == "--rows" else ""
                    hint = f"{other} has it" if other else nearest(name, known)
                    raise BadInput(f"{option} {name!r} is not in {self.name}; {hint}")
        chosen = {column for name in columns for column in families[name]}
        return [
            Cell(self, row, column)
            for column in self.columns
            for row in self.rows
            if (not rows or row in rows) and (not columns or column in chosen)
        ]

    def _beside(self, row: str) -> str:
        """Another table of the same paper with this row."""
        from . import reproducible

        paper = self.name.partition("/")[0]
        tables = (one for one in reproducible().values() if isinstance(one, Grid))
        return next((one.name for one in tables if one.name.startswith(f"{paper}/") and row in one.rows), "")


@dataclass(frozen=True)
class Cell:
    """One experiment but for its seed."""

    grid: Grid
    row: str
    column: str

    @property
    def words(self) -> tuple[str, ...]:
        """Of the paper's protocol."""
        return (*self.grid.words, *self.grid.columns[self.column].words, *self.grid.rows[self.row].words)

    def under(self, words: Sequence[str]) -> tuple[str, ...]:
        """With what this machine needs instead, and with the user's words over it."""
        return tuple(self._laid(words).values())

    def changes(self, words: Sequence[str]) -> tuple[str, ...]:
        """How this differs from the paper's protocol."""
        laid = self._laid(words)
        if _science(*laid.values()) == _science(*self.words):
            return ()
        over = {_setting(word)[0] for word in (*self.grid.columns[self.column].instead, *words)}
        changed = dict(_setting(laid[key]) for key in over & laid.keys() if decides(key))
        return tuple(f"{key}={value}" for key, value in sorted(changed.items()))

    def _laid(self, words: Sequence[str]) -> dict[str, str]:
        return laid((*self.words, *self.grid.columns[self.column].instead, *words))

    def folder(self, out: Path, words: Sequence[str], seed: int) -> Path:
        """Its own for each protocol, so that no two are ever mixed."""
        home = self.grid.rows[self.row].home or self.grid.name
        name = "-".join(part.replace("/", "-") for part in (self.row, self.column) if part)
        return out / home / tagged(name, self.changes(words)) / f"seed{seed}"

    def experiment(self, out: Path, words: Sequence[str], seed: int) -> Experiment:
        experiment = config.read(None, [*self.under(words), f"seed={seed}"])
        return replace(experiment, out=str(self.folder(out, words, seed)))

    def command(self, out: Path, words: Sequence[str], seed: int) -> str:
        where = f"out={self.folder(out, words, seed)}"
        return shlex.join(["fedlens", "run", *self.under(words), f"seed={seed}", where])


@dataclass(frozen=True)
class Done:
    """A finished run of a cell."""

    value: float
    rounds: int
    images: int
    place: str  # device and precision
    run: str


def laid(words: Sequence[str]) -> dict[str, str]:
    """The last word of each key. Another part (model=cnn) takes the settings of the one before (model.weights) away."""
    found: dict[str, str] = {}
    for word in words:
        key, value = _setting(word)
        if key in found and _setting(found[key])[1] != value:
            found = {name: kept for name, kept in found.items() if not name.startswith(f"{key}.")}
        found[key] = word
    return found


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def tagged(name: str, changes: Sequence[str]) -> str:
    """A name that says which protocol it is about."""
    said = ",".join(changes)
    if not re.fullmatch(rf"[\w.,=+-]{{0,{_LONGEST}}}", said, re.ASCII):
        said = sha256(said.encode()).hexdigest()[:10]
    return f"{name}~{said}" if said else name


def seeds_of(text: str) -> list[int]:
    """`3` is 0, 1 and 2; `4,7` is these two; `4,` is one."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts) or parts == ["0"]:
        raise BadInput(f"--seeds is {text!r}, but it should be how many, such as 3, or which, such as 0,1,2 or 4,")
    return list(range(int(parts[0]))) if "," not in text else list(dict.fromkeys(map(int, parts)))


# ---- running ---------------------------------------------------------------------------------------------------------
def reproduce(
    grid: Grid,
    out: Path,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    words: Sequence[str] = (),
    watch: Callable[[], AbstractContextManager[simulate.Watcher]],
    say: Callable[[str], None] = lambda text: None,
) -> Table:
    """Run what is missing, one cell after another, the first seed of all of them first; the table after each of them.

    Interrupted, it goes on where it stopped when it is called again.
    """
    cells = checked(grid, rows, columns, words)
    table = gather(grid, out, words, cells)
    table.write(out)
    failures: dict[tuple[str, str, int], str] = {}
    for seed in seeds:
        for cell in cells:
            if seed in table.done[cell.row, cell.column]:
                continue
            try:
                with watch() as watcher:
                    carry_out(cell, out, words, seed, watcher)
            except GOES_WRONG as error:
                failures[cell.row, cell.column, seed] = reason(error)
            table = replace(gather(grid, out, words, cells), failures=failures)
            table.write(out)
            say(table.numbers())
    return table


def checked(grid: Grid, rows: Sequence[str], columns: Sequence[str], words: Sequence[str]) -> list[Cell]:
    """The cells that are asked for; words that fit no experiment are refused before anything runs."""
    for word in words:
        if (name := _setting(word)[0]) in ("out", "seed"):
            raise BadInput(f"{name}= is not for a table of runs: use --{'out' if name == 'out' else 'seeds'}")
    cells = grid.cells(rows, columns)
    for cell in cells:
        config.read(None, cell.under(words))
    return cells


def carry_out(cell: Cell, out: Path, words: Sequence[str], seed: int, watcher: simulate.Watcher) -> None:
    """Run one cell, or go on with it."""
    where = [word for word in words if not decides(_setting(word)[0])]
    finish(cell.experiment(out, words, seed), where, watcher, among=out)


def finish(experiment: Experiment, where: Sequence[str], watcher: simulate.Watcher, among: Path) -> None:
    """Run it, or go on with what its folder holds, or with a beginning that is the same in another run of `among`.

    `where` says on what engine, should it have begun on another.
    """
    folder = RunFolder(experiment.out)
    if not folder.config.exists() and begin_alike(experiment, among) is None:
        simulate.run(experiment, watcher=watcher)
        return
    same(folder, experiment)
    changed = [word for word in where if _setting(word)[0] in simulate._CHANGEABLE]  # others stay as they began
    simulate.resume(folder.path, changed, watcher=watcher)


def reason(error: BaseException) -> str:
    """In one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def decides(key: str) -> bool:
    """Whether a setting can change a result, or only where and how it is computed."""
    return config_hash({key: None}) != config_hash({})


# A table asks about its hundred cells again and again.
_setting = functools.lru_cache(maxsize=1024)(config.setting)


@functools.lru_cache(maxsize=1024)
def _science(*words: str) -> str:
    return config_hash(config.plain(config.read(None, words)))


def same(folder: RunFolder, experiment: Experiment) -> Experiment:
    """The stored experiment; refuses one that would answer another question than this cell asks."""
    stored, experiment = config.read(folder.config), config.check(experiment)  # 70 is stored as 70.0
    asked = {name: getattr(experiment, name) for name in ("device", "precision")}
    placed = {name: getattr(stored, name) if value == "auto" else value for name, value in asked.items()}
    if config_hash(config.plain(replace(experiment, **placed))) != config_hash(config.plain(stored)):
        raise BadInput(f"{folder.path} holds another experiment than this cell's; move it away or choose another --out")
    return stored


def gather(grid: Grid, out: Path, words: Sequence[str], asked: Sequence[Cell] = ()) -> Table:
    """All that is finished under this protocol, whoever ran it."""
    cells = [cell for cell in grid.cells() if _fits(cell, words)]
    done = {(cell.row, cell.column): dict(_finished(cell, out, words)) for cell in cells}
    begun = {(cell.row, cell.column, seed): said for cell in cells for seed, said in _begun(cell, out, words)}
    shown = [cell for cell in cells if done[cell.row, cell.column] or cell in asked]
    changed = {change for cell in cells for change in cell.changes(words)}
    lacking = {word for column in grid.columns.values() for word in column.instead}
    return Table(grid, tagged(grid.name, sorted(changed - lacking)), tuple(words), shown or cells, done, begun)


def _fits(cell: Cell, words: Sequence[str]) -> bool:
    """Words may be about some methods alone: algorithm.tau=1 is no protocol of FedAvg."""
    try:
        return bool(_science(*cell.under(words)))
    except BadInput:
        return False


def _finished(cell: Cell, out: Path, words: Sequence[str]) -> Iterator[tuple[int, Done]]:
    for seed, folder in _seeds(cell, out, words):
        if (result := folder.result()) is None:
            continue
        try:
            stored = same(folder, cell.experiment(out, words, seed))
        except BadInput:  # said when this cell is asked for
            continue
        if (value := cell.grid.measure(result)) is not None:
            card, path = folder.passport(), str(folder.path.relative_to(out))
            place = f"{card['device_name']}, {card['precision']}"
            yield seed, Done(value, stored.rounds, card["data"]["images"], place, path)


def _begun(cell: Cell, out: Path, words: Sequence[str]) -> Iterator[tuple[int, str]]:
    for seed, folder in _seeds(cell, out, words):
        if folder.result() is None:
            rounds = len(cell.experiment(out, words, seed).timetable())
            yield seed, f"{max(folder.rounds(), default=0)} of {rounds} rounds are saved"


def _seeds(cell: Cell, out: Path, words: Sequence[str]) -> Iterator[tuple[int, RunFolder]]:
    home = cell.folder(out, words, 0).parent
    for path in sorted(home.glob("seed*"), key=lambda path: (len(path.name), path.name)):
        seed, folder = path.name.removeprefix("seed"), RunFolder(path)
        if seed.isdecimal() and folder.config.exists():
            yield int(seed), folder


# ---- showing ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """What is known: {(row, column): {seed: Done}}."""

    grid: Grid
    name: str  # the grid's, and its protocol
    words: tuple[str, ...]
    shown: Sequence[Cell]
    done: Mapping[tuple[str, str], Mapping[int, Done]]
    begun: Mapping[tuple[str, str, int], str] = field(default_factory=dict)
    failures: Mapping[tuple[str, str, int], str] = field(default_factory=dict)

    def write(self, out: Path) -> None:
        """As Markdown, CSV and JSON."""
        path = out / self.name
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
            paper = self.grid.paper.get((cell.row, cell.column))
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
                    "initial_weights": self._weights(cell),
                    "changed": " ".join(cell.changes(self.words)),
                    "runs": {seed: vars(one) for seed, one in done.items()},
                }
            )
        return found

    def markdown(self) -> str:
        return "\n".join([f"# {self.grid.name}: {self.grid.about}", "", self.numbers(), *self._notes()]) + "\n"

    def numbers(self) -> str:
        """Ours and the paper's, in Markdown."""
        rows, columns = (list(dict.fromkeys(getattr(cell, of) for cell in self.shown)) for of in ("row", "column"))
        papers = [column for column in columns if any((row, column) in self.grid.paper for row in rows)]
        head = ["", *(name for column in columns for name in ([column, "paper"] if column in papers else [column]))]
        lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
        for row in rows:
            numbers = []
            for column in columns:
                numbers.append(_ours(self.done.get((row, column), {})))
                if column in papers:
                    numbers.append(_theirs(self.grid.paper.get((row, column))))
            lines.append("| " + " | ".join([row, *numbers]) + " |")
        return "\n".join(lines) + "\n"

    def _notes(self) -> Iterator[str]:
        yield f"- {self.grid.measured}; mean ± standard deviation over seeds (n - 1), then seeds x rounds."
        yield f"- Each cell: `fedlens run {shlex.join(self.grid.words)} ...`; empty: not run."
        for said, columns in self._by_column(lambda cell: " ".join(cell.changes(self.words))):
            yield f"- Protocol of {columns}: " + (f"changed from the paper's by `{said}`." if said else "the paper's.")
        for said, columns in self._by_column(self._weights):
            yield f"- Initial weights of {columns}: {said}."
        for said, columns in self._by_column(lambda cell: self._said_of(cell, lambda one: f"{one.images:,} images")):
            yield from [f"- Data of {columns}: {said}."] if said else []
        for said, columns in self._by_column(lambda cell: self._said_of(cell, lambda one: one.place)):
            yield from [f"- Ran on ({columns}): {said}."] if said else []
        yield from (f"- {note}" for note in self.grid.notes)
        yield from (
            f"- Begun: {row}, {column}, seed {seed}: {said}." for (row, column, seed), said in self.begun.items()
        )
        yield from (f"- Failed: {row}, {column}, seed {seed}: {why}." for (row, column, seed), why in self._failed())

    def _by_column(self, said: Callable[[Cell], str]) -> Iterator[tuple[str, str]]:
        """What is said of cells, once, with the columns it holds for."""
        columns: dict[str, dict[str, None]] = {}
        for cell in self.shown:
            columns.setdefault(said(cell), {})[cell.column] = None
        for text, names in columns.items():
            yield text, ", ".join(names)

    def _said_of(self, cell: Cell, what: Callable[[Done], str]) -> str:
        return "; ".join(dict.fromkeys(what(one) for one in self.done[cell.row, cell.column].values()))

    def _weights(self, cell: Cell) -> str:
        named = getattr(config.read(None, cell.under(self.words)).model, "weights", "")
        return {"": "drawn at random"}.get(named, Path(named).name if named.endswith(".safetensors") else named)

    def _failed(self) -> list[tuple[tuple[str, str, int], str]]:
        return [(where, why.removesuffix(".")) for where, why in self.failures.items()]


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Of a sample; a single value has none."""
    middle = mean(values)
    if middle is None or len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


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
