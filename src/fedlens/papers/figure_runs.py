"""The runs that a paper's figures are drawn from: those of its tables, carried out where they are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.files import write_json
from ..simulate import progress as panel
from .grid import Grid, carry_out, checked, gather

SEED = 0


def finished(grid: Grid, rows: Sequence[str], column: str, words: Sequence[str], path: Path) -> dict[str, Path]:
    """The folders of a table's runs, each carried out first when it is not there."""
    out, found = out_of(path), {}
    for cell in checked(grid, rows, [column], words):
        if SEED not in gather(grid, out, words, [cell]).done[cell.row, cell.column]:
            with panel.watcher(json=True) as watcher:  # standard output is for the names of files
                carry_out(cell, out, words, SEED, watcher)
        found[cell.row] = cell.folder(out, words, SEED)
    return {row: found[row] for row in rows}


def out_of(path: Path) -> Path:
    """Figures lie at out/PAPER/figureN, beside the runs of tables."""
    return path.parent.parent


def note(path: Path, words: Sequence[str], numbers: Mapping[str, Any]) -> Path:
    """The numbers behind a figure, and what was changed of the tables' protocol."""
    beside = path.with_name(f"{path.name}.json")
    write_json(beside, {"changed": list(words), **numbers})
    return beside
