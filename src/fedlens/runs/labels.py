"""Tags and notes that people put on runs. They are beside the run: no hash, table or result knows them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.errors import BadInput, brief
from ..core.files import read_json, write_json

FILE = "labels.json"
_TAG = re.compile(r"[^\W_][\w.:+-]{0,49}")
_LONG = 10_000  # characters of a note


def labels(run: Path) -> dict[str, list[Any]]:
    """{tags: [...], notes: [{at, text}, ...]}, the oldest first; both empty where nobody has written any."""
    try:
        found = read_json(run / FILE)
        tags, notes = found["tags"], found["notes"]
        texts = [*tags, *(note[part] for note in notes for part in ("at", "text"))]
        if not isinstance(tags, list) or not isinstance(notes, list) or not all(isinstance(t, str) for t in texts):
            raise ValueError
    except FileNotFoundError:
        return {"tags": [], "notes": []}
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{run / FILE} is damaged: it should hold tags and notes; delete it to begin anew") from None
    return {"tags": tags, "notes": notes}


def checked(tags: Iterable[str]) -> list[str]:
    """The same, each once; refuses what is no tag."""
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise BadInput(
                f"{brief(tag)} is no tag: letters, digits and . : + - _, at most 50, a letter or digit first"
            )
    return list(dict.fromkeys(tags))


def label(run: Path, *, tags: Iterable[str] = (), without: Iterable[str] = (), note: str = "") -> dict[str, list[Any]]:
    """Add to what a run is labelled with, and take tags away; returns all that it has then."""
    found, gone = labels(run), checked(without)
    if missing := [tag for tag in gone if tag not in found["tags"]]:
        raise BadInput(f"{run} has no tag {missing[0]}; it has {', '.join(found['tags']) or 'none'}")
    if len(note) > _LONG:
        raise BadInput(f"the note has {len(note):,} characters, and {_LONG:,} are allowed")
    kept = [tag for tag in found["tags"] if tag not in gone]
    kept += [tag for tag in checked(tags) if tag not in kept]
    said = [{"at": time.strftime("%Y-%m-%d %H:%M:%S"), "text": note}] if note else []
    new = {"tags": kept, "notes": [*found["notes"], *said]}
    if new != found:
        write_json(run / FILE, new)
    return new
