"""A server that has imported torch: every command of a test is carried out by a fork of it.

Importing takes longer than most commands. A fork has a session of its own, its own arguments, folder, files and exit
code, as a process of the shell has.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one sentence of a run that went wrong, and nothing else."""
        assert self.err.startswith("fedlens: ") and self.err.count("\n") == 1, self.err
        return self.err.removeprefix("fedlens: ").rstrip("\n")


class Nursery:
    """Call it with a command's words, or `begin`, look and `end`. One command at a time."""

    def __init__(self, folder: Path):
        self.folder, self.running = folder, 0
        # Arrow's own pool reserves more than 100 MiB before it needs any, which tests of small memories count.
        environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)

    def __call__(self, *words, cwd, **more) -> Ended:
        self.begin(*words, cwd=cwd, **more)
        return self.end()

    def program(self, file: str, *words: str, cwd, few: bool = False) -> Ended:
        """A Python file as `python file words` runs it; `few`: its runs take one step a client."""
        return self(*words, cwd=cwd, program=file, few=few)

    def begin(self, *words, cwd, environment=(), limit=0, memory=0, terminal=None, program="", few=False) -> None:
        """limit: bytes of a file; memory: bytes that it may take beside those of the server."""
        files = [terminal] * 3 if terminal else [os.devnull, str(self.out), str(self.err)]
        for file in (self.out, self.err):
            file.write_bytes(b"")
        order = dict(words=words, cwd=str(cwd), limit=limit, memory=memory, files=files, program=program, few=few)
        order["environment"] = {**os.environ, **dict(environment)}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.running = int(self.process.stdout.readline())

    def end(self) -> Ended:
        code = int(self.process.stdout.readline())
        self.running = 0
        return Ended(code, self.out.read_text(), self.err.read_text())

    def wait_for(self, text: str) -> None:
        while text not in self.out.read_text():
            assert not self.over, self.err.read_text()
            time.sleep(0.005)

    def kill(self) -> Ended:
        """kill -9 of the process alone: what it started has to notice."""
        os.kill(self.running, signal.SIGKILL)
        return self.end()

    def clean(self) -> None:
        """After a test that stopped half-way."""
        if self.running:
            os.killpg(self.running, signal.SIGKILL)
            self.end()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    @property
    def over(self) -> bool:
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def err(self) -> Path:
        return self.folder / "err"


# ---- the server ------------------------------------------------------------------------------------------------------
def prepared(order: dict) -> None:
    """The fork becomes a process as a shell would start it."""
    import fcntl
    import resource
    import termios

    os.setsid()
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    for number, file in enumerate(order["files"]):
        os.dup2(os.open(file, os.O_RDONLY if file == os.devnull else os.O_RDWR | os.O_CREAT), number)
    with contextlib.suppress(OSError):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C is for us, where we are in a terminal
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    if order["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"],) * 2)
    if order["memory"]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + order["memory"],) * 2)
    sys.path[0] = order["cwd"]


def forked_workers() -> None:
    """Worker processes that need not import torch again; conftest's `whole_processes` starts whole ones."""
    import threading

    from fedlens.engines import fork_server

    class Forked(subprocess.Popen):
        def __init__(self, command, pass_fds, **_):
            self.args, self.returncode, self._child_created = command, None, True
            self.stdin = self.stdout = self.stderr = None
            self._waitpid_lock, self._sigint_wait_secs = threading.Lock(), 0.25
            if not (child := os.fork()):
                os.setpgid(0, 0)
                (pipe,) = pass_fds
                os.closerange(3, pipe)  # the others' pipes have to end with the others
                os.closerange(pipe + 1, 4096)
                sys.argv = command[2:]
                with contextlib.suppress(BaseException):
                    fork_server.main()
                os._exit(0)
            self.pid = child

    class Processes:
        Popen = Forked

        def __getattr__(self, name):
            return getattr(subprocess, name)

    fork_server.subprocess = Processes()


def one_command_line() -> None:
    """Typer puts the commands together at each call, of which a user's process has one."""
    import typer.main
    import typer.testing

    whole, kept = typer.main.get_command, {}

    def get_command(app):
        names = (id(app), *(id(one) for one in (*app.registered_commands, *app.registered_groups)))
        if names not in kept:
            kept[names] = whole(app)
        return kept[names]

    typer.main.get_command = typer.testing._get_command = get_command


def one_step_a_client() -> None:
    """Runs of a program that take little: no workers and no picture."""
    from dataclasses import replace

    import fedlens

    whole = fedlens.run

    def run(experiment=None, **more):
        experiment = experiment or fedlens.Experiment()
        engine = "sequential" if experiment.execution.engine == "auto" else experiment.execution.engine
        experiment = replace(experiment, local=replace(experiment.local, steps=1))
        return whole(experiment.with_execution(engine=engine, picture=False), **more)

    fedlens.run = run


def carried_out(order: dict) -> int:
    import runpy
    import traceback

    from fedlens.cli.main import main

    code: object = 0
    try:
        forked_workers()
        if order["few"]:
            one_step_a_client()
        sys.argv = [order["program"] or "fedlens", *order["words"]]
        if order["program"]:
            sys.path.insert(0, str(Path(order["program"]).resolve().parent))  # as Python does
            runpy.run_path(order["program"], run_name="__main__")
        else:
            main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    return code if isinstance(code, int) else int(code is not None)


def serve() -> None:
    import gc

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    import typer.main

    import fedlens.cli.main
    import fedlens.runs.diff
    import fedlens.simulate.describe
    import fedlens.simulate.progress
    import fedlens.simulate.run

    with contextlib.suppress(ImportError):  # what several commands would import, each time
        import pandas  # noqa: F401
        import torch._dynamo  # noqa: F401
    one_command_line()
    typer.main.get_command(fedlens.cli.main.app)
    gc.freeze()  # what is shared with the forks stays shared
    for line in sys.stdin:
        order = json.loads(line)
        if not (child := os.fork()):
            prepared(order)
            os._exit(carried_out(order))  # without taking torch apart
        os.write(1, b"%d\n" % child)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    serve()
