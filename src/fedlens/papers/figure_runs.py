"""A paper's figures: what they are, and the runs that they are drawn from, carried out where they are missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import BadInput, nearest
from ..core.files import write_json
from ..experiment import Experiment
from ..runs.grid import Cell, Grid, is_done, placement, under_headings
from ..simulate import progress as panel
from ..simulate.finish import finish
from .duration import Effort
from .needs import lacking
from .quick import SAID, reduced, shrunk

SEED = 0


@dataclass(frozen=True)
class Wanted:
    """What is asked of a figure: settings over the paper's, how many images, where it goes."""

    words: Sequence[str]
    images: int
    path: Path  # without its ending
    quick: bool = False
    columns: Sequence[str] = ()  # of the table that it is drawn from; none: those of the paper
    dry: bool = False  # only to say what would be done: nothing may be written
    protocol: Mapping[str, Sequence[str]] = field(default_factory=dict)  # heading -> lines on the paper's

    @property
    def out(self) -> Path:
        """Figures lie at out/PAPER/figureN, beside the runs of tables."""
        return self.path.parent.parent

    def table(self, tables: Sequence[Grid], name: str) -> Grid:
        grid = table_named(tables, name)
        return reduced(grid, self.out, write=not self.dry) if self.quick else grid

    def over(self, words: Sequence[str]) -> tuple[str, ...]:
        """What lies over a protocol of these words: in quick mode something smaller, then the user's words."""
        return (*(shrunk(words, self.out, write=not self.dry) if self.quick else ()), *self.words)

    def chosen(self, known: Sequence[str], usual: Sequence[str]) -> list[str]:
        """The columns that were asked for, or else these."""
        for name in self.columns:
            if name not in known:
                raise BadInput(f"--columns {name!r} is not in this figure; {nearest(name, known)}")
        return list(self.columns or usual)


def _nothing(wanted: Wanted) -> list[Any]:
    return []


@dataclass(frozen=True)
class Figure:
    """A picture (or a measurement) of a paper."""

    name: str  # paper/figure
    about: str
    images: int  # how many it looks at, unless the user says
    make: Callable[[Wanted], list[Path]]  # -> files
    runs: Callable[[Wanted], list[Cell]] = _nothing  # that it is drawn from
    work: Callable[[Wanted], list[Effort]] = _nothing  # beside them
    needs: Callable[[Wanted], list[Experiment]] = _nothing  # whose data and weights it takes besides
    few: int = 0  # images of quick mode
    columns: Sequence[str] = ()  # that --columns may name
    says: tuple[str, ...] = ()  # what the paper says of the protocol
    leaves_open: tuple[str, ...] = ()  # what it does not, and what is taken here

    @property
    def protocol(self) -> dict[str, tuple[str, ...]]:
        return under_headings(self.says, self.leaves_open)

    def draw(
        self, words: Sequence[str], images: int, path: Path, *, quick: bool = False, columns: Sequence[str] = ()
    ) -> list[Path]:
        return self.make(Wanted(words, images, path, quick, columns, protocol=self.protocol))


def table_named(tables: Sequence[Grid], name: str) -> Grid:
    return next(table for table in tables if table.name == name)


def finished(wanted: Wanted, grid: Grid, rows: Sequence[str], column: str) -> dict[str, Path]:
    """The folders of a table's runs, each carried out first when it is not there."""
    found = {}
    for cell in grid.cells(rows, [column], wanted.words):
        if not is_done(cell, wanted.out, SEED):
            with panel.watcher(json=True) as watcher:  # standard output is for the names of files
                finish(cell.at(wanted.out, SEED), placement(wanted.words), watcher, among=wanted.out)
        found[cell.row] = cell.folder(wanted.out, SEED)
    return {row: found[row] for row in rows}


def at_hand(wanted: Wanted, grid: Grid, rows: Sequence[str], columns: Sequence[str]) -> tuple[list[str], list[str]]:
    """(columns whose runs can be had here, a sentence for each other one); refused where none can."""
    here, told = [], []
    for column in columns:
        cells = grid.cells(rows, [column], wanted.words)
        done = all(is_done(cell, wanted.out, SEED) for cell in cells)
        missing = [] if done else list(dict.fromkeys(each for cell in cells for each in lacking(cell.experiment)))
        here += [] if missing else [column]
        told += [f"{column} was not run here: needs {', '.join(missing)}."] if missing else []
    if not here:
        raise BadInput(f"{grid.name}: {' '.join(told).removesuffix('.')}")
    return here, told


def note(wanted: Wanted, numbers: Mapping[str, Any]) -> Path:
    """The numbers behind a figure, the paper's protocol, and what was changed of it."""
    beside = wanted.path.with_name(f"{wanted.path.name}.json")
    beside.parent.mkdir(parents=True, exist_ok=True)
    said = {"quick mode": SAID} if wanted.quick else {}
    protocol = {heading: list(lines) for heading, lines in wanted.protocol.items()}
    write_json(beside, {**said, "changed": list(wanted.words), **protocol, **numbers})
    return beside
