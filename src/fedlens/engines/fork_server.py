"""A process that has imported what workers need, and forks one whenever it is asked to.

Importing torch takes longer than many rounds. Here it happens once for all workers. A server that is started early does
it beside the caller's own imports, so this module imports nothing heavy itself. A server computes nothing: it has no
threads to lose in a fork. Where forks are not safe each server becomes the one worker that it is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from typing import NoReturn

FORKS = sys.platform == "linux"  # elsewhere what torch is linked to may not survive one
_WORD = struct.Struct("<q")
_FORK = 0  # any other word is a process whose end is asked about
_PATIENCE = 5  # seconds that a worker has to end by itself


class ForkServer:
    """The caller's side."""

    def __init__(self, *modules: str):
        """Begins to import `modules`, and does not wait for it."""
        self._socket, theirs = socket.socketpair()
        # One thread from the start: threads of idle OpenMP pools would fight over the cores.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), *modules]
        # A group of their own: Ctrl-C in a terminal is for the parent, even while they still import.
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, process_group=0)
        theirs.close()
        self._asked_for = 0
        self._numbers: list[int] = []  # of workers' processes, as far as they are known

    def fork(self, descriptor: int) -> int:
        """A worker that talks through this end of a pipe; its place among those of this server."""
        with contextlib.suppress(BrokenPipeError):  # whoever talks to the worker finds that there is none
            socket.send_fds(self._socket, [_WORD.pack(_FORK)], [descriptor])
        self._asked_for += 1
        return self._asked_for - 1

    def end_of(self, place: int) -> int:
        """The exit code of a worker that has ended; minus a signal."""
        with contextlib.suppress(EOFError, OSError):  # the server has ended as well
            while FORKS and len(self._numbers) < self._asked_for:
                self._numbers.append(self._read())
            if FORKS:
                self._socket.send(_WORD.pack(self._numbers[place]))
                return self._read()
        return self.process.wait(_PATIENCE)

    def close(self) -> None:
        """Waits for the end of workers that nobody talks to any more; ends them where it takes too long."""
        self._socket.close()
        try:
            self.process.wait(2 * _PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self) -> int:
        if not (data := self._socket.recv(_WORD.size)):
            raise EOFError
        return _WORD.unpack(data)[0]


_early: list[ForkServer] = []


def start_early(*modules: str) -> None:
    """A server for whoever asks for the first: it imports while the caller does."""
    if not _early:
        _early.append(ForkServer(*modules))


def take(*modules: str) -> ForkServer:
    """The one that was started early, or a new one."""
    return _early.pop() if _early else ForkServer(*modules)


def discard_early() -> None:
    """Nobody needs it after all."""
    while _early:
        server = _early.pop()
        server.process.kill()
        server.close()


# ---- the server ------------------------------------------------------------------------------------------------------
def main() -> None:
    die_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        gc.disable()  # looking through half-imported modules for garbage takes a fifth of the time
        from . import worker  # noqa: F401

        for name in sys.argv[3:]:
            with contextlib.suppress(ImportError):  # said by the worker that needs it
                importlib.import_module(name)
        gc.freeze()  # modules stay: no worker looks through them again
        gc.enable()
        _serve(orders)
    os._exit(0)  # without taking torch apart


def _serve(orders: socket.socket) -> None:
    children: set[int] = set()
    with contextlib.suppress(ConnectionError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(orders, _WORD.size, 1)
            if not data:
                break
            asked = _WORD.unpack(data)[0]
            if asked == _FORK:
                child = _forked(orders, descriptors[0])
                children.add(child)
                orders.send(_WORD.pack(child))
            else:
                children.discard(asked)
                orders.send(_WORD.pack(_ended(asked, time.monotonic() + _PATIENCE)))
    until = time.monotonic() + _PATIENCE
    for child in children:
        _ended(child, until)


def _forked(orders: socket.socket, descriptor: int) -> int:
    parent = os.getpid()
    child = os.fork() if FORKS else 0
    if not child:
        orders.close()
        _work(descriptor, parent if FORKS else os.getppid())
    os.close(descriptor)
    return child


def _work(descriptor: int, parent: int) -> NoReturn:
    from . import worker

    code = 0
    try:
        die_with(parent)
        worker.main(descriptor)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)  # without taking torch apart


def _ended(child: int, until: float) -> int:
    """The exit code of a child, which is killed when it has not ended by then."""
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.002)


def die_with(parent: int) -> None:
    """On Linux, ask to be killed with the parent: an orphan must not go on writing memories."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
