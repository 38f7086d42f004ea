"""A paper's figures: what they are, and the runs that they are drawn from, carried out where they are missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.files import write_json
from ..runs.grid import Grid, is_done, placement
from ..simulate import progress as panel
from ..simulate.finish import finish

SEED = 0


@dataclass(frozen=True)
class Figure:
    """A picture (or a measurement) of a paper: draw(words, images, path without ending) -> files."""

    name: str  # paper/figure
    about: str
    images: int  # how many it looks at, unless the user says
    draw: Callable[[Sequence[str], int, Path], list[Path]]


def table_named(tables: Sequence[Grid], name: str) -> Grid:
    return next(table for table in tables if table.name == name)


def finished(grid: Grid, rows: Sequence[str], column: str, words: Sequence[str], path: Path) -> dict[str, Path]:
    """The folders of a table's runs, each carried out first when it is not there."""
    out, found = out_of(path), {}
    for cell in grid.cells(rows, [column], words):
        if not is_done(cell, out, SEED):
            with panel.watcher(json=True) as watcher:  # standard output is for the names of files
                finish(cell.at(out, SEED), placement(words), watcher, among=out)
        found[cell.row] = cell.folder(out, SEED)
    return {row: found[row] for row in rows}


def out_of(path: Path) -> Path:
    """Figures lie at out/PAPER/figureN, beside the runs of tables."""
    return path.parent.parent


def note(path: Path, words: Sequence[str], numbers: Mapping[str, Any]) -> Path:
    """The numbers behind a figure, and what was changed of the tables' protocol."""
    beside = path.with_name(f"{path.name}.json")
    write_json(beside, {"changed": list(words), **numbers})
    return beside
