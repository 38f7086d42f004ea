"""Where data lies on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import BadInput
from ..core.located import how_to_point, places_of


def data_folders() -> list[Path]:
    """The folders named in FEDLENS_DATA."""
    named = os.environ.get("FEDLENS_DATA", "").split(os.pathsep)
    return [Path(name).expanduser() for name in named if name.strip()]


def candidates(names: tuple[str, ...]) -> Iterator[Path]:
    """Folders of one of these names inside a data folder, or a data folder that is itself called so."""
    for root in data_folders():
        for name in names:
            if (root / name).is_dir():
                yield root / name
            # Only by its name: MNIST and Fashion-MNIST, say, are files of the same names.
            if root.is_dir() and root.absolute().parts[-len(Path(name).parts) :] == Path(name).parts:
                yield root


def own_path(path: str, key: str) -> Path:
    """A path that a user wrote: where it was for a run, as it is, or inside a data folder."""
    if not path:
        raise BadInput(f"{key} is empty; set it to where the data is, e.g. {key}=my/data")
    written = Path(path).expanduser()
    around = [] if written.is_absolute() else [root / written for root in data_folders()]
    for place in (*places_of(path), written, *around):
        if place.exists():
            return place.absolute()
    raise BadInput(f"{key} is {str(path)!r}, but there is no such file or folder{how_to_point(path, key)}")


def inside(root: Path, name: str, listed_in: Path) -> Path:
    """root/name for a name that was read from a file; one that points elsewhere is refused."""
    path = root / name
    if Path(name).is_absolute() or not path.resolve().is_relative_to(root.resolve()):
        raise BadInput(f"{listed_in} lists {name!r}, which lies outside {root}; remove that entry")
    return path
