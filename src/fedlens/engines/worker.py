"""The process side of `workers`: answers messages with the sequential engine."""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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
from .shared_memory import Layout, Reader, Writer

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
        self.reader, self.shared_reader = Reader(), Reader()
        # Two in turn: the parent reads one upload while the next client is trained.
        self.writers, self.sent = (Writer(), Writer()), 0
        self.job: Any = None
        self.shared = Tree()

    def open(self, job: Job, download: Any, shared: Any) -> bool:
        """Take in the job; whether clients have anything to remember in it."""
        if shared is not None:
            self.shared = self.shared_reader.get(shared)
        self.job = replace(job, download=self.reader.get(download), shared=self.shared)
        return self.engine.remembers(self.job)

    def train(self, client: int) -> tuple[int, Layout]:
        """(which of two places, where in it) the upload lies."""
        self.sent += 1
        return self.sent % 2, self.writers[self.sent % 2].put(self.engine.train(self.job, client).upload)

    def measure(self, weights: Any, detailed: bool) -> list[dict[str, Any]]:
        tree = self.reader.get(weights)
        scores = [score(self.engine.net, tree, piece, detailed) for piece in self.pieces]
        return [{name: leaf.numpy() for name, leaf in each.items()} for each in scores]

    def save(self) -> dict[Version, Seal]:
        return self.engine.save(0)


def serve(connection: Connection) -> None:
    sys.path += [place for place in connection.recv() if place not in sys.path]
    # At once: the parent has other things to do before its first message.
    failure, worker = _tried(partial(_built, connection.recv_bytes()))
    while True:
        try:
            verb, *arguments = connection.recv()
        except EOFError:
            return
        connection.send((failure, None) if failure else _tried(partial(getattr(worker, verb), *arguments)))


def _built(order: bytes) -> Worker:
    return Worker(*pickle.loads(order))


def _tried(work: Callable[[], Any]) -> tuple[Exception | None, Any]:
    """(why it failed, what it returned)"""
    try:
        return None, work()
    except (BadInput, ClientFailed, OSError, MemoryError) as error:
        return error, None
    except Exception:
        return RunFailed(f"a worker failed:\n{traceback.format_exc()}"), None


def main(descriptor: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection)
