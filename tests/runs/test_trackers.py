"""What trackers wrote, read back by the trackers' own readers, is what the run's tables say."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time

import pytest

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate
from fedlens.simulate.resume import resume

SMALL = (
    "model=cnn2",
    "clients=4",
    "cohort=2",
    "rounds=3",
    "local.steps=1",
    "engine=sequential",
    "picture=false",
)


def needs(package):
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed: pip install 'fedlens[{package}]'")


def tracked_run(tmp_path, name):
    out = tmp_path / "run"
    simulate.run(config.read(None, [*SMALL, f"track={name}", f"out={out}"]))
    return RunFolder(out)


def accuracies(folder):
    rows = folder.metrics().to_pylist()
    return {r["round"]: r["value"] for r in rows if r["model"] == "global" and r["metric"] == "accuracy"}


def check(folder, logged):
    """`logged`: metric -> {round: value}."""
    result = folder.result()
    assert logged["accuracy"] == pytest.approx(accuracies(folder), abs=1e-6) and len(logged["accuracy"]) == 3
    assert logged["bytes_up"][3] == pytest.approx(result["bytes_up"])
    assert logged["personal after/mean"] == pytest.approx({3: result["personal"]["after"]["mean"]}, abs=1e-6)


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder.path / "tensorboard"))
    reader.Reload()
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


@needs("tensorboard")
def test_tensorboard_reads_what_the_run_measured(tmp_path):
    folder = tracked_run(tmp_path, "tensorboard")
    check(folder, events(folder))


@needs("tensorboard")
def test_a_diverged_run_is_told_without_the_losses_it_has_not(tmp_path):
    out = tmp_path / "run"
    simulate.run(config.read(None, [*SMALL, "local.lr=1e30", "track=tensorboard", f"out={out}"]))
    found = events(RunFolder(out))
    assert math.isnan(found["loss"][3]) and "personal after/mean" in found and "personal after/loss_mean" not in found


class Interrupting(recorder.Nobody):
    def round(self, progress):
        if progress.round == 2:
            raise KeyboardInterrupt


@needs("tensorboard")
def test_a_resumed_run_goes_on_in_the_same_events_and_to_the_same_bits(tmp_path):
    out, plain = tmp_path / "run", tmp_path / "plain"
    with pytest.raises(KeyboardInterrupt):
        simulate.run(config.read(None, [*SMALL, "track=tensorboard", f"out={out}"]), watcher=Interrupting())
    resume(out)
    check(RunFolder(out), events(RunFolder(out)))
    simulate.run(config.read(None, [*SMALL, f"out={plain}"]))
    assert not list(differences(out, plain))
    assert RunFolder(out).passport()["config_hash"] == RunFolder(plain).passport()["config_hash"]


@needs("mlflow")
def test_mlflow_reads_what_the_run_measured(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tracked_run(tmp_path, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient((folder.path / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("fedlens").experiment_id])
    names = ("accuracy", "bytes_up", "personal after/mean")
    found = {name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} for name in names}
    check(folder, found)
    assert run.data.params["algorithm"] == "fedavg" and run.info.status == "FINISHED"


def records(data, block=32768):
    """W&B's log: LevelDB's blocks of pieces (checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last)."""
    at, whole = 7, b""  # after its own header
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@needs("wandb")
def test_wandb_writes_offline_what_the_run_measured(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tracked_run(tmp_path, "wandb")
    [file] = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    from wandb.proto import wandb_internal_pb2

    found, end = {}, time.monotonic() + 30
    # Its service writes the file a moment after finish() has returned: the last record says that all is there.
    while not (all_records := [wandb_internal_pb2.Record.FromString(d) for d in records(file.read_bytes())]) or (
        all_records[-1].WhichOneof("record_type") != "exit" and time.monotonic() < end
    ):
        time.sleep(0.05)
        assert time.monotonic() < end
    for record in all_records:
        if record.HasField("history"):
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                found.setdefault(name, {})[items["_step"]] = value
    check(folder, found)


# In a process of its own: it reads TRACKIO_DIR when it is imported.
TRACKIO = """
import sys
from fedlens import config, simulate
simulate.run(config.read(None, sys.argv[1:]))
"""


@needs("trackio")
def test_trackio_reads_what_the_run_measured(tmp_path):
    out = tmp_path / "run"
    words = [*SMALL, "track=trackio", f"out={out}"]
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", TRACKIO, *words]
    said = subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True, text=True)
    assert not said.stdout
    import sqlite3

    [file] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("select step, metrics from metrics order by id").fetchall()
    found = {}
    for step, metrics in rows:
        for name, value in json.loads(metrics).items():
            found.setdefault(name, {})[step] = value
    check(RunFolder(out), found)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb", "trackio"])
def test_a_missing_package_is_named_before_anything_is_run(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # Python's own way to say that there is none
    with pytest.raises(BadInput, match=rf"track={name} needs {name}, .*pip install 'fedlens\[{name}\]'"):
        simulate.run(config.read(None, [*SMALL, f"track={name}", f"out={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_named():
    with pytest.raises(BadInput, match="track"):
        config.read(None, ["track=tensorbored"])
