"""`fedlens league`: all methods over many worlds, at an equal budget and at tuned rates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import Explained, complain
from .format import Json, Style, Width, figures, print_rows, print_text, say_json

FILE, BOOK = "benchmarks/league.yaml", "results/data/league.json"
_BOOK = "All numbers, one line a run; what is in it is not run again."


def league(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[my.module:Method ...] [key=value ...]", show_default=False)
    ] = None,
    file: Annotated[str, typer.Option("--league", help="Worlds, methods and rates.")] = FILE,
    book: Annotated[str, typer.Option(show_default=f"{BOOK}, or beside --league", help=_BOOK)] = "",
    runs: Annotated[str, typer.Option(help="A folder for runs that are not finished.")] = "runs/league",
    processes: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: as many as pay.")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="Stop after so many, whatever is left; 0: at the end.")] = 0.0,
    worlds: Annotated[str, typer.Option(help="Only these, by a part of their names, with commas between.")] = "",
    methods: Annotated[str, typer.Option(help="Only these, with commas between.")] = "",
    count: Annotated[bool, typer.Option("--count", help="Say how many runs there are to come, and stop.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Write page and pictures from the numbers, and stop.")] = False,
    style: Style = "screen",
    width: Width = "3.3in",
    json: Json = False,
) -> None:
    """Which method wins, on equal terms: the same images trained, rates searched for everyone, ranks with uncertainty.

    A method of your own, my.module:Method, is placed among the others. The same command goes on where it stopped.
    """
    from ..compare.board import board
    from ..league.book import Book
    from ..league.page import write
    from ..league.run import Season, play
    from ..league.schedule import to_come
    from ..league.spec import chosen, listed, name_of, read
    from ..league.standings import Standings
    from ..league.words import findings, first, narrow, table

    given, look = words or [], figures(style, width)
    own, where = [word for word in given if "=" not in word], [word for word in given if "=" in word]
    whole, place = read(Path(file), own), Path(book) if book else book_of(Path(file))
    known = Book(place, whole)
    asked = chosen(whole, listed(worlds, whole.worlds), listed(methods) or [name_of(one) for one in own])
    if count:
        for line in to_come(asked, known):
            print_text(line, "  ")
        return
    done = True
    if not page:
        try:
            season = Season(asked, known, Path(runs), ("picture=false", *where))
            done = play(season, board(json), processes=processes, seconds=60 * minutes)
        except KeyboardInterrupt:
            raise Explained(complain("stopped; the same command goes on where it was", 130)) from None
    found, folder = Standings.read(place, [name_of(one) for one in own]), place.parent
    with look as printed:
        written = [*write(found, folder.parent if folder.name == "data" else folder, place), *printed]
    if json:
        told = {"table": table(found), "first": [*first(found)], "findings": [*findings(found)]}
        say_json({**told, "written": [*map(str, written)]})
    else:
        for paragraph in (*first(found), *findings(found)):
            print_text(paragraph.replace("**", ""))
        for title, rows in narrow(found).items():
            print(f"\n{title}" * bool(rows))
            print_rows(rows)
        print(*written, sep="\n")
    raise typer.Exit(0 if done else 1)


def book_of(file: Path) -> Path:
    """The project's own book for its own league; for another one a book beside its file, with its name."""
    return Path(BOOK) if file.resolve() == Path(FILE).resolve() else file.with_suffix(".json")
