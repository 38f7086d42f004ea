"""What a page knows about a run: its folder as plain data, read from its tables and never from memory of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from .. import config
from ..core.errors import BadInput
from ..core.files import finite
from ..data import Names
from ..runs.folder import RunFolder
from ..runs.opened import LOOKS, fairness
from .thumbnails import Pictures

DRAWN = 100  # clients of a split at most
POINTS = 400  # of a curve at most, clients of a chart at most: more cannot be seen, and make the file heavy
TIMED = {"batch": 32, "repeats": 9}  # images a pass, and passes of which the fastest counts, where latency is measured
_SIGNS = ("config.yaml", "passport.json", "metrics.parquet")  # any of these makes a folder a run, whole or not


def runs_in(paths: Iterable[Path]) -> list[Path]:
    """Run folders, and those below folders that hold some, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise BadInput(f"there is no folder {path}; name a run's folder, or one that holds runs")
        if not (here := [*_below(path)]):
            raise BadInput(f"{path} holds no run: there is no config.yaml in it or below it")
        found |= {run.resolve(): run for run in here}
    return list(found.values())


def _below(path: Path) -> Iterator[Path]:
    """The folder itself, or runs in it; a run's own folders, which may hold thousands of files, are not looked into."""
    if _is_run(path):
        yield path
        return
    for inner in sorted(entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)):
        yield from _below(Path(inner))


def _is_run(path: Path) -> bool:
    return any((path / sign).exists() for sign in _SIGNS)


def collect(path: Path, name: str, pictures: Pictures, latency: bool = False) -> dict[str, Any]:
    """A run as plain data; `state` says whether it is complete, unfinished or corrupt, and `trouble` what is wrong."""
    blank = {"name": name, "state": "corrupt", "trouble": "", "method": "?", "settings": {}, "seed": None}
    try:
        settings = _settings(path)
        blank |= {"method": _method(settings["algorithm"]), "settings": flat(settings), "seed": settings.get("seed")}
        return finite(blank | _intact(RunFolder(path), settings, pictures, name, latency))
    except BadInput as error:
        said = str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        said = f"{path} is damaged ({type(error).__name__}: {error})"
    return finite(blank | {"trouble": said.replace(f"{path}/", "").replace(str(path), "the folder")})


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load((path / "config.yaml").read_text("utf-8"))
    except FileNotFoundError:
        raise BadInput("config.yaml is missing") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise BadInput("config.yaml is damaged: it is not YAML") from None
    if not isinstance(found, dict) or not isinstance(found.get("algorithm"), dict):
        raise BadInput("config.yaml is damaged: it names no algorithm")
    return found


def _method(algorithm: Mapping[str, Any]) -> str:
    base = algorithm.get("base")
    if algorithm["is"] == "finetune" and isinstance(base, Mapping):
        return f"{_method(base)}+ft"
    return str(algorithm["is"]).rpartition(":")[2]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys, as they are typed: algorithm=fedprox, algorithm.mu=0.1."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = prefix.rstrip(".") if key == "is" else f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = _listed(value) if isinstance(value, list) else value
    return found


def _listed(values: list[Any]) -> str:
    """Parts with their fields, such as `clip norm=1, noise std=0.1`."""

    def one(value: Any) -> str:
        if not isinstance(value, Mapping):
            return str(value)
        return " ".join([str(value.get("is", "")), *(f"{k}={v}" for k, v in value.items() if k != "is")]).strip()

    return ", ".join(map(one, values)) or "none"


def _intact(
    folder: RunFolder, settings: dict[str, Any], pictures: Pictures, name: str, latency: bool
) -> dict[str, Any]:
    passport, result, names = folder.passport(), folder.result(), folder.names()
    metrics, sent = folder.metrics(), folder.bytes()
    done = max(metrics["round"].to_pylist(), default=0)
    if result and result["rounds"] != done:
        raise BadInput(f"its tables end after round {done}, but result.json says {result['rounds']}")
    if result and max(sent["round"].to_pylist(), default=0) != done:
        raise BadInput(f"its table of bytes does not reach round {done}")
    planned = result["rounds"] if result else _planned(folder, settings)
    return {
        "state": "complete" if result else "unfinished",
        "trouble": "" if result else f"{done} of {planned} rounds are done",
        "rounds": done,
        "planned": planned,
        "passport": {part: value for part, value in passport.items() if part != "names"},
        "split": passport["split_hash"],
        "data": passport["data"]["sha256"],
        "curves": curves(metrics, sent),
        "looks": looks(metrics, names),
        "bytes": traffic(sent),
        "seconds": math.fsum(_timings(metrics).values()),
        "owned": owned(counts, names) if (counts := _json(folder, "label_counts.json")) else None,
        "privacy": _json(folder, "privacy.json"),
        "audit": _json(folder, "audit.json"),
        "flower": _flower(folder, passport),
        "sub_models": _sub_models(folder, settings, names, latency) if result else [],
        "pictures": pictures.of(folder.figures, name),
    }


def _planned(folder: RunFolder, settings: Mapping[str, Any]) -> int:
    try:
        return len(config.read(folder.config).timetable())
    except BadInput:  # a method of the user's own that cannot be imported here
        return int(settings["rounds"])


def _json(folder: RunFolder, name: str) -> Any:
    return folder._json(name) if (folder.path / name).exists() else None


def _flower(folder: RunFolder, passport: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a run over real machines: whether nodes had data of their own, and the bytes that Flower counted, where
    somebody has kept the answer of `fedlens deploy status DIR --json` in the run as flower.json."""
    if passport.get("engine") != "flower":
        return None
    status = _json(folder, "flower.json")
    counts = [row["network-traffic"] for row in status["flower"]] if status else []
    moved = {way: sum(count[f"{way}bound-bytes"] for count in counts) for way in ("in", "out")} if counts else None
    return {"own_data": bool(passport.get("nodes_own_data")), "moved": moved}


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


# ---- tables ----------------------------------------------------------------------------------------------------------
def curves(metrics: pa.Table, sent: pa.Table) -> dict[str, dict[str, list[Any]]]:
    """Model -> accuracy over rounds, with the method's own bytes and the seconds until each of them."""
    spent, taken = _running_total(_per_round(sent)), _running_total(_timings(metrics))
    summary = metrics.filter(pc.field("client").is_null())
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in summary.to_pylist():
        kind = {"accuracy": "accuracy", "loss": "loss", "accuracy_mean": "accuracy", "loss_mean": "loss"}
        if row["model"] and row["metric"] in kind:
            found.setdefault(row["model"], {}).setdefault(row["round"], {})[kind[row["metric"]]] = row["value"]
    return {model: _columns(by_round, spent, taken) for model, by_round in found.items()}


def _columns(
    by_round: Mapping[int, Mapping[str, float]], spent: Mapping[int, float], taken: Mapping[int, float]
) -> dict[str, list[Any]]:
    rounds = thinned(sorted(by_round))
    return {
        "round": rounds,
        "accuracy": [by_round[round].get("accuracy") for round in rounds],
        "loss": [by_round[round].get("loss") for round in rounds],
        "bytes": [spent.get(round) for round in rounds],
        "seconds": [taken.get(round) for round in rounds],
    }


def thinned(values: Sequence[Any], most: int = POINTS) -> list[Any]:
    """At most so many, evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def _per_round(sent: pa.Table) -> dict[int, int]:
    """Bytes of the method itself: looking at models costs others."""
    sums = sent.group_by(["round", "kind"]).aggregate([("payload", "sum"), ("header", "sum")])
    totals: dict[int, int] = {}
    for row in sums.to_pylist():
        if not row["kind"].startswith("evaluation"):
            totals[row["round"]] = totals.get(row["round"], 0) + row["payload_sum"] + row["header_sum"]
    return totals


def _timings(metrics: pa.Table) -> dict[int, float]:
    rows = metrics.filter(pc.field("metric") == "seconds")
    return dict(zip(rows["round"].to_pylist(), rows["value"].to_pylist(), strict=True))


def _running_total(by_round: Mapping[int, float]) -> dict[int, float]:
    total, found = 0, {}
    for round in sorted(by_round):
        total += by_round[round]
        found[round] = total
    return found


def looks(metrics: pa.Table, names: Names) -> dict[str, dict[str, Any]]:
    """Model -> accuracy of each client with it on its own test images at the last look, and how fair that is."""
    rows = metrics.filter(pc.field("client").is_valid() & (pc.field("metric") == "accuracy"))
    found: dict[str, dict[int, float]] = {}
    for row in rows.to_pylist():
        found.setdefault(row["model"], {})[row["client"]] = row["value"]
    return {
        look: {
            "clients": thinned(sorted(by)),
            "names": [names.client(client) for client in thinned(sorted(by))] if names.clients else None,
            "accuracy": [by[client] for client in thinned(sorted(by))],
            "count": len(by),
            **fairness(list(by.values())),
        }
        for look in LOOKS
        if (by := found.get(look))
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


def traffic(sent: pa.Table) -> dict[str, dict[str, int]]:
    """Kind of message -> bytes of values and of headers, over the whole run."""
    sums = sent.group_by("kind").aggregate([("payload", "sum"), ("header", "sum")]).to_pylist()
    by = {row["kind"]: {"payload": row["payload_sum"], "header": row["header_sum"]} for row in sums}
    return {kind: by[kind] for kind in sorted(by)}
