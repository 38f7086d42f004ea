"""All runs below a folder, looked at while somebody asks; what changed since they last asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import BadInput, nearest
from ..core.files import finite
from ..runs.read import differing, runs_in
from .curves import Curves, means
from .follow import Followed

PAUSE = 1.0  # seconds between two searches for news
_PATIENCE = 0.5  # seconds until a page with very many runs is told of the first


class Watch:
    """One reading serves everybody who asks within a second; nobody asking costs nothing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.version = 0
        self._runs: dict[str, Followed] = {}
        self._versions: dict[str, int] = {}  # run -> the version in which it changed
        self._gone: dict[str, int] = {}
        self._lock = threading.Lock()
        self._next_refresh = self._next_search = 0.0

    def since(self, version: int) -> dict[str, Any]:
        """Rows of the runs that changed after this version, and names of those that are gone; whether more are left."""
        with self._lock:
            self._refresh()
            changed = [self._runs[name].row for name, when in self._versions.items() if when > version]
            gone = [name for name, when in self._gone.items() if when > version]
            more = len(self._versions) < len(self._runs)
            return {"version": self.version, "runs": changed, "gone": gone, "more": more}

    def run(self, name: str) -> Followed:
        """A run by its name in the list: no path is ever made of what somebody asks for."""
        with self._lock:
            self._refresh()
            if name not in self._runs:
                raise BadInput(f"there is no run {name!r} in this folder; {nearest(name, self._runs)}")
            if not self._runs[name].row:
                self._note([name])
            return self._runs[name]

    def known(self, names: Sequence[str]) -> list[Followed]:
        """Those of these that are still there; refuses where none is."""
        with self._lock:
            self._refresh()
            there = [name for name in names if name in self._runs]
        return [self.run(name) for name in there or names[:1]]

    def curves(self, asked: Mapping[str, tuple[int, int]], **how: Any) -> dict[str, Any]:
        """Of each run, as `Followed.curves` tells, after a round and of a generation."""
        runs = self.known([*asked])
        with self._lock:
            return {run.name: run.curves(*asked[run.name], **how) for run in runs}

    def means(self, names: Sequence[str], spent: bool = False, **how: Any) -> Curves:
        """Of runs together, at least one of which was evaluated."""
        runs = self.known(names)
        with self._lock:
            found = [series for run in runs if (series := run.series(spent))]
            return means(found, **how) if found else {}

    def settings(self) -> dict[str, Any]:
        """Settings that all runs share, and for each run the others."""
        with self._lock:
            self._refresh()
            each = {name: found for name, run in self._runs.items() if (found := run.settings())}
        other = differing([*each.values()])
        common = {key: value for key, value in next(iter(each.values()), {}).items() if key not in {*other}}
        apart = {name: {key: found[key] for key in other if key in found} for name, found in each.items()}
        return finite({"common": common, "runs": apart})

    def _refresh(self) -> None:
        if time.monotonic() < self._next_refresh:
            return
        if time.monotonic() >= self._next_search:
            began = time.monotonic()
            self._search()
            # A folder that takes long to search is searched less often.
            self._next_search = time.monotonic() + max(2 * PAUSE, 20 * (time.monotonic() - began))
        self._note([name for name, run in self._runs.items() if run.row])
        waiting = [name for name, run in self._runs.items() if not run.row]
        until = time.monotonic() + _PATIENCE
        while waiting:
            self._note([waiting.pop()])
            if time.monotonic() > until:
                break
        self._next_refresh = 0.0 if waiting else time.monotonic() + PAUSE

    def _note(self, names: list[str]) -> None:
        changed = [name for name in names if self._runs[name].refresh()]
        if changed:
            self.version += 1
            self._versions |= dict.fromkeys(changed, self.version)

    def _search(self) -> None:
        found: dict[str, Path] = {}
        with contextlib.suppress(BadInput, OSError):  # none yet, or one that is being removed
            found = {_name(path, self.folder): path for path in runs_in([self.folder])}
        gone = self._runs.keys() - found.keys()
        if gone:
            self.version += 1
            self._gone |= dict.fromkeys(gone, self.version)
            for name in gone:
                del self._runs[name]
                self._versions.pop(name, None)
        for name, path in found.items():
            if name not in self._runs:
                self._runs[name] = Followed(path, name)
                self._gone.pop(name, None)


def _name(path: Path, folder: Path) -> str:
    return path.name if path == folder else path.relative_to(folder).as_posix()
