"""Files that are whole or not there, and durable in groups; files that can be read at once; JSON that all can read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MOST = 1 << 30  # bytes of a JSON file; a split of 60 million images has half of it


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


def read_bytes(path: str | Path, most: float = math.inf) -> bytes:
    """All of a regular file; ValueError where it is none, or has more than `most` bytes."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"it has {size:,} bytes, and {most:,} are allowed")
        return file.read()


def read_json(path: str | Path) -> Any:
    """What a JSON file says; ValueError where it cannot be read as such."""
    return parse_json(read_bytes(path, MOST).decode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """As json.loads; nesting that Python cannot follow is a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


Seal = tuple[int, str]  # length and sha256 of a file

_AT_ONCE = 8  # syncs in flight: a file system makes one journal entry of those that wait together
_TEMPORARY = re.compile(r"\..+\.([0-9]+)(\.part)?")  # without .part: of versions before


class Disk:
    """Everything that is done to the file system: a test puts a recorder in its place."""

    def write(self, path: Path, *parts: bytes | memoryview) -> None:
        with open(path, "wb") as file:
            for part in parts:
                file.write(part)

    def append(self, path: Path, data: bytes) -> None:
        with open(path, "ab") as file:
            file.write(data)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def mkdir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def sync(self, path: Path) -> None:
        """Wait until the disk has a file's content, or a folder's names."""
        if os.name == "nt" and path.is_dir():  # which cannot be opened there
            return
        try:
            number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        except PermissionError:
            if path.is_dir():  # one that may be written to, but not listed
                return
            raise
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that know no sync
                raise
        finally:
            os.close(number)


disk = Disk()


def write_atomic(path: Path, *parts: bytes | memoryview, durable: bool = False) -> None:
    """All of the file or nothing: written beside it, then renamed. `durable` waits until the disk has both."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        disk.write(beside, *parts)
        if durable:
            disk.sync(beside)
        disk.rename(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        disk.sync(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    write_atomic(path, json_bytes(value), durable=durable)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(finite(value), allow_nan=False, indent=1) + "\n").encode()


def finite(value: Any) -> Any:
    """The same with null for numbers that are not finite, which JSON cannot say (the loss of a run that diverged)."""
    if isinstance(value, Mapping):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def seal(data: bytes) -> Seal:
    return len(data), hashlib.sha256(data).hexdigest()


def sealed(data: bytes) -> bytes:
    """With its checksum in front, for files that nothing else speaks for."""
    return hashlib.sha256(data).digest() + data


def unsealed(data: bytes) -> bytes:
    """What `sealed` was given; ValueError where a power cut, or something else, has damaged it."""
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError("its checksum differs")
    return data[32:]


def append_line(path: Path, line: str) -> None:
    append(path, f"{line}\n".encode())


def append(path: Path, data: bytes) -> None:
    disk.append(path, data)


def remove(path: Path) -> None:
    disk.remove(path)


def make_durable(paths: Iterable[Path]) -> None:
    """Wait until the disk has files that were written before, and their names."""
    written = Unsynced()
    for path in paths:
        written.note(path)
    written.sync()


class Unsynced:
    """What was written since the last `sync`, which makes all of it durable together.

    Removed files may come back after a power cut; whoever removes makes sure that they would do no harm.
    """

    def __init__(self, durable: bool = True):
        """`durable`: False where syncs are too slow, or in vain."""
        self.durable = durable
        self._files: set[Path] = set()
        self._folders: set[Path] = set()

    def write(self, path: Path, data: bytes) -> Seal:
        """All of the file or nothing, for the next `sync`."""
        self.write_parts(path, data)
        return seal(data)

    def write_parts(self, path: Path, *parts: bytes | memoryview) -> None:
        """The same of a file whose checksum is known."""
        write_atomic(path, *parts)
        self.note(path)

    def note(self, path: Path) -> None:
        """Another process, or another function, wrote this file."""
        self._files.add(path)
        self._folders.add(path.parent)

    def rename(self, old: Path, new: Path) -> None:
        disk.rename(old, new)
        if old in self._files:
            self._files = self._files - {old} | {new}
        self._folders |= {old.parent, new.parent}

    def remove(self, path: Path) -> None:
        disk.remove(path)
        self._files.discard(path)
        self._folders.add(path.parent)

    def mkdir(self, path: Path) -> None:
        """With its parents."""
        if not path.is_dir():
            self.mkdir(path.parent)
            disk.mkdir(path)
            self._folders.add(path.parent)

    def sync(self) -> None:
        """Wait until the disk has the files, then until it has their names."""
        if self.durable:
            _sync_all(self._files)
            _sync_all(self._folders)
        self._files.clear()
        self._folders.clear()


def _sync_all(paths: Iterable[Path]) -> None:
    if len(each := sorted(paths)) < 2:
        for path in each:
            disk.sync(path)
        return
    with ThreadPoolExecutor(min(len(each), _AT_ONCE)) as pool:
        for _ in pool.map(disk.sync, each):
            pass


def remove_orphans(folder: Path) -> None:
    """Files that a process was writing when it was killed. Those of one that lives stay."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if (found := _TEMPORARY.fullmatch(path.name)) and path.is_file() and not _lives(int(found[1])):
                disk.remove(path)


def _lives(process: int) -> bool:
    """Whether another process has this number."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True
