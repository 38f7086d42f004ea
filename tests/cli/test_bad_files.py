"""Files that nobody would make on purpose, and some that somebody would: one sentence, at once, in little memory."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from fedlens.cli import main as cli
from fedlens.report.split_figure import check_place
from fedlens.runs import tables
from fedlens.runs.folder import RunFolder
from fedlens.ui.watch import Watch

SMALL = ["clients=4", "cohort=3", "model=mlp", "model.hidden=8", "local.steps=2", "rounds=1", "engine=sequential"]
SMALL += ["evaluate.personal=none", "picture=false"]
ROOM = 4 << 30  # bytes that a refusal may reserve, libraries included
X, Y = np.arange(80 * 64, dtype=np.uint8).reshape(80, 8, 8), np.arange(80) % 4


@pytest.fixture
def refused(nursery, tmp_path):
    def refused(*words):
        ended = nursery(*words, cwd=tmp_path, memory=ROOM)
        assert ended.code == 2, ended.err
        return ended.sentence

    return refused


@pytest.fixture(scope="module")
def finished(everyone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    ended = everyone("run", *SMALL, "out=run", cwd=folder)
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "runs" / "run")


# ---- configurations ----
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 3000 + "]" * 3000, "it is nested more than 32 levels deep in line 1"),
        ("algorithm: &a {is: finetune, base: *a}", "*a is inside of what it stands for in line 1"),
        ("seed: " + "9" * 100_000, "a number has 100,000 digits, and 40 are allowed in line 1"),
        ("\n".join(f"k{n}: 1" for n in range(300_000)), "it has 3,188,889 bytes, and 262,144 are allowed"),
        ("\n".join(f"k{n}: 1" for n in range(8_000)) + "\nk0: 1", "k0 is set twice in line 1"),
        (
            "a0: &a0 [1]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)),
            "it has more than 50,000 values in line 14",
        ),
        ("rounds: !!int x", "a value is not of the type that its tag names"),
    ],
    ids=["deep", "itself", "digits", "keys", "twice", "laughs", "tag"],
)
def test_a_configuration_is_refused_before_it_grows(refused, tmp_path, text, said):
    (tmp_path / "a.yaml").write_text(text)
    assert refused("run", "a.yaml") == f"a.yaml cannot be read as YAML: {said}"


@pytest.mark.parametrize("word", ["seed=" + "9" * 100_000, "data=" + "{a: " * 3000 + "}" * 3000, "a" * 5000])
def test_a_long_word_is_not_said_again(refused, word):
    assert len(refused("run", word)) < 400


@pytest.mark.parametrize("key", ["algorithm" + ".is" * 900, "algorithm" + ".base" * 5000, "a" + ".a" * 50_000])
def test_a_dotted_key_nests_no_deeper_than_yaml(refused, tmp_path, key):
    for words in (["describe", "fedavg", f"{key}=1"], ["run", f"{key}=1"]):
        assert refused(*words).endswith("is nested more than 32 levels deep")
    (tmp_path / "a.yaml").write_text(f"? {key}\n: 1\nalgorithm: {{is: finetune, ? {key} : 1}}\n")
    assert refused("run", "a.yaml").endswith("is nested more than 32 levels deep")


# ---- data and splits ----
def npz(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def test_a_split_of_brackets_is_no_split(refused, tmp_path):
    (tmp_path / "split.json").write_text("[" * 50_000)
    assert refused("run", *SMALL, "partition=split.json").endswith("split.json is not JSON")


def test_a_split_that_is_a_pipe_is_not_waited_for(refused, tmp_path):
    os.mkfifo(tmp_path / "split.json")
    assert refused("run", *SMALL, "partition=split.json").endswith("split.json is not JSON")


def test_a_damaged_version_in_an_archive(refused, tmp_path):
    file = npz(tmp_path, x=X, y=Y)
    raw = bytearray(file.read_bytes())
    raw[raw.find(b"PK\x01\x02") + 6] = 99
    file.write_bytes(raw)
    assert refused("run", *SMALL, "data=a.npz").endswith("(zip file version 9.9)")


def test_objects_stay_closed_however_deep_they_lie(refused, tmp_path):
    inside = np.empty(2, object)
    inside[0] = np.empty(2, object)
    for x in (inside, np.zeros(4, [("a", [("b", "O")])])):
        npz(tmp_path, x=x, y=Y)
        assert refused("run", *SMALL, "data=a.npz").endswith("(x.npy holds Python objects)")
    for part in ("train", "test"):
        (tmp_path / "theirs" / part).mkdir(parents=True)
        np.savez(tmp_path / "theirs" / part / "0.npz", data={"x": [np.zeros(2), [inside]], "y": [0, 1]})
    said = refused("run", "data=pfllib", "data.path=theirs", "cohort=1", "model=mlp")
    assert said.endswith("its x or y is a list of arrays of several shapes; it must be one array")


def test_a_bomb_is_measured_before_it_is_opened(refused, tmp_path):
    """50 GB are what the head of an array claims."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as file:
            about = {"descr": "|u1", "fortran_order": False, "shape": (50_000, 1000, 1000)}
            np.lib.format.write_array_header_1_0(file, about)
            file.write(bytes(2_500_000))
        with archive.open("y.npy", "w") as file:
            np.lib.format.write_array(file, Y)
    assert "says that it has 50,000,000,000 bytes, and has 2,500,000" in refused("run", *SMALL, "data=a.npz")


def test_what_does_not_fit_is_refused_by_its_size(monkeypatch, tmp_path):
    from fedlens.core.errors import BadInput
    from fedlens.data import formats

    file = npz(tmp_path, x=X, y=Y)
    monkeypatch.setattr(formats, "free_memory", lambda: 5000)
    with pytest.raises(BadInput, match=r"a\.npz unpacks to 0\.0 GB, and only 0\.0 GB of memory are free"):
        formats.npz(file)


def test_labels_are_no_telephone_numbers(refused, tmp_path):
    npz(tmp_path, x=X, y=np.where(Y == 3, 60_000_000, Y))
    said = refused("run", *SMALL, "data=a.npz")
    assert said.endswith("the highest label is 60000000, and there are 80 images; number classes from 0")


@pytest.mark.parametrize("how", ["empty part", "nothing held out"])
def test_a_run_needs_test_images(refused, tmp_path, how):
    if how == "empty part":
        npz(tmp_path, x_train=X, y_train=Y, x_test=X[:0], y_test=Y[:0])
    else:
        npz(tmp_path, x=X, y=Y)
    said = refused("run", *SMALL, "data=a.npz", "data.holdout=0")
    assert said == "npz has no test images: add some, or hold some out by data.holdout=0.2"


def test_a_picture_of_somebody_is_not_drawn_over(refused, nursery, tmp_path):
    (tmp_path / "split.png").write_bytes(b"mine")
    assert refused("data", "show", *SMALL).startswith("split.png is there already, and is no picture of a split")
    assert (tmp_path / "split.png").read_bytes() == b"mine"
    assert nursery("data", "show", *SMALL, "--out", "other.png", cwd=tmp_path).code == 0
    check_place(tmp_path / "other.png")  # its own may be drawn anew
    (tmp_path / "other-sizes.pdf").write_bytes(b"mine")
    said = refused("data", "show", *SMALL, "--out", "other.png", "--style", "paper")
    assert said.startswith("other-sizes.pdf is there already") and not (tmp_path / "other-sizes.png").exists()


# ---- runs ----
def test_clients_that_never_tuned_predict_as_before(nursery, tmp_path):
    for method in ("scaffold+ft", "fedavg+ft"):
        ended = nursery("run", *SMALL, f"algorithm={method}", "faults.dropout=1", f"out={method}", cwd=tmp_path)
        assert ended.code == 0 and "fine-tuned models: mean" in ended.out, ended.err


def test_files_of_others_beside_the_parts_of_a_table(run):
    (run / "metrics.parquet" / "abcdef-ghijkl.parquet").write_bytes(b"?")
    assert RunFolder(run).metrics().num_rows
    table = tables.GrowingTable(run / "metrics.parquet", tables.METRICS)
    table.cut(0)
    assert (run / "metrics.parquet" / "abcdef-ghijkl.parquet").exists()
    (row,) = Watch(run.parent).since(0)["runs"]
    assert row["state"] in ("done", "corrupt")


@pytest.mark.parametrize("name", ["log.txt", "lock", "config.yaml", "passport.json", "result.json"])
def test_the_live_page_waits_for_no_pipe(run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    (row,) = Watch(run.parent).since(0)["runs"]
    assert row["state"] == ("done" if name == "lock" else "corrupt")
    assert name == "lock" or row["trouble"].startswith(name)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("result.json", "[" * 50_000, "result.json is damaged: it is not JSON"),
        ("result.json", "[]", "result.json is damaged: it does not say how the run ended"),
        ("result.json", '{"rounds": 1}', "it lacks some of what it should say, or says more"),
        ("passport.json", "{}", "passport.json is damaged: it does not say what the run is"),
    ],
)
def test_what_a_run_says_of_itself_is_looked_at(refused, run, name, text, said):
    (run / name).write_text(text)
    assert refused("resume", str(run)).endswith(said)


def test_a_sentence_stays_on_its_line(refused):
    assert refused("run", "a\nb=1").startswith("unknown key a b;")


def test_a_picture_that_is_a_pipe_is_not_waited_for(refused, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        os.mkfifo(tmp_path / "images" / name / "1.png")
    said = refused("run", *SMALL, "data=folder", "data.path=images")
    assert said.endswith("a/1.png cannot be decoded (it is not a regular file); replace or remove it")


def test_a_method_that_traces_its_network_is_timed(nursery, tmp_path):
    """FedXDS attributes by LRP, which follows the network's own operations and no hooks of a counter."""
    few = ["clients=2", "cohort=2", "data.holdout=0.5", "model=cnn2", "local.steps=1", "rounds=1", "algorithm=fedxds"]
    npz(tmp_path, x=np.tile(X, (1, 2, 2)), y=Y)
    ended = nursery("run", *few, "data=a.npz", "partition.min_size=1", "picture=false", "out=run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    ended = nursery("time", "run", "--json", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["runs"][0]["seconds"] > 0


# ---- a locale without UTF-8 ----
def test_a_name_that_the_locale_cannot_spell(tmp_path):
    (tmp_path / "a.yaml").write_text("# ä\nout: rün\n", "utf-8")
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "fedlens", "run", "a.yaml", *SMALL]
    ended = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(rb"fedlens: 'r\xfcn") and ended.stderr.count(b"\n") == 1
    assert b"cannot be written in this locale's ascii; set PYTHONUTF8=1 or LC_ALL=C.UTF-8" in ended.stderr


def test_signs_that_the_terminal_has_not_are_described(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(sys, "argv", ["fedlens", "no–such"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out.flush()
    assert ended.value.code == 2 and rb"no\u2013such" in out.buffer.getvalue()
