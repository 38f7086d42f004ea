"""Grids of experiments, rows x columns x seeds: what each cell is, where its runs lie, what they were measured at."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from .. import config
from ..core.errors import BadInput, nearest
from ..experiment import Experiment
from .folder import RunFolder, config_hash
from .places import typed

_LONGEST = 80  # characters of a protocol in a file's name


def in_percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


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
class Cell:
    """One experiment of a grid, but for its seed and its folder."""

    row: str
    column: str
    words: tuple[str, ...]  # one for each key that is set
    experiment: Experiment
    changes: tuple[str, ...]  # how it differs from the grid's own protocol
    home: str  # of its runs, below the folder of all grids
    instead: tuple[str, ...] = ()  # changes that nobody asked for by a word: for what this machine lacks, or smaller

    def folder(self, out: Path, seed: int) -> Path:
        return out / self.home / f"seed{seed}"

    def at(self, out: Path, seed: int) -> Experiment:
        """With this seed, in its folder."""
        return replace(self.experiment, seed=seed).with_execution(out=str(self.folder(out, seed)))

    def command(self, out: Path, seed: int) -> str:
        return shlex.join(["fedlens", "run", *self.words, f"seed={seed}", f"out={self.folder(out, seed)}"])


def under_headings(says: tuple[str, ...], leaves_open: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """What a paper says of its protocol and what it leaves open, under a heading each; without those that are empty."""
    parts = {"The paper says": says, "It leaves open": leaves_open}
    return {heading: lines for heading, lines in parts.items() if lines}


@dataclass(frozen=True)
class Grid:
    """A table as configuration: `paper` holds a paper's numbers by (row, column)."""

    name: str  # paper/table
    about: str
    rows: Mapping[str, Row]
    columns: Mapping[str, Column]
    words: tuple[str, ...] = ()  # of every cell
    paper: Mapping[tuple[str, str], Reported] = field(default_factory=dict)
    measure: Callable[[Mapping[str, Any]], float | None] = lambda result: in_percent(result["accuracy_last"])
    measured: str = "accuracy of the global model on the pooled test set, mean of the last evaluations, %"
    notes: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # rows of the paper's other tables -> table
    titles: Mapping[str, str] = field(default_factory=dict)  # of columns, where their names do not say all
    smaller: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None  # words of a cell -> words over them
    says: tuple[str, ...] = ()  # what the paper says of the protocol
    leaves_open: tuple[str, ...] = ()  # what it does not, and what is taken here

    @property
    def protocol(self) -> dict[str, tuple[str, ...]]:
        return under_headings(self.says, self.leaves_open)

    def cells(self, rows: Sequence[str] = (), columns: Sequence[str] = (), words: Sequence[str] = ()) -> list[Cell]:
        """Those of these rows and columns, or all, with `words` over them; `cifar10` stands for columns `cifar10/...`.

        Refuses unknown names, and words that do not fit one of these cells.
        """
        for name in ("out", "seed"):
            if any(config.setting(word)[0] == name for word in words):
                raise BadInput(f"{name}= is not for a table of runs: use --{'out' if name == 'out' else 'seeds'}")
        return [self._cell(row, column, words) for row, column in self._chosen(rows, columns)]

    def fitting(self, words: Sequence[str]) -> list[Cell]:
        """All cells that these words fit: algorithm.tau=1 is no protocol of FedAvg."""
        found = []
        for row, column in self._chosen((), ()):
            with suppress(BadInput):
                found.append(self._cell(row, column, words))
        return found

    def _chosen(self, rows: Sequence[str], columns: Sequence[str]) -> list[tuple[str, str]]:
        families: dict[str, list[str]] = {}
        for column in self.columns:
            for name in {column, column.partition("/")[0]}:
                families.setdefault(name, []).append(column)
        for wanted, known, option in ((rows, self.rows, "--rows"), (columns, families, "--columns")):
            for name in wanted:
                if name not in known:
                    other = self.elsewhere.get(name) if option == "--rows" else None
                    hint = f"{other} has it" if other else nearest(name, known)
                    raise BadInput(f"{option} {name!r} is not in {self.name}; {hint}")
        some = {column for name in columns for column in families[name]}
        return [
            (row, column)
            for column in self.columns
            for row in self.rows
            if (not rows or row in rows) and (not columns or column in some)
        ]

    def _cell(self, row: str, column: str, words: Sequence[str]) -> Cell:
        own = (*self.words, *self.columns[column].words, *self.rows[row].words)
        instead = (*self.columns[column].instead, *(self.smaller(own) if self.smaller else ()))
        over = (*instead, *words)
        whole = merged_words((*own, *over))
        experiment, changes = config.read(None, [*whole.values()]), ()
        if over and config_hash(experiment) != config_hash(config.read(None, [*merged_words(own).values()])):
            keys = {config.setting(word)[0] for word in over} & whole.keys()
            changed = dict(config.setting(whole[key]) for key in keys if config.affects_results(key))
            changes = tuple(f"{key}={value}" for key, value in sorted(changed.items()))
        name = protocol_name("-".join(part.replace("/", "-") for part in (row, column) if part), changes)
        place = f"{self.rows[row].home or self.name}/{name}"
        stays = tuple("{}={}".format(*config.setting(word)) for word in instead if word in whole.values())
        return Cell(row, column, tuple(whole.values()), experiment, changes, place, stays)


# ---- words and names -------------------------------------------------------------------------------------------------
def merged_words(words: Sequence[str]) -> dict[str, str]:
    """The last word of each key. Another part (model=cnn) takes the settings of the one before (model.weights) away."""
    found: dict[str, str] = {}
    for word in words:
        key, value = config.setting(word)
        if key in found and config.setting(found[key])[1] != value:
            found = {name: kept for name, kept in found.items() if not name.startswith(f"{key}.")}
        found[key] = word
    return found


def placement(words: Sequence[str]) -> list[str]:
    """The words that say where and how to compute alone."""
    return [word for word in words if not config.affects_results(config.setting(word)[0])]


def protocol_name(name: str, changes: Sequence[str]) -> str:
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


# ---- runs ------------------------------------------------------------------------------------------------------------
def stored(folder: RunFolder, experiment: Experiment) -> Experiment:
    """The experiment in this folder; refused where it would answer another question than this one."""
    found, experiment = config.read(folder.config), config.check(experiment)  # 70 is stored as 70.0
    asked = {name: getattr(experiment.execution, name) for name in ("device", "precision", "compile")}
    placed = {name: getattr(found.execution, name) if value == "auto" else value for name, value in asked.items()}
    if config_hash(experiment.with_execution(**placed)) != config_hash(found) or typed(experiment) != typed(found):
        raise BadInput(f"{folder.path} holds another experiment than this cell's; move it away or choose another --out")
    return found


def runs_of(cell: Cell, out: Path) -> Iterator[tuple[int, RunFolder]]:
    """Every run of a cell that has begun, by seed."""
    for path in sorted((out / cell.home).glob("seed*"), key=lambda path: (len(path.name), path.name)):
        seed, folder = path.name.removeprefix("seed"), RunFolder(path)
        if seed.isdecimal() and folder.config.exists():
            yield int(seed), folder


def is_done(cell: Cell, out: Path, seed: int) -> bool:
    """Whether this very experiment is complete there; another one in its folder is refused."""
    folder = RunFolder(cell.folder(out, seed))
    return folder.config.exists() and bool(stored(folder, cell.at(out, seed))) and folder.result() is not None


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Of a sample; a single value has none."""
    middle = mean(values)
    if middle is None or len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))
