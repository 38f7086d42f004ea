"""Image files with their class, part, owner and patient; and all of them read into one data set."""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import BadInput
from ...core.fields import Number, Part
from ...core.rng import key
from ..decode import ENDINGS, Decoding
from ..formats import stratified
from ..groups import by_first_appearance, held_out_groups
from ..images import Decoded, Found
from ..paths import own_path
from ..pictures import Read, read_pictures, skipped_note
from ..source import LATER, OwnData

TEST_NAMES = ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class Listed:
    """An image file: of which class, in the training or the test part, and whose."""

    file: Path
    label: str
    test: bool = False
    owner: str = ""
    group: str = ""  # whose images stay together: a patient


@dataclass(frozen=True)
class OwnImages(OwnData):
    """Image files that a user brings, of any kind and size."""

    path: str = ""  # where it lies
    size: Number = 32  # pixels of the square that images are made; 0: they are all of one size
    colour: bool = True  # grey ones among them are converted; False: all become grey
    holdout: Part = 0.2  # only where there is no test part
    resize: Literal["crop", "fit", "pad"] = field(
        default="crop", kw_only=True, metadata=LATER
    )  # to the middle square, stretched, or whole with black bars
    bits: Literal[0, 8, 10, 12, 14, 16] = field(
        default=0, kw_only=True, metadata=LATER
    )  # of gray images with 16; 0: the fewest that hold the image
    decoder = 2

    @property
    def wanted(self) -> Decoding:
        return Decoding("RGB" if self.colour else "L", self.size, self.resize, self.bits)

    def found(
        self,
        listing: tuple[list[Listed], bool],
        origin: str,
        group: str,
        notes: tuple[str, ...],
        take: Callable[[Decoded, np.ndarray], Decoded],
        *more: Path,
    ) -> Found:
        """Listed files and how to read them; `take` gets the number of each image's owner, too."""
        listed, has_test = listing

        def read() -> Decoded:
            return take(*read_listed(listed, has_test, self.holdout, self.wanted, group))

        return Found((*more, *(one.file for one in listed)), origin, read, notes)


# ---- folders ---------------------------------------------------------------------------------------------------------
def own_folder(source: OwnImages) -> Path:
    path = own_path(source.path, "data.path")
    if not path.is_dir():
        table = path.suffix.lower() in (".csv", ".tsv", ".parquet")
        hint = f"; a table of images is data=table data.path={source.path}" if table else ""
        raise BadInput(f"data.path is {source.path!r}, which is a file; {source.name} needs a folder{hint}")
    return path


def folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def images_in(folder: Path, skipped: Counter[str] | None = None) -> list[Path]:
    """All image files at any depth below, in a fixed order; others are counted by their kind."""
    found = []
    for place, below, names in os.walk(folder):
        below.sort()
        for name in sorted(names):
            if name[0] != "." and _is_image(place, name):
                found.append(Path(place) / name)
            elif skipped is not None:
                skipped[_kind(name)] += 1
    return found


def _is_image(place: str, name: str) -> bool:
    """By its ending; scanners give files names without one, or numbers with dots, so that their content tells."""
    if name.lower().endswith(ENDINGS):
        return True
    if not (ending := name.rpartition(".")[2]).isdecimal() and ending != name:
        return False
    try:
        with open(os.open(os.path.join(place, name), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            return file.read(132)[128:] == b"DICM" and name != "DICOMDIR"
    except OSError:
        return False


def _kind(name: str) -> str:
    if name[0] == ".":
        return "hidden"
    stem, dot, ending = name.rpartition(".")
    return f".{ending.lower()}" if dot and stem and ending else "without an ending"


def list_classes(
    folder: Path, test: bool = False, owner: str = "", skipped: Counter[str] | None = None, patients: bool = False
) -> list[Listed]:
    """folder/<class>/**/<image>; with `patients`, folder/<class>/<patient>/**/<image>."""
    found = []
    for of in folders_in(folder):
        files = images_in(of, skipped)
        if not files and skipped is not None:
            skipped[f"empty class folder ({'/'.join(of.parts[-2 if owner else -1 :])})"] += 1
        for file in files:
            below = file.relative_to(of).parts[:-1] if patients else ()
            found.append(Listed(file, of.name, test, owner, below[0] if below else ""))
    return found


def list_parts(
    folder: Path, owner: str = "", skipped: Counter[str] | None = None, patients: bool = False
) -> tuple[list[Listed], bool]:
    """(images, whether there is a test part) of folder/{train,test}/<class> or folder/<class>."""
    names = {path.name: path for path in folders_in(folder)}
    tests = [names[name] for name in TEST_NAMES if name in names]
    if skipped is not None:
        outside = sum(path.is_file() and _is_image(str(folder), path.name) for path in folder.iterdir())
        skipped.update({"images outside of class folders": outside} if outside else {})
    if "train" not in names or not tests:
        whole = names["train"] if set(names) == {"train"} else folder
        return list_classes(whole, False, owner, skipped, patients), False
    if skipped is not None:
        for unused in tests[1:]:
            skipped[f"images in {unused.name}, as there is {tests[0].name}"] += len(images_in(unused))
    parts = (names["train"], False), (tests[0], True)
    return [one for part, test in parts for one in list_classes(part, test, owner, skipped, patients)], True


def list_owners(folder: Path, skipped: Counter[str] | None = None, patients: bool = False) -> tuple[list[Listed], bool]:
    """folder/<owner>/..., each as above; an owner without images is refused rather than lost."""
    listed, with_test = [], []
    for owner in folders_in(folder):
        some, has_test = list_parts(owner, owner.name, skipped, patients)
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


# ---- reading ---------------------------------------------------------------------------------------------------------
def read_listed(
    listed: list[Listed], has_test: bool, holdout: float, wanted: Decoding, group: str = "none"
) -> tuple[Decoded, np.ndarray]:
    """(data set with the training part first, number of each image's owner); with a `group`, patients stay together."""
    listed = sorted(listed, key=lambda one: one.test)
    read = read_pictures([one.file for one in listed], replace(wanted, salt=secrets.token_hex(16)))
    listed = [listed[index] for index in read.kept.tolist()]
    classes, y = np.unique([one.label for one in listed], return_inverse=True)
    owners, owner = np.unique([one.owner for one in listed], return_inverse=True)
    groups = _groups(listed, read) if group != "none" else None
    strata = owner * len(classes) + y
    if has_test:
        train, test = np.split(np.arange(len(listed)), [sum(not one.test for one in listed)])
        _refuse_shared(listed, groups, len(train))
    elif groups is None:
        train, test = stratified(strata, holdout, key("folder", "test part"))
    else:
        train, test = held_out_groups(strata, groups, holdout, key("folder", "test part"))
    scaled = in_words(read.sizes, wanted) if wanted.size else ""
    about = {"scaled": scaled, "owner_names": tuple(name for name in owners.tolist() if name)}
    notes = (*read.notes, *_patients_note(listed, read, groups))
    return Decoded(
        read.x, y.astype(np.int64), train, test, tuple(classes.tolist()), groups=groups, notes=notes, **about
    ), owner


def _groups(listed: list[Listed], read: Read) -> np.ndarray | None:
    """Of each image; one without a group is alone. None where nobody knows of any."""
    named = _named(listed, read)
    return by_first_appearance(named) if any(named) else None


def _named(listed: list[Listed], read: Read) -> list[str]:
    """The group or patient of each image, empty where it has none."""
    return [one.group or patient for one, patient in zip(listed, read.patients, strict=True)]


def _patients_note(listed: list[Listed], read: Read, groups: np.ndarray | None) -> tuple[str, ...]:
    if groups is None:
        return ()
    named = _named(listed, read)
    alone = sum(not name for name in named)
    without = f" ({alone} images have none)" if alone else ""
    return (f"{len(set(named) - {''})} patients or groups{without}: none is both in training and in test",)


def _refuse_shared(listed: list[Listed], groups: np.ndarray | None, count: int) -> None:
    """Parts that the user made must keep patients apart, too."""
    if groups is None or not len(both := np.intersect1d(groups[:count], groups[count:])):
        return
    one, other = (listed[int(np.flatnonzero(groups == both[0])[end])].file for end in (0, -1))
    raise BadInput(
        f"{len(both)} patients or groups are both in the training and in the test part, such as that of {one} and "
        f"{other}: move their images into one part, or set data.group=none"
    )


def in_words(sizes: set[tuple[int, int]], wanted: Decoding) -> str:
    """What becomes of images of these heights and widths when they are to be squares of this size."""
    size = wanted.size
    if sizes == {(size, size)}:
        return ""
    smallest, largest = (" x ".join(map(str, end(sorted(sizes), key=math.prod))) for end in (min, max))
    found = smallest if len(sizes) == 1 else f"{smallest} to {largest}"
    done = {"crop": "cut to their middle square and ", "fit": "stretched and ", "pad": "set on black and "}
    changed = "" if all(height == width for height, width in sizes) else done[wanted.resize]
    return f"{found} {changed}made {size} x {size} (data.size)"


def notes_of(skipped: Counter[str]) -> tuple[str, ...]:
    """What was left out while files were listed; said once for many of a kind."""
    return skipped_note(skipped)
