"""Data that a user brings: a file of arrays, a folder of images, a folder per client or per domain."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import BadInput
from ...core.fields import Part
from ...core.rng import key
from ..formats import npz, stratified
from ..images import Decoded, Found
from ..paths import own_path
from ..source import LATER, OwnData
from .listing import Listed, OwnImages, folders_in, list_owners, list_parts, notes_of, own_folder, shared_below


@dataclass(frozen=True)
class Npz(OwnData):
    """A .npz file with x_train, y_train, x_test, y_test, or with x and y, of which a share is held out to test on."""

    path: str = ""  # where it lies
    holdout: Part = 0.2  # only where the file has no test part
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


Group = Literal["auto", "folder", "none"]


@dataclass(frozen=True)
class Folder(OwnImages):
    """Images in folders named after their class, below train/ and test/ or with a share held out to test on.

    With `domains`, one level higher: <domain>/<class>/ or <domain>/{train,test}/<class>/.
    """

    domains: bool = False  # whether the first level are domains, and classes lie below
    # Whose images stay together: DICOM patients; folder: <class>/<patient>/; none.
    group: Group = field(default="auto", kw_only=True, metadata=LATER)
    name = "folder"

    def find(self) -> Found:
        skipped: Counter[str] = Counter()
        path = own_folder(self)
        listing = (list_owners if self.domains else self._list)(path, skipped, self.group == "folder")
        return _found(self, path, listing, skipped, "domains" if self.domains else "")

    def _list(self, path: Path, skipped: Counter[str], patients: bool) -> tuple[list[Listed], bool]:
        listed, has_test = list_parts(path, "", skipped, patients)
        if not patients and (shared := shared_below(path, listed, has_test)):
            one, other, name = shared
            raise BadInput(
                f"data.path is {self.path!r}, but its images lie two levels down, in {one}/{name} and {other}/{name}: "
                "this looks like a folder for each client, so use data=clients_folder partition=by_user (if "
                f"{one} and {other} are classes, put the images right into them)"
            )
        return listed, has_test


@dataclass(frozen=True)
class ClientsFolder(OwnImages):
    """A folder per client: <client>/<class>/ or <client>/{train,test}/<class>/; partition=by_user is its default."""

    # Whose images stay together: DICOM patients; folder: <class>/<patient>/; none.
    group: Group = field(default="auto", kw_only=True, metadata=LATER)
    name = "clients_folder"

    def owners(self) -> int:
        return len(folders_in(own_folder(self)))

    def find(self) -> Found:
        skipped: Counter[str] = Counter()
        path = own_folder(self)
        return _found(self, path, list_owners(path, skipped, self.group == "folder"), skipped, "users")


def _found(
    source: Folder | ClientsFolder, path: Path, listing: tuple[list[Listed], bool], skipped: Counter[str], whose: str
) -> Found:
    if not listing[0]:
        hint = f" ({notes_of(skipped)[0]})" if skipped else ""
        raise BadInput(f"data.path is {source.path!r}, but no folders named after a class with images are in it{hint}")
    if source.group == "folder" and not any(one.group for one in listing[0]):
        said = "data.group=folder, but no image lies in a patient's folder"
        raise BadInput(f"{said}, which are CLASS/PATIENT/IMAGE: make them, or leave data.group out")

    def take(decoded: Decoded, owner: np.ndarray) -> Decoded:
        return replace(decoded, **{whose: owner}) if whose else decoded

    return source.found(listing, f"folder {path}", source.group, notes_of(skipped), take)
