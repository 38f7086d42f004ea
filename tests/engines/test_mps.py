"""Several processes on one GPU: the service is started, tried, handed on and ended. No GPU is needed here."""

import os
from pathlib import Path

import pytest

from fedlens.engines import mps

# Stands in for NVIDIA's program: says what it was asked, and in which folder.
FAKE = """#!/bin/sh
if [ "$1" = "-d" ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> "$FAKE_LOG"; exit ${FAKE_CODE:-0}; fi
echo "$(cat) $CUDA_MPS_PIPE_DIRECTORY" >> "$FAKE_LOG"
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    """What the stand-in was told; a GPU that answers."""
    program = tmp_path / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(mps, "_USUAL", tmp_path / "nobody")
    monkeypatch.setattr(mps, "_TRY", "")
    return tmp_path / "log"


def test_processes_are_told_of_the_service_and_it_ends(log):
    with mps.shared_gpu() as ways:
        folder = ways["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir() and log.read_text() == f"start {folder}\n"
    assert log.read_text().splitlines() == [f"start {folder}", f"quit {folder}"]
    assert not Path(folder).exists() and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_it_ends_where_the_runs_fail(log):
    with pytest.raises(RuntimeError), mps.shared_gpu():
        raise RuntimeError
    assert "quit" in log.read_text()


@pytest.mark.parametrize("trouble", ["it does not start", "no GPU answers"])
def test_without_a_service_that_works_runs_go_on_as_before(log, monkeypatch, trouble):
    if trouble == "it does not start":
        monkeypatch.setenv("FAKE_CODE", "1")
    else:
        monkeypatch.setattr(mps, "_TRY", "raise SystemExit(805)")
    with mps.shared_gpu() as ways:
        assert ways == {}


def test_a_service_of_somebody_else_is_left_alone(log, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    with mps.shared_gpu() as ways:
        assert ways == {} and not log.exists()


def test_nobody_asks_for_it_on_a_cpu(log):
    with mps.shared_gpu(False) as ways:
        assert ways == {} and not log.exists()
