"""A command that fails has changed nothing: every file around it is as it was, whatever was missing or impossible."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedlens import config
from fedlens.cli import main as cli
from fedlens.models import MODELS
from fedlens.runs.folder import RunFolder
from fedlens.runs.grid import Column, Grid, Row
from fedlens.simulate.run import run
from tiny import Net, Tiny

WORDS = ("data=npz", "data.path=x.npz", "model=tiny", "model.weights=w.safetensors", "clients=3", "cohort=2")
SMALL = ("local.steps=1", "local.batch_size=4", "engine=sequential", "picture=false", "evaluate.personal=none")
COMMON = (*WORDS, *SMALL)


@pytest.fixture(scope="module", autouse=True)
def _tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tiny", Tiny)
        config._names.cache_clear()
        yield
    config._names.cache_clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A place of work: data, weights, and a run of two rounds."""
    home = tmp_path_factory.mktemp("work")
    draw = np.random.default_rng(0)
    parts = {f"x_{part}": draw.integers(0, 255, (60, 6, 6), np.uint8) for part in ("train", "test")}
    np.savez(home / "x.npz", **parts, **{f"y_{part}": np.arange(60) % 3 for part in ("train", "test")})
    torch.manual_seed(1)
    save_file(Net(3, 36).state_dict(), home / "w.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run(config.read(None, [*COMMON, "rounds=2", "out=R"]))
    return home


@pytest.fixture
def work(made, tmp_path, monkeypatch) -> Path:
    home = Path(shutil.copytree(made, tmp_path / "work"))
    (home / "R" / "places.json").unlink()  # it would find the files of the other copy
    monkeypatch.chdir(home)
    return home


def files(home: Path) -> dict[str, str]:
    """Every file and folder, and what is in it."""
    return {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(home.rglob("*"))
    }


def said(capsys, monkeypatch, *words: str) -> tuple[int, str]:
    """The exit code and the sentence of a command, carried out here."""
    monkeypatch.setattr(sys, "argv", ["fedlens", *words])
    capsys.readouterr()
    code = cli._guarded()
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return code, err.splitlines()[-1] if err else ""


def without_wandb(monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))


# ---- what goes wrong: how, and what of it is said --------------------------------------------------------------------
def no_data(home: Path) -> list[str]:
    (home / "x.npz").unlink()
    return []


def no_weights(home: Path) -> list[str]:
    (home / "w.safetensors").unlink()
    shutil.rmtree(home / "R" / "clients", ignore_errors=True)
    (home / "R" / "initial.safetensors").unlink()
    return []


def other_data(home: Path) -> list[str]:
    shutil.copy(home / "w.safetensors", home / "x.npz")
    return []


FAILURES = {
    "no data": (no_data, "data.path is 'x.npz'"),
    "no weights": (no_weights, "weights=w.safetensors: no such file"),
    "no such format": (other_data, "x.npz"),
    "bad key": (lambda home: ["rounbs=4"], "rounbs"),
    "impossible": (lambda home: ["workers=-1"], "workers"),
    "too many": (lambda home: ["clients=1000"], "clients"),
    "no tracker": (lambda home: ["track=wandb"], "wandb"),
}
TABLE = Grid("own/table", "a table", {"fedavg": Row(("algorithm=fedavg",))}, {"all": Column(())}, (*COMMON, "rounds=2"))


COMMANDS = {
    "resume": ["resume", "R", "rounds=4"],
    "run": ["run", *COMMON, "rounds=2", "out=new"],
    "compare": ["compare", "fedavg", "fedprox", *COMMON, "rounds=2", "--out", "compared", "--processes", "1"],
    "reproduce": ["reproduce", "own/table", "--out", "reproduced"],
}
CASES = [(command, failure) for failure in FAILURES for command in COMMANDS]


@pytest.mark.parametrize(("command", "failure"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_failed_command_changes_nothing(work, capsys, monkeypatch, command, failure):
    monkeypatch.setattr("fedlens.papers.registry.reproducible", lambda: {TABLE.name: TABLE})
    without_wandb(monkeypatch)
    breaks, sentence = FAILURES[failure]
    more = breaks(work)
    before = files(work)
    code, text = said(capsys, monkeypatch, *COMMANDS[command], *more)
    assert code == 2 and sentence in text and text.startswith("fedlens: "), text
    assert files(work) == before


def test_it_was_the_failure(work, capsys, monkeypatch):
    """Without one the same commands do their work."""
    before = files(work)
    assert said(capsys, monkeypatch, "resume", "R", "rounds=4")[0] == 0
    assert RunFolder("R").result()["rounds"] == 4 and files(work) != before
    assert "rounds: 4" in (work / "R" / "config.yaml").read_text()


def test_a_beginning_that_was_taken_over_goes_with_its_run(work, monkeypatch):
    """Its data are gone before it can go on from there."""
    from fedlens.core.errors import BadInput
    from fedlens.simulate.finish import finish
    from fedlens.simulate.recorder import Nobody

    run(config.read(None, [*COMMON, "rounds=2", "out=all/R", "keep=1"]))
    before = files(work)
    asked = config.read(None, [*COMMON, "rounds=6", "keep=1"]).with_execution(out="all/new")
    monkeypatch.setattr("fedlens.simulate.resume.checked", lambda experiment: (_ for _ in ()).throw(BadInput("gone")))
    with pytest.raises(BadInput, match="gone"):
        finish(asked, (), Nobody(), Path("all"))
    assert files(work) == before


# ---- a folder that nobody may write to -------------------------------------------------------------------------------
_CLOSED: list[str] = []


def _guard(event: str, arguments: tuple) -> None:
    """As a read-only file system does it, also for root."""
    if not _CLOSED:
        return
    writes = event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")
    if event == "open" and isinstance(arguments[2], int):
        writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND))
    if writes and isinstance(arguments[0], str | os.PathLike):
        path = os.path.abspath(os.fspath(arguments[0]))
        if any(path.startswith(place) for place in _CLOSED):
            raise PermissionError(30, "Read-only file system", path)


@pytest.fixture
def closed(work):
    if not getattr(_guard, "installed", False):
        sys.addaudithook(_guard)
        _guard.installed = True
    _CLOSED.append(str(work))
    yield work
    _CLOSED.clear()


@pytest.mark.parametrize("command", ["resume", "run", "compare", "reproduce", "deploy"])
def test_a_folder_that_cannot_be_written_to(closed, capsys, monkeypatch, command):
    monkeypatch.setattr("fedlens.papers.registry.reproducible", lambda: {TABLE.name: TABLE})
    words = ["deploy", "init", "federation", *COMMON] if command == "deploy" else COMMANDS[command]
    if command == "deploy":
        pytest.importorskip("flwr")
    before = files(closed)
    code, text = said(capsys, monkeypatch, *words)
    assert code in (1, 2) and "Read-only file system" in text and text.startswith("fedlens: "), text
    assert files(closed) == before


@pytest.mark.parametrize("words", [["rounbs=4"], ["model.weights=nowhere.safetensors"]])
def test_quick_mode_takes_its_images_back(work, capsys, monkeypatch, words):
    usual = ["reproduce", "spatl/table1", "--quick", "--out", "reproduced"]
    before = files(work)
    assert said(capsys, monkeypatch, *usual, *words)[0] == 2 and files(work) == before
    (work / "reproduced" / "quick" / "data").mkdir(parents=True)
    (work / "reproduced" / "quick" / "data" / "mine.npz").write_bytes(b"mine")
    before = files(work)
    assert said(capsys, monkeypatch, *usual, *words)[0] == 2 and files(work) == before


# ---- deploy ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["init", "federation", "rounbs=4"], "rounbs"),
        (["init", "federation", "clients=0"], "clients"),
        (["init", "federation", "faults.dropout=0.5"], "leave faults out"),
        (["init", "federation", "checkpoint=3"], "leave checkpoint out"),
        (["certs", "R"], "is no part of a federation"),
        (["server", "half"], "has no tls.crt"),
        (["run", "half"], "has no tls.crt"),
        (["status", "half"], "has no tls.crt"),
        (["init", "half"], "already holds a federation"),
        (["init", "algorithm=fedprox", "rounds=2"], "name a folder first"),
    ],
)
def test_a_deployment_that_is_refused(work, capsys, monkeypatch, words, sentence):
    pytest.importorskip("flwr")
    assert said(capsys, monkeypatch, "deploy", "init", "half", *COMMON)[0] == 0
    before = files(work)
    code, text = said(capsys, monkeypatch, "deploy", *words)
    assert code == 2 and sentence in text, text
    assert files(work) == before


@pytest.mark.parametrize("failure", ["no data", "no weights", "no tracker"])
def test_a_server_that_cannot_begin_has_no_run(work, monkeypatch, failure):
    pytest.importorskip("flwr")
    from fedlens.core.errors import BadInput
    from fedlens.flower.server_app import federate

    without_wandb(monkeypatch)
    breaks, sentence = FAILURES[failure]
    words = [*(word for word in COMMON if not word.startswith("engine")), "rounds=2", *breaks(work)]
    before = files(work)
    with pytest.raises(BadInput, match=sentence):
        federate(None, {"settings": " ".join([*words, f"out={work / 'served'}"])})
    assert files(work) == before
