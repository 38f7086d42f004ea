"""A path as somebody typed it, with the places where it was: what is stored and compared is what was typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATHS = ("path", "weights")  # settings of parts that name a file or a folder


class Located(str):
    """Equal to the text, hashed and written as the text; `places` are tried before it is looked for by its name."""

    places: tuple[Path, ...]
    run: str  # the folder of the run that tells

    def __new__(cls, typed: str, places: Sequence[str | Path], run: str = "") -> Located:
        self = super().__new__(cls, typed)
        self.places, self.run = tuple(map(Path, places)), run
        return self

    def __reduce__(self):  # other processes know the places, too
        return Located, (str(self), self.places, self.run)


def as_typed(value: Any) -> Any:
    """A plain text of a located one; anything else as it is."""
    return str(value) if isinstance(value, Located) else value


def portable(settings: Any) -> Any:
    """Settings with the last name alone of each whole path: a hash must not depend on where files lie."""
    if isinstance(settings, dict):
        named = {k: Path(v).name for k, v in settings.items() if k in PATHS and isinstance(v, str) and _is_whole(v)}
        return {key: portable(value) for key, value in (settings | named).items()}
    return [portable(value) for value in settings] if isinstance(settings, list) else settings


def _is_whole(path: str) -> bool:
    return Path(path).expanduser().is_absolute()


def places_of(path: str) -> tuple[Path, ...]:
    return path.places if isinstance(path, Located) else ()


def how_to_point(path: str, key: str) -> str:
    """The end of a sentence about something that is gone: where it was, and how to say where it is now."""
    if not isinstance(path, Located):
        return ""
    was = next((f", nor is there {place}" for place in path.places if place.is_absolute()), "")
    return f"{was}; say where it is now: add {key}=PLACE, which {path.run} remembers"
