"""kill -9 at random moments, resume each time: the run ends with the same bits as one that was never disturbed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlens.runs.diff import differences

SETTINGS = ["algorithm=scaffold", "clients=8", "cohort=4", "model=mlp", "local.epochs=2", "evaluate.personal_every=7"]


def fedlens(*words: str, cwd: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "fedlens", *words]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def complete(*words: str, cwd: Path) -> None:
    process = fedlens(*words, cwd=cwd)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def started(process: subprocess.Popen) -> None:
    """Until the run says what it is going to do: the folder is there, training begins."""
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "->" in first, first + process.stdout.read()


def kill_and_resume(tmp_path: Path, engine: list[str], rounds: int, kills: int, seed: int) -> int:
    """How many rounds were done when the last kill came."""
    draw = random.Random(seed)
    settings = [*SETTINGS, f"rounds={rounds}", *engine]
    complete("run", *settings, "out=whole", cwd=tmp_path)
    process = fedlens("run", *settings, "out=killed", cwd=tmp_path)
    for number in range(kills):
        started(process)
        if number % 2 == 0 and process.stdout is not None:  # every other time while rounds go on, not while it starts
            process.stdout.readline()
        time.sleep(draw.uniform(0, 1.2))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        process = fedlens("resume", "killed", cwd=tmp_path)
    started(process)
    done = max((int(path.stem) for path in (tmp_path / "killed/checkpoints").glob("*.json")), default=0)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert list(differences(tmp_path / "whole", tmp_path / "killed")) == []
    return done


@pytest.mark.parametrize("engine", [["engine=sequential"], ["engine=workers", "workers=2"]], ids=" ".join)
def test_two_kills(tmp_path, engine):
    kill_and_resume(tmp_path, engine, rounds=12, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_ten_kills(tmp_path, workers):
    done = kill_and_resume(tmp_path, ["engine=workers", f"workers={workers}"], rounds=150, kills=10, seed=workers)
    assert 5 < done < 150  # the kills fell inside the run


def test_number_of_workers_does_not_matter(tmp_path):
    """In float32, as users run it: one process, and one, two and three workers; another number when resumed."""
    settings = [*SETTINGS, "rounds=4", "evaluate.personal_every=2"]
    complete("run", *settings, "engine=sequential", "out=reference", cwd=tmp_path)
    for workers in (1, 2, 3):
        complete("run", *settings, "engine=workers", f"workers={workers}", f"out=w{workers}", cwd=tmp_path)
        assert list(differences(tmp_path / "reference", tmp_path / f"w{workers}")) == []
    complete("run", *settings[:-2], "rounds=2", "engine=workers", "workers=2", "out=two", cwd=tmp_path)
    complete("resume", "two", "rounds=4", "workers=3", cwd=tmp_path)
    weights = [
        d for d in differences(tmp_path / "reference", tmp_path / "two") if not d.startswith(("metrics", "bytes"))
    ]
    assert weights == []  # it looked at personal models at other rounds, so the tables differ
