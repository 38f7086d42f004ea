"""Workers are forks of a server: which one, what becomes of it, and how a worker's end is told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlens.cli import startup
from fedlens.core.errors import RunFailed
from fedlens.engines import fork_server
from fedlens.engines.workers import Workers
from small import SIZES, build, network

linux = pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def lives(process: int) -> bool:
    """Nobody may have fetched the exit code of an orphan yet: a zombie is dead."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def workers():
    engine = Workers(build, SIZES, 2)
    engine.measure(network().initial_weights())  # they have started
    yield engine
    engine.close()


@linux
def test_workers_are_forks_of_one_server_and_end_with_it(workers):
    (server,) = workers._servers
    forks = children(server.process.pid)
    assert len(forks) == 2
    workers.close()
    assert not any(map(lives, [server.process.pid, *forks]))


@linux
@pytest.mark.parametrize("place", [0, 1])
def test_a_worker_that_is_killed_is_named(workers, place):
    forks = children(workers._servers[0].process.pid)
    os.kill(forks[place], signal.SIGKILL)
    with pytest.raises(RunFailed, match=rf"worker {place} ended unexpectedly \(signal SIGKILL\)"):
        workers.measure(network().initial_weights())


@linux
def test_no_worker_outlives_its_server(workers):
    server = workers._servers[0].process
    forks = children(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    with pytest.raises(RunFailed, match=r"worker 0 ended unexpectedly \(signal SIGKILL\)"):
        workers.measure(network().initial_weights())
    until = time.monotonic() + 30
    while any(map(lives, forks)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_server_that_was_started_early_is_used_once():
    fork_server.start_early()
    (early,) = fork_server._early
    engine = Workers(build, SIZES, 1)
    assert engine._servers == [early] and not fork_server._early
    assert len(engine.measure(network().initial_weights())) == 3
    engine.close()


def test_a_server_that_nobody_needs_is_ended():
    fork_server.start_early()
    (early,) = fork_server._early
    fork_server.discard_early()
    assert early.process.returncode == -signal.SIGKILL and not fork_server._early


def test_a_server_is_started_without_torch():
    code = "import sys, fedlens.engines.fork_server; print({'torch', 'numpy', 'pydantic'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("words", "gpu", "cores", "likely"),
    [
        ([], False, 2, True),
        (["rounds=3", "model.width=8"], False, 2, True),
        ([], True, 2, False),
        (["device=cpu"], True, 2, True),
        (["device=cuda"], True, 2, False),
        ([], False, 1, False),
        (["engine=workers"], False, 1, True),
        (["engine=sequential"], False, 2, False),
        (["engine=lanes"], False, 2, False),
        (["workers=1"], False, 2, False),
        (["cohort=1"], False, 2, False),
    ],
)
def test_when_workers_are_likely(monkeypatch, words, gpu, cores, likely):
    monkeypatch.setattr(startup.glob, "glob", lambda pattern: ["/dev/nvidia0"] * gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores), raising=False)
    assert startup._likely_workers(words) == likely
