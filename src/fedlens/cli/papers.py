"""`fedlens reproduce`: the tables and figures of papers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import Explained, complain
from .format import Json, print_rows, say_json, split_words

if TYPE_CHECKING:
    from ..runs.grid import Grid

Which = tuple[list[str], list[str], list[str]]  # rows, columns and settings of a table


def reproduce(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PAPER/WHAT] [key=value ...]", show_default=False)
    ] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Such as fedavg,uniform; without it all.")] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="Such as cifar10 or cifar10/0.05,cifar10/0.1; without it all.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, such as 3, or which, such as 0,1,2.")] = "1",
    images: Annotated[int, typer.Option(min=0, help="That a figure looks at; 0: as many as the paper.")] = 0,
    out: Annotated[str, typer.Option(help="Where runs, tables and pictures go.")] = "reproduced",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of each missing run.")] = False,
    json: Json = False,
) -> None:
    """Run what is missing of a paper's table, or draw one of its figures; alone, list what there is.

    Settings change every run of the table: that is another protocol, which the table says and keeps apart.
    """
    from ..core.errors import BadInput, nearest
    from ..papers.figure_runs import Figure
    from ..papers.registry import reproducible
    from ..runs.grid import seeds_of

    known = reproducible()
    name, settings = split_words(words)
    if name is None:
        listed = [{"name": one.name, "about": one.about} for one in known.values()]
        say_json(listed) if json else print_rows(listed)
        return
    if name not in known:
        raise BadInput(f"{name!r} is nothing that can be reproduced; {nearest(name, known)}")
    asked, place = known[name], Path(out)
    if isinstance(asked, Figure):
        if rows or columns or dry_run:
            raise BadInput(f"{name} is a figure: --rows, --columns and --dry-run are for tables")
        drawn = [str(path) for path in asked.draw(settings, images or asked.images, place / name)]
        say_json({"files": drawn}) if json else print("\n".join(drawn))
        return
    which = _listed("--rows", rows, asked.rows), _listed("--columns", columns, asked.columns), settings
    if dry_run:
        commands = _missing(asked, which, seeds_of(seeds), place)
        said = [f"# {heading}: {line}" for heading, lines in asked.protocol.items() for line in lines]
        say_json(commands) if json else print("\n".join([*said, *commands]))
    else:
        _table(asked, which, seeds_of(seeds), place, json)


def _missing(grid: Grid, which: Which, seeds: list[int], place: Path) -> list[str]:
    """The command of each run that is missing."""
    from ..papers.table import gather

    cells, done = grid.cells(*which), gather(grid, place, which[2]).done
    return [cell.command(place, seed) for seed in seeds for cell in cells if seed not in done[cell.row, cell.column]]


def _table(grid: Grid, which: Which, seeds: list[int], place: Path, json: bool) -> None:
    """Run what is missing, and show the table; exit code 1 where a run failed."""
    from ..papers.table import reproduce
    from ..papers.table_figure import draw
    from ..simulate import progress as panel

    rows, columns, words = which
    watch = {
        "watch": lambda: panel.watcher(json),
        "say": lambda text: print(text, file=sys.stderr if json else sys.stdout),
    }
    try:
        table = reproduce(grid, place, rows=rows, columns=columns, seeds=seeds, words=words, **watch)
    except KeyboardInterrupt:
        raise Explained(complain("stopped; the same command goes on where it was", 130)) from None
    drawn = draw(table)
    if json:
        say_json(table.entries())
    else:
        print(f"{table.markdown()}\n{place / table.name}.md\n{drawn or ''}".rstrip())
    raise typer.Exit(1 if table.failures else 0)


def _listed(option: str, texts: list[str] | None, known: Iterable[str]) -> list[str]:
    """Names with commas between them, where a name may have a comma itself: the longest that is known is meant."""
    from ..core.errors import BadInput

    found, longest_first = [], sorted(known, key=len, reverse=True)
    for text in texts or ():
        rest = text.strip(", ")
        if not rest:
            raise BadInput(f"{option} {text!r} names nothing")
        while rest:
            whole = next((name for name in longest_first if f"{rest},".startswith(f"{name},")), rest.partition(",")[0])
            found.append(whole.strip())
            rest = rest[len(whole) :].lstrip(", ")
    return found
