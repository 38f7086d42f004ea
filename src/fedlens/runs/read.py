"""A run as its folder tells it: the one reader of settings, tables and summaries."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import yaml

from .. import config
from ..core.errors import BadInput
from ..core.yaml_dialect import read_yaml
from ..experiment import Experiment
from .folder import RunFolder
from .measures import PERSONAL, best_of, closing, closing_mean
from .rounds import Rounds
from .tables import where

POINTS = 400  # of a curve at most, clients of a chart at most: more cannot be seen, and make a page heavy
# What damaged files raise.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, pa.ArrowException)
_SIGNS = ("config.yaml", "passport.json", "metrics.parquet")  # any of these makes a folder a run, whole or not
_METRICS = {"accuracy": 0, "loss": 1, "accuracy_mean": 0, "loss_mean": 1}  # metric -> its place in a point


# ---- which runs there are, and their settings ------------------------------------------------------------------------
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
    """The folder itself, or runs in it; a run's own folders, which may hold thousands of files, are not searched."""
    if any((path / sign).exists() for sign in _SIGNS):
        yield path
        return
    for inner in sorted(entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)):
        yield from _below(Path(inner))


def settings_of(path: Path) -> dict[str, Any]:
    """What config.yaml says, also where a method of the user's own cannot be imported here."""
    try:
        found = read_yaml(path / "config.yaml")
    except FileNotFoundError:
        raise BadInput("config.yaml is missing") from None
    except (yaml.YAMLError, ValueError):
        raise BadInput("config.yaml is damaged: it is not YAML") from None
    if not isinstance(found, dict) or not isinstance(found.get("algorithm"), dict):
        raise BadInput("config.yaml is damaged: it names no algorithm")
    return found


def method_of(algorithm: Mapping[str, Any]) -> str:
    """Its short name: fedavg, fedavg+ft, MyMethod."""
    base = algorithm.get("base")
    if algorithm["is"] == "finetune" and isinstance(base, Mapping):
        return f"{method_of(base)}+ft"
    return str(algorithm["is"]).rpartition(":")[2]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys, as they are typed: algorithm=fedprox, algorithm.mu=0.1."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = prefix.rstrip(".") if key == "is" else f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = (", ".join(map(_part, value)) or "none") if isinstance(value, list) else value
    return found


def _part(value: Any) -> str:
    """One of a list with its fields, such as `clip norm=1`."""
    if not isinstance(value, Mapping):
        return str(value)
    return " ".join([str(value.get("is", "")), *(f"{k}={v}" for k, v in value.items() if k != "is")]).strip()


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that some have not, or with another value."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if len({repr(each.get(key, "–")) for each in settings}) > 1]


# ---- one run ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StoredRun:
    """What the tables of a run say, complete or not."""

    folder: RunFolder
    settings: Mapping[str, Any]  # as config.yaml has them
    result: Mapping[str, Any] | None  # of a complete run
    metrics: pa.Table
    bytes: pa.Table

    @classmethod
    def read(cls, path: Path) -> StoredRun:
        """Refuses damaged files, and tables that end elsewhere than result.json says."""
        folder = RunFolder(path)
        run = cls(folder, settings_of(path), folder.result(), folder.metrics(), folder.bytes())
        done = run.all_rounds
        if run.result and run.result["rounds"] != done:
            raise BadInput(f"its tables end after round {done}, but result.json says {run.result['rounds']}")
        if run.result and max(run.bytes["round"].to_pylist(), default=0) != done:
            raise BadInput(f"its table of bytes does not reach round {done}")
        return run

    @property
    def method(self) -> str:
        return method_of(self.settings["algorithm"])

    @cached_property
    def passport(self) -> dict[str, Any]:
        return self.folder.passport()

    @cached_property
    def experiment(self) -> Experiment:
        return config.read(self.folder.config)

    @cached_property
    def all_rounds(self) -> int:
        """That are done, preparation among them: tables and checkpoints are numbered by these."""
        return max(self.metrics["round"].to_pylist(), default=0)

    @cached_property
    def counts(self) -> Rounds:
        return rounds_of(self.folder)

    @property
    def rounds(self) -> int:
        """Of training that are done."""
        return self.counts.trained(self.all_rounds)

    @property
    def planned(self) -> int:
        """Rounds of training in all."""
        return self.counts.total

    @property
    def unfinished(self) -> str:
        """How far it is; empty for a complete run."""
        if self.result:
            return ""
        more = f", after {self.counts.preparation} of preparation" if self.counts.preparation else ""
        return f"{self.rounds} of {self.planned} rounds are done{more}"

    def curves(self) -> dict[str, dict[str, list[Any]]]:
        """Model -> accuracy over rounds of training; bytes and seconds are all that were spent until each of them."""
        spent, taken = _running_total(bytes_per_round(self.bytes)), _running_total(self.per_round("seconds"))
        found = {}
        for model, by_round in points(self.metrics).items():
            if not (counted := self.counts.counted(by_round)):
                continue
            rounds = thinned([*counted])
            at, values = zip(*(counted[round] for round in rounds), strict=True)
            found[model] = {
                "round": rounds,
                "accuracy": [accuracy for accuracy, _ in values],
                "loss": [loss for _, loss in values],
                "bytes": [spent.get(round) for round in at],
                "seconds": [taken.get(round) for round in at],
            }
        return found

    def per_round(self, metric: str) -> dict[int, float]:
        """What is measured once a round, such as seconds."""
        rows = where(self.metrics, metric=metric)
        return dict(zip(rows["round"].to_pylist(), rows["value"].to_pylist(), strict=True))

    def total(self, metric: str) -> float | None:
        found = self.per_round(metric)
        return math.fsum(found.values()) if found else None

    def traffic(self) -> dict[str, dict[str, int]]:
        """Kind of message -> bytes of values and of headers, over the whole run."""
        sums = self.bytes.group_by("kind").aggregate([("payload", "sum"), ("header", "sum")]).to_pylist()
        by = {row["kind"]: {"payload": row["payload_sum"], "header": row["header_sum"]} for row in sums}
        return {kind: by[kind] for kind in sorted(by)}

    def json(self, name: str) -> Any:
        """A file that not every run has, or None."""
        return self.folder.read_json(name) if (self.folder.path / name).exists() else None


def label_counts(folder: RunFolder) -> list[list[int]] | None:
    """[clients][classes] training images; None where nodes keep that to themselves."""
    if not (folder.path / "label_counts.json").exists():
        return None
    counts = folder.read_json("label_counts.json")
    rows = counts if isinstance(counts, list) and all(isinstance(row, list) for row in counts) else [[None]]
    if len({len(row) for row in rows}) != 1 or not all(isinstance(count, int) for row in rows for count in row):
        raise BadInput("label_counts.json is damaged: it should hold a list of numbers for each client")
    return counts


@contextlib.contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """One sentence for whatever a damaged run makes libraries raise, without the folder that everybody knows."""
    try:
        yield
        return
    except BadInput as error:
        said = str(error)
    except DAMAGE as error:
        said = f"{path} is damaged ({type(error).__name__}: {error})"
    raise BadInput(said.replace(f"{path}/", "").replace(str(path), "the folder"))


# ---- tables ----------------------------------------------------------------------------------------------------------
def points(metrics: pa.Table) -> dict[str, dict[int, list[float | None]]]:
    """Model -> round -> [accuracy, loss]: of the global model, or means over clients."""
    table = where(metrics, of_clients=False)
    found: dict[str, dict[int, list[float | None]]] = {}
    for round, model, metric, value in columns(table, "round", "model", "metric", "value"):
        if model and metric in _METRICS:
            found.setdefault(model, {}).setdefault(round, [None, None])[_METRICS[metric]] = value
    return found


def columns(table: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)


def rounds_of(folder: RunFolder) -> Rounds:
    """Which rounds of a run count: as its passport says, or as the settings of a run from before tell.

    Nobody's code is imported for that: of such a run from before all rounds count.
    """
    card = folder.passport() if (folder.path / "passport.json").exists() else {}
    if "rounds" in card:
        return Rounds.stored(card["rounds"])
    settings = settings_of(folder.path)
    if not any(":" in str(value) for value in flat(settings).values()):
        with contextlib.suppress(BadInput):
            return Rounds.of(config.read(folder.config).timetable())
    return Rounds(((1, asked := int(settings["rounds"])),), asked)


def curve(folder: RunFolder) -> tuple[list[int], list[float]]:
    """Rounds of training, and the accuracy of the global model after each of them."""
    found = evaluations(folder.metrics(), "accuracy", rounds_of(folder))
    return list(found), [value for _, value in found.values()]


def bytes_per_round(sent: pa.Table) -> dict[int, int]:
    """Bytes of the method itself: evaluations cost others."""
    sums = sent.group_by(["round", "kind"]).aggregate([("payload", "sum"), ("header", "sum")])
    totals: dict[int, int] = {}
    for row in sums.to_pylist():
        if not row["kind"].startswith("evaluation"):
            totals[row["round"]] = totals.get(row["round"], 0) + row["payload_sum"] + row["header_sum"]
    return totals


def bytes_until(folder: RunFolder, rounds: Sequence[int]) -> list[int]:
    """Bytes of the method itself until each of these rounds."""
    spent = bytes_per_round(folder.bytes())
    return [sum(count for done, count in spent.items() if done <= round) for round in rounds]


def _running_total(by_round: Mapping[int, float]) -> dict[int, float]:
    total, found = 0, {}
    for round in sorted(by_round):
        total += by_round[round]
        found[round] = total
    return found


def thinned(values: Sequence[Any], most: int = POINTS) -> list[Any]:
    """At most so many, evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


# ---- clients ---------------------------------------------------------------------------------------------------------
def client_accuracies(metrics: pa.Table) -> dict[str, dict[int, float]]:
    """Model -> accuracy of each client with it on its own test images, at the last evaluation; best trained first."""
    rows = where(metrics, of_clients=True, metric="accuracy")
    found: dict[str, dict[int, float]] = {}
    for model, client, value in columns(rows, "model", "client", "value"):
        found.setdefault(model, {})[client] = value
    return {model: found[model] for model in PERSONAL if model in found}


def client_evaluation(folder: RunFolder) -> tuple[str, dict[int, float]]:
    """(the best trained model that clients have, accuracy of each client with it) at the last evaluation."""
    for model, accuracies in client_accuracies(folder.metrics(partly=True)).items():
        return model, accuracies
    raise BadInput(f"{folder.path} has no accuracies of single clients: run it to its end with evaluate.personal=both")


def measure_of(models: Collection[str]) -> str | None:
    """Which of these a run is evaluated on: what it fine-tuned at its end, or else its global model, or personal ones.

    This choice decides on the headline of a report and on the ranks of a comparison.
    """
    return next((model for model in ("fine-tuned", "global", *PERSONAL) if model in models), None)


def fairness(accuracies: Sequence[float]) -> dict[str, float]:
    """Mean, deviation, mean of the worst tenth, and Jain's index: (sum x)^2 / (n sum x^2), one when all are alike."""
    x = torch.tensor(accuracies, dtype=torch.float64)
    squares = len(x) * x.square().sum().item()
    return {**summary_statistics(accuracies), "jain": x.sum().item() ** 2 / squares if squares else 1.0}


def summary_statistics(values: Sequence[float], lowest: bool = False) -> dict[str, float]:
    """Mean, deviation, and the mean of the worst tenth (at least one client); `lowest`: low values are good."""
    ordered = torch.tensor(sorted(values, reverse=lowest), dtype=torch.float64)
    worst = ordered[: max(1, len(values) // 10)]
    return {
        "mean": ordered.mean().item(),
        "std": ordered.std(unbiased=False).item(),
        "worst_decile": worst.mean().item(),
    }


# ---- how a run ended -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    """How a run ended. `accuracy` and `loss`: the global model on the pooled test set after the last round.

    Losses of a run that diverged are not finite; read back from result.json they are None.
    """

    run: str
    accuracy: float | None
    loss: float | None
    personal: dict[str, dict[str, float]]  # before, after, fine-tuned: mean, std, worst_decile over clients
    rounds: int  # in all: checkpoints and tables are numbered by these
    bytes_up: int
    bytes_down: int
    seconds: float
    engine: str
    training_rounds: int | None = None  # of them: without warm-up, weighing, fine-tuning; None: a run from before
    accuracy_last: float | None = None  # mean of the last evaluations, those after
    last_rounds: list[int] = field(default_factory=list)  # of training
    accuracy_best: float | None = None
    backdoor: float | None = None  # share of patched test images that attack=backdoor gets taken for its target
    simulated_seconds: float | None = None  # on `devices`
    # all measures of the global model, pooled; of personal models by their names, pooled over clients' test images
    measures: dict[str, dict[str, float]] = field(default_factory=dict)
    best: dict[str, float] | None = None  # the round (and round of training) with the best validation, and its values
    # accuracy -> round of training; bytes and seconds until then, of the whole run
    targets: dict[str, dict[str, float] | None] = field(default_factory=dict)
    setbacks: dict[str, int] = field(default_factory=dict)  # replies missing, late, refused; rounds void

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def stored(cls, value: Mapping[str, Any]) -> Result:
        """As `plain` wrote it; refuses anything else."""
        try:
            found = cls(**value)
            numbers = [
                found.rounds,
                found.bytes_up,
                found.bytes_down,
                found.seconds,
                found.accuracy or 0,
                found.loss or 0,
            ]
            numbers += [each[part] or 0 for each in found.personal.values() for part in summary_statistics([0.0])]
            if not isinstance(found.run, str) or not all(isinstance(each, int | float) for each in numbers):
                raise TypeError
        except (TypeError, AttributeError, KeyError):
            raise BadInput("result.json is damaged: it lacks some of what it should say, or says more") from None
        return found


def summary(folder: RunFolder, experiment: Experiment) -> Result:
    """The result of a complete run, read back from its tables."""
    metrics, counts = folder.metrics(partly=True), Rounds.of(experiment.timetable())
    rows, whole = metrics.to_pylist(), folder.has_all_rows  # of one that has not, sums and firsts are not known
    found = {name: evaluations(metrics, name, counts) for name in ("accuracy", "loss", "backdoor")}
    curve = {name: [value for _, value in by.values()] for name, by in found.items()}
    accuracies = curve["accuracy"]
    last, rounds = closing_mean(found["accuracy"] if whole else {}, experiment.evaluate.last)
    personal: dict[str, dict[str, float]] = {}
    end = max((row["round"] for row in rows), default=0)
    for row in rows:
        if row["client"] is None and row["weighting"] == "clients" and row["round"] == end:
            name = row["model"].removeprefix("personal ")
            personal.setdefault(name, {})[row["metric"].removeprefix("accuracy_")] = row["value"]
    kinds = Counter(row["metric"] for row in rows if whole and row["metric"] in ("missing", "late", "refused", "void"))
    simulated = {row["round"]: row["value"] for row in rows if whole and row["metric"] == "simulated seconds"}
    ledger, seconds = folder.totals()  # a complete run ends with a checkpoint
    return Result(
        run=str(folder.path),
        accuracy=accuracies[-1] if accuracies else None,
        loss=curve["loss"][-1] if accuracies else None,
        personal=personal,
        rounds=end,
        bytes_up=ledger.up,
        bytes_down=ledger.down,
        seconds=round(seconds, 3),
        engine=experiment.execution.engine,
        training_rounds=counts.trained(end),
        accuracy_last=last,
        last_rounds=rounds,
        accuracy_best=max(accuracies, default=None) if whole else None,
        backdoor=curve["backdoor"][-1] if curve["backdoor"] else None,
        simulated_seconds=sum(simulated.values()) if simulated else None,
        targets={
            f"{target:g}": _reached(folder, found["accuracy"], target, simulated)
            for target in (experiment.evaluate.targets if whole else ())
        },
        setbacks=dict(kinds),
        measures=closing(rows, end),
        best=best_of(metrics, experiment.evaluate.watch, counts),
    )


def evaluations(metrics: pa.Table, metric: str, counts: Rounds) -> dict[int, tuple[int, float]]:
    """{round of training: (round of the run, value)} of the global model, each model once."""
    table = where(metrics, model="global", metric=metric)
    return counts.counted(dict(columns(table, "round", "value")))


def _reached(
    folder: RunFolder, curve: dict[int, tuple[int, float]], target: float, simulated: dict[int, float]
) -> dict[str, float] | None:
    """The first round whose accuracy is at least the target, bytes and simulated seconds until then; None: never."""
    reached = next(((trained, at) for trained, (at, accuracy) in curve.items() if accuracy >= target), None)
    if reached is None:
        return None
    trained, first = reached
    found: dict[str, float] = {"round": trained, "bytes": bytes_until(folder, [first])[0]}
    seconds = {"simulated_seconds": sum(value for round, value in simulated.items() if round <= first)}
    return found | seconds if simulated else found
