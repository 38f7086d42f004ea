"""What the live page draws: thinned curves, means over seeds, bytes, lost replies, labels, settings, the log's end."""

import gzip
import json
import os
import shutil
import statistics
from itertools import accumulate
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fedlens.report.page import gather
from fedlens.runs.labels import label
from fedlens.ui import curves, follow
from fedlens.ui.watch import Watch
from test_report import run
from test_ui import ask, got, serving, six, synthetic


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> Path:
    """Two methods, two seeds each; one more whose replies get lost."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "scaffold"):
        for seed in (0, 1):
            run(root / f"{method}-{seed}", f"algorithm={method}", f"seed={seed}")
    faults = "faults.dropout=0.3", "faults.straggler=0.3", "policy.deadline=30", "faults.corrupt=0.2", "rounds=8"
    run(root / "faults", *faults, "policy.min_replies=2")
    return root


def read(path: Path, table: str = "metrics") -> list[dict]:
    return pq.read_table(path / f"{table}.parquet").to_pylist()


# ---- curves ----------------------------------------------------------------------------------------------------------
def test_a_thinned_curve_keeps_its_ends_and_its_extremes():
    values = [0.5 + 0.001 * (at % 7) for at in range(1000)]
    values[333], values[777] = 0.0, 1.0  # one round in which a model broke down, and one in which it shone
    found = curves.kept(values, 40)
    assert len(found) <= 40 and found == sorted({*found}) and {0, 333, 777, 999} <= {*found}
    assert curves.kept(values[:40], 40) == [*range(40)]
    assert {0, 99} <= {*curves.kept([None] * 100, 10)} and len(curves.kept([None] * 100, 10)) <= 10


def test_a_window_of_rounds_is_sent_with_all_of_its_points(tmp_path):
    path = synthetic(tmp_path / "runs" / "long", 1000)
    with serving(path.parent) as server:
        whole = got(server, "/curves?run=long&points=100")["long"]["curves"]["global"]
        part = got(server, "/curves?run=long&points=100&from=500&to=540")["long"]["curves"]["global"]
        assert len(whole["round"]) <= 100 and whole["round"][0] == 1 and whole["round"][-1] == 1000
        assert part["round"] == [*range(499, 542)]  # with those to which lines lead
        rows = {m["round"]: m["value"] for m in read(path) if m["metric"] == "accuracy"}
        assert part["accuracy"] == [six(rows[round]) for round in part["round"]]
        assert got(server, "/curves?run=long&from=2000&to=3000")["long"]["curves"]["global"]["round"] == []
        for wrong in ("points=3", "points=99999", "points=x", "after=1&after=2", "from=-1&to=3"):
            assert ask(server, f"/curves?run=long&{wrong}")[0] == 400


def test_bytes_are_those_of_the_report(seeds):
    with serving(seeds) as server:
        names = "run=fedavg-0&run=scaffold-1"
        found, plain = got(server, f"/curves?{names}&bytes=1"), got(server, f"/curves?{names}")
    for shown in gather([seeds / "fedavg-0", seeds / "scaffold-1"])["runs"]:
        assert found[shown["name"]]["curves"]["global"]["bytes"] == shown["curves"]["global"]["bytes"]
        assert plain[shown["name"]]["curves"]["global"]["bytes"] == [None] * 4  # nobody asked


def test_means_and_bands_over_seeds(seeds):
    with serving(seeds) as server:
        found = got(server, "/means?run=fedavg-0&run=fedavg-1&bytes=1")["global"]
    tables = [read(seeds / f"fedavg-{seed}") for seed in (0, 1)]
    for measure in ("accuracy", "loss"):
        each = [[m["value"] for m in t if m["model"] == "global" and m["metric"] == measure] for t in tables]
        assert found[measure] == [six(statistics.fmean(pair)) for pair in zip(*each, strict=True)]
        assert found[f"{measure}_low"] == [six(min(pair)) for pair in zip(*each, strict=True)]
        assert found[f"{measure}_high"] == [six(max(pair)) for pair in zip(*each, strict=True)]
    sent = [[b["payload"] + b["header"] for b in read(seeds / f"fedavg-{seed}", "bytes")
             if not b["kind"].startswith("evaluation")] for seed in (0, 1)]  # fmt: skip
    assert found["bytes"][-1] == six(statistics.fmean(map(sum, sent))) and found["runs"] == [2] * 4


def test_a_run_that_begins_does_not_cut_its_group_short():
    def line(rounds: int, value: float) -> dict:
        return {"global": {round: (value, 1.0, 1.0, None) for round in range(1, rounds + 1)}}

    found = curves.means([line(10, 0.2), line(8, 0.4), line(3, 0.9)])["global"]
    assert found["round"] == [*range(1, 9)] and set(found["accuracy"]) == {0.3} and found["runs"] == [2] * 8
    broken = {"global": {1: (None, None, 1.0, None), 2: (0.5, 1.0, 2.0, None)}}
    found = curves.means([broken, line(2, 0.7)])["global"]
    assert found["accuracy"] == [None, 0.6] and found["accuracy_low"] == [0.7, 0.5]


def test_groups_are_those_of_the_report(seeds):
    rows = {row["name"]: row for row in Watch(seeds).since(0)["runs"]}
    mine = {frozenset(n for n in rows if rows[n]["group"] == row["group"]) for row in rows.values()}
    shown = gather([seeds])
    theirs = {frozenset(shown["runs"][number]["name"] for number in group["runs"]) for group in shown["groups"]}
    assert mine == theirs and len(mine) == 3
    assert rows["fedavg-0"]["family"] == "global" and rows["fedavg-0"]["group"] != rows["scaffold-0"]["group"]


def test_some_of_many_names_may_be_gone(seeds):
    with serving(seeds) as server:
        assert got(server, "/curves?run=nothing&run=fedavg-0").keys() == {"fedavg-0"}
        assert got(server, "/means?run=nothing&run=fedavg-0")["global"]["runs"] == [1] * 4
        assert ask(server, "/means?run=nothing")[0] == 400 and ask(server, "/curves")[0] == 400
        assert ask(server, "/means?" + "&".join(f"run=r{n}" for n in range(201)))[0] == 400


# ---- settings, labels, lost replies, log -----------------------------------------------------------------------------
def test_settings_that_all_share_are_sent_once(seeds, tmp_path):
    root = Path(shutil.copytree(seeds, tmp_path / "runs"))
    (root / "scaffold-1" / "config.yaml").write_text("{")
    with open(root / "faults" / "config.yaml", "a") as file:
        file.write("odd: .inf\n")  # which JSON does not know
    with serving(root) as server:
        found = got(server, "/settings")
    assert found["common"]["data"] == "mnist5k" and "seed" not in found["common"] and "out" not in found["common"]
    assert found["runs"].keys() == {"fedavg-0", "fedavg-1", "scaffold-0", "faults"}
    assert found["runs"]["fedavg-1"]["seed"] == 1 and found["runs"]["faults"]["faults.dropout"] == 0.3
    assert found["runs"]["faults"]["odd"] is None and "odd" not in found["runs"]["fedavg-0"]


def test_tags_and_notes_are_shown_as_they_change(seeds, tmp_path):
    path = Path(shutil.copytree(seeds / "fedavg-0", tmp_path / "runs" / "one"))
    watch = Watch(path.parent)
    assert watch.since(0)["runs"][0]["tags"] == []
    label(path, tags=["paper"], note="table 1")
    watch._next_refresh = 0
    [row] = watch.since(1)["runs"]
    assert (row["tags"], row["remark"], row["state"]) == (["paper"], "table 1", "done")
    with serving(path.parent) as server:
        assert [note["text"] for note in got(server, "/run?run=one")["remarks"]] == ["table 1"]
    for damaged in ("{", '{"tags": 5, "notes": []}', '{"tags": [[]], "notes": [7]}'):
        (path / "labels.json").write_text(damaged)
        watch._next_refresh = 0
        [row] = watch.since(watch.version - 1)["runs"]
        assert (row["tags"], row["state"]) == ([], "done"), "labels are beside a run, which they leave whole"
    (path / "labels.json").unlink()
    assert not follow.Followed(path, "one").labels["tags"]


def test_lost_replies_by_round(seeds):
    rows = [m for m in read(seeds / "faults") if m["metric"] in follow.SETBACKS]
    assert {m["metric"] for m in rows} >= {"missing", "late"}, "the example should lose some"
    with serving(seeds) as server:
        found = got(server, "/run?run=faults")["setbacks"]
        [row] = [row for row in server.watch.since(0)["runs"] if row["name"] == "faults"]
        assert got(server, "/run?run=fedavg-0")["setbacks"]["first"] == []
    assert found["first"] == found["last"] == sorted({m["round"] for m in rows})
    for at, round in enumerate(found["first"]):
        for kind in follow.SETBACKS:
            assert found[kind][at] == sum(m["round"] == round and m["metric"] == kind for m in rows)
    assert row["lost"] == sum(m["metric"] != "void" for m in rows)


def test_lost_replies_of_a_long_run_share_bars(tmp_path):
    seen = follow.Followed(tmp_path, "long")
    seen._lost = {round: {"missing": 1, "late": 0, "refused": 0, "void": 0} for round in range(1, 1001)}
    found = seen.setbacks()
    assert len(found["first"]) <= 120 and sum(found["missing"]) == 1000
    assert [a + 1 for a in found["last"][:-1]] == found["first"][1:] and found["first"][0] == 1


def test_the_end_of_a_log(seeds, tmp_path):
    path = Path(shutil.copytree(seeds / "fedavg-0", tmp_path / "runs" / "one"))
    with serving(path.parent) as server:
        said = got(server, "/log?run=one")["lines"]
        assert said == (path / "log.txt").read_text().splitlines() and said[-1].startswith("round 4/4")
        with open(path / "log.txt", "ab") as file:
            file.write(b"\xff<b>\n" + b"note: x\n" * 20_000)
        said = got(server, "/log?run=one")["lines"]
        assert 1000 < len(said) < 20_000 and set(said) == {"note: x"}, "whole lines, and not all of them"
        (path / "log.txt").unlink()
        assert got(server, "/log?run=one") == {"lines": []}
        os.mkfifo(path / "log.txt")
        assert b"not a regular file" in ask(server, "/log?run=one")[2]


def test_damaged_bytes_cost_their_axis_alone(seeds, tmp_path):
    path = Path(shutil.copytree(seeds / "fedavg-0", tmp_path / "runs" / "one"))
    [part] = (path / "bytes.parquet").iterdir()
    part.write_bytes(b"PAR1")
    with serving(path.parent) as server:
        found = got(server, "/curves?run=one&bytes=1")["one"]["curves"]["global"]
        assert found["bytes"] == [None] * 4 and len(found["accuracy"]) == 4
        assert got(server, "/means?run=one&bytes=1")["global"]["bytes"] == [None] * 4


def test_answers_are_packed_for_who_can_unpack_them(tmp_path):
    synthetic(tmp_path / "runs" / "one", 300)
    with serving(tmp_path / "runs") as server:
        plain = ask(server, "/curves?run=one")
        packed = ask(server, "/curves?run=one", Accept_Encoding="br, gzip")
        assert gzip.decompress(packed[2]) == plain[2] and len(packed[2]) < len(plain[2]) / 2
        assert packed[1]["Content-Encoding"] == "gzip" and "Content-Encoding" not in plain[1]
        assert "default-src 'none'" in packed[1]["Content-Security-Policy"]


def test_bytes_of_a_run_that_went_back(tmp_path):
    """Rounds that are run again count once."""
    from fedlens.runs.folder import RunFolder
    from test_ui import grow

    path = synthetic(tmp_path / "run", 6, done=False)
    seen = follow.Followed(path, "run")
    seen.refresh()
    assert seen.curves(0, 0, spent=True)["curves"]["global"]["bytes"][-1] == 6 * 20 * 1010
    for table in RunFolder(path).tables():
        table.cut(4)
    grow(path, 4, 7, 100, seed=9)
    seen.refresh()
    found = seen.curves(0, 0, spent=True)["curves"]["global"]["bytes"]
    assert found == [*accumulate([20 * 1010] * 7)] and json.dumps(found)
