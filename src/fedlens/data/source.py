"""What every data set's configuration has in common."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

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
    decoder: ClassVar[int] = 1  # decoded copies with a lower number are made anew
    known: ClassVar[bool] = False  # one that everybody has alike; of others a run says what was read

    def find(self) -> Found:
        """Where the data is; BadInput says what to fetch when it is nowhere."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its files are")

    def owners(self) -> int:
        """Among how many clients the files themselves are divided; 0: they are not."""
        return 0

    def keep_beside(self, folder: Path) -> None:
        """Write into a run's folder what cannot be found elsewhere; usually nothing."""

    def load(self, *, labelled: bool = True) -> Images:
        """labelled: whether somebody will learn the classes, of which there must be two then."""
        found = self.find()
        images = cached(self.name, self.settings(), found, lambda: _checked(self.name, found.read()), self.decoder)
        images = replace(images, notes=(*found.notes, *images.notes))
        if labelled and len(images.classes) < 2:
            only = ", ".join(images.classes)
            raise BadInput(f"{self.name} has one class only ({only}); a classifier needs at least two")
        mean, std = self.statistics(images)
        return replace(images, mean=mean, std=std)

    def statistics(self, images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, by which images are normalised."""
        return (images.mean, images.std) if self.mean is None or self.std is None else (self.mean, self.std)

    def settings(self) -> dict[str, str]:
        """What the decoded copy depends on besides the files; later settings only where they are not the default."""
        found = {each.name: each for each in fields(self) if each.metadata.get("decodes", True)}
        left = {name: each for name, each in found.items() if not each.metadata.get("later")}
        left |= {name: each for name, each in found.items() if getattr(self, name) != each.default}
        return {name: repr(getattr(self, name)) for name in left}


LATER = {"later": True}  # a setting that older decoded copies do not know: at its default they are still good
APPLIED = {"decodes": False}  # a setting that is applied to the decoded copy, which does not depend on it
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what published weights expect


@dataclass(frozen=True)
class OwnData(DataSource):
    """Data whose channel statistics nobody has published: measured, ImageNet's, none, or as they are declared."""

    # By statistics of the training images, or by ImageNet's, which published weights expect.
    normalise: Literal["own", "imagenet", "none"] = field(default="own", kw_only=True, metadata=APPLIED)
    # Of each channel, declared in place of normalise; pixels go from 0 to 1.
    mean: tuple[float, ...] = field(default=(), kw_only=True, metadata=APPLIED)  # pyright: ignore[reportIncompatibleVariableOverride]
    # The same: deviations.
    std: tuple[float, ...] = field(default=(), kw_only=True, metadata=APPLIED)  # pyright: ignore[reportIncompatibleVariableOverride]

    def statistics(self, images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
        channels = images.x.shape[1]
        if not self.mean and not self.std:
            if self.normalise == "own":
                return images.mean, images.std
            if self.normalise == "none":
                return (0.0,) * channels, (1.0,) * channels
            mean, std = IMAGENET if channels == 3 else (((sum(each) / 3,) * channels) for each in IMAGENET)
            return mean, std
        if self.normalise != "own":
            raise BadInput(f"data.mean and data.normalise={self.normalise} contradict each other: remove one of them")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != channels:
                raise BadInput(f"data.{name} has {len(values)} numbers, but images have {channels} channels")
        if min(self.std) <= 0:
            raise BadInput(f"data.std is {min(self.std):g} somewhere, but images are divided by it: it must be above 0")
        return self.mean, self.std


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
