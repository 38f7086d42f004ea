"""What `fedlens data` says: which data sets there are and where, and whether they are sound."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from ..core.errors import BadInput, nearest
from . import DATASETS, PARTITIONS
from .cache import cache_folder, checksum
from .images import Images
from .paths import data_folders
from .source import DataSource
from .sources.base import Named


def about(kind: type) -> str:
    """The first sentence of its docstring."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def options(kind: type) -> str:
    """Its fields with their defaults, as they are written on the command line."""
    shown = []
    for field in fields(kind):
        default = field.default if field.default is not MISSING else {}
        shown.append(f"{field.name}={getattr(type(default), 'name', default)}")
    return " ".join(shown)


def list_rows() -> list[dict[str, str]]:
    """A row for every data set (where it is) and every partition (what it does)."""
    rows = [
        {"kind": "data", "name": name, **_whereabouts(kind()), "about": about(kind), "options": options(kind)}
        for name, kind in DATASETS.items()
    ]
    rows += [
        {"kind": "partition", "name": name, "state": "", "where": "", "about": about(kind), "options": options(kind)}
        for name, kind in PARTITIONS.items()
    ]
    return rows


def _whereabouts(source: DataSource) -> dict[str, str]:
    if any(field.name in ("path", "id") for field in fields(source)):
        key = "data.path" if hasattr(source, "path") else "data.id"
        return {"state": "yours", "where": f"name it by {key}"}
    try:
        found = source.find()
    except BadInput as problem:
        return {"state": "missing", "where": str(problem)}
    return {"state": "here" if found.files else "hub", "where": found.origin}


def source_named(name: str) -> DataSource:
    if name not in DATASETS:
        raise BadInput(f"there is no data set {name!r}; {nearest(name, DATASETS)}")
    return DATASETS[name]()


def get(name: str) -> dict[str, Any]:
    """Fetch and decode a data set; a row that says what was got."""
    start = time.perf_counter()
    images = source_named(name).load()
    return _row(images) | {"seconds": round(time.perf_counter() - start, 2)}


def check_rows(names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """A row for every data folder and every data set that is here, all bytes of its decoded copy read and compared."""
    rows: list[dict[str, Any]] = [
        {"name": str(folder), "state": "ok" if folder.is_dir() else "missing", "where": "named in FEDLENS_DATA"}
        for folder in data_folders()
    ]
    rows.append({"name": str(cache_folder()), "state": "ok" if cache_folder().is_dir() else "empty", "where": "cache"})
    for name in names or [name for name, kind in DATASETS.items() if _is_here(kind)]:
        try:
            images = source_named(name).load()
        except BadInput as problem:
            rows.append({"name": name, "state": "damaged", "where": str(problem)})
            continue
        sound = checksum(images.x.numpy(), images.y.numpy()) == images.checksum
        rows.append(_row(images) | {"state": "ok" if sound else "damaged"})
    return rows


def _is_here(kind: type[DataSource]) -> bool:
    return (issubclass(kind, Named) or not fields(kind)) and _whereabouts(kind())["state"] == "here"


def _row(images: Images) -> dict[str, Any]:
    return {
        "name": images.name,
        "state": "ok",
        "where": images.origin,
        "train": len(images.train),
        "test": len(images.test),
        "classes": len(images.classes),
        "size": "x".join(map(str, images.x.shape[1:])),
        "users": 0 if images.users is None else int(images.users.max()) + 1,
        "checksum": images.checksum,
    }
