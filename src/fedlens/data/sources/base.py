"""What data sets with a name have in common: data folders first, then the hub."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ...core.errors import BadInput
from ..images import Found
from ..paths import candidates, data_folders
from ..source import DataSource
from .hub import Hub


@dataclass(frozen=True)
class Named(DataSource):
    """Looks into every data folder for each layout it knows, then asks the hub."""

    folders: ClassVar[tuple[str, ...]]  # that it is known to lie in
    fetch: ClassVar[str]  # what to put there, in words
    known = True

    def look(self, folder: Path) -> Found | None:
        """What this folder holds of it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its files are called")

    def hub(self) -> Hub | None:
        """Where the hub has it."""
        return None

    def find(self) -> Found:
        for folder in candidates(self.folders):
            if found := self.look(folder):
                return found
        hub = self.hub()
        if hub is not None and importlib.util.find_spec("datasets"):
            # The sentence for a hub that does not answer must still say what to fetch by hand.
            found = hub.find()
            return replace(found, read=lambda: hub.read(otherwise=self.missing()))
        raise BadInput(self.missing())

    def missing(self) -> str:
        places = ", ".join(map(str, data_folders())) or "not set"
        online = "" if self.hub() is None else ", or install fedlens[hub] and be online once"
        where = f"into a folder that FEDLENS_DATA names (now {places})"
        return f"{self.name} was not found: put {self.fetch} {where}{online}"
