"""Readers of the file formats that data sets come in; each returns uint8 [N, C, H, W] and labels."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..core.errors import BadInput


def bytes_of(path: Path) -> bytes:
    """A file's content, unpacked when it is gzip."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read ({error}); fetch it again") from None


def idx(path: Path) -> np.ndarray:
    """MNIST's own format: a magic number with the rank, the sizes, the bytes."""
    raw = bytes_of(path)
    rank = raw[3] if len(raw) > 4 and raw[:3] == b"\0\0\x08" else 0
    sizes = np.frombuffer(raw, ">u4", count=rank, offset=4).astype(int).tolist() if len(raw) >= 4 + 4 * rank else []
    content = np.frombuffer(raw, np.uint8, offset=min(len(raw), 4 + 4 * rank))
    if not rank or len(content) != int(np.prod(sizes)):
        raise BadInput(f"{path} is not a whole idx file; fetch it again")
    return content.reshape(sizes)


def webp_strips(path: Path, labels: str, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Packed images: labels, and pictures of many images one below the other."""
    with npz(path) as pack:
        strips = [pack[name] for name in sorted(pack.files) if name.startswith("strip_")]
        y = pack[labels].astype(np.int64)
    x = np.concatenate([pixels(io.BytesIO(strip.tobytes()), path).reshape(-1, size, size, 3) for strip in strips])
    if len(x) != len(y):
        raise BadInput(f"{path} holds {len(x)} images but {len(y)} labels; fetch it again")
    return channels_first(x), y


def npz(path: Path) -> np.lib.npyio.NpzFile:
    """An archive of plain arrays; pickled objects stay closed."""
    import zipfile

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path} is not a readable .npz file ({error})") from None


def pixels(file: Path | io.BytesIO, path: Path, mode: str | None = "RGB", size: int | None = None) -> np.ndarray:
    """One picture as bytes [H, W, C], converted to `mode`; with `size`, scaled and cut to a square in the middle."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            picture = image.convert(mode) if mode and image.mode != mode else image
            if size is not None and picture.size != (size, size):
                picture = ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR)
            array = np.asarray(picture)
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        reason = "it is not an image" if isinstance(error, UnidentifiedImageError) else str(error)
        raise BadInput(f"{path} cannot be decoded ({reason}); replace or remove it") from None
    return array if array.ndim == 3 else array[:, :, None]


def channels_first(x: np.ndarray) -> np.ndarray:
    """[N, H, W] or [N, H, W, C] as [N, C, H, W]."""
    return x[:, None] if x.ndim == 3 else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def stack(pictures: Iterable[np.ndarray], count: int, files: Sequence[Path] | None = None) -> np.ndarray:
    """Pictures [H, W, C] of one size as [N, C, H, W], written into place one by one."""
    x = None
    for index, picture in enumerate(pictures):
        if x is None:
            x = np.empty((count, picture.shape[2], *picture.shape[:2]), np.uint8)
        if picture.transpose(2, 0, 1).shape != x.shape[1:]:
            where = f"{files[index]}" if files else f"image {index}"
            raise BadInput(f"{where} is {picture.shape[1]}x{picture.shape[0]}, unlike {x.shape[3]}x{x.shape[2]} before")
        x[index] = picture.transpose(2, 0, 1)
    return np.empty((0, 3, 1, 1), np.uint8) if x is None else x


def stratified(y: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (rest, held out): `share` of every class, to rounding; at least one stays."""
    from ..core.rng import numpy_generator

    draw = numpy_generator(seed)
    held = []
    for label in np.unique(y):
        of_class = draw.permutation(np.flatnonzero(y == label))
        held.append(of_class[: min(round(share * len(of_class)), len(of_class) - 1)])
    out = np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(len(y)), out), out
