"""`fedlens list`: the methods with their families, and the same in help."""

from __future__ import annotations

import json as formats
import re
from pathlib import Path
from typing import Annotated

import typer

from .format import Json, print_rows, say_json

_UP = re.compile(r"up: ([^;]+);")


def families() -> dict[str, dict[str, str]]:
    """family -> method -> the models it is about; read without importing the methods, so that help answers at once."""
    return formats.loads((Path(__file__).parents[1] / "algorithms" / "families.json").read_text("utf-8"))


def help_text() -> str:
    """A line for each family."""
    return "Methods, by family. " + " ".join(f"{name}: {', '.join(known)}." for name, known in families().items())


def list_known(
    methods: Annotated[bool, typer.Option("--methods", help="The methods, by family.")] = False, json: Json = False
) -> None:
    """What there is: --methods lists every method with its family, what it shares, and whether it is personal."""
    from ..core.errors import BadInput

    if not methods:
        raise BadInput("fedlens list needs to know what to list: give --methods")
    rows = method_rows()
    say_json({"methods": rows}) if json else print_rows(rows)


def method_rows() -> list[dict[str, str]]:
    """A row for each method, family by family."""
    from ..algorithms import ALGORITHMS, FAMILIES

    def shared(name: str) -> str:
        found = _UP.search(ALGORITHMS[name].__doc__ or "")
        return found[1] if found else "as its base"

    return [
        {"method": name, "family": family, "models": models, "shared": shared(name)}
        for family, known in FAMILIES.items()
        for name, models in known.items()
    ]
