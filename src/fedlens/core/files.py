"""Files that are whole or not there, files that can be read at once, and JSON that every program reads."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MOST = 1 << 30  # bytes of a file that is read as a whole; a split of 60 million images has half of it


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """To read from; ValueError for a folder, and for a pipe, which might never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_bytes(path: str | Path, most: int = MOST) -> bytes:
    """All of a regular file; ValueError where it is none, or has more than `most` bytes."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"it has {size:,} bytes, and {most:,} are allowed")
        return file.read()


def read_json(path: str | Path) -> Any:
    """What a JSON file says; ValueError where it cannot be read as such."""
    return parse_json(read_bytes(path).decode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """As json.loads; nesting that Python cannot follow is a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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
