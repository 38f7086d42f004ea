"""Who won among some runs, whether that is safe and what it cost: the report's answer, for the live page."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report import summary_text
from ..report.collect import collect
from ..report.groups import grouped
from ..report.ranking import ranked

_FILES = ("config.yaml", "result.json", "privacy.json", "audit.json")  # a finished run changes with one of them
_MOST = 400  # runs that are kept in memory
_PATIENCE = 1.0  # seconds until somebody is told how far it is, and others can be answered
Stamp = tuple[tuple[int, int] | None, ...]


class LiveAnswers:
    """Each run is read once, as long as its files stay as they are."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[Stamp, dict[str, Any]]] = {}
        self._lock = threading.Lock()  # one at a time: of many runs it is seconds of work

    def about(self, paths: Mapping[str, Path]) -> dict[str, Any]:
        """The answer about finished runs, by their names; `marks` says of runs of the best methods what they are.

        `scores`: what runs are ranked by, where that is not the accuracy of the global model, and `scored` its name.
        `read`, where that takes longer: how many were read so far. Who asks again gets on.
        """
        until, read = time.monotonic() + _PATIENCE, list[dict[str, Any]]()
        with self._lock:
            for name, path in paths.items():
                if read and time.monotonic() > until:
                    return {"read": len(read)}
                read.append(self._run(path, name))
        runs = _of_common_splits(read)
        groups, fields = ranked(runs)
        told = summary_text.told(runs, groups, fields)
        if left_out := len(read) - len(runs):
            many = "1 run is" if left_out == 1 else f"{left_out} runs are"
            told["sentences"] = [f"{many} left out: not all methods have finished the same seeds.", *told["sentences"]]
        return (
            told
            | {"warnings": summary_text.warnings(runs, groups, fields), "marks": _marks(groups, runs, fields)}
            | _scores(groups, runs)
        )

    def _run(self, path: Path, name: str) -> dict[str, Any]:
        stamp = tuple(_stamp(path / file) for file in _FILES)
        known = self._read.pop(path, None)
        found = known[1] if known and known[0] == stamp else _ends(collect(path, name, None))
        self._read[path] = stamp, found
        while len(self._read) > _MOST:
            del self._read[next(iter(self._read))]  # the one that was not asked for longest
        return found


def _ends(run: dict[str, Any]) -> dict[str, Any]:
    """Without all but the last point of its curves: means over long curves take seconds, and no answer needs them."""
    curves = {
        model: {name: values[-1:] for name, values in curve.items()} for model, curve in run.get("curves", {}).items()
    }
    return run | {"curves": curves}


def _of_common_splits(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """While seeds of a comparison are under way: the runs whose split every method has finished, where there are any.

    Groups with other seeds could not be compared at all.
    """
    splits = [{(runs[n]["data"], runs[n]["split"]) for n in group["runs"]} for group in grouped(runs)]
    common = set.intersection(*splits) if splits else set()
    return [run for run in runs if not common or run["state"] == "corrupt" or (run["data"], run["split"]) in common]


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _marks(
    groups: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], fields: Sequence[Sequence[int]]
) -> dict[str, str]:
    """Run -> "best", or "ahead" where no test says so, or "among the best" where several cannot be told apart."""
    found = {}
    for field in fields:
        having = [groups[number] for number in field if groups[number]["rank"]]
        top = [group for group in having if group["rank"]["is_best"] or group["rank"]["is_close"]]
        word = "among the best" if len(top) > 1 else "best" if top and top[0]["rank"]["tested"] else "ahead"
        found |= {runs[number]["name"]: word for group in top for number in group["runs"]}
    return found


def _scores(groups: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ranked_by = [group for group in groups if group["rank"] and group["rank"]["by"] == "personal"]
    scores = {runs[n]["name"]: value for group in ranked_by for n, value in group["rank"]["scores"].items()}
    return {"scores": scores, "scored": summary_text.model_words(ranked_by) if scores else ""}
