"""A decoded data set, and what a reader of files hands over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadInput

NAMED = 10  # classes that are told by name, at most


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
    scaled: str = ""  # in words: what was done to their size, where something was
    owner_names: tuple[str, ...] = ()  # of users by number, or of domains where there are no users
    groups: Tensor | None = None  # whose images must not be both in training and in test: patients, by number
    notes: tuple[str, ...] = ()  # what was found while they were read: kinds of files, and what was skipped

    def __len__(self) -> int:
        return len(self.y)

    def pictures(self, index: Tensor | int) -> Tensor:
        """These images from 0 to 1, as people see them; floats that a program gave are stretched to that range."""
        x = self.x[index]
        if x.dtype == torch.uint8:
            return x.float() / 255
        low, high = x.aminmax()
        return (x - low) / (high - low).clamp(min=torch.finfo(x.dtype).tiny)

    @property
    def summary(self) -> str:
        """What was read: how many, of which classes, of which size."""
        more = ", ..." if len(self.classes) > NAMED else ""
        size = self.scaled or " x ".join(map(str, self.x.shape[2:]))
        return f"{len(self)} images, {len(self.classes)} classes ({', '.join(self.classes[:NAMED])}{more}), {size}"


def alike(classes: Sequence[str]) -> tuple[str, ...]:
    """A note for each two classes that are probably one: their names differ in case or spaces alone."""
    first: dict[str, str] = {}
    pairs = [(first.setdefault("".join(name.casefold().split()), name), name) for name in classes]
    return tuple(
        f"classes {a!r} and {b!r} differ in case or spaces alone: rename one if they are the same"
        for a, b in pairs
        if a != b
    )


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
    scaled: str = ""  # as in Images
    owner_names: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @staticmethod
    def parts(
        train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], classes: tuple[str, ...]
    ) -> Decoded:
        """From the two canonical parts, the training part first: the order in which other tools number them, too."""
        (x, y), (x_test, y_test) = train, test
        if x.shape[1:] != x_test.shape[1:]:
            raise BadInput(
                f"training images are {x.shape[1:]}, but test images {x_test.shape[1:]} (channels, height, width)"
            )
        index = np.arange(len(y) + len(y_test))
        both = np.concatenate([x, x_test]), np.concatenate([y, y_test])
        return Decoded(*both, index[: len(y)], index[len(y) :], classes)


@dataclass(frozen=True)
class Found:
    """Files that hold a data set, and how to read them."""

    files: tuple[Path, ...]
    origin: str
    read: Callable[[], Decoded]
    notes: tuple[str, ...] = ()  # what was found while they were listed
