"""Models of a run over a real SuperLink with TLS, exported by the commands, used without the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import test_flower as flower
from fedlens.flower import launch
from fedlens.flower.node import Node
from fedlens.runs.folder import RunFolder
from fedlens.runs.measures import confusion
from fedlens.runs.read import client_evaluation
from live import own, started, submit
from test_flower import needs_flower
from test_own_model import load_images, pictures

pytestmark = [needs_flower, pytest.mark.slow, pytest.mark.flower]
SMALL = ["cohort=3", "local.steps=4", "model=cnn2", "model.predictor=linear", "evaluate.measures=all"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """Three nodes with images of their owners' own."""
    folder = tmp_path_factory.mktemp("deployed") / "federation"

    def owners(client: int, place: Path) -> None:
        own(place, flower.digits(folder.parent / f"own{client}.npz", seed=client + 1, train=30 + 9 * client))

    with started(folder, [*flower.words(folder.parent, "scaffold"), *SMALL], owners):
        yield folder


def fedlens(*words: str, cwd: Path) -> str:
    line = [sys.executable, "-m", "fedlens", *words]
    ended = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def accuracy(model: Path, images: Path, without: Path) -> float:
    """As predict.py counts it, in a process in which importing fedlens fails."""
    without.mkdir(exist_ok=True)
    (without / "fedlens.py").write_text("raise ImportError('this machine has no fedlens')")
    line = [sys.executable, str(model / "predict.py"), str(images), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(without)}
    ended = subprocess.run(line, cwd=model, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])["accuracy"]


def settings_of(folder: Path, method: str) -> list[str]:
    words = [word for word in flower.words(folder.parent, method) if not word.startswith("uplink")]
    return [*words, *SMALL, "partition=dirichlet", "partition.min_size=25"]  # the server's images part unevenly


def test_the_global_model_has_the_runs_own_accuracy(hospitals, tmp_path):
    """A minute: `fedlens export` from the server's folder; and measures of every class came from the nodes."""
    run = tmp_path / "run"
    words = [*settings_of(hospitals, "fedavg"), "local.steps=6"]
    assert submit(hospitals, words, run, patience=600.0).wait(600) == 0
    result = RunFolder.open(run).result()
    said = json.loads(fedlens("export", str(run), "--out", "model", "--json", cwd=tmp_path).splitlines()[-1])
    images = load_images(hospitals.parent / "data16.npz", tmp_path / "images")
    assert 0.34 < result["accuracy"] < 1  # an error would show
    assert accuracy(tmp_path / "model", images, tmp_path / "none") == result["accuracy"] == said["accuracy"]
    metrics, whole = RunFolder.open(run).metrics(), torch.zeros(3, 3)
    model, accuracies = client_evaluation(RunFolder.open(run))
    for client in range(3):
        counts = torch.tensor(confusion(metrics, model, 3, client))
        assert float(counts.trace() / counts.sum()) == pytest.approx(accuracies[client])
        whole += counts
    assert whole.tolist() == confusion(metrics, model, 3)
    assert {"balanced_accuracy", "auroc", "ece", "sensitivity/2", "specificity/0"} <= result["measures"][model].keys()


def test_a_nodes_own_model_has_the_accuracy_that_it_told(hospitals, tmp_path):
    """A minute: `fedlens deploy export` at each node, of a method that keeps the head there."""
    run = tmp_path / "run"
    assert submit(hospitals, settings_of(hospitals, "fedper"), run, patience=600.0).wait(600) == 0
    _, accuracies = client_evaluation(RunFolder.open(run))
    assert any(0.34 < each < 1 for each in accuracies.values())
    for client, place in enumerate(launch.node_folders(hospitals)):
        out = tmp_path / f"model{client}"
        said = json.loads(fedlens("deploy", "export", str(place), "--out", str(out), "--json", cwd=tmp_path))
        images = Node.read(place / "node.yaml").data.load()
        files = pictures(images, images.test, tmp_path / f"images{client}")
        assert accuracy(out, files, tmp_path / "none") == accuracies[client] == said["accuracy"]
    ended = subprocess.run(
        [sys.executable, "-m", "fedlens", "export", str(run), "--client", "0"], capture_output=True, text=True
    )
    assert ended.returncode == 2 and "never leaves its node" in ended.stderr
