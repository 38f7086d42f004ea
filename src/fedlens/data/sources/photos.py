"""Photographs with a name, in folders: CINIC-10, Tiny-ImageNet, CelebA."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import BadInput
from ...core.fields import Count, Part
from ...core.rng import key
from ..decode import Decoding
from ..formats import stratified
from ..images import Decoded, Found
from ..paths import inside
from ..pictures import pictures
from .base import Named
from .femnist import leaf_examples, leaf_files
from .hub import Hub
from .listing import Listed, list_classes, read_listed
from .small import Cifar10


@dataclass(frozen=True)
class Cinic10(Named):
    """90,000 + 90,000 colour images 32x32, CIFAR-10 and ImageNet in CIFAR-10's classes (Darlow et al., 2018)."""

    with_valid: bool = False  # the 90,000 validation images train, too
    name = "cinic10"
    mean, std = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
    folders = ("cinic10", "CINIC-10", "cinic-10")
    fetch = "a folder cinic10 with its folders train, valid and test"

    def hub(self) -> Hub | None:
        return None if self.with_valid else Hub("flwrlabs/cinic10")

    def look(self, folder: Path) -> Found | None:
        parts = ("train", "valid", "test") if self.with_valid else ("train", "test")
        if not all((folder / part / Cifar10.classes[0]).is_dir() for part in parts):
            return None
        listed = [one for part in parts for one in list_classes(folder / part, part == "test")]
        files = tuple(one.file for one in listed)
        return Found(files, f"folder {folder}", lambda: read_listed(listed, True, 0.0, Decoding(size=32))[0])


@dataclass(frozen=True)
class TinyImagenet(Named):
    """100,000 + 10,000 photographs 64x64 of 200 classes of ImageNet; its validation part is the test part."""

    size: Count = 64  # pixels
    name = "tiny_imagenet"
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    folders = ("tiny_imagenet", "tiny-imagenet-200", "tiny_imagenet/tiny-imagenet-200")
    fetch = "the unpacked folder tiny-imagenet-200"

    def hub(self) -> Hub:
        return Hub("zh-plus/tiny-imagenet", test="valid", size=self.size)

    def look(self, folder: Path) -> Found | None:
        packs = (folder / "train.parquet", folder / "val.parquet")
        if all(file.is_file() for file in packs):
            return Found(packs, f"folder {folder} (a subset)", lambda: self._packed(*packs))
        if not ((folder / "train").is_dir() and (folder / "val").is_dir()):
            return None
        listed = list_classes(folder / "train") + self._validation(folder / "val")
        words = _words(folder / "words.txt")
        return Found(tuple(one.file for one in listed), f"folder {folder}", lambda: self._read(listed, words))

    def _read(self, listed: list[Listed], words: dict[str, str]) -> Decoded:
        decoded, _ = read_listed(listed, True, 0.0, Decoding(size=self.size))
        return replace(decoded, classes=tuple(words.get(wnid, wnid) for wnid in decoded.classes))

    def _validation(self, folder: Path) -> list[Listed]:
        """By the annotations beside the images, or in class folders as some scripts rearrange them."""
        annotations = folder / "val_annotations.txt"
        if not annotations.is_file() or not (folder / "images").is_dir():
            return list_classes(folder, test=True)
        lines = [line.split("\t") for line in annotations.read_text("utf-8").splitlines() if line.strip()]
        return [Listed(inside(folder / "images", line[0], annotations), line[1], test=True) for line in lines]

    def _packed(self, *files: Path) -> Decoded:
        (x, y, words), (x_test, y_test, _) = (self._pack(file) for file in files)
        return Decoded.parts((x, y), (x_test, y_test), words)

    def _pack(self, file: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        table = parquet(file)
        raw = table["jpeg"].to_pylist()
        names = [file / name for name in table["name"].to_pylist()]
        x = pictures(names, size=self.size, content=lambda index: io.BytesIO(raw[index]))
        words = json.loads(table.schema.metadata[b"words"])
        return x, np.array(table["label"], np.int64), tuple(word.split(",")[0] for word in words)


def parquet(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{file} cannot be read ({error}); fetch it again") from None


def _words(file: Path) -> dict[str, str]:
    """The first word for each class of WordNet."""
    lines = [line.split("\t") for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    return {line[0]: line[1].split(",")[0] for line in lines if len(line) > 1}


@dataclass(frozen=True)
class Celeba(Named):
    """Who smiles? 202,599 portraits of 10,177 persons (Liu et al., 2015), by person as in LEAF."""

    size: Count = 84  # pixels, LEAF's
    min_examples: Count = 5  # persons with fewer are left out, as in LEAF
    holdout: Part = 0.1  # of each person's portraits, to test on; LEAF's, where it has not split them already
    name = "celeba"
    folders = ("celeba", "CelebA", "celeba/data", "celeba/data/raw", "celeba/raw")
    fetch = "a folder celeba with img_align_celeba/, list_attr_celeba.txt and identity_CelebA.txt"
    classes = ("serious", "smiling")

    def look(self, folder: Path) -> Found | None:
        raw = next((place for place in (folder, folder / "raw") if (place / "img_align_celeba").is_dir()), None)
        if raw is None:
            return None
        portraits = raw / "img_align_celeba"  # its date stands for those of the portraits
        if parts := leaf_files(folder):
            files = (portraits, *(file for part in parts for file in part))
            return Found(files, f"folder {folder} (users of LEAF)", lambda: self._by_leaf(parts, portraits))
        about = (raw / "list_attr_celeba.txt", raw / "identity_CelebA.txt")
        if not all(file.is_file() for file in about):
            return None
        return Found((portraits, *about), f"folder {folder}", lambda: self._whole(portraits, *about))

    def _by_leaf(self, parts: tuple[list[Path], list[Path]], folder: Path) -> Decoded:
        def read(x: list[str], file: Path) -> list[Path]:
            return [inside(folder, str(name), file) for name in x]

        files, y, users, train, test, names = leaf_examples(parts, read, self.holdout)
        x = pictures([file for some in files for file in some], size=self.size)
        return Decoded(x, y, train, test, self.classes, users, owner_names=names)

    def _whole(self, folder: Path, attributes: Path, identities: Path) -> Decoded:
        lines = attributes.read_text("utf-8").splitlines()
        column = lines[1].split().index("Smiling") + 1 if len(lines) > 1 and "Smiling" in lines[1].split() else 0
        if not column:
            raise BadInput(f"{attributes} has no column Smiling; fetch it again")
        smiles = {row[0]: int(row[column] == "1") for line in lines[2:] if len(row := line.split()) > column}
        person = {row[0]: row[1] for line in identities.read_text("utf-8").splitlines() if len(row := line.split()) > 1}
        names = sorted(smiles.keys() & person.keys())
        persons, users, counts = np.unique([person[name] for name in names], return_inverse=True, return_counts=True)
        kept = np.flatnonzero(counts[users] >= self.min_examples)
        many, users = np.unique(users[kept], return_inverse=True)
        files = [inside(folder, names[index], attributes) for index in kept]
        y = np.array([smiles[names[index]] for index in kept], np.int64)
        train, test = stratified(users, self.holdout, key("celeba", "test part"))
        x, called = pictures(files, size=self.size), tuple(persons[many].tolist())
        return Decoded(x, y, train, test, self.classes, users, owner_names=called)
