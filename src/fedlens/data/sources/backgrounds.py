"""Pieces of natural photographs: BSDS500, or whatever else is there."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ...core.errors import BadInput
from ..formats import picture
from ..images import Found
from ..partition.counts import Generator
from ..paths import candidates
from .photos import TinyImagenet, parquet
from .small import Cifar10
from .tree import images_in

FOLDERS = ("bsds500", "BSDS500", "BSR/BSDS500", "BSR_bsds500/BSR/BSDS500")


def find_photographs() -> tuple[tuple[Path, ...], str]:
    """(files, what they are in words)."""
    for folder in candidates(FOLDERS):
        pack = folder / "images_half.parquet"
        files = (pack,) if pack.is_file() else tuple(images_in(folder))
        if files:
            return files, "BSDS500"
    for source in (TinyImagenet(), Cifar10()):
        if found := _found(source):
            return found.files, f"{source.name}, as BSDS500 is not there"
    raise BadInput(
        "the view colour needs natural photographs: put BSDS500 into a folder bsds500 in one that FEDLENS_DATA names"
    )


def _found(source: TinyImagenet | Cifar10) -> Found | None:
    return next((found for folder in candidates(source.folders) if (found := source.look(folder))), None)


def patches(count: int, size: tuple[int, ...], draw: Generator) -> np.ndarray:
    """Random pieces [count, 3, H, W], each of a random photograph."""
    photographs = [photo for photo in _photographs() if photo.shape[0] >= size[0] and photo.shape[1] >= size[1]]
    if not photographs:
        raise BadInput(f"no photograph for the view colour is as large as the images, {size[1]}x{size[0]}")
    which = draw.integers(len(photographs), size=count)
    corners = draw.random((count, 2))
    cut = np.empty((count, *size, 3), np.uint8)
    for index, photo in enumerate(photographs[number] for number in which):
        top, left = (corners[index] * (np.array(photo.shape[:2]) - size + 1)).astype(int)
        cut[index] = photo[top : top + size[0], left : left + size[1]]
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 2))


def _photographs() -> list[np.ndarray]:
    files, words = find_photographs()
    if words != "BSDS500":
        source = TinyImagenet() if words.startswith(TinyImagenet.name) else Cifar10()
        return list(source.load().x.numpy().transpose(0, 2, 3, 1))
    if files[0].suffix == ".parquet":
        return [picture(io.BytesIO(raw), files[0]) for raw in parquet(files[0])["jpeg"].to_pylist()]
    return [picture(file, file) for file in files]
