"""benchmarks/evidence.py: cells that are cut keep their curves, and travel to another machine with their checkpoint."""

import json
import sys
from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).parents[2]
WORDS = ("device=cpu", "engine=sequential", "data=mnist5k", "model=mlp", "model.hidden=4", "rounds=4", "local.epochs=1")
WORDS = (*WORDS, "local.batch_size=64", "evaluate.every=1", "evaluate.personal=none", "checkpoint=1", "picture=false")


@pytest.fixture(scope="module")
def evidence():
    return script("benchmarks/evidence.py")


def test_what_is_required_comes_first(evidence):
    cells = evidence.queue([*evidence.PAPERS])
    assert [one.required for one in cells] == sorted((one.required for one in cells), reverse=True)
    assert len({one.key for one in cells}) == len(cells)
    needed = [one.name for one in cells if one.required]
    assert sum(name.startswith("pse/table2") for name in needed) == 11 * 3 * 2
    assert sum(name.startswith("fedsls") for name in needed) == 6 * 2 * 3
    assert sum(name.startswith("spatl") for name in needed) == 2 * (6 + 4)


def test_equal_training_is_what_the_budget_counts(evidence):
    def images(row, words=(), grid="fedxds/table4"):
        one = evidence.Wanted(grid, row, evidence.MAIN, words)
        return evidence.trained(evidence.cell_of(one, ("data=mnist5k",)).experiment)

    longer = next(one for one in evidence.queue(["fedxds"]) if one.words and one.row == "fedavg" and one.required)
    assert images("fedavg", longer.words) == pytest.approx(images("fedavg+fedxds"), rel=0.01)
    composed = evidence.queue(["compose"])
    assert len(composed) == 24 and not any(one.required for one in composed)
    assert len({round(images(one.row, one.words, one.grid), -1) for one in composed if one.seed == 0}) == 1


def test_named_cells_come_in_the_order_of_their_texts(evidence):
    cells = evidence.chosen(evidence.queue(["pse"]), ["pse/ablations v2", "pse cifar10/", "pse/ablations"])
    rows = [(one.grid.partition("/")[2], one.row) for one in cells]
    assert rows[:6] == [("ablations", "v2")] * 2 + [("table2", "pse")] * 4
    assert {row for _, row in rows[6:]} == {"v1", "v3"}
    every = evidence.queue(["pse"])
    assert evidence.chosen(every, [""]) == every


def test_a_cut_cell_has_its_curve_and_goes_on_elsewhere(evidence, tmp_path):
    one = next(cell for cell in evidence.queue(["pse"]) if cell.row == "ditto")
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "e.json"
    assert evidence.work([one], here, WORDS, until=sys.float_info.min) == 0  # no time at all: nothing begins
    assert not here.exists() or not any(here.rglob("config.yaml"))
    watch = evidence.Clocked.round

    def late(self, progress):
        self.until = -1.0 if progress.round == 2 else self.until
        watch(self, progress)

    evidence.Clocked.round = late
    try:
        code = evidence.work([one], here, WORDS, until=float("inf"))
    finally:
        evidence.Clocked.round = watch
    cell = evidence.cell_of(one, WORDS)
    assert code == 3 and not evidence.is_done(cell, here, one.seed)  # stopped after round 3, before the time was up
    assert evidence.collected(file, [one], here, WORDS) == []
    (row,) = json.loads(file.with_name("e_begun.json").read_text())
    assert (row["reached"], row["rounds"], [at for at, _ in row["curve"]]) == (3, 4, [1, 2, 3])
    evidence.pack(tmp_path / "state", [one], here, WORDS)
    assert [part.name for part in evidence.parts_of(tmp_path / "state")] == ["state.000"]
    evidence.unpack(tmp_path / "state", there)
    assert len([*cell.folder(there, one.seed).glob("checkpoints/*.safetensors")]) == 1  # the newest alone
    assert evidence.work([one], there, WORDS, until=float("inf")) == 0
    (whole,) = evidence.collected(file, [one], there, WORDS)
    assert [at for at, _ in whole["curve"]] == [1, 2, 3, 4] and whole["curve"][:3] == row["curve"]
    assert json.loads(file.with_name("e_begun.json").read_text()) == []


def test_only_what_should_end_in_time_begins(evidence, tmp_path, monkeypatch, capsys):
    ditto, local = (next(one for one in evidence.queue(["pse"]) if one.row == row) for row in ("ditto", "local"))
    monkeypatch.setattr(evidence, "estimated", lambda cell: 100.0)
    evidence.note_pace(ditto, evidence.cell_of(ditto, WORDS), tmp_path, 300.0)
    evidence.note_pace(local, evidence.cell_of(local, WORDS), tmp_path, 50.0)
    other, elsewhere = evidence.queue(["spatl"])[0], evidence.Wanted("pse/table1", "local", "fashion_gray_colour/3")
    unlike = evidence.Wanted("pse/table1", "pse", "fashion_gray_colour/3")
    found = [evidence.pace(one, tmp_path) for one in (ditto, local, other, elsewhere, unlike)]
    assert found == [3.0, 0.5, 1.0, 0.5, 3.0]  # its own, none of its paper, its row in another table, its paper
    monkeypatch.setattr(evidence.time, "monotonic", lambda: 1000.0)
    assert evidence.work([ditto], tmp_path, WORDS, until=1250.0, whole=True) == 0  # 300 s, and 250 are left
    assert "would take too long" in capsys.readouterr().out
    monkeypatch.undo()
    assert not evidence.is_done(evidence.cell_of(ditto, WORDS), tmp_path, ditto.seed)
    assert evidence.work([local], tmp_path, WORDS, until=float("inf"), whole=True) == 0
    assert evidence.is_done(evidence.cell_of(local, WORDS), tmp_path, local.seed)


def test_processes_begin_with_a_paper_each(evidence):
    assert evidence.turns(["a", "b"], [2]) == [["a", "b"]] * 2
    assert evidence.turns(["a", "b", "c"], [1, 2, 0]) == [["a", "b", "c"], ["b", "c", "a"], ["b", "c", "a"]]


def test_results_of_another_machine_are_added_once(evidence, tmp_path):
    def row(seed, value):
        return {"table": "t", "row": "r", "column": "c", "over": [], "seed": seed, "value": value}

    here, there = tmp_path / "here.json", tmp_path / "there.json"
    here.write_text(json.dumps([row(0, 1.0)]))
    there.write_text(json.dumps([row(0, 2.0), row(1, 3.0)]))
    evidence.merge(here, [there])
    assert json.loads(here.read_text()) == [row(0, 1.0), row(1, 3.0)]


def test_losses_are_kept_and_a_cell_is_measured_once(evidence, tmp_path, monkeypatch):
    local = next(one for one in evidence.queue(["pse"]) if one.row == "local")
    words, file = (*WORDS, "keep=2", "clients=4", "cohort=everyone"), tmp_path / "e.json"
    assert evidence.work([local], tmp_path, words, until=float("inf")) == 0
    monkeypatch.setattr(evidence, "_measured", lambda *_: pytest.fail("measured again"))
    (row,) = evidence.collected(file, [local], tmp_path, words, ready=True)
    assert [int(at) for at in row["losses"]] == [2, 3, 4] and row["losses"]["4"] < row["losses"]["2"]
    evidence.place_of(tmp_path, "rows", local, evidence.cell_of(local, words)).unlink()
    assert evidence.collected(tmp_path / "other.json", [local], tmp_path, words, ready=True) == []  # its process does
