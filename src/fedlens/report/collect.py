"""What a page knows about a run: its folder as plain data, read from its tables and never from memory of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..compare.measured import Compared, as_compared
from ..core.errors import BadInput
from ..core.files import finite
from ..data import Names
from ..runs.opened import OpenedRun
from ..runs.places import without_folders
from ..runs.read import (
    StoredRun,
    bytes_per_round,
    client_accuracies,
    damage_of,
    fairness,
    flat,
    label_counts,
    method_of,
    settings_of,
    thinned,
)
from ..simulate.progress import counted
from .measures import by_client, detailed
from .safety import leaking, sharing
from .thumbnails import Pictures

DRAWN = 100  # clients of a split at most
PASSES = 9  # of which the fastest counts, where latency is measured


def collect(path: Path, name: str, pictures: Pictures | None, latency: bool = False) -> dict[str, Any]:
    """A run as plain data; `state` says whether it is complete, unfinished or corrupt, and `trouble` what is wrong.

    Without `pictures`, also without what its method adds: enough to tell who won, and quicker.
    """
    blank = {"name": name, "state": "corrupt", "trouble": "", "method": "?", "settings": {}, "seed": None}
    try:
        with damage_of(path):
            settings = settings_of(path)
            method = method_of(settings["algorithm"])
            shown = {key: without_folders(value) for key, value in flat(settings).items()}
            blank |= {"method": method, "settings": shown, "seed": settings.get("seed")}
            return finite(blank | _intact(StoredRun.read(path), pictures, name, latency))
    except BadInput as error:
        return finite(blank | {"trouble": str(error)})


def _intact(run: StoredRun, pictures: Pictures | None, name: str, latency: bool) -> dict[str, Any]:
    names = run.folder.names()
    own = _own_part(run, latency) if run.result and pictures else {}
    sent, privacy, audit = run.traffic(), run.json("privacy.json"), _without_run(run.json("audit.json"))
    return {
        "state": "complete" if run.result else "unfinished",
        "trouble": run.unfinished,
        "rounds": run.rounds,
        "planned": run.planned,
        "passport": _passport(run.passport),
        "split": run.passport["split_hash"],
        "data": run.passport["data"]["sha256"],
        "curves": run.curves(),
        "evaluations": evaluations(run, names),
        "preparation": preparation(run),
        "detailed": detailed(run, names) if run.result else {},
        "compared": as_compared(Compared("", run.method, run.settings.get("seed", 0), run.folder.path), run),
        "bytes": sent,
        "seconds": run.total("seconds") or 0.0,
        "owned": owned(counts, names) if (counts := label_counts(run.folder)) else None,
        "privacy": privacy,
        "shares": sharing(run.method, sent, privacy),
        "audit": audit,
        "flower": _flower(run),
        "sub_models": [{**row, "name": names.client(row["client"])} for row in own.get("sub_models", ())],
        "timed": own.get("timed", ""),
        "pictures": pictures.of(run.folder.figures, name, leaking(audit)) if pictures else [],
    }


def preparation(run: StoredRun) -> dict[str, float]:
    """What was spent before the first round that counts; `others`: rounds later on that count no more than these."""
    rounds, done = min(run.counts.preparation, run.all_rounds), run.all_rounds
    sent, taken = bytes_per_round(run.bytes), run.per_round("seconds")
    return {
        "rounds": rounds,
        "bytes": sum(count for round, count in sent.items() if round <= rounds),
        "seconds": sum(seconds for round, seconds in taken.items() if round <= rounds),
        "others": done - rounds - run.rounds,
    }


def _passport(card: dict[str, Any]) -> dict[str, Any]:
    """What may be shown to anybody: not where files lie on this machine."""
    shown = {part: value for part, value in card.items() if part != "names"}
    for part in ("data", "auxiliary"):
        if part in shown:
            shown[part] = {name: without_folders(value) for name, value in shown[part].items()}
    return shown


def _without_run(audit: dict[str, Any] | None) -> dict[str, Any] | None:
    return audit and {name: value for name, value in audit.items() if name != "run"}


def _flower(run: StoredRun) -> dict[str, Any] | None:
    """Of a run over real machines: whether nodes had data of their own, and the bytes that Flower counted, where
    somebody has kept the answer of `fedlens deploy status DIR --json` in the run as flower.json."""
    if run.passport.get("engine") != "flower":
        return None
    status = run.json("flower.json")
    counts = [row["network-traffic"] for row in status["flower"]] if status else []
    moved = {way: sum(count[f"{way}bound-bytes"] for count in counts) for way in ("in", "out")} if counts else None
    return {"own_data": bool(run.passport.get("nodes_own_data")), "moved": moved}


def _own_part(run: StoredRun, latency: bool) -> dict[str, Any]:
    """What the run's method adds to a report; nothing where data or the method's code are not at hand."""
    try:
        report = getattr(run.experiment.algorithm, "report", None)
        opened = partial(OpenedRun.open, run.folder.path)
        return report(opened, PASSES if latency else 0, partial(counted, what="sub-models")) if report else {}
    except BadInput:
        return {}


def evaluations(run: StoredRun, names: Names) -> dict[str, dict[str, Any]]:
    """Model -> accuracy of each client with it on its own test images at the last evaluation, and how fair that is."""
    return {
        model: {
            "clients": thinned(sorted(by)),
            "names": [names.client(client) for client in thinned(sorted(by))] if names.clients else None,
            "accuracy": [by[client] for client in thinned(sorted(by))],
            "more": by_client(run.metrics, model, thinned(sorted(by))),
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
