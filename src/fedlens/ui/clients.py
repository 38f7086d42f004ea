"""Clients of a run, some at a time: a run of ten thousand is never sent whole."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..core.errors import BadInput, nearest
from ..core.files import finite, read_bytes, read_json
from ..report.thumbnails import KINDS
from ..runs import tables
from ..runs.folder import RunFolder
from ..runs.read import client_accuracies, columns, label_counts, rounds_of, thinned

PAGE = 25  # clients at a time
ORDERS = ("number", "worst", "best", "largest", "smallest")
Evaluation = tuple[str, int, dict[int, float]]  # model, round, accuracy of each client


def clients(run: Path, order: str, at: int) -> dict[str, Any]:
    """Clients from place `at` on in this order: how much they own of what, and how accurate their models are."""
    if order not in ORDERS:
        raise BadInput(f"order is {order!r}; {nearest(order, ORDERS)}")
    counts, (model, round, accuracy), names = _counts(run), _last_evaluation(run), RunFolder(run).names()
    numbers = range(len(counts)) if counts is not None else sorted(accuracy)
    sizes = counts.sum(1) if counts is not None else None
    if order in ("worst", "best"):
        sign = 1 if order == "worst" else -1
        known = [client for client in numbers if client in accuracy]
        numbers = sorted(known, key=lambda client: (sign * accuracy[client], client))
    elif order in ("largest", "smallest") and sizes is not None:
        numbers = np.argsort(-sizes if order == "largest" else sizes, kind="stable").tolist()
    rows = []
    for client in numbers[at : at + PAGE]:
        row: dict[str, Any] = {"client": client, "name": names.client(client), "accuracy": accuracy.get(client)}
        if counts is not None and sizes is not None:
            own = counts[client]
            mix = [[names.label(label), int(own[label])] for label in np.argsort(-own, kind="stable")[:3] if own[label]]
            row |= {"images": int(sizes[client]), "classes": int((own > 0).sum()), "most": mix}
        rows.append(row)
    trained = rounds_of(RunFolder(run)).trained(round)
    return finite({"count": len(numbers), "at": at, "model": model, "round": trained, "rows": rows})


def client(run: Path, number: int) -> dict[str, Any]:
    """One client: its data, its weight, its accuracy over rounds, when it took part."""
    counts, names, rounds = _counts(run), RunFolder(run).names(), rounds_of(RunFolder(run))
    rows = _rows(run / "metrics.parquet", tables.METRICS, number)
    if counts is not None and number >= len(counts):
        raise BadInput(f"client {number} does not exist: there are {len(counts)}, counted from 0")
    seen: dict[str, dict[int, float]] = {}
    setbacks: dict[str, int] = {}
    for round, model, metric, value in columns(rows, "round", "model", "metric", "value"):
        if metric == "accuracy":
            seen.setdefault(model, {})[round] = value
        elif not model:
            setbacks[metric] = setbacks.get(metric, 0) + 1
    curves: dict[str, dict[str, list[Any]]] = {}
    for model, by_round in seen.items():
        counted = rounds.counted(by_round)
        if kept := thinned([*counted]):
            curves[model] = {"round": kept, "accuracy": [counted[round][1] for round in kept]}
    sent = _rows(run / "bytes.parquet", tables.BYTES, number)
    sent_in = {round: kind for round, kind in columns(sent, "round", "kind") if kind == "upload"}
    took_part = [round for round in sent_in if rounds.trained(round) > rounds.trained(round - 1)]
    found: dict[str, Any] = {"client": number, "name": names.client(number), "curves": curves, "setbacks": setbacks}
    found |= {"took_part": len(took_part), "last_part": rounds.trained(max(took_part)) if took_part else None}
    if counts is not None:
        own = counts[number]
        found |= {"counts": own.tolist(), "images": int(own.sum()), "share": float(own.sum() / counts.sum())}
        found |= {"classes": [names.label(label) for label in range(len(own))]}
    return finite({**found, "weight": _weight(run, number), "pictures": pictures(run)})


def pictures(run: Path) -> list[dict[str, str]]:
    """What `fedlens explain` and others left in the run."""
    found = []
    for path in sorted((run / "figures").glob("*.png")):
        kind = next((words for start, words in KINDS.items() if path.stem.startswith(start)), None)
        if kind and path.is_file() and not path.is_symlink():
            found.append({"name": path.name, "about": f"{kind} ({path.stem})"})
    return found


def picture(run: Path, name: str) -> bytes:
    """One of them, by its name in that list."""
    known = [each["name"] for each in pictures(run)]
    if name not in known:
        raise BadInput(f"there is no picture {name!r} of this run; {nearest(name, known)}")
    data = read_bytes(run / "figures" / name)
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        raise BadInput(f"{name} is no PNG")
    return data


def _counts(run: Path) -> np.ndarray | None:
    """[clients, classes] training images; none where nodes keep that to themselves."""
    path = run / "label_counts.json"
    return _read_counts(path, path.stat().st_mtime_ns) if path.exists() else None


@functools.lru_cache(maxsize=4)
def _read_counts(path: Path, _changed: int) -> np.ndarray:
    return np.array(label_counts(RunFolder(path.parent)), np.int64)


def _weight(run: Path, number: int) -> float | None:
    """Its share of an average as the method weighed it, where `fedlens explain` has left that."""
    try:
        return float(read_json(run / "figures" / "explain-weights.json")["used"][str(number)])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_evaluation(run: Path) -> Evaluation:
    parts = tables.parts(run / "metrics.parquet")
    return _newest(tuple((part, part.stat().st_mtime_ns) for part in parts))


@functools.lru_cache(maxsize=4)
def _newest(parts: tuple[tuple[Path, int], ...]) -> Evaluation:
    """From the newest part backwards, until clients were evaluated."""
    for part, _ in reversed(parts):
        table = tables.read_part(part, tables.METRICS)
        for model, accuracies in client_accuracies(table).items():
            own = table.filter((pc.field("model") == model) & pc.field("client").is_valid())
            return model, max(own["round"].to_pylist()), accuracies
    return "", 0, {}


def _rows(folder: Path, schema: pa.Schema, number: int) -> pa.Table:
    """All that a table says of a client."""
    own = [tables.read_part(part, schema).filter(pc.field("client") == number) for part in tables.parts(folder)]
    return pa.concat_tables(own) if own else schema.empty_table()
