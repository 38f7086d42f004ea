"""Data that a user brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import BadInput
from ..core.fields import Share
from ..core.rng import key
from .formats import npz, stratified
from .images import DataSource, Decoded, Found
from .places import own_path


@dataclass(frozen=True)
class Npz(DataSource):
    """A .npz file with x_train, y_train, x_test and y_test, or with x and y, of which a share is held out to test on."""

    path: str = ""
    holdout: Share = 0.2  # only where the file has no test part
    name = "npz"

    def find(self) -> Found:
        path = own_path(self.path, "data.path")
        return Found((path,), f"file {path}", lambda: self._read(path))

    def _read(self, path: Path) -> Decoded:
        with npz(path) as file:
            names = set(file.files)
            try:
                stored = {name: file[name] for name in names}
            except ValueError as error:
                raise BadInput(f"{path} cannot be read ({error})") from None
        if {"x_train", "y_train", "x_test", "y_test"} <= names:
            train, test = (
                (images(stored[f"x_{part}"], path), labels(stored[f"y_{part}"], path)) for part in ("train", "test")
            )
            y = np.concatenate([train[1], test[1]])
            return Decoded.parts(train, test, class_names(stored, y))
        if {"x", "y"} <= names:
            x, y = images(stored["x"], path), labels(stored["y"], path)
            rest, held = stratified(y, self.holdout, key("npz", "test part"))
            return Decoded(x, y, rest, held, class_names(stored, y))
        raise BadInput(
            f"{path} has the keys {', '.join(sorted(names))}; it needs x_train, y_train, x_test, y_test or x, y"
        )


def class_names(stored: dict[str, np.ndarray], y: np.ndarray) -> tuple[str, ...]:
    if "classes" in stored:
        return tuple(str(name) for name in stored["classes"])
    return tuple(str(label) for label in range(int(y.max(initial=-1)) + 1))


def images(x: np.ndarray, path: Path) -> np.ndarray:
    """[N, H, W], [N, H, W, C] or [N, C, H, W], bytes or numbers in [0, 1], as bytes [N, C, H, W]."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise BadInput(f"{path}: images of shape {x.shape} are neither [N, H, W] nor [N, H, W, 1 or 3]")
    if x.dtype == np.uint8:
        return x
    if not np.issubdtype(x.dtype, np.floating) or not np.isfinite(x).all() or x.min() < 0 or x.max() > 1:
        raise BadInput(f"{path}: images must be bytes (uint8) or floats in [0, 1], not {x.dtype}")
    return np.round(x * 255).astype(np.uint8)


def labels(y: np.ndarray, path: Path) -> np.ndarray:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise BadInput(f"{path}: labels must be one whole number per image, not {y.dtype} {y.shape}")
    return y.astype(np.int64)
