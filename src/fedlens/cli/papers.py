"""`fedlens reproduce`: the tables and figures of papers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import Explained, complain
from .format import Json, Style, Width, figures, print_rows, say_json, split_words

if TYPE_CHECKING:
    from ..papers.figure_runs import Figure, Wanted
    from ..runs.grid import Cell, Grid

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
    processes: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: as many as pay.")] = 0,
    images: Annotated[int, typer.Option(min=0, help="That a figure looks at; 0: as many as the paper.")] = 0,
    out: Annotated[str, typer.Option(help="Where runs, tables and pictures go.")] = "reproduced",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A few images and three rounds: what it looks like. A minute of processor time at most."
        ),
    ] = False,
    every: Annotated[bool, typer.Option("--list", help="Every table and figure of the papers.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of each missing run.")] = False,
    style: Style = "screen",
    width: Width = "3.3in",
    json: Json = False,
) -> None:
    """Run what is missing of a paper's table, or draw one of its figures; alone, list what there is.

    Settings change every run of the table: that is another protocol, which the table says and keeps apart.
    """
    from ..core.errors import BadInput
    from ..papers.catalogue import listed, resolved
    from ..papers.figure_runs import Figure, Wanted
    from ..papers.quick import SAID, reduced, some_columns, taken_back
    from ..papers.registry import reproducible
    from ..plots.style import stamped
    from ..runs.grid import seeds_of

    known = reproducible()
    name, settings = split_words(words)
    if name is None or every:
        return say_json(listed(known)) if json else print_rows(listed(known))
    name = resolved(name, known)
    asked, place = known[name], Path(out) / "quick" if quick else Path(out)
    if quick:
        print(SAID, file=sys.stderr)
    with taken_back(place, quick), stamped(SAID) if quick else nullcontext(), figures(style, width) as printed:
        if isinstance(asked, Figure):
            if rows or (columns and not asked.columns):
                raise BadInput(f"{name} is a figure: {'--rows is' if rows else '--columns is'} for tables")
            some = _listed("--columns", columns, asked.columns)
            count = images or (asked.few if quick and asked.few else asked.images)
            wanted = Wanted(settings, count, place / name, quick, some, dry_run, asked.protocol)
            return _figure(asked, wanted, json, printed)
        which = _listed("--rows", rows, asked.rows), _listed("--columns", columns, asked.columns), settings
        if quick:
            which = which[0], some_columns(asked, which[0], which[1]), settings
            asked = reduced(asked, place, write=not dry_run)
        if dry_run:
            _print_commands(_missing(asked, which, seeds_of(seeds), place), place, json, _protocol(asked), quick)
        else:
            _table(asked, which, seeds_of(seeds), place, json, printed, processes)


def _figure(figure: Figure, wanted: Wanted, json: bool, printed: list[Path]) -> None:
    """Draw it, after what it is drawn from; or say what that would be."""
    from ..papers.figure_runs import SEED
    from ..papers.needs import remarks
    from ..runs.grid import is_done

    cells = [(cell, SEED) for cell in figure.runs(wanted) if not is_done(cell, wanted.out, SEED)]
    work = figure.work(wanted)
    if wanted.dry:
        text = f"# {figure.name} looks at {wanted.images:,} images itself" if wanted.images else ""
        asked = [*(one.experiment for one in work), *figure.needs(wanted)]
        said = dict.fromkeys(f"# {each}" for one in asked for each in remarks(one))
        first = [*_protocol(figure), *([text] if text else []), *([] if wanted.quick else said)]
        _print_commands(cells, wanted.out, json, first, wanted.quick)
        return
    _say_how_long([cell for cell, _ in cells], work)
    drawn = list(dict.fromkeys(map(str, [*figure.make(wanted), *printed])))
    say_json({"files": drawn}) if json else print("\n".join(drawn))


def _protocol(asked: Grid | Figure) -> list[str]:
    """What the paper says and what it leaves open, as comments."""
    return [f"# {heading}: {line}" for heading, lines in asked.protocol.items() for line in lines]


def _say_how_long(cells: Sequence[Cell], work: Sequence = ()) -> None:
    """One sentence before anything starts; nothing where nothing is left to do."""
    from ..papers.duration import seconds, sentence
    from ..papers.needs import lacking

    here = [cell.experiment for cell in cells if not lacking(cell.experiment)]
    if here or work:
        print(sentence(len(here), seconds(here, work)), file=sys.stderr, flush=True)


def _missing(grid: Grid, which: Which, seeds: list[int], place: Path) -> list[tuple[Cell, int]]:
    """The cell and the seed of each run that is missing."""
    from ..papers.table import gather

    cells, done = grid.cells(*which), gather(grid, place, which[2]).done
    return [(cell, seed) for seed in seeds for cell in cells if seed not in done[cell.row, cell.column]]


def _print_commands(
    missing: Sequence[tuple[Cell, int]], place: Path, json: bool, first: Sequence[str], quick: bool
) -> None:
    """A command a line; before one that cannot run here, what it needs. Quick mode needs nothing but its own files."""
    from ..papers.needs import remarks

    lines = list(first)
    if quick and missing:
        lines.append(f"# images of quick mode, in {place / 'data'}: the same command without --dry-run writes them")
    for cell, seed in missing:
        lines += [] if quick else [f"# {said}" for said in remarks(cell.experiment)]
        lines.append(cell.command(place, seed))
    if json:
        say_json([line for line in lines if not line.startswith("#")])
    elif lines:
        print("\n".join(lines))


def _table(
    grid: Grid, which: Which, seeds: list[int], place: Path, json: bool, printed: list[Path], processes: int
) -> None:
    """Run what is missing, and show the table; exit code 1 where a run failed."""
    from ..compare.board import board
    from ..papers.table import reproduce
    from ..papers.table_figure import draw
    from ..simulate import progress as panel

    rows, columns, words = which
    missing = _missing(grid, which, seeds, place)
    _say_how_long([cell for cell, _ in missing])
    say = _progress(len(missing), sys.stderr if json else sys.stdout)
    try:
        table = reproduce(
            grid,
            place,
            rows=rows,
            columns=columns,
            seeds=seeds,
            words=words,
            watch=lambda: panel.watcher(json),
            say=say,
            board=lambda: board(json),
            processes=processes,
        )
    except KeyboardInterrupt:
        raise Explained(complain("stopped; the same command goes on where it was", 130)) from None
    drawn = draw(table)
    if json:
        say_json(table.entries())
    else:
        files = dict.fromkeys(map(str, [f"{place / table.name}.md", *([drawn] if drawn else []), *printed]))
        print(table.markdown(), *files, sep="\n")
    raise typer.Exit(1 if table.failures else 0)


def _progress(runs: int, stream) -> Callable[[str], None]:
    """Says a table after each run, and how long the others will take by those that are done."""
    from ..papers.duration import about

    start, done = time.monotonic(), 0

    def say(text: str) -> None:
        nonlocal done
        done += 1
        print(text, file=stream)
        if left := runs - done:
            print(f"{left} of {runs} runs are left: {about((time.monotonic() - start) / done * left)}", file=sys.stderr)

    return say


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
