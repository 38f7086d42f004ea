"""Papers' tables and figures: what `fedlens reproduce` knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .grid import Grid


@dataclass(frozen=True)
class Figure:
    """A picture (or a measurement) of a paper: draw(words, images, path without ending) -> files."""

    name: str  # paper/figure
    about: str
    images: int  # how many it looks at, unless the user says
    draw: Callable[[Sequence[str], int, Path], list[Path]]


def reproducible() -> dict[str, Grid | Figure]:
    """By name; built when asked for, as what a machine has decides on the initial weights."""
    from . import compose
    from .fedsls import figures as fedsls_figures
    from .fedsls import tables as fedsls
    from .fedxds import figures as fedxds_figures
    from .fedxds import tables as fedxds
    from .pse import figures as pse_figures
    from .pse import tables as pse
    from .spatl import figures as spatl_figures
    from .spatl import tables as spatl

    found: list[Grid | Figure] = [*fedsls.tables(), *fedsls_figures.FIGURES, *fedxds.tables(), *spatl.tables()]
    found += [*spatl_figures.FIGURES, *pse.tables(), *pse_figures.FIGURES]
    found += [*fedxds_figures.FIGURES, *compose.tables()]
    return {one.name: one for one in found}
