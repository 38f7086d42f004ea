"""What commands have in common: the words they take, and rows and JSON as they print them."""

from __future__ import annotations

import json as json_module
import os
import re
import shutil
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")]
Style = Annotated[
    str, typer.Option(metavar="screen|paper", help="paper: also each panel as a file of its own, for a document.")
]
Width = Annotated[str, typer.Option(metavar="LENGTH", help="Of a panel with --style paper, such as 3.3in or 84mm.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[FILE.yaml] [key=value ...]", show_default=False)]
_NUMBER = re.compile(r"[-+<]?\d[\d,.]*( ?± ?[\d.]+)?\*?( ?(%|k?B|[MGT]B|s|min|h))?$|[–-]?$|best$")
CLIENTS = 20  # listed at most: they must fit a screen


def figures(style: str, width: str) -> AbstractContextManager[list[Path]]:
    """Figures that are drawn meanwhile have this style; the list fills with those for a paper. Refuses at once."""
    from ..core.errors import BadInput, nearest
    from ..plots import paper

    if style not in paper.STYLES:
        raise BadInput(f"--style {style!r} is unknown; {nearest(style, paper.STYLES)}")
    wide = paper.inches(width)
    return paper.printed(wide) if style == "paper" else nullcontext([])


def is_setting(word: str) -> bool:
    """key=value; folders of runs that `fedlens reproduce` makes have a = in their names, too."""
    return "=" in word and not os.path.exists(word)


def split_words(words: list[str] | None) -> tuple[str | None, list[str]]:
    from ..core.errors import BadInput

    files = [word for word in words or () if not is_setting(word)]
    if options := [word for word in files if word.startswith("-")]:
        raise BadInput(f"unknown option {options[0]}; there is --json, and settings look like key=value")
    if len(files) > 1:
        raise BadInput(f"one YAML file at most, not {' and '.join(files)}; settings look like key=value")
    settings = [word for word in words or () if is_setting(word)]
    if files and os.path.isfile(os.path.join(files[0], "server", "link.json")):  # a federation: what it runs, simulated
        from ..flower.launch import words_of

        return None, [*(word for word in words_of(Path(files[0])) if not word.startswith("out=")), *settings]
    return (files[0] if files else None), settings


def runs_among(words: list[str] | None) -> list[str]:
    """The runs that are named; words beside them such as data.path=PLACE say where their files are now."""
    from ..runs.places import remember_moved
    from ..runs.read import runs_in

    runs, moved = [word for word in words or () if not is_setting(word)], [w for w in words or () if is_setting(w)]
    for run in runs_in(map(Path, runs)) if moved else ():
        remember_moved(run, moved)
    return runs


def one_run(done: str, run: str, words: list[str] | None) -> None:
    """Of a command about one run: words such as data.path=PLACE say where its files are now, and others are refused."""
    from ..core.errors import BadInput

    if extra := [word for word in words or () if not is_setting(word)]:
        raise BadInput(f"one run is {done} at a time, and {extra[0]} is another word; data.path=PLACE may follow")
    runs_among([run, *(words or ())])


def numbers(option: str, text: str) -> list[int]:
    from ..core.errors import BadInput

    if not all(part.strip().isdigit() for part in text.split(",") if part):
        raise BadInput(f"{option} is {text!r}, but it should be numbers such as 0,3")
    return [int(part) for part in text.split(",") if part]


def shares(option: str, text: str, like: str) -> list[float]:
    from ..core.errors import BadInput

    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError:
        raise BadInput(f"{option} is {text!r}, but it should be {like}") from None


def columns() -> int:
    """Columns of the terminal, or what COLUMNS says; 0 for a file, where a line may be long."""
    return shutil.get_terminal_size((0, 0)).columns


def print_text(text: str, indent: str = "") -> None:
    """Prose, in lines that fit the terminal; those after the first begin with `indent`."""
    for line in text.split("\n"):
        print(textwrap.fill(line, columns() or 10**6, subsequent_indent=indent, break_on_hyphens=False))


def needed(rows: list[dict[str, Any]]) -> int:
    """Columns of a terminal that these rows take as a table in which nothing is wrapped."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return sum(max(len(key), *(len(_cell(row.get(key, ""))) for row in rows)) + 2 for key in keys) - 2


def print_rows(rows: list[dict[str, Any]], wide: bool = False) -> None:
    """A table that fits the terminal, numbers to the right. `wide`: in a file a line may be long."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=200 if wide and not sys.stdout.isatty() else None)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = {key: [_cell(row.get(key, "")) for row in rows] for key in keys}
    is_tight = needed(rows) > console.width
    if is_tight:  # deviations close up first
        cells = {key: [cell.replace(" ± ", "±") for cell in column] for key, column in cells.items()}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)  # all the room is theirs
    for key, column in cells.items():
        is_name = key in ("method", "run")  # never cut, nor in two lines
        is_number = all(map(_NUMBER.match, column))
        least = max(map(len, column)) if is_name else None
        # A title is wrapped before a number is.
        most = max(len(word) for word in (*column, *key.split())) if is_number and is_tight else None
        how = {"min_width": least, "max_width": most, "no_wrap": is_name, "overflow": "fold"}
        table.add_column(Text(key), justify="right" if is_number else "left", **how)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, row))  # as text: rich would take the brackets of fedlens[hub] for a style
    console.print("", table, "", sep="\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def say_json(value: Any) -> None:
    from ..core.files import finite

    print(json_module.dumps(finite(value)))
