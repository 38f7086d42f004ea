"""Classes as a run declares them: a data set may lack some, and may not bring others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..core.errors import BadInput
from .images import NAMED, Images


class OtherClasses(BadInput):
    """A data set has classes that the run does not declare."""

    def __init__(self, names: Sequence[str]):
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        super().__init__(f"classes= does not declare {', '.join(names[:NAMED])}{more}, of which the data has images")
        self.names = tuple(names)


def declared(images: Images, classes: tuple[str, ...], drop: bool = False) -> Images:
    """With labels as the run numbers its classes. Some may be lacking; others are refused, or dropped."""
    if len(set(classes)) < max(2, len(classes)):
        raise BadInput(f"classes are {', '.join(classes) or 'none'}, but they must be two or more different names")
    if images.classes == classes:
        return images
    place = torch.tensor([classes.index(name) if name in classes else -1 for name in images.classes])
    y = place[images.y]
    used = torch.cat([images.train, images.test])
    others = sorted({images.classes[label] for label in images.y[used][y[used] < 0].tolist()})
    if others and not drop:
        raise OtherClasses(others)
    train, test = (part[y[part] >= 0] for part in (images.train, images.test))
    if not len(train):
        raise BadInput("none of the training images is of a class that the run declares")
    return replace(images, y=y.clamp(min=0), train=train, test=test, classes=classes)
