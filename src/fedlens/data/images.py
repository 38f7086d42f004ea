"""A decoded data set, and what every data set's configuration has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
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

    def __len__(self) -> int:
        return len(self.y)

    @property
    def summary(self) -> str:
        """What was read: how many, of which classes, of which size."""
        more = ", ..." if len(self.classes) > NAMED else ""
        size = self.scaled or " x ".join(map(str, self.x.shape[2:]))
        return f"{len(self)} images, {len(self.classes)} classes ({', '.join(self.classes[:NAMED])}{more}), {size}"


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


@dataclass(frozen=True)
class DataSource:
    """Configuration of a data set; `load()` decodes it once and afterwards maps the decoded copy."""

    name: ClassVar[str]
    mean: ClassVar[tuple[float, ...] | None] = None  # the published ones; None: measured on the training part
    std: ClassVar[tuple[float, ...] | None] = None
    known: ClassVar[bool] = False  # one that everybody has alike; of others a run says what was read

    def find(self) -> Found:
        """Where the data is; BadInput says what to fetch when it is nowhere."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its files are")

    def owners(self) -> int:
        """Among how many clients the files themselves are divided; 0: they are not."""
        return 0

    def load(self, *, labelled: bool = True) -> Images:
        """labelled: whether somebody will learn the classes, of which there must be two then."""
        from .cache import cached

        found = self.find()
        images = cached(self.name, self.settings(), found, lambda: _checked(self.name, found.read()))
        if labelled and len(images.classes) < 2:
            only = ", ".join(images.classes)
            raise BadInput(f"{self.name} has one class only ({only}); a classifier needs at least two")
        if self.mean is None or self.std is None:
            return images
        return replace(images, mean=self.mean, std=self.std)

    def settings(self) -> dict[str, str]:
        """What the decoded copy depends on besides the files."""
        return {field.name: repr(getattr(self, field.name)) for field in fields(self)}


def _checked(name: str, decoded: Decoded) -> Decoded:
    """The same, or one sentence on what is wrong with it."""
    x, y, classes = decoded.x, decoded.y, decoded.classes
    if x.dtype != np.uint8 or x.ndim != 4 or y.shape != x.shape[:1]:
        raise BadInput(
            f"{name} must have byte images [N, C, H, W] and a label for each, not {x.dtype} {x.shape}, {y.shape}"
        )
    if len(decoded.train) == 0:
        raise BadInput(f"{name} has no training images")
    if y.min() < 0 or y.max() >= len(classes):
        wrong = y[(y < 0) | (y >= len(classes))][0]
        raise BadInput(f"{name} has the label {wrong}, but labels must lie in 0 to {len(classes) - 1}")
    return decoded
