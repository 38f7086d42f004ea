"""Data that a user brings: a file of arrays, a folder of images, a folder per client or per domain."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...core.errors import BadInput
from ...core.fields import Number, Share
from ...core.rng import key
from ..formats import npz, pictures, size_of, stratified
from ..images import Decoded, Found
from ..paths import own_path
from ..source import DataSource


@dataclass(frozen=True)
class Npz(DataSource):
    """A .npz file with x_train, y_train, x_test, y_test, or with x and y, of which a share is held out to test on."""

    path: str = ""
    holdout: Share = 0.2  # only where the file has no test part
    name = "npz"

    def find(self) -> Found:
        path = own_path(self.path, "data.path")
        return Found((path,), f"file {path}", lambda: self._read(path))

    def _read(self, path: Path) -> Decoded:
        stored = npz(path)
        if {"x_train", "y_train", "x_test", "y_test"} <= set(stored):
            x, x_test = (as_images(stored[part], path) for part in ("x_train", "x_test"))
            y, y_test = (as_labels(stored[part], path) for part in ("y_train", "y_test"))
            return Decoded.parts((x, y), (x_test, y_test), _classes(stored, np.concatenate([y, y_test]), path))
        if {"x", "y"} <= set(stored):
            x, y = as_images(stored["x"], path), as_labels(stored["y"], path)
            return Decoded(x, y, *stratified(y, self.holdout, key("npz", "test part")), _classes(stored, y, path))
        keys = ", ".join(sorted(stored)) or "nothing"
        raise BadInput(f"{path} holds {keys}; it must hold x_train, y_train, x_test, y_test or x, y")


_CLASSES = 100_000  # labels up to it are believed, however few images there are


def _classes(stored: dict[str, np.ndarray], y: np.ndarray, path: Path) -> tuple[str, ...]:
    if "classes" not in stored:
        return numbered_classes(y, path)
    if stored["classes"].ndim != 1:
        raise BadInput(f"{path}: classes must be a list of names, not an array of shape {stored['classes'].shape}")
    return tuple(map(str, stored["classes"].tolist()))


def numbered_classes(y: np.ndarray, path: Path) -> tuple[str, ...]:
    """0, 1, ... up to the highest label; refused where that is so high that it is rather a number of something else."""
    highest = int(y.max(initial=-1))
    if highest >= max(len(y), _CLASSES):
        raise BadInput(f"{path}: the highest label is {highest}, and there are {len(y)} images; number classes from 0")
    return tuple(map(str, range(highest + 1)))


def as_images(x: np.ndarray, path: Path) -> np.ndarray:
    """[N, H, W], [N, H, W, C] or [N, C, H, W], bytes or numbers in [0, 1], as bytes [N, C, H, W]."""
    shape = x.shape
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise BadInput(
            f"{path}: images of shape {shape} are none of [N, H, W], [N, H, W, C], [N, C, H, W] with C 1 or 3"
        )
    if x.dtype == np.uint8:
        return x
    wanted = f"{path}: images must be bytes (uint8) or floats in [0, 1]"
    if not np.issubdtype(x.dtype, np.floating):
        raise BadInput(f"{wanted}, not {x.dtype}")
    if odd := int((~np.isfinite(x)).any(axis=(1, 2, 3)).sum()):
        raise BadInput(f"{wanted}; in {odd} of {len(x)} some are not numbers (NaN) or infinite")
    if ((x < 0) | (x > 1)).any():
        raise BadInput(f"{wanted}; these go from {x.min():g} to {x.max():g}")
    return np.round(x * 255).astype(np.uint8)


def as_labels(y: np.ndarray, path: Path) -> np.ndarray:
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise BadInput(f"{path}: labels must be one whole number per image, not {y.dtype} {y.shape}")
    return y.astype(np.int64)


@dataclass(frozen=True)
class Folder(DataSource):
    """Images in folders named after their class, below train/ and test/ or with a share held out to test on.

    With `domains`, one level higher: <domain>/<class>/ or <domain>/{train,test}/<class>/.
    """

    path: str = ""
    size: Number = 32  # pixels of the square that images are cut and scaled to; 0: they are all of one size
    colour: bool = True  # grey ones among them are converted; False: all become grey
    holdout: Share = 0.2  # only where there is no test folder
    domains: bool = False
    name = "folder"

    def find(self) -> Found:
        return _found(self, list_owners if self.domains else self._list, lambda some: self._read(*some))

    def _list(self, path: Path) -> tuple[list[Listed], bool]:
        listed, has_test = list_parts(path)
        if shared := shared_below(path, listed, has_test):
            one, other, name = shared
            raise BadInput(
                f"data.path is {self.path!r}, but its images lie two levels down, in {one}/{name} and {other}/{name}: "
                "this looks like a folder for each client, so use data=clients_folder partition=by_user (if "
                f"{one} and {other} are classes, put the images right into them)"
            )
        return listed, has_test

    def _read(self, listed: list[Listed], has_test: bool) -> Decoded:
        decoded, owner = read_listed(listed, has_test, self.holdout, "RGB" if self.colour else "L", self.size or None)
        return replace(decoded, domains=owner) if self.domains else decoded


@dataclass(frozen=True)
class ClientsFolder(DataSource):
    """A folder per client: <client>/<class>/ or <client>/{train,test}/<class>/; partition=by_user is its default."""

    path: str = ""
    size: Number = 32  # as in Folder
    colour: bool = True
    holdout: Share = 0.2
    name = "clients_folder"

    def owners(self) -> int:
        return len(folders_in(_folder(self)))

    def find(self) -> Found:
        return _found(self, list_owners, lambda some: self._read(*some))

    def _read(self, listed: list[Listed], has_test: bool) -> Decoded:
        decoded, owner = read_listed(listed, has_test, self.holdout, "RGB" if self.colour else "L", self.size or None)
        return replace(decoded, users=owner)


def _found(
    source: Folder | ClientsFolder,
    list_images: Callable[[Path], tuple[list[Listed], bool]],
    read: Callable[[tuple[list[Listed], bool]], Decoded],
) -> Found:
    path = _folder(source)
    listed, has_test = list_images(path)
    if not listed:
        raise BadInput(f"data.path is {source.path!r}, but no folders named after a class with images are in it")
    return Found(tuple(one.file for one in listed), f"folder {path}", lambda: read((listed, has_test)))


def _folder(source: Folder | ClientsFolder) -> Path:
    path = own_path(source.path, "data.path")
    if not path.is_dir():
        raise BadInput(f"data.path is {source.path!r}, which is a file; {source.name} needs a folder")
    return path


# ---- folders of images: the class is the folder's name ---------------------------------------------------------------
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
