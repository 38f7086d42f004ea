"""A decoded data set, and what every data set's configuration has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadInput


@dataclass(frozen=True)
class Images:
    """A decoded data set; `train` and `test` are its canonical parts, as indices."""

    x: Tensor  # uint8 [N, C, H, W]
    y: Tensor  # int64 [N]
    train: Tensor
    test: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    users: Tensor | None  # who made each example
    domains: Tensor | None  # which domain or modality it is from
    checksum: str  # sha256 of the decoded bytes and labels
    origin: str  # in words: where it was found
    name: str

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Decoded:
    """What a reader of files hands over, all of it numpy."""

    x: np.ndarray  # uint8 [N, C, H, W]
    y: np.ndarray
    train: np.ndarray
    test: np.ndarray
    classes: tuple[str, ...]
    users: np.ndarray | None = None
    domains: np.ndarray | None = None
    mean: tuple[float, ...] | None = None  # None: taken from the training part
    std: tuple[float, ...] | None = None

    @staticmethod
    def parts(
        train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], classes: tuple[str, ...], **more
    ) -> Decoded:
        """From the two canonical parts, the training part first: the order in which other tools number them, too."""
        (x, y), (x_test, y_test) = train, test
        index = np.arange(len(y) + len(y_test))
        return Decoded(
            np.concatenate([x, x_test]),
            np.concatenate([y, y_test]),
            index[: len(y)],
            index[len(y) :],
            classes,
            **more,
        )


@dataclass(frozen=True)
class Found:
    """Files that hold a data set, and how to read them."""

    files: tuple[Path, ...]
    origin: str
    read: Callable[[], Decoded]


@dataclass(frozen=True)
class DataSource:
    """Configuration of a data set; `load()` decodes it once and afterwards maps the decoded copy."""

    name: ClassVar[str]
    mean: ClassVar[tuple[float, ...] | None] = None  # the published ones
    std: ClassVar[tuple[float, ...] | None] = None

    def find(self) -> Found:
        """Where the data is; BadInput says what to fetch when it is nowhere."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its files are")

    def load(self) -> Images:
        from .cache import cached

        found = self.find()
        settings = {field.name: repr(getattr(self, field.name)) for field in fields(self)}
        images = cached(self.name, settings, found, lambda: _checked(self.name, found.read()))
        if self.mean is None or self.std is None:
            return images
        from dataclasses import replace

        return replace(images, mean=self.mean, std=self.std)


def _checked(name: str, decoded: Decoded) -> Decoded:
    """The same, or one sentence on what is wrong with it."""
    x, y = decoded.x, decoded.y
    if x.dtype != np.uint8 or x.ndim != 4 or len(x) != len(y):
        raise BadInput(f"{name}: images must be bytes [N, C, H, W] with one label each, not {x.dtype} {x.shape}")
    if len(decoded.train) == 0:
        raise BadInput(f"{name} has no training images")
    if len(decoded.classes) < 2:
        raise BadInput(f"{name} has one class only ({', '.join(decoded.classes)}); a classifier needs at least two")
    if y.min() < 0 or y.max() >= len(decoded.classes):
        wrong = y[(y < 0) | (y >= len(decoded.classes))][0]
        raise BadInput(f"{name} has the label {wrong}, but labels must lie in 0 to {len(decoded.classes) - 1}")
    return decoded


def as_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)
