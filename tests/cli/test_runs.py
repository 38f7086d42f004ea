"""`fedlens list`, `show`, `rm`, `note`, tags, `run --keys` and completion, as a person calls them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import pytest

from fedlens import config
from fedlens.cli.keys import GROUPS, keys_of, meanings, type_of, unit_of
from fedlens.core.errors import BadInput
from fedlens.experiment import Evaluation, Execution, Experiment, LocalTraining
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.runs.labels import FILE, label, labels

SMALL = ["clients=4", "cohort=2", "model=mlp", "model.hidden=4", "local.steps=1", "engine=sequential", "rounds=1"]
SMALL += ["evaluate.personal=none", "picture=false", "durable=false"]


@pytest.fixture(scope="module")
def finished(everyone, tmp_path_factory):
    """Two runs, one of them tagged and half done; and a folder that is none."""
    place = tmp_path_factory.mktemp("finished")
    for words in (["out=runs/a"], ["algorithm=scaffold", "out=runs/b", "--tag", "first", "--tag", "ablation-2"]):
        ended = everyone("run", *SMALL, *words, cwd=place)
        assert ended.code == 0, ended.err
    (place / "runs" / "b" / "result.json").unlink()
    (place / "runs" / "mine").mkdir()
    (place / "runs" / "mine" / "thesis.txt").write_text("mine")
    return place


@pytest.fixture
def place(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "place", symlinks=True)


@pytest.fixture
def call(nursery, place):
    def call(*words, code=0, **more):
        ended = nursery(*words, cwd=place, **more)
        assert ended.code == code, ended.err
        return ended.out if code == 0 else ended.sentence

    return call


# ---- list and show ----
def test_list_sorts_and_tells_of_damage(call, place):
    rows = json.loads(call("list", "--json", "--sort", "run"))["runs"]
    assert [row["run"] for row in rows] == ["runs/a", "runs/b"]
    assert [row["method"] for row in rows] == ["fedavg", "scaffold"] and rows[1]["tags"] == ["first", "ablation-2"]
    assert rows[0]["state"] == "done" and rows[1]["state"] == "failed" and 0 < rows[0]["accuracy"] < 1
    swapped = json.loads(call("list", "--json", "--sort", "run", "--reverse"))["runs"]
    assert [row["run"] for row in swapped] == ["runs/b", "runs/a"]
    assert [r["run"] for r in json.loads(call("list", "runs", "--tag", "first", "--json"))["runs"]] == ["runs/b"]
    by = [row["accuracy"] for row in json.loads(call("list", "--sort", "accuracy", "--json"))["runs"]]
    assert by == sorted(by, reverse=True)
    (place / "runs" / "a" / "config.yaml").write_text("?")
    said = call("list")
    assert "2 runs" in said and "runs/a: config.yaml is damaged" in said and "scaffold" in said
    assert call("list", "--sort", "acuracy", code=2) == "--sort 'acuracy' is no column; did you mean 'accuracy'?"
    assert call("list", "nowhere", code=2).startswith("there is no folder nowhere")


def test_a_list_fits_eighty_columns(monkeypatch, capsys):
    """What all runs share is said once, above the table; no number is wrapped."""
    from fedlens.cli import runs

    row = {"method": "scaffold", "data": "mnist5k", "seed": 0, "round": 8, "rounds": 8, "accuracy": 0.867, "tags": []}
    row |= {"bytes": 271e6, "seconds": 27.0, "state": "done", "began": 1_000_000_000_000, "trouble": ""}
    names = [f"runs/a-long-name-of-a-table/scaffold/seed{seed}" for seed in range(3)]
    monkeypatch.setattr(runs, "run_rows", lambda _: [row | {"run": name, "seed": at} for at, name in enumerate(names)])

    def listed(columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        runs.list_known([], False, "run", False, "", False)
        return capsys.readouterr().out.splitlines()

    narrow, wide = listed(80), listed(140)
    assert max(map(len, narrow)) <= 80 and max(map(len, wide)) > 80
    assert (
        narrow[0]
        == (
            "All: data mnist5k, state done, round 8/8, method scaffold, run below runs/a-long-name-of-a-table/scaffold/"
        )[:80].rpartition(" ")[0]
    )
    assert [line.split()[:4] for line in narrow if line.startswith("seed")] == [
        [f"seed{seed}", str(seed), "86.70", "%"] for seed in range(3)
    ]
    assert sum(names[0] in line and "mnist5k" in line for line in wide) == 1 and "All:" not in wide[0]
    assert not any("tags" in line for line in wide)  # nobody has any
    one = row | {"run": "runs/mnist5k-scaffold-001", "tags": ["demo", "second"]}
    monkeypatch.setattr(runs, "run_rows", lambda _: [one])
    alone = listed(80)
    assert max(map(len, alone)) <= 80 and alone[1].endswith("with --json: bytes, seed, seconds, began")
    assert any(
        line.split() == ["mnist5k-scaffold-001", "scaffold", "mnist5k", "8/8", "86.70", "%", "done", "demo,", "second"]
        for line in alone
    )


def test_facts_of_a_run_and_heads_of_keys_fit_eighty_columns(monkeypatch, capsys):
    from fedlens.cli import run, runs

    monkeypatch.setenv("COLUMNS", "80")
    runs._fact("settings", " ".join(f"a.long.setting{number}=0.001" for number in range(9)))
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("settings  a.long.setting0=") and len(said) == 3
    assert all(len(line) <= 80 for line in said) and all(line.startswith(10 * " " + "a") for line in said[1:])
    run._print_keys([], False)
    keys = capsys.readouterr().out.splitlines()
    assert len(keys) > 100 and max(map(len, keys)) <= 80


def test_show_names_what_is_not_usual(call):
    call("note", "runs/b", "the learning rate was wrong")
    said = call("show", "runs/b")
    assert "algorithm=scaffold" in said and "rounds=1" in said and "local.lr" not in said
    assert "the learning rate was wrong" in said and "fedlens resume runs/b" in said
    assert "fedlens export" not in said and "fedlens export runs/a" in call("show", "runs/a")
    told = json.loads(call("show", "runs/a", "--json"))
    assert told["result"]["rounds"] == 1 and told["changed"]["clients"] == 4 and told["notes"] == []
    assert call("show", "runs/bb", code=2) == "there is no run runs/bb; did you mean 'runs/b'?"
    assert call("show", "nowhere", code=2) == "there is no run nowhere; `fedlens list` shows those there are"


# ---- rm ----
def test_rm_asks_and_refuses(call, place):
    assert call("rm", "runs/a", code=2) == "nobody can be asked here; say --yes to delete"
    assert call("rm", "runs/a", "runs/mine", "--yes", code=2).startswith("runs/mine holds no run")
    assert call("rm", "runs", "--yes", code=2).startswith("runs holds no run")
    (place / "link").symlink_to(place / "runs" / "a")
    assert call("rm", "link", "--yes", code=2) == "link is a link: name the folder that it points to"
    with RunFolder(place / "runs" / "a").locked():
        assert call("rm", "runs/a", "--yes", code=2) == "runs/a is running: stop it first"
    shutil.copytree(place / "runs" / "b", place / "runs" / "a" / "inner")
    said = call("rm", "runs/a", "--yes", code=2)
    assert said == "runs/a holds another run, runs/a/inner: delete that first"
    assert sorted(os.listdir(place / "runs")) == ["a", "b", "mine"]  # nothing is gone yet
    shutil.rmtree(place / "runs" / "a" / "inner")
    deleted = json.loads(call("rm", "runs/a", "runs/a", "--yes", "--json"))
    assert deleted["deleted"] == ["runs/a"] and deleted["bytes"] > 1000
    assert sorted(os.listdir(place / "runs")) == ["b", "mine"]


# ---- tags and notes ----
def test_labels_enter_no_hash_and_no_result(place, finished):
    run = place / "runs" / "a"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    label(run, tags=["x", "x"], note="why")
    assert labels(run)["tags"] == ["x"] and [note["text"] for note in labels(run)["notes"]] == ["why"]
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != FILE}
    assert after == before and list(differences(run, finished / "runs" / "a")) == []
    assert FILE not in os.listdir(finished / "runs" / "a")  # nobody tagged it
    with pytest.raises(BadInput, match=r"has no tag y; it has x"):
        label(run, without=["y"])
    assert label(run, without=["x"])["tags"] == []
    for text in ("[]", "{", '{"tags": [1], "notes": []}', '{"tags": [], "notes": [{}]}'):
        (run / FILE).write_text(text)
        with pytest.raises(BadInput, match=r"labels.json is damaged"):
            labels(run)


def test_a_tag_is_refused_before_anything_runs(call, place):
    for words in (["run", *SMALL, "out=runs/c"], ["compare", "fedavg", *SMALL], ["note", "runs/a"]):
        said = call(*words, "--tag", "two words", code=2)
        assert said.startswith("'two words' is no tag: letters, digits")
    assert not (place / "runs" / "c").exists()


def test_compare_tags_its_runs(call, place):
    call("compare", "fedavg", *SMALL, "--processes", "1", "--out", "runs/both", "--tag", "table-1")
    rows = json.loads(call("list", "runs/both", "--json"))["runs"]
    assert rows and all(row["tags"] == ["table-1"] for row in rows)


# ---- keys ----
def test_every_setting_has_a_meaning():
    sections = [Experiment, Execution, LocalTraining, Evaluation]
    sections += [type(getattr(Experiment(), name)) for name in ("policy", "faults")]
    parts = [cls for known in config.REGISTRIES.values() for cls in known.values()]
    own = {"local", "evaluate", "execution", "ray"}  # sections, which GROUPS describes
    without = {
        f"{cls.__name__}.{name}"
        for cls in (*sections, *parts)
        if dataclasses.is_dataclass(cls)
        for name, told in meanings(cls).items()
        if (not told or "pyright" in told or told.startswith("as in ")) and name not in own
    }
    assert without == set(), "write a comment beside each field: what it means, its unit first"


def test_keys_have_types_units_and_defaults():
    found = {key.key: key for key in keys_of(config.read(None, ["algorithm=fedprox", "uplink=clip", "local.lr=0.5"]))}
    lr, mu, clip = found["local.lr"], found["algorithm.mu"], found["uplink.clip.norm"]
    assert (lr.value, lr.default, lr.type, lr.group) == (0.5, 0.01, "number above 0", "local")
    assert mu.group == "algorithm" and mu.default == 0.01 and clip.value == 1.0 and clip.group == "uplink"
    assert found["local.epochs"].unit == "epochs" and found["memory"].unit == "GiB" and found["seed"].unit == ""
    assert found["faults.dropout"].unit == "share" and found["transcript"].unit == "MiB"
    assert found["engine"].type == "one of auto, sequential, workers, lanes, ray"
    assert {key.group for key in found.values()} <= GROUPS.keys()
    assert found["local.schedule"].type == "one of constant, cosine, exponential, staircase"
    assert found["data"].type == "a name"  # of many: they have a list of their own
    assert type_of(int | None) == "whole number or none" and type_of(tuple[float, ...]) == "a list: number"
    assert (
        unit_of("of the shared images", "number above 0") == ""
        and unit_of("images of a step", "whole number") == "images"
    )


def test_keys_are_words_of_the_same_experiment(nursery, tmp_path):
    words = ["algorithm=fedxds/paper", "uplink=clip,topk", "uplink.topk.share=0.3", "attack=sign_flip"]
    ended = nursery("run", "--keys", *words, cwd=tmp_path)
    assert ended.code == 0, ended.err
    lines = [line.partition("  # ")[0] for line in ended.out.split("\n\n")[0].splitlines() if line[:2] != "# "]
    assert config.read(None, lines) == config.read(None, words)


def test_keys_of_one_group(nursery, tmp_path):
    ended = nursery("run", "--keys", "fedprox", "local", cwd=tmp_path)
    assert ended.out.startswith("# algorithm: the method\n") and "\n# local: how clients train\n" in ended.out
    assert "algorithm.mu=0.01  # weight of the proximal term" in ended.out and "evaluate" not in ended.out
    rows = json.loads(nursery("run", "--keys", "policy", "--json", cwd=tmp_path).out)["keys"]
    assert {row["group"] for row in rows} == {"policy"} and all(row["meaning"] and row["type"] for row in rows)
    one = nursery("run", "--keys", "local.schedule", "fedprox.mu", cwd=tmp_path)
    assert one.sentence == "--keys 'fedprox.mu' is no group of keys; did you mean 'fedprox'?"
    one = nursery("run", "--keys", "local.lr", "faults", cwd=tmp_path)
    assert "local.lr=0.01  #" in one.out and "local.epochs" not in one.out and "faults.dropout=" in one.out
    assert nursery("run", "--keys", "locl", cwd=tmp_path).sentence == (
        "--keys 'locl' is no group of keys; did you mean 'local'?"
    )


def test_keys_of_parts_that_are_none_by_default(nursery, tmp_path):
    """One that is named is shown, in every place that takes it; else a sentence says how to ask for it."""
    said = nursery("run", "--keys", "dp", "multikrum", cwd=tmp_path).out
    assert (
        "uplink.dp.trust=nobody  #" in said and "defences.multikrum.hostile=0.2  #" in said and "local.lr" not in said
    )
    both = nursery("run", "--keys", "clip", "phone", cwd=tmp_path).out
    assert (
        all(key in both for key in ("uplink.clip.norm=", "defences.clip.norm=", "devices.up=11.0"))
        and "engine" not in both
    )
    hint = "depend on what is chosen: fedlens run --keys topk"
    assert f"Keys of uplink {hint}" in nursery("run", "--keys", "uplink", cwd=tmp_path).out and hint not in both
    assert f"Keys of uplink, defences, attack, devices {hint}" in nursery("run", "--keys", cwd=tmp_path).out


# ---- completion ----
def test_the_shell_completes_commands(nursery, tmp_path):
    asked = {"_FEDLENS_COMPLETE": "complete_bash", "COMP_WORDS": "fedlens re", "COMP_CWORD": "1"}
    ended = nursery(cwd=tmp_path, environment=asked)
    assert {"resume", "report", "recommend", "reproduce"} <= {*ended.out.split()}
    script = nursery(cwd=tmp_path, environment={"_FEDLENS_COMPLETE": "source_bash"})
    assert "_FEDLENS_COMPLETE=complete_bash" in script.out and "--install-completion" in nursery("-h", cwd=tmp_path).out


# ---- what a run measured ----
def test_measures_and_the_best_round_are_told(everyone, tmp_path):
    """At the end of a run, by `show`, in a client's confusion; and numbers of `list --json` are not rounded."""
    more = ["evaluate.personal=after", "evaluate.measures=all", "evaluate.validation=0.2", "evaluate.watch=auroc/3"]
    ended = everyone("run", *SMALL, *more, "out=runs/a", cwd=tmp_path)
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    line = f"balanced accuracy {100 * result['measures']['global']['balanced_accuracy']:.2f} %, AUROC "
    best = f"on validation images: round 1 (auroc/3 {100 * result['best']['validation_auroc/3']:.2f} %)"
    assert line in ended.out and best in ended.out and "fedlens export runs/a --round best" in ended.out
    shown = everyone("show", "runs/a", cwd=tmp_path).out
    assert f"measures  {line}" in shown and f"best      {best}" in shown and "personal  after: mean " in shown
    (row,) = json.loads(everyone("list", "--json", cwd=tmp_path).out)["runs"]
    assert (row["bytes"], row["seconds"]) == (result["bytes_up"] + result["bytes_down"], result["seconds"])
    assert "no runs below runs have the tag x" in everyone("list", "--tag", "x", cwd=tmp_path).out
    said = json.loads(everyone("clients", "runs/a", "--confusion", "2", "--json", cwd=tmp_path).out)
    ((name, counts),) = said["confusion"].items()
    right, all = sum(counts[label][label] for label in range(10)), sum(map(sum, counts))
    assert right / all == said["accuracies"][name]["2"]
    ended = everyone("compare", "fedavg", "fedprox", *SMALL, "--by", "sensitivity/11", cwd=tmp_path)
    assert ended.code == 2 and "there is no class '11'" in ended.sentence
