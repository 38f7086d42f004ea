"""Client memories: hot ones in RAM, the rest in a folder, every version named by the round that wrote it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from .errors import BadInput
from .files import Seal, read_bytes, remove, seal, write_atomic
from .tree import Tree
from .wire import decode, encode

GIB = 1 << 30
Version = tuple[int, int]  # client, and the round that wrote it
_NAME = re.compile(r"([0-9]{6,})-([0-9]{6,})\.safetensors")


class Memories:
    """One Tree for each client that has something to remember.

    In RAM up to `limit` bytes, least recently used out first; without a folder everything stays in RAM. A file
    `<client>-<round>` is what the client knew after that round; older versions stay until `prune`, so that any
    checkpoint since then can be taken up again.
    """

    def __init__(
        self,
        folder: Path | None = None,
        limit: int = GIB,
        round: int | None = None,
        versions: Mapping[int, int] | None = None,
    ):
        """Takes up `versions` (client -> round), or the newest from before `round`; without either there are none."""
        self.folder, self.limit = folder, limit
        self._hot: OrderedDict[int, tuple[int, Tree]] = OrderedDict()  # client -> (round, memory)
        self._stored: dict[int, int] = {}  # client -> round of its newest file
        self._written: dict[Version, Seal] = {}  # since the last save
        self._size = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._stored = dict(newest(folder, round or 0) if versions is None else versions)

    def get(self, client: int) -> Tree:
        """What the client remembers; an empty tree at first."""
        if client in self._hot:
            self._hot.move_to_end(client)
            return self._hot[client][1]
        if client not in self._stored:
            return Tree()
        assert self.folder is not None
        path = self.folder / name(client, self._stored[client])
        try:
            memory = decode(read_bytes(path))
        except (ValueError, OSError):
            raise BadInput(f"{path} is damaged: what this client remembered cannot be read") from None
        self._keep(client, self._stored[client], memory)
        return memory

    def put(self, client: int, memory: Tree, round: int) -> None:
        if self._stored.get(client) == round:  # it was asked twice in this round: the file is out of date
            del self._stored[client]
        self._keep(client, round, memory)

    def save(self) -> dict[Version, Seal]:
        """Everything that is in RAM alone goes to the folder; returns all files written since the last time."""
        for client, (round, memory) in self._hot.items():
            self._write(client, round, memory)
        written, self._written = self._written, {}
        return written

    def __iter__(self):
        return iter(sorted(self._hot.keys() | self._stored.keys()))

    def _keep(self, client: int, round: int, memory: Tree) -> None:
        if client in self._hot:
            self._size -= self._hot.pop(client)[1].nbytes
        self._hot[client] = round, memory
        self._size += memory.nbytes
        while self.folder is not None and self._size > self.limit and len(self._hot) > 1:
            old, (written, kept) = self._hot.popitem(last=False)
            self._write(old, written, kept)
            self._size -= kept.nbytes

    def _write(self, client: int, round: int, memory: Tree) -> None:
        old = self._stored.get(client)
        if self.folder is not None and old != round:
            data = encode(memory)
            write_atomic(self.folder / name(client, round), data)
            self._stored[client] = round
            self._written[client, round] = seal(data)
            if old is not None and self._written.pop((client, old), None):  # no checkpoint has it
                remove(self.folder / name(client, old))


def name(client: int, round: int) -> str:
    return f"{client:06d}-{round:06d}.safetensors"


def version_of(file: str) -> Version | None:
    """Whose memory a file of this name is, and of which round; None: it is none."""
    found = _NAME.fullmatch(file)
    return (int(found[1]), int(found[2])) if found else None


def versions(folder: Path) -> list[Version]:
    """(client, round) of every memory in a folder."""
    return [found for path in folder.iterdir() if (found := version_of(path.name))] if folder.exists() else []


def newest(folder: Path, before: int) -> dict[int, int]:
    """client -> round of its newest memory from before this round."""
    return {client: round for client, round in sorted(versions(folder)) if round < before}


def prune(
    folder: Path,
    *,
    before: int,
    after: int,
    keep: Iterable[int] = (),
    found: Collection[Version] | None = None,
) -> list[Version]:
    """Drop versions that no checkpoint from round `before` on can need, and those written in or after round `after`.

    Those that the checkpoints of the rounds in `keep` need stay. `found`: the versions that there are, where that is
    known. Returns what was dropped.
    """
    needed: dict[tuple[int, int], int] = {}  # (checkpoint, client) -> newest version before it
    found, checkpoints = versions(folder) if found is None else found, {before, *keep}
    for client, round in found:
        for checkpoint in checkpoints:
            if round < checkpoint:
                needed[checkpoint, client] = max(round, needed.get((checkpoint, client), -1))
    stay = {(client, round) for (_, client), round in needed.items()}
    dropped = [each for each in found if each[1] >= after or (each[1] < before and each not in stay)]
    for client, round in dropped:
        remove(folder / name(client, round))
    return dropped
