"""A data set in folders as PFLlib writes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...core.errors import BadInput
from ..images import Decoded, Found
from ..paths import own_path
from ..pickles import pickled_array
from ..source import DataSource
from .folders import as_images, as_labels, numbered_classes


@dataclass(frozen=True)
class Pfllib(DataSource):
    """A data set as PFLlib splits it: {train,test}/<client>.npz; partition=by_user is its default."""

    path: str = ""  # the folder with train/ and test/
    name = "pfllib"

    def owners(self) -> int:
        return len(list((own_path(self.path, "data.path") / "train").glob("*.npz")))

    def find(self) -> Found:
        folder = own_path(self.path, "data.path")
        parts = [sorted((folder / part).glob("*.npz"), key=_number) for part in ("train", "test")]
        if not parts[0] or [file.name for file in parts[0]] != [file.name for file in parts[1]]:
            raise BadInput(f"{folder} needs train/<client>.npz and test/<client>.npz for the same clients")
        return Found((*parts[0], *parts[1]), f"folder {folder} of PFLlib", lambda: self._read(*parts))

    def _read(self, *parts: list[Path]) -> Decoded:
        clients = [[_client(file) for file in part] for part in parts]
        x, x_test = (np.concatenate([images for images, _ in part]) for part in clients)
        y, y_test = (np.concatenate([labels for _, labels in part]) for part in clients)
        users = np.concatenate(
            [np.full(len(labels), number) for part in clients for number, (_, labels) in enumerate(part)]
        )
        classes = numbered_classes(np.concatenate([y, y_test]), parts[0][0].parent.parent)
        decoded = Decoded.parts((x, y), (x_test, y_test), classes)
        return replace(decoded, users=users)


def _number(file: Path) -> tuple[int, str]:
    return (int(file.stem) if file.stem.isdigit() else -1, file.name)


def _client(file: Path) -> tuple[np.ndarray, np.ndarray]:
    stored = pickled_array(file, "data")
    if not isinstance(stored, dict) or not {"x", "y"} <= stored.keys():
        raise BadInput(f"{file} does not hold x and y under data, as PFLlib writes them")
    try:
        x, y = (np.asarray(stored[part]) for part in ("x", "y"))
    except ValueError:
        raise BadInput(f"{file}: its x or y is a list of arrays of several shapes; it must be one array") from None
    if np.issubdtype(x.dtype, np.floating) and x.min(initial=0) < 0:
        x = np.clip(x / 2 + 0.5, 0, 1)  # its scripts normalise with mean and std 0.5
    return as_images(x, file), as_labels(y, file)
