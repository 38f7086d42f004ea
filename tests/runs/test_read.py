"""One reader of run folders: what it finds, and what it refuses."""

import json

import pytest

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.runs import tables
from fedlens.runs.diff import _untimed
from fedlens.runs.folder import RunFolder
from fedlens.runs.opened import OpenedRun, named
from fedlens.runs.read import (
    Result,
    StoredRun,
    bytes_until,
    client_evaluation,
    curve,
    damage_of,
    label_counts,
    measure_of,
    runs_in,
    settings_of,
    summary,
)
from fedlens.simulate import run as simulate

SMALL = ("clients=3", "cohort=2", "model=cnn2", "rounds=2", "local.steps=1", "engine=sequential", "picture=false")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("read") / "run"
    simulate.run(config.read(None, [*SMALL, "evaluate.personal=both", f"out={out}"]))
    return out


def test_tables_summary_and_result_say_the_same(finished):
    folder, run = RunFolder(finished), StoredRun.read(finished)
    result = Result(**folder.result())
    assert result == summary(folder, run.experiment) and run.rounds == run.planned == 2 and not run.unfinished
    rounds, accuracies = curve(folder)
    assert rounds == [1, 2] == run.curves()["global"]["round"]
    assert accuracies == run.curves()["global"]["accuracy"] and accuracies[-1] == result.accuracy
    own = sum(sum(part.values()) for kind, part in run.traffic().items() if not kind.startswith("evaluation"))
    assert bytes_until(folder, [2]) == [own] == [run.curves()["global"]["bytes"][-1]]
    model, by_client = client_evaluation(folder)
    assert model == "personal after" and sorted(by_client) == [0, 1, 2]
    assert sum(by_client.values()) / 3 == pytest.approx(result.personal["after"]["mean"])
    assert measure_of(run.curves()) == "global" and len(label_counts(folder)) == 3
    assert runs_in([finished.parent]) == [finished] and [*named([finished])] == ["fedavg"]


def test_models_are_those_of_the_checkpoint(finished):
    run = OpenedRun.open(finished, device="cpu")
    assert run.evaluated_on == "personal after" and [*run.models()] == [""]
    assert run.confusion(0).sum() == len(run.federation.test[0])
    with pytest.raises(BadInput, match="client 7 does not exist: there are 3"):
        run.models(clients=[7])


def test_damage_is_one_sentence_without_the_folder(finished, tmp_path):
    for name, text, said in (
        ("result.json", {"rounds": 9}, "its tables end after round 2, but result.json says 9"),
        ("label_counts.json", [[1], [2, 3]], "label_counts.json is damaged: it should hold a list of numbers"),
        ("config.yaml", ["x"], "config.yaml is damaged: it names no algorithm"),
    ):
        before = (finished / name).read_text()
        (finished / name).write_text(json.dumps(text))
        with pytest.raises(BadInput, match=said), damage_of(finished):
            settings_of(finished)
            StoredRun.read(finished)
            label_counts(RunFolder(finished))
        (finished / name).write_text(before)
    with pytest.raises(BadInput, match=r"^the folder is damaged \(KeyError: 'x'\)$"), damage_of(tmp_path):
        raise KeyError("x")


def test_runs_without_a_row_differ_in_words(tmp_path):
    """As of runs whose tables are gone: diff compares what is left."""
    assert _untimed(tables.METRICS.empty_table()).num_rows == 0
