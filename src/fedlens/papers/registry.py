"""Every table and figure that `fedlens reproduce` knows, by name."""

from __future__ import annotations

from dataclasses import replace

from ..runs.grid import Grid
from . import compose
from .fedsls import figures as fedsls_figures
from .fedsls import tables as fedsls
from .fedxds import figures as fedxds_figures
from .fedxds import tables as fedxds
from .figure_runs import Figure
from .pse import figures as pse_figures
from .pse import tables as pse
from .spatl import figures as spatl_figures
from .spatl import tables as spatl


def reproducible() -> dict[str, Grid | Figure]:
    """Built when asked for, as what a machine has decides on the initial weights."""
    found: list[Grid | Figure] = [*_beside(fedsls.tables()), *fedsls_figures.FIGURES, *_beside(fedxds.tables())]
    found += [*_beside(spatl.tables()), *spatl_figures.FIGURES, *_beside(pse.tables()), *pse_figures.FIGURES]
    found += [*fedxds_figures.FIGURES, *compose.tables()]
    return {one.name: one for one in found}


def _beside(tables: list[Grid]) -> list[Grid]:
    """A paper's tables, each with the rows that only others have."""
    rows = {row: table.name for table in reversed(tables) for row in table.rows}
    return [replace(table, elsewhere=rows) for table in tables]
