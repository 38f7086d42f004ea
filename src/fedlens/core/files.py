"""Files that are whole or not there, and JSON that every program reads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> None:
    """All of the file or nothing: written beside it, then renamed. `durable` waits until the disk has it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(finite(value), allow_nan=False, indent=1) + "\n").encode())


def finite(value: Any) -> Any:
    """The same with null for numbers that are not finite, which JSON cannot say (the loss of a run that diverged)."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
