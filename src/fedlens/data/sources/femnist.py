"""LEAF (Caldas et al., 2018): JSON files of users with their examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import BadInput
from ...core.fields import Part
from ...core.files import read_json
from ...core.rng import key
from ..formats import stratified
from ..images import Decoded, Found
from .base import Named
from .hub import Hub


def leaf_files(folder: Path) -> tuple[list[Path], list[Path]] | None:
    """(train, test) as LEAF's scripts leave them, or (all_data, nothing)."""
    train, test, whole = (sorted((folder / part).glob("*.json")) for part in ("train", "test", "all_data"))
    return (train, test) if train and test else (whole, []) if whole else None


def leaf_users(files: list[Path]) -> Iterator[tuple[str, list[Any], list[int], Path]]:
    """(user, x, y, file), file by file."""
    for file in files:
        try:
            content = read_json(file)
            users = [
                (user, content["user_data"][user]["x"], content["user_data"][user]["y"]) for user in content["users"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{file} is not a LEAF file with users and user_data ({error!r}); make it again") from None
        for user, x, y in users:
            if len(x) != len(y):
                raise BadInput(f"{file} has {len(x)} examples but {len(y)} labels for user {user!r}; make it again")
            yield user, x, y, file


def leaf_examples(
    parts: tuple[list[Path], ...], read: Callable[[list[Any], Path], Any], holdout: float
) -> tuple[list[Any], np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    """(what `read` made of each user's x, labels, users, training part, test part, names of users)."""
    made, y, users, sizes, numbers = [], [], [], [], {}
    for part in parts:
        for user, x, labels, file in leaf_users(part):
            made.append(read(x, file))
            y += labels
            users += [numbers.setdefault(user, len(numbers))] * len(labels)
        sizes.append(len(y))
    whose, index = np.array(users, np.int64), np.arange(len(y))
    train, test = index[: sizes[0]], index[sizes[0] :]
    if not parts[1]:
        train, test = stratified(whose, holdout, key("leaf", "test part"))
    return made, np.array(y, np.int64), whose, train, test, tuple(numbers)


@dataclass(frozen=True)
class Femnist(Named):
    """Handwritten digits and letters, grey, 28x28, 62 classes, by writer (3,550 of them when complete)."""

    holdout: Part = 0.1  # of each writer's examples, to test on; where LEAF has not split them already
    name = "femnist"
    folders = ("femnist", "FEMNIST", "femnist/data")
    fetch = "a folder femnist with LEAF's folders train and test of JSON files"
    classes = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")

    def hub(self) -> Hub:
        return Hub("flwrlabs/femnist", label="character", user="writer_id", holdout=self.holdout)

    def look(self, folder: Path) -> Found | None:
        if not (parts := leaf_files(folder)):
            return None
        files = tuple(file for part in parts for file in part)
        return Found(files, f"folder {folder} ({len(files)} files of LEAF)", lambda: self._read(*parts))

    def _read(self, *parts: list[Path]) -> Decoded:
        pixels, y, users, train, test, names = leaf_examples(parts, _bytes, self.holdout)
        x = np.concatenate(pixels).reshape(-1, 1, 28, 28)
        return Decoded(x, y, train, test, self.classes, users, owner_names=names)


def _bytes(x: list[list[float]], file: Path) -> np.ndarray:
    try:
        values = np.array(x, np.float64).reshape(len(x), 784)
    except ValueError:
        raise BadInput(f"{file} has examples that are not 784 numbers; make it again") from None
    if not ((values >= 0) & (values <= 1)).all():
        raise BadInput(f"{file} has pixels outside [0, 1]; make it again")
    return np.round(values * 255).astype(np.uint8)
