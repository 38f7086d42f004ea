"""kill -9 at random moments, resume each time: the run ends with the same bits as one that was never disturbed."""

import random
import time
from pathlib import Path

import pytest

from fedlens.runs.diff import differences
from fedlens.simulate.describe import described_with

SETTINGS = ["algorithm=scaffold", "clients=8", "cohort=4", "model=mlp", "local.epochs=1", "picture=false"]
SETTINGS += ["evaluate.personal_every=7"]
REMEMBER = ["fedala", "fedproto", "fedrod", "pfedme", "ccvr+ft", "fedpac", "fedfomo"]
REMEMBER += ["fedbabu", "feddbe", "scaffnew", "fedamp", "fedas"]


def complete(nursery, *words: str, cwd: Path) -> None:
    ended = nursery(*words, cwd=cwd)
    assert ended.code == 0, ended.err


def kill_and_resume(
    nursery, tmp_path: Path, engine: list[str], rounds: int, kills: int, seed: int, method: str = "scaffold"
) -> int:
    """How many rounds were done when the last kill came."""
    draw = random.Random(seed)
    settings = [f"algorithm={method}", *SETTINGS[1:], *described_with(method), f"rounds={rounds}", *engine]
    complete(nursery, "run", *settings, "out=whole", cwd=tmp_path)
    nursery.begin("run", *settings, "out=killed", cwd=tmp_path)
    for number in range(kills):
        nursery.wait_for("->")  # it said what it is going to do: the folder is there, training begins
        if number % 2 == 0:  # every other time while rounds go on, not while it starts
            nursery.wait_for("round ")
        time.sleep(draw.uniform(0, 0.6))
        nursery.kill()
        nursery.begin("resume", "killed", cwd=tmp_path)
    nursery.wait_for("->")
    done = max((int(path.stem) for path in (tmp_path / "killed/checkpoints").glob("*.json")), default=0)
    ended = nursery.end()
    assert ended.code == 0, ended.err
    assert list(differences(tmp_path / "whole", tmp_path / "killed")) == []
    return done


@pytest.mark.parametrize("engine", [["engine=sequential"], ["engine=workers", "workers=2"]], ids=" ".join)
def test_two_kills(nursery, tmp_path, engine):
    kill_and_resume(nursery, tmp_path, engine, rounds=10, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("method", REMEMBER)
def test_kills_of_methods_that_remember(nursery, tmp_path, method):
    kill_and_resume(nursery, tmp_path, ["engine=workers", "workers=2"], rounds=10, kills=3, seed=2, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_ten_kills(nursery, tmp_path, workers):
    engine = ["engine=workers", f"workers={workers}"]
    done = kill_and_resume(nursery, tmp_path, engine, rounds=150, kills=10, seed=workers)
    assert 5 < done < 150  # the kills fell inside the run


def test_number_of_workers_does_not_matter(nursery, tmp_path):
    """In float32, as users run it: one process, one worker, and two that are three when resumed."""
    settings = [*SETTINGS[:-1], "local.steps=4", "evaluate.personal_every=2"]
    complete(nursery, "run", *settings, "rounds=4", "engine=sequential", "out=reference", cwd=tmp_path)
    complete(nursery, "run", *settings, "rounds=4", "engine=workers", "workers=1", "out=one", cwd=tmp_path)
    assert list(differences(tmp_path / "reference", tmp_path / "one")) == []
    complete(nursery, "run", *settings, "rounds=2", "engine=workers", "workers=2", "out=more", cwd=tmp_path)
    complete(nursery, "resume", "more", "rounds=4", "workers=3", cwd=tmp_path)
    assert list(differences(tmp_path / "reference", tmp_path / "more")) == []
