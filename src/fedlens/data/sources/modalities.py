"""One data set seen through several eyes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...core.errors import BadInput, nearest
from ...core.rng import key, numpy_generator
from ..images import DataSource, Decoded, Found, Images
from .backgrounds import find_photographs
from .small import FashionMnist
from .views import VIEWS, Colour, View


@dataclass(frozen=True)
class Modalities(DataSource):
    """Another data set in several views, each a domain; deal it with partition=domains (PSE, joint shift)."""

    base: DataSource = FashionMnist()
    views: tuple[str | View, ...] = ("gray", "colour")
    images: Literal["all", "own"] = "all"  # every view shows all images, or each image is in one view only
    name = "modalities"
    known = True

    def find(self) -> Found:
        views = self.seen()
        found = self.base.find()
        files, origin = found.files, f"{found.origin}, seen as {', '.join(view.name for view in views)}"
        if any(isinstance(view, Colour) for view in views):
            photographs, words = find_photographs()
            files, origin = (*files, *photographs), f"{origin} (backgrounds: {words})"
        return Found(files, origin, lambda: self._read(self.base.load(), views))

    def seen(self) -> list[View]:
        if len(self.views) < 2:
            raise BadInput(f"data.views has {len(self.views)} views, but modalities need at least two")
        for view in self.views:
            if isinstance(view, str) and view not in VIEWS:
                raise BadInput(f"data.views names {view!r}; {nearest(view, VIEWS)}")
        return [VIEWS[view]() if isinstance(view, str) else view for view in self.views]

    def settings(self) -> dict[str, str]:
        return super().settings() | {"views": repr(self.seen())}

    def _read(self, images: Images, views: list[View]) -> Decoded:
        x, count = images.x.numpy(), len(images)
        if self.images == "all":
            of_view = [np.arange(count)] * len(views)
        else:
            of_view = np.array_split(numpy_generator(key("modalities", "images")).permutation(count), len(views))
            of_view = [np.sort(index) for index in of_view]
        draws = [numpy_generator(key("modalities", number)) for number in range(len(views))]
        shown = [view(x[index], draw) for view, index, draw in zip(views, of_view, draws, strict=True)]
        channels = max(part.shape[1] for part in shown)
        pixels = np.concatenate([np.broadcast_to(part, (len(part), channels, *part.shape[2:])) for part in shown])
        source = np.concatenate(of_view)
        domains = np.repeat(np.arange(len(views)), [len(index) for index in of_view])
        is_train = np.isin(source, images.train.numpy())
        is_test = np.isin(source, images.test.numpy())
        users = None if images.users is None else images.users.numpy()[source]
        y, train, test = images.y.numpy()[source], np.flatnonzero(is_train), np.flatnonzero(is_test)
        names = tuple(view.name for view in views) if users is None else images.owner_names
        return Decoded(pixels, y, train, test, images.classes, users, domains, owner_names=names)
