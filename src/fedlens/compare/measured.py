"""What a comparison knows of each run, from its tables; and which runs may be compared at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import config
from ..core.errors import BadInput
from ..experiment import Evaluation
from ..runs.measures import closing_mean
from ..runs.read import (
    PERSONAL,
    StoredRun,
    client_accuracies,
    damage_of,
    differing,
    evaluations,
    flat,
    measure_of,
    method_of,
    runs_in,
)


@dataclass(frozen=True)
class Compared:
    """One run: a method under a setting with a seed."""

    setting: str
    method: str
    seed: int
    run: Path
    state: str = "missing"  # complete, unfinished, corrupt, failed
    trouble: str = ""
    algorithm: str = ""  # the method without its settings: colours go by it
    global_last: float | None = None  # the global model on the pooled test set, mean of the last evaluations
    last: int = 0  # how many these are
    last_rounds: Sequence[int] = ()  # after which rounds of training
    global_end: float | None = None  # the same after the last round
    measures: Mapping[str, float] = field(default_factory=dict)  # measure -> of the global model, or clients' mean
    clients: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # model -> client -> accuracy
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    server_seconds: float | None = None
    simulated_seconds: float | None = None
    curves: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    split: str = ""
    data: str = ""
    place: str = ""  # engine, device and precision

    @property
    def personal_model(self) -> str | None:
        """The best trained of the models that clients were evaluated on."""
        return next(iter(self.clients), None)

    @property
    def evaluated_on(self) -> str | None:
        return measure_of([*self.clients, *([] if self.global_last is None else ["global"])])


def measured(setting: str, method: str, seed: int, path: Path, trouble: str = "") -> Compared:
    """A run as it lies there: complete, or why it is not."""
    blank = Compared(setting, method, seed, path, "failed" if trouble else "missing", trouble)
    if not (path / "config.yaml").exists():
        return blank
    try:
        with damage_of(path):
            return as_compared(blank, StoredRun.read(path))
    except BadInput as error:
        return replace(blank, state="corrupt", trouble=str(error))


def as_compared(blank: Compared, run: StoredRun) -> Compared:
    """What a comparison needs of a run that is read already; no code of a method is imported for it."""
    if run.result is None:
        state, left = ("failed", blank.trouble) if blank.trouble else ("unfinished", run.unfinished)
        return replace(blank, state=state, trouble=left, algorithm=run.method)
    card, sent, asked = run.passport, run.traffic(), run.settings.get("evaluate") or {}
    found = evaluations(run.metrics, "accuracy", run.counts)
    mean, rounds = closing_mean(found, asked.get("last", Evaluation.last))
    workers = f" x{card['workers']}" if card["engine"] == "workers" else ""
    return replace(
        blank,
        state="complete",
        trouble="",
        algorithm=run.method,
        global_last=mean,
        last=len(rounds),
        last_rounds=rounds,
        global_end=found[rounds[-1]][1] if rounds else None,
        clients=client_accuracies(run.metrics),
        measures=_measures(run.result, run.folder.names().classes),
        rounds=run.rounds,
        bytes_up=sum(sent.get("upload", {}).values()),
        bytes_down=sum(count for way in ("download", "shared") for count in sent.get(way, {}).values()),
        seconds=run.total("seconds") or 0.0,
        server_seconds=run.total("server seconds"),
        simulated_seconds=run.total("simulated seconds"),
        curves=run.curves(),
        split=card["split_hash"],
        data=card["data"]["sha256"],
        place=f"{card['engine']}{workers}, {card['device_name']}, {card['precision']}",
    )


def _measures(result: Mapping[str, Any], classes: Sequence[str]) -> dict[str, float]:
    """`global auroc`, `personal after auroc`, ...: of the global model, or the mean over clients, at the end.

    Those of a class, such as `global sensitivity/ill`, over all test images; the class by number, and by name.
    """
    pooled = result.get("measures", {})
    found = {f"global {name}": value for name, value in pooled.get("global", {}).items()}
    for model, values in pooled.items():
        for name, value in values.items():
            base, slash, label = name.partition("/")
            if slash:
                found[f"{model} {name}"] = value
                if int(label) < len(classes):
                    found[f"{model} {base}/{classes[int(label)]}"] = value
    found |= {"global loss": result["loss"]} if result.get("loss") is not None else {}
    for model, values in result["personal"].items():
        name = model if model in PERSONAL else f"personal {model}"
        found |= {f"{name} {key.removesuffix('_mean')}": v for key, v in values.items() if key.endswith("_mean")}
    return found


# ---- runs that are there already -------------------------------------------------------------------------------------
def existing(paths: Sequence[Path]) -> list[Compared]:
    """Runs by method and seed; those over another federation (data, partition, clients) are a setting of their own."""
    folders = runs_in(paths)
    root = Path(os.path.commonpath([folder.absolute().parent for folder in folders]))
    known: dict[Path, dict[str, Any]] = {}
    broken: list[Compared] = []
    for folder in folders:
        try:
            known[folder] = config.to_dict(config.read(folder / "config.yaml"))
        except BadInput as error:
            name = os.path.relpath(folder.absolute(), root)
            broken.append(Compared("", name, -1, folder, "corrupt", str(error).replace(f"{folder}/", "")))
    settings = _settings(known)
    return [
        *(measured(settings[folder], label, known[folder]["seed"], folder) for folder, label in _labels(known).items()),
        *broken,
    ]


def _federation(plain: Mapping[str, Any]) -> dict[str, Any]:
    return flat({key: plain[key] for key in ("data", "partition", "clients")})


def _settings(known: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    federations = {folder: _federation(plain) for folder, plain in known.items()}
    keys = differing(list(federations.values()))
    return {
        folder: ",".join(_said(key, found[key]) for key in keys if key in found)
        for folder, found in federations.items()
    }


def _labels(known: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """By the method, and by what else runs of one method over one federation differ in."""
    own = {folder: _own(plain) for folder, plain in known.items()}
    labels = {}
    for folder, plain in known.items():
        method = method_of(plain["algorithm"])
        alike = [own[other] for other, one in known.items() if method_of(one["algorithm"]) == method]
        more = [_said(key, own[folder].get(key, "–")) for key in differing(alike)]
        labels[folder] = ",".join([method, *more])
    return labels


def _said(key: str, value: Any) -> str:
    """As it is typed for short: alpha=5."""
    return f"{key.rpartition('.')[2]}={value:g}" if isinstance(value, float) else f"{key.rpartition('.')[2]}={value}"


def _own(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What decides on a result, but the federation, the method's name and the seed."""
    left = {k: v for k, v in plain.items() if k not in ("data", "partition", "clients", "seed")}
    return flat({k: v for k, v in left.items() if config.affects_results(k)})


def check_same_split(runs: Sequence[Compared]) -> None:
    """Methods are compared over the same images: one setting and seed have one split."""
    first: dict[tuple[str, int], Compared] = {}
    for run in runs:
        if run.state != "complete":
            continue
        other = first.setdefault((run.setting, run.seed), run)
        if (run.data, run.split) != (other.data, other.split):
            raise BadInput(
                f"{run.run} and {other.run} have other data or another split, and cannot be compared; "
                "run them again with `fedlens compare`, which gives all methods the same"
            )
        if run is not other and run.method == other.method:
            raise BadInput(f"{run.run} and {other.run} are the same experiment; name one of them")
