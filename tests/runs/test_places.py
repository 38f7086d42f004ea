"""A run stands alone: moved, and opened from a third folder, without its weights and with data that have moved, too."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedlens import config
from fedlens.audit.run import prepared
from fedlens.cli.main import main
from fedlens.core.errors import BadInput
from fedlens.explain.run import explain_run
from fedlens.models import MODELS
from fedlens.report.page import write
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.runs.opened import OpenedRun
from fedlens.runs.places import FILE, WEIGHTS, places, typed, without_folders
from fedlens.runs.reuse import begin_alike
from fedlens.simulate.resume import resume
from fedlens.simulate.run import run
from tiny import Net, Tiny

WORDS = ("data=npz", "data.path=x.npz", "model=tiny", "model.weights=w.safetensors", "algorithm=fedper", "clients=3")
SMALL = (
    "cohort=1",
    "evaluate.personal_every=2",
    "local.steps=1",
    "local.batch_size=4",
    "engine=sequential",
    "picture=false",
    "transcript=10",
)


@pytest.fixture(scope="module", autouse=True)
def _tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tiny", Tiny)
        config._names.cache_clear()
        yield
    config._names.cache_clear()


def images(path: Path, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    parts = {f"x_{part}": draw.integers(0, 255, (90, 6, 6), np.uint8) for part in ("train", "test")}
    np.savez(path, **parts, **{f"y_{part}": np.arange(90) % 3 for part in ("train", "test")})


@pytest.fixture(scope="module")
def began(tmp_path_factory):
    """A folder with data, weights, a run that stopped after two rounds, and the same run that did not."""
    home = tmp_path_factory.mktemp("home")
    images(home / "x.npz")
    torch.manual_seed(1)
    save_file(Net(3, 36).state_dict(), home / "w.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name, rounds in (("two", 2), ("whole", 6)):
            run(config.read(None, [*WORDS, *SMALL, f"rounds={rounds}", f"out={name}"]))
    return home


@pytest.fixture
def moved(began, tmp_path, monkeypatch):
    """The run in another folder, looked at from a third; its weights are gone."""
    home = Path(shutil.copytree(began, tmp_path / "home"))
    folder = Path(shutil.move(began_run(home, began), tmp_path / "archive" / "run"))
    (home / "w.safetensors").unlink()
    (tmp_path / "third").mkdir()
    monkeypatch.chdir(tmp_path / "third")
    return folder


@pytest.fixture
def command(monkeypatch, capfd):
    """The command line in this process, which knows the tiny network; its exit code, and what it complained of."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedlens", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capfd.readouterr().err

    return run


def began_run(home: Path, before: Path) -> Path:
    """As if it had been run in `home`."""
    (home.parent / "archive").mkdir()
    text = (home / "two" / FILE).read_text()
    assert str(before) in text
    (home / "two" / FILE).write_text(text.replace(str(before), str(home)))
    return home / "two"


def test_what_is_typed_is_found_and_written_beside_it(began):
    folder = RunFolder(began / "two")
    experiment = config.read(folder.config)
    assert typed(experiment) == {"data.path": "x.npz", "model.weights": "w.safetensors"}
    found = {"data.path": str(began / "x.npz"), "model.weights": str(began / "w.safetensors")}
    assert folder.read_json(FILE) == found
    assert (began / "two" / WEIGHTS).read_bytes() == (began / "w.safetensors").read_bytes()
    texts = [(began / "two" / name).read_text() for name in ("config.yaml", "log.txt", "result.json")]
    assert not any(str(began) in text for text in texts)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "bare pickle of old"])
def test_a_run_from_a_file_of_torch_is_opened_and_resumed_from_its_own_copy(zipped, began, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(began / "x.npz", tmp_path)
    weights = load_file(began / "w.safetensors")
    torch.save(weights, "w.pth", _use_new_zipfile_serialization=zipped)
    words = [word.replace("w.safetensors", "w.pth") for word in (*WORDS, *SMALL)]
    run(config.read(None, [*words, "rounds=2", "out=run"]))
    Path("w.pth").unlink()
    assert explain_run("run", clients=[0], count=2, methods=["gradient"]).stat().st_size > 1000
    resume("run", ["rounds=6"])
    ours, theirs = (OpenedRun.open(path, device="cpu").newest().state for path in ("run", began / "whole"))
    assert all(torch.equal(a, b) for a, b in zip(ours.leaves(), theirs.leaves(ours), strict=True))


def test_a_moved_run_is_opened_explained_reported_audited_and_resumed(moved, began, tmp_path):
    there = OpenedRun.open(moved, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(began)
        here = OpenedRun.open(began / "two", device="cpu")
    for client in range(3):
        mine, theirs = (dict(each.model(client).paths()) for each in (here, there))
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[path], theirs[path]) for path in mine)
    assert explain_run(moved, clients=[0], count=2, methods=["gradient"]).stat().st_size > 1000
    page = write([moved], tmp_path / "report.html").read_text()
    assert str(tmp_path) not in page and "fedper" in page
    transcript, _ = prepared(RunFolder(moved), (), 20, 1, "cpu")
    assert len(transcript) == 2
    result = resume(moved, ["rounds=6"])  # clients that never took part begin with the first weights
    assert result.rounds == 6 and [*differences(moved, began / "whole")] == []


def test_data_that_have_gone_are_named_and_pointed_to_once(moved, tmp_path):
    shutil.move(tmp_path / "home" / "x.npz", tmp_path / "now.npz")
    before = RunFolder(moved).config.read_bytes()
    said = f"data.path is 'x.npz', .* nor is there {tmp_path}/home/x.npz; say where it is now: add"
    for use in (lambda: OpenedRun.open(moved), lambda: resume(moved, ["rounds=4"])):
        with pytest.raises(BadInput, match=rf"{said} data.path=PLACE, which {moved} remembers$"):
            use()
    assert RunFolder(moved).config.read_bytes() == before
    assert OpenedRun.open(moved, words=[f"data.path={tmp_path / 'now.npz'}"]).net
    resume(moved, [f"data.path={tmp_path / 'now.npz'}", "rounds=2"])  # complete: nothing is left but to remember
    assert OpenedRun.open(moved).net and RunFolder(moved).config.read_bytes() == before
    assert resume(moved, ["rounds=3"]).rounds == 3
    with pytest.raises(BadInput, match=r"data.path is 'nowhere', but there is no such file or folder$"):
        resume(moved, ["data.path=nowhere"])


def test_every_command_that_needs_data_takes_their_place(moved, tmp_path, command):
    """Which the run remembers: nobody says it twice."""
    shutil.move(tmp_path / "home" / "x.npz", tmp_path / "now.npz")
    for name in ("explain", "audit", "clients", "report"):
        shutil.copytree(moved, tmp_path / name)
    usual = {"clients": ["--confusion", "0"], "audit": ["--attacks", "loss_personal", "--candidates", "10"]}
    usual["explain"] = ["--clients", "0", "--methods", "gradient", "--images", "1"]
    for name in ("explain", "audit", "clients", "report"):
        words = [name, str(tmp_path / name), *usual.get(name, [])]
        if name != "report":  # which needs none for most
            code, said = command(*words)
            assert code == 2 and said.count("\n") == 1 and "say where it is now: add data.path=PLACE, which" in said
        code, said = command(*words, f"data.path={tmp_path / 'now.npz'}")
        assert code == 0, said
        assert RunFolder(tmp_path / name).read_json(FILE)["data.path"] == str(tmp_path / "now.npz")
        assert command(*words)[0] == 0
        images(tmp_path / "other.npz", seed=5)
        code, said = command(*words, f"data.path={tmp_path / 'other.npz'}")
        assert code == 2 and "the data of this run have changed" in said
        code, said = command(*words, "rounds=3")
        can = "where its files are now can (data.path, model.weights)"
        assert code == 2 and f"rounds cannot change for {tmp_path / name}" in said and can in said


def test_export_takes_the_place_of_data_too(moved, tmp_path, command):
    shutil.move(tmp_path / "home" / "x.npz", tmp_path / "now.npz")
    words = ["export", str(moved), "--client", "0", "--out", str(tmp_path / "model")]
    code, said = command(*words)
    assert code == 2 and "add data.path=PLACE" in said
    code, said = command(*words, "elsewhere")
    assert code == 2 and "one run is exported at a time, and elsewhere is another word" in said
    code, said = command(*words, f"data.path={tmp_path / 'now.npz'}")
    assert code == 0 and (tmp_path / "model" / "weights.safetensors").exists(), said
    assert RunFolder(moved).read_json(FILE)["data.path"] == str(tmp_path / "now.npz")


def test_a_confusion_matrix_that_cannot_be_made_leaves_no_picture(moved, tmp_path, command):
    (tmp_path / "home" / "x.npz").unlink()
    assert command("clients", str(moved), "--confusion", "0")[0] == 2 and not (moved / "figures").exists()


def test_data_that_moved_with_the_run_are_found_beside_it(moved, tmp_path):
    shutil.move(tmp_path / "home" / "x.npz", moved.parent / "x.npz")
    assert OpenedRun.open(moved).net


def test_other_data_are_refused(moved, tmp_path):
    images(tmp_path / "home" / "x.npz", seed=7)
    for use in (OpenedRun.open, lambda path: resume(path, ["rounds=3"])):
        with pytest.raises(BadInput, match=r"the data of this run have changed.*data.path=PLACE"):
            use(moved)


def test_damaged_weights_of_its_own_are_none(moved):
    data = bytearray((moved / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (moved / WEIGHTS).write_bytes(data)
    with pytest.raises(BadInput, match=r"weights=w.safetensors: no such file.*model.weights=PLACE"):
        OpenedRun.open(moved)


def test_other_weights_are_refused_wherever_they_lie(moved, tmp_path, command):
    """A client that never took part begins with them: other ones would silently be another run."""
    torch.manual_seed(2)
    save_file(Net(3, 36).state_dict(), tmp_path / "other.safetensors")
    before = {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
    word, said = f"model.weights={tmp_path / 'other.safetensors'}", "the weights of this run have changed"
    for name in ("resume", "explain", "audit"):
        code, complaint = command(name, str(moved), word, *(["rounds=4"] if name == "resume" else []))
        assert code == 2 and said in complaint and "add model.weights=PLACE" in complaint
    assert before == {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
    (moved / WEIGHTS).unlink()
    shutil.copy(tmp_path / "other.safetensors", tmp_path / "home" / "w.safetensors")
    for use in (OpenedRun.open, lambda path: resume(path, ["rounds=3"])):
        with pytest.raises(BadInput, match=said):
            use(moved)


def test_a_beginning_over_another_file_of_the_same_name_is_not_taken(began, tmp_path, monkeypatch):
    shutil.copytree(began / "two", tmp_path / "runs" / "two")
    more = [*WORDS, *SMALL[:-1], "rounds=6"]
    (tmp_path / "runs" / "two" / "config.yaml").write_text(
        (began / "two" / "config.yaml").read_text().replace("transcript: 10.0", "transcript: 0.0")
    )
    monkeypatch.chdir(began)
    asked = config.read(None, more).with_execution(out=str(tmp_path / "runs" / "a"))
    assert begin_alike(asked, tmp_path / "runs") is not None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    images(elsewhere / "x.npz", seed=3)
    shutil.copy(began / "w.safetensors", elsewhere)
    monkeypatch.chdir(elsewhere)
    asked = config.read(None, more).with_execution(out=str(tmp_path / "runs" / "b"))
    assert places(asked)["data.path"] == str(elsewhere / "x.npz")
    assert begin_alike(asked, tmp_path / "runs") is None


def test_nobody_else_is_told_where_files_lie():
    assert without_folders("file /home/me/my data/x.npz; not cached, as /tmp/c cannot be written") == (
        "file x.npz; not cached, as c cannot be written"
    )
    for text in ("timm/resnet18", "https://host/a/b", "50 / 100", "x.npz", 7, None):
        assert without_folders(text) == text
    assert without_folders("~/data/x.npz") == "x.npz"
