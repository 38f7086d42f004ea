"""Rounds as they go, into the tools people watch runs with: TensorBoard, MLflow, Weights & Biases, trackio.

They write to the run's folder and reach no network, unless MLFLOW_TRACKING_URI or WANDB_MODE say so; trackio has one
place for all runs of a user, which TRACKIO_DIR moves.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from .. import config
from ..core.errors import BadInput
from ..experiment import Experiment
from .folder import RunFolder
from .read import flat
from .rounds import Rounds


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], round: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Events under the run's tensorboard/; those of rounds that a crash undid are taken back."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], again: bool, step: int):
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportMissingImports]

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if again else None)
        if not again:
            self.writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in settings.items()))

    def log(self, values, round):
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)

    def close(self):
        self.writer.close()


class MLflow:
    """A run of the experiment `fedlens`, in the run's mlruns/."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], again: bool, step: int):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder needs no database
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").absolute().as_uri())
        known = self.client.get_experiment_by_name("fedlens")
        experiment = known.experiment_id if known else self.client.create_experiment("fedlens")
        place = folder / "mlflow-run"
        if again and place.exists():
            self.run = place.read_text("utf-8")
            return
        self.run = self.client.create_run(experiment, run_name=folder.name).info.run_id
        place.write_text(self.run, "utf-8")
        for key, value in settings.items():
            self.client.log_param(self.run, key, value)

    def log(self, values, round):
        for name, value in values.items():
            self.client.log_metric(self.run, name, value, step=round)

    def close(self):
        self.client.set_terminated(self.run)


class Wandb:
    """A run of the project `fedlens`, offline in the run's wandb/; `wandb sync` sends it when you want."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], again: bool, step: int):
        import wandb  # pyright: ignore[reportMissingImports]

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        quiet = wandb.Settings(silent=True, console="off")
        where: Any = dict(dir=str(folder), project="fedlens", name=folder.name, mode=mode, settings=quiet)
        self.run = wandb.init(**where, config=dict(settings), reinit="create_new")

    def log(self, values, round):
        self.run.log(dict(values), step=round)

    def close(self):
        self.run.finish()


class Trackio:
    """A run of the project `fedlens`, named by the run's folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], again: bool, step: int):
        import trackio  # pyright: ignore[reportMissingImports]

        how: Any = dict(resume="allow" if again else "never", embed=False, auto_log_gpu=False, auto_log_cpu=False)
        with redirect_stdout(sys.stderr):  # standard output is ours: it may be one line of JSON
            self.run = trackio.init(project="fedlens", name=str(folder), config=dict(settings), **how)

    def log(self, values, round):
        self.run.log(dict(values), step=round)

    def close(self):
        import trackio  # pyright: ignore[reportMissingImports]

        with redirect_stdout(sys.stderr):
            trackio.finish()  # not run.finish(): Python's end would finish it once more, and say so


TRACKERS: dict[str, type] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb, "trackio": Trackio}


def check(experiment: Experiment) -> None:
    """Refused before anything is run."""
    for name in experiment.execution.track:
        if importlib.util.find_spec(name) is None:
            raise BadInput(f"track={name} needs {name}, which is not here: pip install 'fedlens[{name}]'")


class Tracked:
    """A watcher that passes everything on, and tells the trackers."""

    def __init__(self, watcher: Any, trackers: list[Tracker], trained: int):
        self.watcher, self.trackers, self.trained = watcher, trackers, trained

    def begin(self, experiment, folder, notes, round, rounds):
        self.watcher.begin(experiment, folder, notes, round, rounds)

    def clients(self, answered, asked):
        self.watcher.clients(answered, asked)

    def round(self, progress):
        if progress.trained > self.trained:  # a round of preparation is no step
            values = {n: getattr(progress, n) for n in ("accuracy", "loss", "bytes_up", "bytes_down", "seconds")}
            self.log({name: value for name, value in values.items() if value is not None}, progress.trained)
            self.trained = progress.trained
        self.watcher.round(progress)

    def note(self, text):
        self.watcher.note(text)

    def phase(self, name, done, total):
        self.watcher.phase(name, done, total)

    def log(self, values: Mapping[str, float], round: int) -> None:
        for tracker in self.trackers:
            tracker.log(values, round)


@contextmanager
def tracked(watcher: Any, experiment: Experiment, folder: Path, round: int) -> Iterator[Any]:
    """The watcher, with those of experiment.execution.track beside it; at the end they are told what clients got."""
    if not experiment.execution.track:
        yield watcher
        return
    check(experiment)
    settings, trained = flat(config.to_dict(experiment)), Rounds.of(experiment.timetable()).trained(round)
    told = folder, settings, round > 0, trained
    trackers: list[Tracker] = [TRACKERS[name](*told) for name in experiment.execution.track]
    try:
        both = Tracked(watcher, trackers, trained)
        yield both
        result = RunFolder(folder).result() or {"personal": {}, "training_rounds": 0}
        for model, spread in result["personal"].items():
            known = {f"personal {model}/{name}": value for name, value in spread.items() if value is not None}
            both.log(known, result["training_rounds"])
    finally:
        for tracker in trackers:
            tracker.close()
