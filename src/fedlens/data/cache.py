"""Decoded once, memory-mapped ever after."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .images import Decoded, Found, Images

VERSION = 1  # of the layout below; a new number makes every old copy a stranger
ARRAYS = ("x", "y", "train", "test", "users", "domains")


def cache_folder() -> Path:
    """FEDLENS_CACHE, or the place where this system keeps caches."""
    if own := os.environ.get("FEDLENS_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "win32":
        usual = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        usual = "~/Library/Caches"
    else:
        usual = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(usual).expanduser() / "fedlens"


def cached(name: str, settings: dict[str, str], found: Found, read: Callable[[], Decoded]) -> Images:
    """The data set from its decoded copy, which is made first when it is missing, damaged or out of date."""
    folder = cache_folder() / f"{name}-{_fingerprint(name, settings, found)}"
    if (images := _open(folder, name, found.origin)) is not None:
        return images
    decoded = read()
    try:
        _store(folder, decoded)
    except OSError:  # read-only or full: the data set still works, it is only decoded again next time
        return _in_memory(decoded, name, f"{found.origin}, not cached: {folder.parent} cannot be written")
    return _open(folder, name, found.origin) or _in_memory(decoded, name, found.origin)


def _fingerprint(name: str, settings: dict[str, str], found: Found) -> str:
    stats = [(path.name, os.stat(path)) for path in found.files]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr((VERSION, name, sorted(settings.items()), found.origin, files)).encode()).hexdigest()[
        :20
    ]


@dataclass(frozen=True)
class _Header:
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    checksum: str
    sums: dict[str, int]  # of every array's bytes, see _sum


def _header(decoded: Decoded) -> _Header:
    mean, std = decoded.mean, decoded.std
    if mean is None or std is None:
        mean, std = moments(decoded.x, decoded.train)
    sums = {name: _sum(array) for name in ARRAYS if (array := _array(decoded, name)) is not None}
    return _Header(decoded.classes, mean, std, checksum(decoded.x, decoded.y), sums)


def _array(decoded: Decoded, name: str) -> np.ndarray | None:
    array = getattr(decoded, name)
    return None if array is None else np.ascontiguousarray(array, np.uint8 if name == "x" else np.int64)


def _sum(array: np.ndarray) -> int:
    """Of all bytes as words: any one damaged place changes it, and it runs at the speed of memory."""
    flat = array.reshape(-1).view(np.uint8)
    whole = len(flat) // 8 * 8
    total = int(flat[:whole].view(np.uint64).sum(dtype=np.uint64)) + int.from_bytes(flat[whole:].tobytes(), "little")
    return total % 2**64


def checksum(x: np.ndarray, y: np.ndarray) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(x).data)
    digest.update(np.ascontiguousarray(y, np.int64).data)
    return digest.hexdigest()


def moments(x: np.ndarray, index: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, of pixels in [0, 1]; exact, from histograms of the bytes."""
    counts = np.zeros((x.shape[1], 256), np.int64)
    for some in np.array_split(index, max(1, len(index) // 4096)):
        for channel in range(x.shape[1]):
            counts[channel] += np.bincount(x[some, channel].reshape(-1), minlength=256)
    values, shares = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    std = np.sqrt(np.maximum((shares * (values - mean[:, None]) ** 2).sum(1), 0))
    # An image set without any contrast must not divide by zero.
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _store(folder: Path, decoded: Decoded) -> None:
    """Written aside and renamed, so that a half-made copy never has the name of a whole one."""
    header = _header(decoded)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name in header.sums:
            array = _array(decoded, name)
            assert array is not None
            with open(aside / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        (aside / "header.json").write_text(json.dumps({"version": VERSION, **vars(header)}))
        _put(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put(aside: Path, folder: Path) -> None:
    """Rename; when another process was first, its copy is as good. A damaged copy makes way."""
    for _ in range(3):
        try:
            os.rename(aside, folder)
            return
        except OSError:
            if not folder.exists():
                raise
            if _header_of(folder) is not None:
                return
            gone = Path(tempfile.mkdtemp(prefix=f".{folder.name}-damaged-", dir=folder.parent))
            with contextlib.suppress(OSError):
                os.rename(folder, gone / "copy")
            shutil.rmtree(gone, ignore_errors=True)


def _header_of(folder: Path) -> tuple[_Header, dict[str, np.ndarray]] | None:
    """Header and mapped arrays of a whole and undamaged copy."""
    try:
        stored = json.loads((folder / "header.json").read_text())
        if stored.pop("version") != VERSION:
            return None
        header = _Header(
            tuple(stored["classes"]), tuple(stored["mean"]), tuple(stored["std"]), stored["checksum"], stored["sums"]
        )
        # Copy-on-write: torch insists on writable memory, and nobody can write to the file.
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in header.sums}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return (header, arrays) if all(_sum(arrays[name]) == header.sums[name] for name in arrays) else None


def _open(folder: Path, name: str, origin: str) -> Images | None:
    opened = _header_of(folder)
    return None if opened is None else _images(*opened, name, origin)


def _in_memory(decoded: Decoded, name: str, origin: str) -> Images:
    header = _header(decoded)
    arrays = {part: array for part in header.sums if (array := _array(decoded, part)) is not None}
    return _images(header, arrays, name, origin)


def _images(header: _Header, arrays: dict[str, np.ndarray], name: str, origin: str) -> Images:
    tensors = {part: torch.from_numpy(arrays[part]) if part in arrays else None for part in ARRAYS}
    return Images(
        **tensors,  # pyright: ignore[reportArgumentType]
        classes=header.classes,
        mean=header.mean,
        std=header.std,
        checksum=header.checksum,
        origin=origin,
        name=name,
    )
