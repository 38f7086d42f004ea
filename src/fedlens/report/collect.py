"""What a page knows about a run: its folder as plain data, read from its tables and never from memory of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import BadInput
from ..core.files import finite
from ..data import Names
from ..runs.folder import RunFolder
from ..runs.read import StoredRun, client_accuracies, damage_of, fairness, flat, method_of, settings_of, thinned
from .thumbnails import Pictures

DRAWN = 100  # clients of a split at most
TIMED = {"batch": 32, "repeats": 9}  # images a pass, and passes of which the fastest counts, where latency is measured


def collect(path: Path, name: str, pictures: Pictures, latency: bool = False) -> dict[str, Any]:
    """A run as plain data; `state` says whether it is complete, unfinished or corrupt, and `trouble` what is wrong."""
    blank = {"name": name, "state": "corrupt", "trouble": "", "method": "?", "settings": {}, "seed": None}
    try:
        with damage_of(path):
            settings = settings_of(path)
            method = method_of(settings["algorithm"])
            blank |= {"method": method, "settings": flat(settings), "seed": settings.get("seed")}
            return finite(blank | _intact(StoredRun.read(path), pictures, name, latency))
    except BadInput as error:
        return finite(blank | {"trouble": str(error)})


def _intact(run: StoredRun, pictures: Pictures, name: str, latency: bool) -> dict[str, Any]:
    names = run.folder.names()
    return {
        "state": "complete" if run.result else "unfinished",
        "trouble": run.unfinished,
        "rounds": run.rounds,
        "planned": run.planned,
        "passport": {part: value for part, value in run.passport.items() if part != "names"},
        "split": run.passport["split_hash"],
        "data": run.passport["data"]["sha256"],
        "curves": run.curves(),
        "looks": looks(run, names),
        "bytes": run.traffic(),
        "seconds": run.total("seconds") or 0.0,
        "owned": owned(counts, names) if (counts := run.json("label_counts.json")) else None,
        "privacy": run.json("privacy.json"),
        "audit": run.json("audit.json"),
        "flower": _flower(run),
        "sub_models": _sub_models(run.folder, run.settings, names, latency) if run.result else [],
        "pictures": pictures.of(run.folder.figures, name),
    }


def _flower(run: StoredRun) -> dict[str, Any] | None:
    """Of a run over real machines: whether nodes had data of their own, and the bytes that Flower counted, where
    somebody has kept the answer of `fedlens deploy status DIR --json` in the run as flower.json."""
    if run.passport.get("engine") != "flower":
        return None
    status = run.json("flower.json")
    counts = [row["network-traffic"] for row in status["flower"]] if status else []
    moved = {way: sum(count[f"{way}bound-bytes"] for count in counts) for way in ("in", "out")} if counts else None
    return {"own_data": bool(run.passport.get("nodes_own_data")), "moved": moved}


def _sub_models(folder: RunFolder, settings: Mapping[str, Any], names: Names, latency: bool) -> list[dict[str, Any]]:
    """SPATL's smaller networks, a row for each client; nothing where the data are not at hand to build them.

    Latency only where it is asked for: it differs each time, and a page is otherwise the same, byte by byte.
    """
    if not str(settings["algorithm"]["is"]).startswith("spatl") or settings["algorithm"].get("selector") == "all":
        return []
    from ..papers.spatl.tables import sub_models

    try:
        found = sub_models(folder.path, TIMED["batch"], TIMED["repeats"] if latency else 0)
    except BadInput:
        return []
    shown = ("client", "flops", "parameters", "sent", "bytes", "accuracy", "dense", *(("latency",) if latency else ()))
    return [{key: getattr(one, key) for key in shown} | {"name": names.client(one.client)} for one in found]


def looks(run: StoredRun, names: Names) -> dict[str, dict[str, Any]]:
    """Model -> accuracy of each client with it on its own test images at the last evaluation, and how fair that is."""
    return {
        model: {
            "clients": thinned(sorted(by)),
            "names": [names.client(client) for client in thinned(sorted(by))] if names.clients else None,
            "accuracy": [by[client] for client in thinned(sorted(by))],
            "count": len(by),
            **fairness(list(by.values())),
        }
        for model, by in client_accuracies(run.metrics).items()
    }


def owned(counts: Sequence[Sequence[int]], names: Names) -> dict[str, Any]:
    """How many images of which class clients own; of very many clients some."""
    sizes, drawn = [sum(row) for row in counts], thinned(range(len(counts)), DRAWN)
    held = sum(count > 0 for row in counts for count in row) / len(counts)
    return {
        "total": {"clients": len(counts), "smallest": min(sizes), "largest": max(sizes), "classes": held},
        "clients": drawn,
        "names": [names.client(client) for client in drawn],
        "ticks": [names.tick(client) for client in drawn],
        "classes": [names.label(label) for label in range(len(counts[0]))],
        "counts": [list(counts[client]) for client in drawn],
    }
