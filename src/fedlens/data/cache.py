"""Decoded once, memory-mapped ever after."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..core.errors import BadInput
from ..core.files import read_json
from .images import Decoded, Found, Images

VERSION = 1  # of the layout below and of how files are decoded; a new number makes every old copy a stranger
ARRAYS = ("x", "y", "train", "test", "users", "domains", "groups")
# MAP_NORESERVE has no name in Python before 3.13; this is its value on the processors named.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_PRIVATE = mmap.MAP_PRIVATE | _NO_RESERVE if _NO_RESERVE else 0


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


def cached(name: str, settings: dict[str, str], found: Found, read: Callable[[], Decoded], decoder: int = 1) -> Images:
    """The data set from its decoded copy, which is made first when it is missing, damaged or out of date.

    A copy by an earlier decoder is out of date: it may have been blind to what this one sees.
    """
    folder = place(name, settings, found)
    if (copy := opened(folder, decoder)) is not None:
        return _images(*copy, name, found.origin)
    decoded = read()
    header, arrays = _header(decoded, decoder), _arrays(decoded)
    try:
        _store(folder, header, arrays)
    except OSError:  # read-only or full: the data set still works, it is only decoded again next time
        return _images(header, arrays, name, f"{found.origin}; not cached, as {folder.parent} cannot be written")
    return _images(*(opened(folder, decoder) or (header, arrays)), name, found.origin)


def place(name: str, settings: dict[str, str], found: Found) -> Path:
    """The folder of the decoded copy: it depends on the settings, and on the date and size of every source file."""
    try:
        stats = [(str(path), os.stat(path)) for path in found.files]
    except OSError as error:  # such as a link that leads nowhere
        raise BadInput(f"{error.filename} cannot be read ({error.strerror}); replace or remove it") from None
    files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    source, state = _digest(sorted(settings.items()), found.origin), _digest(VERSION, files)
    return cache_folder() / f"{name}-{source}-{state}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Header:
    """What is known of a decoded copy besides its arrays."""

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    checksum: str
    sums: dict[str, int]  # of every array's bytes, see byte_sum
    scaled: str = ""
    owner_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    decoder: int = 1


def _header(decoded: Decoded, decoder: int) -> Header:
    sums = {part: byte_sum(array) for part, array in _arrays(decoded).items()}
    mean, std = moments(decoded.x, decoded.train)
    about = checksum(decoded.x, decoded.y), sums, decoded.scaled, decoded.owner_names, decoded.notes, decoder
    return Header(decoded.classes, mean, std, *about)


def _arrays(decoded: Decoded) -> dict[str, np.ndarray]:
    there = {part: array for part in ARRAYS if (array := getattr(decoded, part)) is not None}
    return {part: np.ascontiguousarray(array, np.uint8 if part == "x" else np.int64) for part, array in there.items()}


def byte_sum(array: np.ndarray) -> int:
    """Of all bytes as 64-bit words: any one damaged place changes it, and it runs at the speed of memory."""
    flat = array.reshape(-1).view(np.uint8)
    whole = len(flat) // 8 * 8
    words = int(flat[:whole].view(np.uint64).sum(dtype=np.uint64)) if whole else 0
    return (words + int.from_bytes(flat[whole:].tobytes(), "little")) % 2**64


def checksum(x: np.ndarray, y: np.ndarray) -> str:
    """sha256 of the decoded bytes and labels."""
    digest = hashlib.sha256(np.ascontiguousarray(x).data)
    digest.update(np.ascontiguousarray(y, np.int64).data)
    return digest.hexdigest()


MOMENTS_AT_ONCE = 16 << 20  # bytes


def moments(x: np.ndarray, index: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, of pixels in [0, 1]; exact, as bytes can be counted."""
    counts = np.zeros((x.shape[1], 256), np.int64)
    for some in np.array_split(index, max(1, x[index[:1]].nbytes * len(index) // MOMENTS_AT_ONCE)):
        for channel in range(x.shape[1]):
            counts[channel] += np.bincount(x[some, channel].reshape(-1), minlength=256)
    values, shares = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
    # A channel without any contrast must not divide by zero.
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _store(folder: Path, header: Header, arrays: dict[str, np.ndarray]) -> None:
    """Written aside and renamed, so that a half-made copy never has the name of a whole one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for part, array in arrays.items():
            with open(aside / f"{part}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        (aside / "header.json").write_text(json.dumps(vars(header)), "utf-8")
        _rename(aside, folder, header.decoder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _tidy(folder)


def _rename(aside: Path, folder: Path, decoder: int) -> None:
    """A damaged copy makes way; when another process was first, its copy is as good."""
    for _ in range(3):
        try:
            os.rename(aside, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if opened(folder, decoder) is not None:
            return
        away = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        with contextlib.suppress(OSError):
            os.rename(folder, away / "damaged")
        shutil.rmtree(away, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Copies of older files of the same source, and what interrupted processes left behind more than a day ago."""
    source = folder.name.rsplit("-", 1)[0]
    for other in folder.parent.glob(f"{source}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    for aside in folder.parent.glob(f".{source}-*"):
        with contextlib.suppress(OSError):
            if time.time() - aside.stat().st_mtime > 86400:
                shutil.rmtree(aside, ignore_errors=True)


def opened(folder: Path, decoder: int = 1) -> tuple[Header, dict[str, np.ndarray]] | None:
    """Header and mapped arrays of a copy that is whole, undamaged and not by an earlier decoder."""
    try:
        stored = read_json(folder / "header.json")
        # Older copies do not say what was scaled, nor names; that is not worth a second download.
        stored = {"scaled": "", "owner_names": (), "notes": (), "decoder": 1, **stored}
        if stored["decoder"] < decoder:
            return None
        lists = {name: tuple(stored[name]) for name in ("classes", "mean", "std", "owner_names", "notes")}
        header = Header(**lists, **{name: stored[name] for name in ("checksum", "sums", "scaled", "decoder")})
        arrays = {part: _mapped(folder / f"{part}.npy") for part in header.sums}
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = {"x", "y", "train", "test"} <= arrays.keys()
    return (header, arrays) if whole and all(byte_sum(arrays[part]) == header.sums[part] for part in arrays) else None


def _mapped(path: Path) -> np.ndarray:
    """Copy-on-write: torch insists on writable memory, and nobody must write to the file.

    Linux would set memory aside for all that might be written, and refuse a file larger than what there is.
    """
    if not _PRIVATE:
        return np.load(path, mmap_mode="c")
    stored = np.load(path, mmap_mode="r")
    with open(path, "rb") as file:
        room = mmap.mmap(file.fileno(), 0, flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.ndarray(stored.shape, stored.dtype, room, stored.offset)


def _images(header: Header, arrays: dict[str, np.ndarray], name: str, origin: str) -> Images:
    def tensor(part: str) -> torch.Tensor:
        return torch.from_numpy(arrays[part])

    return Images(
        x=tensor("x"),
        y=tensor("y"),
        train=tensor("train"),
        test=tensor("test"),
        classes=header.classes,
        mean=header.mean,
        std=header.std,
        users=tensor("users") if "users" in arrays else None,
        domains=tensor("domains") if "domains" in arrays else None,
        checksum=header.checksum,
        origin=origin,
        name=name,
        scaled=header.scaled,
        owner_names=header.owner_names,
        groups=tensor("groups") if "groups" in arrays else None,
        notes=header.notes,
    )
