"""The process side of `workers`: answers messages with the sequential engine.

Started as `python -m fedlens.engines.worker FILE_DESCRIPTOR PARENT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..core.batches import Federation
from ..core.engine import Job
from ..core.errors import BadInput, ClientFailed, RunFailed
from ..core.evaluate import score
from ..core.files import Seal
from ..core.memories import GIB, Memories, Version
from ..core.network import Network
from ..core.tree import Tree
from .process import keep_freed_memory
from .sequential import Sequential
from .shared_memory import Reader, Writer

Build = Callable[[], tuple[Network, Federation]]


@dataclass(frozen=True)
class Storage:
    """Where a worker keeps memories: a folder (None: RAM alone), bytes in RAM, which to take up."""

    folder: Path | None = None
    limit: int = GIB
    round: int | None = None  # the newest from before it, or
    versions: Mapping[int, int] | None = None  # client -> the round that wrote it


class Worker:
    """Its methods are the messages it answers."""

    def __init__(self, build: Build, storage: Storage, index: int, count: int):
        net, federation = build()
        memories = Memories(storage.folder, storage.limit, storage.round, storage.versions)
        self.engine = Sequential(net, federation, memories=memories)
        self.pieces = self.engine.pieces()[index::count]
        self.reader, self.shared_reader, self.writer = Reader(), Reader(), Writer()
        self.job: Any = None
        self.shared = Tree()

    def open(self, job: Job, download: Any, shared: Any) -> bool:
        """Take in the job; whether clients have anything to remember in it."""
        if shared is not None:
            self.shared = self.shared_reader.get(shared)
        self.job = replace(job, download=self.reader.get(download), shared=self.shared)
        return self.engine.remembers(self.job)

    def train(self, client: int) -> Any:
        return self.writer.put(self.engine.train(self.job, client).upload)

    def measure(self, weights: Any, detailed: bool) -> list[dict[str, Any]]:
        tree = self.reader.get(weights)
        scores = [score(self.engine.net, tree, piece, detailed) for piece in self.pieces]
        return [{name: leaf.numpy() for name, leaf in each.items()} for each in scores]

    def save(self) -> dict[Version, Seal]:
        return self.engine.save(0)


def serve(connection: Connection) -> None:
    order, worker = connection.recv_bytes(), None
    while True:
        try:
            verb, *arguments = connection.recv()
        except EOFError:
            return
        try:
            worker = worker or Worker(*pickle.loads(order))
            answer = None, getattr(worker, verb)(*arguments)
        except (BadInput, ClientFailed, OSError, MemoryError) as error:
            answer = error, None
        except Exception:
            answer = RunFailed(f"a worker failed:\n{traceback.format_exc()}"), None
        connection.send(answer)


def _die_with(parent: int) -> None:
    """On Linux, ask to be killed with the parent: an orphan must not go on writing memories."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


def main() -> None:
    _die_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    keep_freed_memory()
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(connection)


if __name__ == "__main__":
    main()
