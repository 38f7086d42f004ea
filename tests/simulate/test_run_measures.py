"""All measures of a run, the best validation round, early stopping, and class weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedlens import config
from fedlens.compare.run import compare_existing
from fedlens.core.errors import BadInput
from fedlens.core.objective import ClassWeighted
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.runs.measures import confusion, validated
from fedlens.simulate.resume import resume
from fedlens.simulate.run import run

TINY = ["model=mlp", "model.hidden=8", "clients=4", "cohort=2", "rounds=3", "local.steps=3", "local.lr=0.1"]
TINY += ["picture=false", "evaluate.measures=all", "evaluate.validation=0.2", "evaluate.watch=auroc", "data=mnist5k"]


def read(*words):
    return config.read(None, words)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    place = tmp_path_factory.mktemp("measures")
    result = run(read(*TINY, "engine=sequential", f"out={place / 'one'}"))
    return place / "one", result


def test_measures_follow_from_the_confusion_that_is_kept(done):
    path, result = done
    metrics = RunFolder(path).metrics()
    counts = torch.tensor(confusion(metrics, "global", 10)).double()
    found = result.measures["global"]
    assert counts.sum() == 1000 and counts.trace() / 1000 == pytest.approx(result.accuracy)
    assert found["balanced_accuracy"] == pytest.approx((counts.diagonal() / counts.sum(1)).mean().item())
    assert found["sensitivity/3"] == pytest.approx((counts[3, 3] / counts[3].sum()).item())
    assert 0 < found["auroc"] < 1 and 0 <= found["ece"] <= 1
    own = torch.tensor(confusion(metrics, "personal after", 10)).double()
    assert result.measures["personal after"]["balanced_accuracy"] == pytest.approx(
        (own.diagonal() / own.sum(1)).nanmean().item()
    )
    assert {"auroc_mean", "ece_worst_decile", "balanced_accuracy_std"} <= result.personal["after"].keys()


def test_worst_tenth_of_a_calibration_error_is_its_largest(done):
    path, result = done
    rows = [r for r in RunFolder(path).metrics().to_pylist() if r["metric"] == "ece" and r["client"] is not None]
    last = [r["value"] for r in rows if r["model"] == "personal after"]
    assert result.personal["after"]["ece_worst_decile"] == pytest.approx(max(last))


def test_the_best_round_is_chosen_on_validation_images_and_kept(done):
    path, result = done
    values = validated(RunFolder(path).metrics(), "auroc")
    assert sorted(values) == [1, 2, 3]
    assert result.best["round"] == max(values, key=values.get) and result.best["accuracy"] is not None
    assert result.best["validation_auroc"] == max(values.values())
    assert result.best["round"] in RunFolder(path).rounds()


def test_workers_measure_the_same_bits(done, tmp_path):
    run(read(*TINY, "engine=workers", "workers=2", f"out={tmp_path / 'two'}"))
    assert list(differences(done[0], tmp_path / "two")) == []


def test_validation_images_are_nobodys_else():
    experiment = read("clients=4", "evaluate.validation=0.2")
    images = experiment.data.load()
    federation, split = experiment.federation(images)
    plain, same = read("clients=4").federation(images)
    assert split.hash == same.hash
    for client, index in federation.validation.items():
        kept, aside = {*federation.train[client].tolist()}, {*index.tolist()}
        assert kept | aside == {*plain.train[client].tolist()} and not kept & aside
        assert len(aside) == round(0.2 * len(plain.train[client]))
        assert not aside & {*federation.test[client].tolist()} and not aside & {*federation.pool.tolist()}


def test_no_patient_is_both_in_training_and_in_validation():
    experiment = read("clients=4", "evaluate.validation=0.2")
    images, groups = experiment.data.load(), torch.arange(5000) + 5000
    groups[images.train] = torch.arange(len(images.train)) // 3
    federation, _ = experiment.federation(replace(images, groups=groups))
    for client, index in federation.validation.items():
        kept, aside = (set(groups[part].tolist()) for part in (federation.train[client], index))
        assert not kept & aside
        assert abs(len(index) / (len(index) + len(federation.train[client])) - 0.2) < 0.02


def test_a_class_decides_which_round_is_best(tmp_path):
    """sensitivity/3 is how many of the threes are found, on validation images of all clients; a run that it ends has
    the measures of every class, and says why it ended."""
    words = ["evaluate.watch=sensitivity/3", "evaluate.patience=1", "rounds=12", "local.lr=0.4", "seed=2"]
    result = run(read(*TINY, *words, f"out={tmp_path / 'run'}"))
    folder = RunFolder(tmp_path / "run")
    values = validated(folder.metrics(), "sensitivity/3")
    best = max(values, key=lambda round: (values[round], -round))
    assert result.rounds == best + 1 < 12 and result.best["round"] == best
    assert result.best["validation_sensitivity/3"] == values[best]
    assert {"sensitivity/3", "specificity/3", "auroc/3"} <= result.measures["global"].keys()
    assert sum(map(sum, confusion(folder.metrics(), "global", 10))) == 1000
    assert (
        f"ended early: 1 evaluations on validation images were no better than round {best}"
        in (tmp_path / "run/log.txt").read_text()
    )


def test_confusions_of_clients_are_kept(done):
    path, _ = done
    metrics, whole = RunFolder(path).metrics(), torch.zeros(10, 10)
    for client in range(4):
        own = torch.tensor(confusion(metrics, "personal after", 10, client))
        rows = [row for row in metrics.to_pylist() if row["client"] == client and row["metric"] == "accuracy"]
        last = next(row["value"] for row in reversed(rows) if row["model"] == "personal after")
        assert own.trace() / own.sum() == pytest.approx(last)
        whole += own
    assert whole.tolist() == confusion(metrics, "personal after", 10)


def test_a_measure_that_validation_images_leave_open_is_said(tmp_path):
    """Each client has one class: there is no AUROC, no best round, and no traceback."""
    words = ["partition=shards", "partition.classes=1", "clients=10", "evaluate.measures=accuracy"]
    result = run(read(*TINY, *words, "rounds=1", f"out={tmp_path / 'run'}"))
    assert result.best is None
    assert "round 1 has no auroc: no client's validation images have" in (tmp_path / "run/log.txt").read_text()


def test_patience_ends_a_run_that_is_complete_then(tmp_path):
    words = ["evaluate.measures=accuracy", "evaluate.watch=accuracy", "evaluate.patience=2", "rounds=40", "local.lr=2"]
    result = run(read(*TINY, *words, f"out={tmp_path / 'run'}"))
    values = validated(RunFolder(tmp_path / "run").metrics(), "accuracy")
    best = max(values, key=lambda round: (values[round], -round))
    assert result.rounds == best + 2 < 40 and result.best["round"] == best
    assert result.personal["after"]["mean"] is not None  # evaluated as after any last round
    again = resume(tmp_path / "run")
    assert again.rounds == result.rounds and again.accuracy == result.accuracy


@pytest.mark.parametrize(
    "words, said",
    [
        (["evaluate.validation=0", "evaluate.patience=3"], "evaluate.validation"),
        (["evaluate.patience=3", "algorithm=fedavg+ft"], "stage of its own"),
        (["evaluate.validation=0.0000001"], "evaluate.validation"),
        (["evaluate.watch=auc"], "auroc"),
        (["evaluate.watch=sensitivity"], "sensitivity/CLASS"),
        (["evaluate.watch=sensitivity/12"], "there is no class '12'"),
    ],
)
def test_refusals(words, said, tmp_path):
    with pytest.raises(BadInput, match=said):
        run(read(*TINY, *words, f"out={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    place = tmp_path_factory.mktemp("measures")
    return place / "b", run(read(*TINY, "algorithm=fedprox", "algorithm.mu=5", f"out={place / 'b'}"))


@pytest.mark.parametrize("measure", ["ece", "balanced_accuracy", "sensitivity/7", "specificity/7", "auroc/7"])
def test_comparisons_rank_by_a_measure(done, other, measure):
    found = compare_existing([done[0], other[0]], measure)
    rows = found.rows(found.settings[0])
    scores = {"fedavg": done[1].measures["global"][measure], "fedprox": other[1].measures["global"][measure]}
    best_first = sorted(scores, key=scores.get, reverse=measure != "ece")
    assert [row["method"] for row in rows] == best_first and rows[0]["mean"] == scores[best_first[0]]
    assert found.plain()["measure"] == measure and measure in found.tables()[0][1][0]
    base, _, label = measure.partition("/")
    assert base.capitalize().replace("_", " ") + f" of {label}" * bool(label) in found.latex()


def test_a_class_that_no_run_has_is_refused(done, other):
    with pytest.raises(BadInput, match="no run has auroc/17"):
        compare_existing([done[0], other[0]], "auroc/17")


def test_class_weights_are_those_of_torch():
    draw = torch.Generator().manual_seed(0)
    logits, y = torch.randn(6, 3, generator=draw, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 1])
    rarity = torch.tensor([6 / (2 * 4), 6 / (2 * 2), 0.0])

    class Someone:
        memory = type("Memory", (), {"rarity": rarity})

    from fedlens.core.tree import Tree

    batch = Tree(y=y, weight=torch.ones(6, dtype=torch.float64))
    found = ClassWeighted()(Someone, Tree(), batch, Tree(logits=logits))
    assert found.item() == pytest.approx(F.cross_entropy(logits, y, rarity.double()).item(), abs=1e-12)


def test_clients_weigh_their_own_classes(tmp_path):
    words = [*TINY, "evaluate.validation=0", "evaluate.measures=accuracy", "rounds=1", "local.class_weights=balanced"]
    experiment = read(*words)
    images = experiment.data.load()
    (federation, _), net = experiment.federation(images), experiment.network(images)
    from fedlens.core.algorithm import Server
    from fedlens.core.run import job_of, open_round
    from fedlens.core.tree import Tree
    from fedlens.engines.sequential import Sequential

    turn = experiment.timetable()[0]
    server = open_round(Server(net, Tree(), 4), turn, 0)
    client, _ = Sequential(net, federation).open(job_of(server, turn, 0), 1)
    counts = torch.bincount(images.y[federation.train[1]], minlength=10).double()
    there = counts > 0
    expected = torch.where(there, counts.sum() / (there.sum() * counts), torch.zeros(10).double())
    assert torch.allclose(client.memory.rarity, expected)


def test_lanes_measure_the_same_bits(done, tmp_path):
    run(read(*TINY, "engine=lanes", f"out={tmp_path / 'lanes'}"))
    assert list(differences(done[0], tmp_path / "lanes")) == []
