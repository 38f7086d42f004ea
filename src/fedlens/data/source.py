"""What every data set's configuration has in common."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from ..core.errors import BadInput
from .cache import cached
from .images import Decoded, Found, Images


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
    if not all(x.shape[1:]):
        raise BadInput(f"{name} has images of {x.shape[2]} x {x.shape[3]} pixels; they must have some")
    if len(decoded.train) == 0:
        raise BadInput(f"{name} has no training images")
    if y.min() < 0 or y.max() >= len(classes):
        wrong = y[(y < 0) | (y >= len(classes))][0]
        raise BadInput(f"{name} has the label {wrong}, but labels must lie in 0 to {len(classes) - 1}")
    return decoded
