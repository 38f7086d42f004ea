"""`fedlens explain` of a run with saliency weights: the chart shows what the server used, and maps are compared."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedlens import config
from fedlens.cli.main import app
from fedlens.core.rng import generator
from fedlens.papers.fedsls.weights import agreement, explain_weights, legends
from fedlens.runs.folder import RunFolder
from fedlens.simulate import run as simulate

SMALL = (
    "data=mnist5k",
    "model=cnn2",
    "clients=4",
    "cohort=4",
    "rounds=3",
    "local.steps=1",
    "evaluate.personal=none",
    "engine=sequential",
    "picture=false",
    "partition.alpha=0.3",
)


def run(out, *words):
    simulate.run(config.read(None, [*SMALL, f"out={out}", *words]))
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "fedsls"
    return run(out, "algorithm=fedsls", "algorithm.pretrain_epochs=0", "algorithm.normalize=mean", "keep=2")


def test_the_command_draws_weights_and_maps(finished, nursery, tmp_path):
    ended = nursery("explain", str(finished), "--images", "2", "--methods", "gradient", "--json", cwd=tmp_path)
    said = json.loads(ended.out)
    assert [path.rpartition("/")[2] for path in said["more"]] == ["explain-weights.png", "explain-saliency.png"]
    for name in ("explain-weights", "explain-saliency"):
        assert (finished / "figures" / f"{name}.png").stat().st_size > 10_000
        assert (finished / "figures" / f"{name}.svg").exists()


def test_numbers_are_the_clients_own(finished, tmp_path):
    explain_weights(finished, tmp_path / "look.png", clients=[0, 2], count=3)
    numbers = json.loads((tmp_path / "look-weights.json").read_text())
    memories = RunFolder(finished).client_memories(round=4)
    totals, examples = (
        np.array([float(memories[client].saliency[name]) for client in range(4)]) for name in ("total", "examples")
    )
    assert list(numbers["saliency"].values()) == totals.tolist() and totals.min() > 0
    assert list(numbers["examples"].values()) == examples.tolist() and examples.sum() == 4000
    assert list(numbers["per_image"].values()) == pytest.approx((totals / examples).tolist())
    used = totals / examples / (totals / examples).sum()  # normalize=mean
    assert list(numbers["used"].values()) == pytest.approx(used.tolist())
    copies = numbers["agreement of clients' copies"]
    assert copies["names"] == ["at first", "client 0", "client 2"]
    # Without training of their own, the copies are the first model: they look at the same places.
    assert np.allclose(copies["rank_correlation"], 1)
    rounds = numbers["agreement of the global model over rounds"]
    assert rounds["names"] == ["at first", *(f"round {n} ({n - 1} of training)" for n in (2, 3, 4))]
    matrix = np.array(rounds["rank_correlation"])
    assert np.allclose(matrix, matrix.T) and np.allclose(np.diag(matrix), 1) and (matrix[0, 1:] < 1).all()


def test_copies_that_trained_look_elsewhere(tmp_path):
    out = run(tmp_path / "trained", "algorithm=fedsls", "algorithm.pretrain_epochs=1", "rounds=1", "local.lr=0.05")
    explain_weights(out, clients=[1], count=3)
    numbers = json.loads((out / "figures" / "explain-weights.json").read_text())
    matrix = np.array(numbers["agreement of clients' copies"]["rank_correlation"])
    assert matrix.shape == (2, 2) and matrix[0, 1] < 0.999


def test_every_picture_says_how_to_read_it_and_so_does_the_command(finished, monkeypatch):
    said = []
    for module in ("weights", "saliency"):
        monkeypatch.setattr(f"fedlens.papers.fedsls.{module}.caption", lambda figure, text: said.append(text))
    explain_weights(finished, count=1)
    assert sorted(said) == sorted(legends(maps=True)) and "1 the same, 0 unrelated" in legends(maps=True)[0]
    shown = CliRunner().invoke(app, ["explain", str(finished), "--images", "1", "--methods", "gradient"]).output
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0].startswith("the model: right on") and lines[0].endswith("of these 1 images.")
    assert lines[1].endswith("explain.png") and lines[2].startswith("red speaks for the true class")
    assert lines[4::2] == legends(maps=True) and len(lines) == 7


def test_without_maps_there_is_the_chart_and_without_weights_nothing(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("fedlens.papers.fedsls.weights.caption", lambda figure, text: said.append(text))
    fedsl = run(tmp_path / "fedsl", "algorithm=fedsl", "rounds=1")
    assert [path.name for path in explain_weights(fedsl)] == ["explain-weights.png"]
    assert said == legends(maps=False) and "two models" not in said[0]  # there are no maps to agree
    assert explain_weights(run(tmp_path / "fedavg", "algorithm=fedavg", "rounds=1")) == []


def test_agreement_by_hand():
    maps = {name: torch.rand(3, 4, 5, generator=generator(at)) for at, name in enumerate("ab")}
    ranks = {name: found.flatten(1).argsort(1).argsort(1).double().numpy() for name, found in maps.items()}
    by_hand = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(ranks["a"], ranks["b"], strict=True)])
    assert float(agreement(maps)[0, 1]) == pytest.approx(by_hand, abs=1e-12)
