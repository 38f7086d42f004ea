"""Client memories: hot ones in RAM, the rest in a folder, every version named by the round that wrote it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError

from .errors import BadInput
from .files import write_atomic
from .tree import Tree
from .wire import decode, encode

GIB = 1 << 30


class Memories:
    """One Tree for each client that has something to remember.

    In RAM up to `limit` bytes, least recently used out first; without a folder everything stays in RAM. A file
    `<client>-<round>` is what the client knew after that round; older versions stay until `prune`, so that any
    checkpoint since then can be taken up again.
    """

    def __init__(self, folder: Path | None = None, limit: int = GIB, round: int | None = None):
        """`round`: take up the memories as they were before it; without it there are none yet."""
        self.folder, self.limit = folder, limit
        self._hot: OrderedDict[int, tuple[int, Tree]] = OrderedDict()  # client -> (round, memory)
        self._stored: dict[int, int] = {}  # client -> round of its newest file
        self._size = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for client, written in versions(folder):
                if round is not None and written < round:
                    self._stored[client] = max(written, self._stored.get(client, 0))

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
            memory = decode(path.read_bytes())
        except (SafetensorError, ValueError, KeyError, FileNotFoundError):
            raise BadInput(f"{path} is damaged: what this client remembered cannot be read") from None
        self._keep(client, self._stored[client], memory)
        return memory

    def put(self, client: int, memory: Tree, round: int) -> None:
        self._keep(client, round, memory)

    def save(self) -> None:
        """Everything that is in RAM alone goes to the folder."""
        for client, (round, memory) in self._hot.items():
            self._write(client, round, memory)

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
        if self.folder is not None and self._stored.get(client) != round:
            write_atomic(self.folder / name(client, round), encode(memory))
            self._stored[client] = round


def name(client: int, round: int) -> str:
    return f"{client:06d}-{round:06d}.safetensors"


def versions(folder: Path) -> list[tuple[int, int]]:
    """(client, round) of every memory in a folder."""
    found = (path.name.split(".")[0].split("-") for path in folder.glob("??????*-??????*.safetensors"))
    return [(int(client), int(round)) for client, round in found]


def prune(folder: Path, *, before: int, after: int, keep: Iterable[int] = ()) -> None:
    """Drop versions that no checkpoint from round `before` on can need, and those written in or after round `after`.

    Those that the checkpoints of the rounds in `keep` need stay.
    """
    needed: dict[tuple[int, int], int] = {}  # (checkpoint, client) -> newest version before it
    found, checkpoints = versions(folder), {before, *keep}
    for client, round in found:
        for checkpoint in checkpoints:
            if round < checkpoint:
                needed[checkpoint, client] = max(round, needed.get((checkpoint, client), -1))
    stay = {(client, round) for (_, client), round in needed.items()}
    for client, round in found:
        if round >= after or (round < before and (client, round) not in stay):
            (folder / name(client, round)).unlink(missing_ok=True)
