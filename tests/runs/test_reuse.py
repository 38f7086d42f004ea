"""Runs that begin alike: what is taken over is what would have been computed."""

import shutil
from pathlib import Path

import pytest

from fedlens import config
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.runs.reuse import begin_alike
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate
from fedlens.simulate.finish import finish

pytestmark = pytest.mark.usefixtures("fewer_images")
FEW = ("model=cnn2", "clients=4", "cohort=2", "local.steps=1", "engine=sequential", "picture=false", "evaluate.every=1")
XDS = ("algorithm=fedxds", "algorithm.warmup_rounds=3", "algorithm.warmup_epochs=1", "rounds=3")


def asked(out: Path, *words: str):
    return config.read(None, [*FEW, *words]).with_execution(out=str(out))


def done(out: Path, *words: str) -> RunFolder:
    simulate.run(asked(out, *words))
    return RunFolder(out)


SCAFFOLD = ("algorithm=scaffold", "rounds=6", "keep=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, fewer_images) -> Path:
    place = tmp_path_factory.mktemp("runs")
    done(place / "fedxds", *XDS)
    done(place / "scaffold", *SCAFFOLD)
    return place


@pytest.mark.parametrize(
    ("words", "rounds"),
    [
        ((*XDS, "algorithm.sparsity=50"), 3),  # the warm-up
        ((*SCAFFOLD, "rounds=8"), 5),
    ],
)
def test_the_longest_beginning_is_taken_over_to_the_bit(tmp_path, runs, words, rounds):
    finish(asked(tmp_path / "second", *words), [], recorder.Nobody(), runs)
    log = (tmp_path / "second" / "log.txt").read_text()
    assert log.startswith(f"rounds 1 to {rounds} are those of") and f"round {rounds}/" not in log
    assert not list(differences(tmp_path / "second", done(tmp_path / "alone", *words).path))


@pytest.mark.parametrize(
    ("words", "rounds"),
    [
        ((*SCAFFOLD, "rounds=3"), 2),  # the last round of a run has looks of its own
        ((*SCAFFOLD, "rounds=8", "evaluate.closing=3"), 0),  # other looks
        ((*XDS, "algorithm.base=scaffold"), 0),
        ((*XDS, "seed=1"), 0),
        ((*XDS, "local.lr=0.5"), 0),
        (("algorithm=fedavg", "rounds=6"), 0),
        ((*XDS, "algorithm.sparsity=50", "transcript=50"), 0),  # it would lack messages
    ],
)
def test_no_more_than_what_is_the_same(tmp_path, runs, words, rounds):
    folder = begin_alike(asked(tmp_path / "second", *words), runs)
    assert (max(folder.rounds()) if folder else 0) == rounds


def test_a_run_of_other_code_or_with_a_damaged_checkpoint_is_no_beginning(tmp_path, runs):
    shutil.copytree(runs / "fedxds", tmp_path / "runs" / "fedxds")
    donor = RunFolder(tmp_path / "runs" / "fedxds")
    wish = asked(tmp_path / "runs" / "second", *XDS, "algorithm.sparsity=50")
    card = donor.passport()
    donor.write_json("passport.json", {**card, "code": {**card["code"], "sha256": "0"}})
    assert begin_alike(wish, tmp_path / "runs") is None
    donor.write_json("passport.json", card)
    (donor.checkpoints / "000003.safetensors").unlink()
    assert begin_alike(wish, tmp_path / "runs") is None and not Path(wish.execution.out).exists()


def test_the_end_of_a_stage_stays_however_long_the_next_one(tmp_path):
    words = ("algorithm=finetune", "algorithm.epochs=1", "rounds=2", "checkpoint=1")
    assert done(tmp_path / "a", *words).rounds() == [2, 3]
    assert done(tmp_path / "b", *XDS, "rounds=4", "checkpoint=1").rounds() == [3, 7, 8]


def test_looks_at_a_model_that_is_thrown_away_do_not_count(tmp_path):
    """FedXDS's training begins afresh after its warm-up: mean, best and targets are of what came after."""
    out = done(tmp_path / "runs" / "a", *XDS, "evaluate.last=10", "evaluate.targets=0.01")
    rows = [row for row in out.metrics().to_pylist() if row["model"] == "global" and row["metric"] == "accuracy"]
    after = [row["value"] for row in rows if row["round"] > 4]  # 3 of warm-up, and the exchange
    assert len(rows) == 7 and len(after) == 3
    result = out.result()
    assert result["accuracy_last"] == pytest.approx(sum(after) / 3) and result["accuracy_best"] == max(after)
    assert result["targets"]["0.01"]["round"] == 1 and result["training_rounds"] == 3 and result["rounds"] == 7
    kept = done(tmp_path / "runs" / "b", *XDS, "algorithm.continue_from_warmup=true", "evaluate.targets=0.01")
    assert kept.result()["targets"]["0.01"]["round"] == 1


def test_a_model_that_is_looked_at_twice_counts_once(tmp_path):
    """Fine-tuning leaves the global model as it is: FedAvg has the same mean of its last looks with it and without."""
    words = ("algorithm=finetune", "algorithm.epochs=1", "rounds=3", "evaluate.last=10", "evaluate.targets=0.01")
    tuned, plain = done(tmp_path / "a", *words), done(tmp_path / "b", "algorithm=fedavg", *words[2:])
    seen = [row for row in tuned.metrics().to_pylist() if row["model"] == "global" and row["metric"] == "accuracy"]
    assert len(seen) == 4 and seen[2]["value"] == seen[3]["value"]
    assert tuned.result()["accuracy_last"] == plain.result()["accuracy_last"]
    assert tuned.result()["targets"]["0.01"] == plain.result()["targets"]["0.01"]  # and where it was first reached
    # Looked at only at its end, the last model is not forgotten.
    rare = done(tmp_path / "c", *words, "evaluate.every=2").result()
    assert rare["accuracy"] == plain.result()["accuracy"]
    assert rare["accuracy_last"] == pytest.approx((seen[1]["value"] + seen[3]["value"]) / 2)


@pytest.mark.parametrize(
    ("words", "twice"),
    [
        (("algorithm=feddisco",), ()),  # counts labels, then trains
        (("algorithm=fedsls", "algorithm.pretrain_epochs=1"), ()),
        (("algorithm=fedsl",), ()),
        (("algorithm=finetune", "algorithm.base=feddisco", "algorithm.epochs=1"), (-1,)),
        ((*XDS, "algorithm.base=feddisco"), ()),
        ((*XDS, "algorithm.base=feddisco", "algorithm.continue_from_warmup=true"), (3,)),  # the exchange
    ],
)
def test_every_model_that_training_made_counts(tmp_path, words, twice):
    """Methods that ask something first, or train through the eyes of another."""
    out = done(tmp_path / "a", *words, "rounds=3", "local.steps=12", "local.lr=0.05", "evaluate.last=10")
    rows = [row for row in out.metrics().to_pylist() if row["model"] == "global" and row["metric"] == "accuracy"]
    turns = asked(tmp_path / "b", *words, "rounds=3").timetable()
    trains = [turn.stage.algorithm.updates_model for turn in turns]
    before = trains.index(True, turns[-1].since)  # what is asked first leaves the first weights as they are
    counted = [row["value"] for row in rows if row["round"] > before]
    for at in sorted(twice, reverse=True):
        assert counted[at] == counted[at - 1]
        del counted[at]
    result = out.result()
    assert len({*counted}) >= 3 and result["accuracy"] == rows[-1]["value"]
    assert result["accuracy_last"] == pytest.approx(sum(counted) / len(counted))
    assert result["accuracy_best"] == max(counted)
