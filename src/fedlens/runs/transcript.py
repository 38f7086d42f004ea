"""What crossed between server and clients, kept as it was sent: all that an adversary at the server can look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.algorithm import Stage
from ..core.engine import Job, Reply
from ..core.errors import BadInput
from ..core.files import Seal, Unsynced, open_regular, read_bytes, seal
from ..core.tree import Tree
from ..core.wire import decode, digest, encode, header, notes

_MIB = 2**20
_HEAD = 100 * _MIB  # bytes before the values at most: as safetensors has it


@dataclass(frozen=True)
class Crossing:
    """One round as it was seen at the server."""

    round: int  # counted from 0
    at: int  # of the stage
    stage: Stage  # the protocol, which everybody knows
    download: Tree
    shared: Tree
    replies: Mapping[int, Tree]  # client -> what it sent, after its uplink


class Recording:
    """Writes rounds as they cross, one file each, from the first one on until `limit` MiB are full."""

    def __init__(
        self,
        folder: Path,
        limit: float,
        round: int,
        unsynced: Unsynced | None = None,
        files: Mapping[str, Seal] | None = None,
    ):
        """`round`: as many are done; what was recorded of later ones is recorded again. `files`: what is known of them.

        `unsynced` makes them durable, together with what else the run has written.
        """
        self.folder, self.limit, self.unsynced = folder, limit * _MIB, unsynced or Unsynced()
        self.files: dict[str, Seal] = dict(files or {})
        self.unsynced.mkdir(folder)
        for path in _messages(folder):
            if int(path.stem) > round:
                self.unsynced.remove(path)
        for path in recorded(folder):
            if path.name not in self.files:  # of a run from before
                try:
                    self.files[path.name] = seal(read_bytes(path))
                except (OSError, ValueError) as error:
                    raise BadInput(f"{path} is damaged ({error}): it is no record of a round") from None
        self.unsynced.sync()
        self.rounds = len(recorded(folder))
        self.spent = sum(path.stat().st_size for path in recorded(folder))
        self.version = _notes(recorded(folder)[-1])["shared"] if self.rounds else ""

    def add(self, job: Job, replies: Sequence[Reply]) -> str:
        """A sentence when this was the first round that there is no room for."""
        if self.rounds != job.round:  # a gap would hide from an audit what it missed
            return ""
        version = digest(job.shared)[:16] if job.shared else ""  # made once: it may be of hundreds of megabytes
        tree = Tree(
            download=job.download,
            replies=Tree({str(reply.client): reply.upload for reply in replies}),
            shared=job.shared if version != self.version else Tree(),
        )
        if self.spent + len(header(tree)) + tree.nbytes > self.limit:
            return (
                f"the transcript is full after {self.rounds} rounds ({self.spent / _MIB:.1f} of "
                f"{self.limit / _MIB:g} MiB) and records no more; a larger transcript= holds more"
            )
        data = encode(tree, shared=version, at=str(job.at))
        file = f"{job.round + 1:06d}.safetensors"
        self.files[file] = self.unsynced.write(self.folder / file, data)
        self.rounds, self.spent, self.version = self.rounds + 1, self.spent + len(data), version
        return ""


@dataclass(frozen=True)
class Transcript:
    """The rounds that were recorded, read one at a time; and what the server holds itself."""

    folder: Path
    stages: Sequence[Stage]  # of every round of the run
    state: Tree  # of the server, after the last round that is done
    device: str = "cpu"
    whole: int | None = None  # rounds whose messages are as they were sent; None: of a run from before
    damage: str = ""  # which messages it has taken, in words

    def __post_init__(self) -> None:
        if self.whole == 0 and recorded(self.folder):
            raise BadInput(f"{recorded(self.folder)[0]} is damaged, and an audit begins with the first round")
        if not recorded(self.folder):
            raise BadInput(
                f"{self.folder.parent} has no transcript: an audit attacks what the server received, so run it again "
                "with transcript=1000 (MiB)"
            )

    def __len__(self) -> int:
        found = len(recorded(self.folder))
        return found if self.whole is None else min(found, self.whole)

    def __iter__(self) -> Iterator[Crossing]:
        return (self[round] for round in range(len(self)))

    def __getitem__(self, round: int) -> Crossing:
        path = self._path(round)
        try:
            return self._crossing(round, path)
        except (AttributeError, ValueError, TypeError, StopIteration):
            raise BadInput(f"{path} is damaged: it is no record of a round") from None

    def _crossing(self, round: int, path: Path) -> Crossing:
        tree = self._tree(path)
        shared = tree.shared
        if (version := _notes(path)["shared"]) and not shared:  # it was sent in an earlier round
            first = next(n for n in range(round) if _notes(self._path(n))["shared"] == version)
            shared = self._tree(self._path(first)).shared
        replies = {int(client): upload for client, upload in tree.replies.items()}
        at = int(_notes(path)["at"])
        return Crossing(round, at, self.stages[round], tree.download, shared, dict(sorted(replies.items())))

    def _path(self, round: int) -> Path:
        return self.folder / f"{round + 1:06d}.safetensors"

    def _tree(self, path: Path) -> Tree:
        try:
            return decode(read_bytes(path)).map(lambda leaf: leaf.to(self.device))
        except Exception:  # whatever a damaged file makes the library raise
            raise BadInput(f"{path} is damaged: it is no record of a round") from None


def recorded(folder: Path) -> list[Path]:
    """The messages of each round, from the first one on, up to a gap."""
    return [path for number, path in enumerate(_messages(folder), 1) if int(path.stem) == number]


def _messages(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??????.safetensors") if path.stem.isdecimal())


def _notes(path: Path) -> dict[str, str]:
    """What a record says beside its values; `shared`: the version of the shared data that clients had in this round."""
    try:
        with open_regular(path) as file:
            length = file.read(8)
            found = notes(length + file.read(min(int.from_bytes(length, "little"), _HEAD)))
            return {"shared": found["shared"], "at": str(int(found["at"]))}
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{path} is damaged: it is no record of a round") from None
