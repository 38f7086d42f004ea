"""JSON that every program reads: the standard has no word for NaN and infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .memories import write_whole


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(finite(value), allow_nan=False, indent=1) + "\n").encode())


def finite(value: Any) -> Any:
    """The same with null for numbers that are not finite, such as the loss of a run that diverged."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
