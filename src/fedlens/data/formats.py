"""Readers of the file formats that images come in."""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from ..core.errors import BadInput
from ..core.files import open_regular, read_bytes
from ..core.rng import numpy_generator
from .partition.counts import largest_remainder
from .pictures import picture

_UNPACKED = 2 << 30  # bytes of a gzip file at most; the largest of the known data sets has half of it


def bytes_of(path: Path) -> bytes:
    """A file's content, unpacked when it is gzip."""
    try:
        raw = read_bytes(path, _UNPACKED)
        if raw[:2] != b"\x1f\x8b":
            return raw
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            unpacked = file.read(_UNPACKED)
            if file.read(1):
                raise ValueError(f"it unpacks to more than {_UNPACKED >> 30} GiB")
            return unpacked
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read ({error}); fetch it again") from None


def idx(path: Path) -> np.ndarray:
    """MNIST's own format: a magic number with the rank, the sizes, the bytes."""
    raw = bytes_of(path)
    rank = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    start = 4 + 4 * rank
    if rank and len(raw) >= start:
        sizes = np.frombuffer(raw, ">u4", count=rank, offset=4).astype(int).tolist()
        if len(raw) - start == int(np.prod(sizes)):
            return np.frombuffer(raw, np.uint8, offset=start).reshape(sizes)
    raise BadInput(f"{path} is not a whole idx file; fetch it again")


def npz(path: Path) -> dict[str, np.ndarray]:
    """An archive of plain arrays; pickled objects stay closed."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            check_memory(sum(_claimed(archive, part) for part in parts), path)
            return {part.filename.removesuffix(".npy"): _array(archive, part) for part in parts}
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise BadInput(f"{path} is not a readable .npz file of plain arrays ({error})") from None


def _claimed(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> int:
    """Bytes of an array, from its head; refused when it holds objects, or others than the archive says."""
    with archive.open(part) as file:
        head = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(head)
        if read is None:
            raise ValueError(f"{part.filename} has version {head} of numpy's format")
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{part.filename} holds Python objects")
        size = math.prod(shape) * dtype.itemsize
        if size != (there := part.file_size - file.tell()):
            raise ValueError(f"{part.filename} says that it has {size:,} bytes, and has {there:,}")
        return size


def _array(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(part) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def check_memory(needed: int, path: Path) -> None:
    """Refuses a file before memory is taken for what it claims to hold."""
    if needed > (free := free_memory()):
        raise BadInput(f"{path} unpacks to {needed / 1e9:,.1f} GB, and only {free / 1e9:,.1f} GB of memory are free")


def free_memory() -> float:
    """Bytes that are free on this machine, or left to its container; infinite where the system does not say."""
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="utf-8") as lines:
        found.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: the container has no limit
        group = Path("/sys/fs/cgroup")
        most, used = (int((group / f"memory.{name}").read_text("utf-8")) for name in ("max", "current"))
        found.append(most - used)
    return min(found)


def webp_strips(path: Path, size: int = 32) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Images packed one below the other into lossless pictures, and the arrays that lie beside them."""
    pack = npz(path)
    strips = [pack.pop(name) for name in sorted(pack) if name.startswith("strip_")]
    if not strips:
        raise BadInput(f"{path} holds no images; fetch it again")
    x = [picture(io.BytesIO(strip.tobytes()), path).reshape(-1, size, size, 3) for strip in strips]
    return channels_first(np.concatenate(x)), pack


def channels_first(x: np.ndarray) -> np.ndarray:
    """[N, H, W] or [N, H, W, C] as [N, C, H, W]."""
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def stratified(groups: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (rest, held out): `share` of the whole and, to rounding, of every group; a group keeps one at least."""
    draw = numpy_generator(seed)
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    wanted = np.minimum(largest_remainder(sizes, round(share * len(groups))), sizes - 1)
    order = draw.permutation(len(groups))
    order = order[np.argsort(group[order], kind="stable")]
    place = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # inside its group
    held = place < np.repeat(wanted, sizes)
    return np.sort(order[~held]), np.sort(order[held])
