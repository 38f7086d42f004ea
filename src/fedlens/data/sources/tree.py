"""Folders of images: the class is the folder's name."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import BadInput
from ...core.rng import key
from ..formats import pictures, size_of, stratified
from ..images import Decoded

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TEST_NAMES = ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class Listed:
    """Image files of one kind: of which class, in the training or the test part, and whose."""

    file: Path
    label: str
    test: bool = False
    owner: str = ""


def folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def images_in(folder: Path) -> list[Path]:
    """All image files at any depth below, in a fixed order; other files are none of our business."""
    found = []
    for place, below, names in os.walk(folder):
        below.sort()
        found += [Path(place) / name for name in sorted(names) if name.lower().endswith(ENDINGS) and name[0] != "."]
    return found


def list_classes(folder: Path, test: bool = False, owner: str = "") -> list[Listed]:
    """folder/<class>/**/<image>"""
    return [Listed(file, of.name, test, owner) for of in folders_in(folder) for file in images_in(of)]


def list_parts(folder: Path, owner: str = "") -> tuple[list[Listed], bool]:
    """(images, whether there is a test part) of folder/{train,test}/<class> or folder/<class>."""
    names = {path.name: path for path in folders_in(folder)}
    test = next((names[name] for name in TEST_NAMES if name in names), None)
    if "train" in names and test is not None:
        return list_classes(names["train"], False, owner) + list_classes(test, True, owner), True
    return list_classes(names["train"] if set(names) == {"train"} else folder, False, owner), False


def list_owners(folder: Path) -> tuple[list[Listed], bool]:
    """folder/<owner>/..., each as above; an owner without images is refused rather than lost."""
    listed, with_test = [], []
    for owner in folders_in(folder):
        some, has_test = list_parts(owner, owner.name)
        if not any(not one.test for one in some):
            raise BadInput(f"{owner} holds no training images in class folders; fill it or remove it")
        listed += some
        with_test.append(has_test)
    if any(with_test) and not all(with_test):
        without = folders_in(folder)[with_test.index(False)]
        raise BadInput(f"{without} has no test folder, but others have one; give one to all or to none")
    return listed, any(with_test)


def shared_below(folder: Path, listed: list[Listed], has_test: bool) -> tuple[str, str, str] | None:
    """(two folders taken for classes, the name of one that both hold), as folders of clients would.

    None where some image lies right in its class folder, or where what lies between is each class's own: patients, say.
    """
    above = 1 if has_test or [path.name for path in folders_in(folder)] == ["train"] else 0
    shared, first = None, {}
    for of, *below in (one.file.relative_to(folder).parts[above:-1] for one in listed):
        if not below:
            return None
        # A client may have a test part of its own, with the classes one level deeper.
        is_part = below[0] in ("train", *TEST_NAMES)
        for name in below[1:2] if is_part else below[:1]:
            other = first.setdefault(name, of)
            shared = shared or ((other, of, name) if other != of else None)
    return shared


def read_listed(
    listed: list[Listed], has_test: bool, holdout: float, mode: str = "RGB", size: int | None = None
) -> tuple[Decoded, np.ndarray]:
    """(data set with the training part first, number of each image's owner)."""
    listed = sorted(listed, key=lambda one: one.test)
    classes, y = np.unique([one.label for one in listed], return_inverse=True)
    owners, owner = np.unique([one.owner for one in listed], return_inverse=True)
    x = pictures([one.file for one in listed], mode, size)
    if has_test:
        train, test = np.split(np.arange(len(listed)), [sum(not one.test for one in listed)])
    else:
        train, test = stratified(owner * len(classes) + y, holdout, key("folder", "test part"))
    scaled = in_words({size_of(one.file) for one in listed}, size) if size else ""
    about = {"scaled": scaled, "owner_names": tuple(name for name in owners.tolist() if name)}
    return Decoded(x, y.astype(np.int64), train, test, tuple(classes.tolist()), **about), owner


def in_words(sizes: set[tuple[int, int]], size: int) -> str:
    """What becomes of images of these heights and widths when they are to be squares of this size."""
    if sizes == {(size, size)}:
        return ""
    smallest, largest = (" x ".join(map(str, end(sorted(sizes), key=math.prod))) for end in (min, max))
    found = smallest if len(sizes) == 1 else f"{smallest} to {largest}"
    cut = "" if all(height == width for height, width in sizes) else "cut to their middle square and "
    return f"{found} {cut}made {size} x {size} (data.size)"
