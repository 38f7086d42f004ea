"""A part of another data set: as many images as a run has time for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...core.fields import Count
from ...core.rng import key, numpy_generator
from ..images import Decoded, Found, Images
from ..source import DataSource
from .small import FashionMnist


@dataclass(frozen=True)
class Sample(DataSource):
    """So many images of another data set, classes in its own proportions; always the same ones."""

    base: DataSource = FashionMnist()  # the data set that they are from
    train: Count = 10_000  # of its training images, at most
    test: Count = 5_000  # of its test images, at most
    name = "sample"
    known = True

    def find(self) -> Found:
        found = self.base.find()
        origin = f"{found.origin}, {self.train} training and {self.test} test images of it at most"
        return Found(found.files, origin, lambda: self._read(self.base.load(labelled=False)), found.notes)

    def owners(self) -> int:
        return self.base.owners()

    def statistics(self, images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Published ones of the whole, where there are such."""
        return self.base.statistics(images)

    def _read(self, images: Images) -> Decoded:
        labels = images.y.numpy()
        train, test = (
            _some(labels, part.numpy(), count, name)
            for part, count, name in ((images.train, self.train, "train"), (images.test, self.test, "test"))
        )
        kept = np.concatenate([train, test])

        def of(values: Tensor | None) -> np.ndarray | None:
            return None if values is None else values.numpy()[kept]

        return Decoded(
            images.x.numpy()[kept],
            labels[kept],
            np.arange(len(train)),
            np.arange(len(train), len(kept)),
            images.classes,
            of(images.users),
            of(images.domains),
            images.scaled,
            images.owner_names,
            of(images.groups),
        )


def _some(labels: np.ndarray, part: np.ndarray, count: int, name: str) -> np.ndarray:
    """That many of a part, sorted: of each class its share, rounded so that the whole is exact."""
    if count >= len(part):
        return part
    mixed = numpy_generator(key("sample", name)).permutation(part)
    ordered = mixed[np.argsort(labels[mixed], kind="stable")]
    # Evenly spaced places in an order by class: each class has its share to within one image.
    return np.sort(ordered[(np.arange(count) * len(part) + len(part) // 2) // count])
