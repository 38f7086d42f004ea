"""What commands have in common: the words they take, and rows and JSON as they print them."""

from __future__ import annotations

import json as json_module
import os
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[FILE.yaml] [key=value ...]", show_default=False)]
CLIENTS = 20  # listed at most: they must fit a screen


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
    return (files[0] if files else None), [word for word in words or () if is_setting(word)]


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


def print_rows(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # all the room of a narrow terminal is theirs
    for key in dict.fromkeys(key for row in rows for key in row):
        cells = [_cell(row.get(key, "")) for row in rows]
        is_name = key in ("method", "run")  # never cut, nor in two lines
        table.add_column(key, min_width=max(map(len, cells)) if is_name else None, no_wrap=is_name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(str(column.header), "")) for column in table.columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def say_json(value: Any) -> None:
    from ..core.files import finite

    print(json_module.dumps(finite(value)))
