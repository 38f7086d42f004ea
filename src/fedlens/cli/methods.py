"""The methods with their families, for `fedlens list --methods` and help."""

from __future__ import annotations

import json as formats
import re
from pathlib import Path

_UP = re.compile(r"up: ([^;]+);")


def families() -> dict[str, dict[str, str]]:
    """family -> method -> the models it is about; read without importing the methods, so that help answers at once."""
    return formats.loads((Path(__file__).parents[1] / "algorithms" / "families.json").read_text("utf-8"))


def help_text() -> str:
    """A line for each family."""
    return "Methods, by family. " + " ".join(f"{name}: {', '.join(known)}." for name, known in families().items())


def method_rows() -> list[dict[str, str]]:
    """A row for each method, family by family."""
    from ..algorithms import ALGORITHMS, FAMILIES

    def shared(name: str) -> str:
        found = _UP.search(ALGORITHMS[name].__doc__ or "")
        return found[1] if found else getattr(ALGORITHMS[name], "sends", "as its base")

    return [
        {"method": name, "family": family, "models": models, "shared": shared(name)}
        for family, known in FAMILIES.items()
        for name, models in known.items()
    ]
