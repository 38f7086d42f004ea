"""Persistent processes, one intra-op thread each. A worker owns clients `i % workers`: their data and memories.

Processes are forks of a server of their own, so that a user's script is never imported again, and talk over a pipe;
trees go through shared memory. Results do not depend on the number of workers: nothing random
is shared, every client is trained by the code of `Sequential`, and replies are sorted by client.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..core.engine import Job, OnProgress, Reply, ignore
from ..core.errors import BadInput, RunFailed
from ..core.files import Seal
from ..core.memories import Version
from ..core.tree import Tree
from .fork_server import FORKS, ForkServer, take
from .shared_memory import Reader, Writer
from .worker import Build, Storage


class Workers:
    """Hands clients to processes, the largest first."""

    def __init__(self, build: Build, sizes: Sequence[int], workers: int, storage: Storage | None = None):
        """`build` makes network and federation in each process; `sizes` are the clients' numbers of examples."""
        self.population, self.sizes, self.workers = len(sizes), sizes, workers
        self.heard: OnProgress = ignore
        self._writer = Writer()
        self._readers = [(Reader(sole=True), Reader(sole=True)) for _ in range(workers)]
        self._shared: tuple[Tree, Any] | None = None
        self._shared_writer = Writer()
        self._servers: list[ForkServer] = []
        self._places: list[tuple[ForkServer, int]] = []  # of each worker
        self._connections: list[Connection] = []
        module = getattr(build, "func", build).__module__
        for index in range(workers):
            if not self._servers or not FORKS:
                self._servers.append(take(*(() if module == "__main__" else (module,))))
            self._start(index, build, storage or Storage())

    def _start(self, index: int, build: Build, storage: Storage) -> None:
        mine, theirs = Pipe()
        server = self._servers[-1]
        self._places.append((server, server.fork(theirs.fileno())))
        self._connections.append(mine)
        theirs.close()
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the first message finds that it ended
                mine.send([place for place in sys.path if place])
                mine.send_bytes(pickle.dumps((build, storage, index, self.workers)))
        except (AttributeError, pickle.PicklingError) as error:
            self.close()
            raise BadInput(f"worker processes cannot import what they need ({error}); use engine=sequential") from None

    # ---- the engine ----
    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        bare = replace(job, download=Tree(), shared=Tree())
        layouts = self._writer.put(job.download), self._shared_layout(job.shared)
        remembers = any(self._all("open", bare, *layouts))
        self._writer.withdraw()
        self._shared_writer.withdraw()
        waiting = sorted(cohort, key=lambda i: (-self.sizes[i], i))
        busy: dict[int, int] = {}
        replies: list[Reply] = []
        for index in range(self.workers):
            self._next_client(index, waiting, busy, remembers)
        while busy:
            for connection in wait([self._connections[index] for index in busy]):
                index = self._connections.index(connection)  # pyright: ignore[reportArgumentType]
                (place, layout), client = self._receive(index), busy.pop(index)
                self._next_client(index, waiting, busy, remembers)  # first: it must not wait for us
                replies.append(Reply(client, self._readers[index][place].get(layout)))
                self.heard(len(replies), len(cohort))
        return replies

    def _next_client(self, index: int, waiting: list[int], busy: dict[int, int], remembers: bool) -> None:
        # A client whose memory matters stays with its owner; without memories anyone may take anyone.
        mine = (i for i in waiting if i % self.workers == index or not remembers)
        if (client := next(mine, None)) is not None:
            waiting.remove(client)
            busy[index] = client
            self._send(index, "train", client)

    def measure(self, weights: Tree, detailed: bool = False) -> list[Tree]:
        shares = self._all("measure", self._writer.put(weights), detailed)
        self._writer.withdraw()
        count = sum(map(len, shares))
        return [_as_tree(shares[piece % self.workers][piece // self.workers]) for piece in range(count)]

    def save(self, round: int) -> dict[Version, Seal]:
        return {version: seal for written in self._all("save") for version, seal in written.items()}

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()  # a worker ends when nobody listens
        for server in self._servers:
            server.close()

    # ---- talking ----
    def _shared_layout(self, shared: Tree) -> Any:
        """The common payload travels when it changed; None: you have it."""
        if self._shared is not None and self._shared[0] is shared:
            return None
        self._shared = shared, self._shared_writer.put(shared)
        return self._shared[1]

    def _all(self, *message: Any) -> list[Any]:
        for index in range(self.workers):
            self._send(index, *message)
        return [self._receive(index) for index in range(self.workers)]

    def _send(self, index: int, *message: Any) -> None:
        try:
            self._connections[index].send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death(index) from None
        except (AttributeError, pickle.PicklingError) as error:
            raise BadInput(
                f"worker processes cannot import a part of this run ({error}); use engine=sequential"
            ) from None

    def _receive(self, index: int) -> Any:
        try:
            failure, answer = self._connections[index].recv()
        except (EOFError, ConnectionResetError):
            raise self._death(index) from None
        if failure is not None:
            raise failure
        return answer

    def _death(self, index: int) -> RunFailed:
        server, place = self._places[index]
        code = server.end_of(place)
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        return RunFailed(f"worker {index} ended unexpectedly ({cause}){hint}")


def _as_tree(score: dict[str, Any]) -> Tree:
    return Tree({name: torch.as_tensor(values) for name, values in score.items()})
