"""Checkpoints that outlive a power cut: everything they need is on the disk before the manifest that lists it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors import SafetensorError

from ..core.errors import BadInput
from ..core.files import (
    Seal,
    Unsynced,
    json_bytes,
    parse_json,
    read_bytes,
    read_json,
    remove_orphans,
    seal,
    write_atomic,
)
from ..core.ledger import Ledger
from ..core.memories import Version, name, newest, prune, version_of, versions
from ..core.tree import Tree
from ..core.wire import decode, digest, encode, parts
from . import tables

_KEPT = 2  # checkpoints: a damaged last one costs rounds, not the run
_DAMAGE = (BadInput, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
_SEAL = re.compile(rb', "seal": "([0-9a-f]{64})"\}')
_SEAL_LENGTH = len(', "seal": ""}') + 64
_TABLES = {"metrics.parquet": tables.METRICS, "bytes.parquet": tables.BYTES}
LOST = "lost.json"  # what damage has taken from a run for good, by its file or folder


@dataclass(frozen=True)
class Checkpoint:
    """All that a run is made of after `round` rounds. Memories, messages and rows of tables lie beside it."""

    round: int
    state: Tree
    ledger: Ledger
    seconds: float
    memories: Mapping[int, tuple[int, Seal]] = field(default_factory=dict)  # client -> its round and file
    transcript: Mapping[str, Seal] = field(default_factory=dict)  # file names
    tables: Mapping[str, Seal] = field(default_factory=dict)  # number and checksum of all rows
    answers: Mapping[str, list[str]] | None = None  # what errands let out; None: of a run from before
    rows: Mapping[str, pa.Table] = field(default_factory=dict)  # of damaged tables, as far as they are known
    damaged: Path | None = None  # the first message that is not as it was written; `transcript` ends before it
    lost: Mapping[str, str] = field(default_factory=dict)  # what nothing can bring back, in words

    @property
    def versions(self) -> dict[int, int]:
        """client -> the round that wrote its memory."""
        return {client: round for client, (round, _) in self.memories.items()}


class CheckpointStore:
    """Writes and reads the checkpoints of a run in this folder."""

    def __init__(self, run: Path, unsynced: Unsynced):
        """`unsynced`: what the run has written since the last checkpoint."""
        self.run, self.unsynced = run, unsynced
        self.folder, self.memories, self.transcript = run / "checkpoints", run / "clients", run / "transcript"
        self._shared: tuple[Tree, str] | None = None  # the last common payload, and its checksum
        self._versions: set[Version] | None = None  # memories that some checkpoint lists
        self._seen: dict[Path, tuple[Any, Seal]] = {}  # what files were when they were last looked at

    # ---- writing ----
    def save(self, checkpoint: Checkpoint, keep: int = 0, ends: Collection[int] = ()) -> None:
        """First what it consists of, then the manifest, without which it does not exist; older ones go last.

        One stays every `keep` rounds, and after each round of `ends`.
        """
        common = checkpoint.state.get("shared", Tree())
        changing = Tree({part: value for part, value in checkpoint.state.items() if part != "shared"})
        files = {self._state(checkpoint.round): self.unsynced.write(*self._encoded(checkpoint.round, changing))}
        shared = self._store(common) if common else None
        if shared:
            files[self._shared_file(shared)] = self._shared_file(shared).stat().st_size, shared
        known = self._known()
        for client, (round, found) in checkpoint.memories.items():
            files[self.memories / name(client, round)] = found
            if (client, round) not in known:
                self.unsynced.note(self.memories / name(client, round))
                known.add((client, round))
        files |= {self.transcript / each: found for each, found in checkpoint.transcript.items()}
        self.unsynced.sync()
        manifest = {
            "round": checkpoint.round,
            "shared": shared,
            "seconds": checkpoint.seconds,
            "bytes_up": checkpoint.ledger.up,
            "bytes_down": checkpoint.ledger.down,
            "holders": {version: sorted(clients) for version, clients in checkpoint.ledger.holders.items()},
            "answers": checkpoint.answers or {},
            "tables": checkpoint.tables,
            "files": {path.relative_to(self.run).as_posix(): found for path, found in files.items()},
        }
        write_atomic(self._manifest(checkpoint.round), _sealed(manifest), durable=self.unsynced.durable)
        self._drop_older(checkpoint.round, keep, ends, known)

    def _drop_older(self, last: int, keep: int, ends: Collection[int], known: set[Version]) -> None:
        """Should a power cut bring some of it back, nothing reads it: newer manifests do not list it."""
        rounds = self.rounds()
        stay = [round for round in rounds[:-_KEPT] if round in ends or (keep and round % keep == 0)]
        for round in rounds[:-_KEPT]:
            for path in (self._manifest(round), self._state(round)) if round not in stay else ():
                self.unsynced.remove(path)
        known -= {*prune(self.memories, before=min(rounds[-_KEPT:]), after=last, keep=stay, found=known)}

    def _encoded(self, round: int, state: Tree) -> tuple[Path, bytes]:
        return self._state(round), encode(Tree(state=state))

    def _store(self, shared: Tree) -> str:
        """The common payload, once: it can be as large as the data and stays the same."""
        if self._shared is None or self._shared[0] is not shared:
            data = parts(shared)
            self._shared = shared, digest(shared, data)
            file = self._shared_file(self._shared[1])
            if not file.exists() or self._look(file) != (sum(map(len, data)), self._shared[1]):
                self.unsynced.write_parts(file, *data)
        return self._shared[1]

    # ---- taking up ----
    def tidy(self, start: Checkpoint) -> None:
        """Make the folder what it was when this checkpoint was written: nothing later, nothing half-written."""
        self.mend(start)
        for folder in (self.run, *(path for path in self.run.iterdir() if path.is_dir())):
            remove_orphans(folder)
        for round in self.rounds():
            for path in (self._manifest(round), self._state(round)) if round > start.round else ():
                self.unsynced.remove(path)
        known = self._known(start.round)
        for client, round in versions(self.memories):
            if (client, round) not in known:
                self.unsynced.remove(self.memories / name(client, round))
        self.unsynced.sync()

    def mend(self, start: Checkpoint) -> None:
        """Bring tables back from their copies; what is lost for good is written down, and what is damaged put aside."""
        if start.lost:
            known = {**lost(self.run), **start.lost}
            write_atomic(self.run / LOST, json_bytes(known), durable=self.unsynced.durable)
        if start.damaged is not None and start.damaged.is_file():
            self.unsynced.rename(start.damaged, start.damaged.with_name(f"{start.damaged.name}.damaged"))
        for file, rows in start.rows.items():
            tables.GrowingTable(self.run / file, _TABLES[file], self.unsynced).replace(rows)
        self.unsynced.sync()

    def _known(self, until: int | None = None) -> set[Version]:
        """Memories that checkpoints list, those until a round where one is given."""
        if self._versions is None or until is not None:
            self._versions = set()
            for round in self.rounds():
                if until is None or round <= until:
                    self._versions |= {*self._listed_versions(round)}
        return self._versions

    def _listed_versions(self, round: int) -> Iterator[Version]:
        try:
            manifest = self.manifest(round)
        except _DAMAGE:
            return
        if "files" not in manifest:  # of a run from before: all that were there
            yield from (each for each in versions(self.memories) if each[1] < round)
            return
        for path in manifest["files"]:
            folder, _, file = path.partition("/")
            if folder == self.memories.name and (version := version_of(file)):
                yield version

    # ---- reading ----
    def rounds(self) -> list[int]:
        """After which rounds there is a checkpoint."""
        found = self.folder.glob("[0-9]" * 6 + ".json")
        return sorted(int(path.stem) for path in found if path.is_file())

    def load(self, rows: bool = True) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint (None: start from the beginning), and what was wrong with newer ones.

        A model needs no messages and no rows of tables. So where the newest two both lack some, the newest is taken up
        without. `rows`: False leaves out of account what a model does not need.
        """
        wrong, usable, found = [], [], self.rounds()[::-1]
        for round in found:
            try:
                checkpoint = self.read(round)
                checkpoint = self._with_rows(checkpoint) if rows else checkpoint
            except _DAMAGE as error:
                wrong.append(f"checkpoint {round} is damaged ({_said(error)})")
                continue
            usable.append(checkpoint)
            if not checkpoint.lost or not rows:
                earlier = [f"checkpoint {each.round} lacks {_listed(each.lost)}" for each in usable[:-1]]
                return checkpoint, [*wrong, *earlier, *_mended(checkpoint)]
            if len(usable) == _KEPT:
                break
        if usable:
            return usable[0], [*wrong, f"damage has taken {_listed(usable[0].lost)}; the model is whole"]
        if found:
            again = f"the same settings run it again: fedlens run {self.run}/config.yaml out=NEW"
            raise BadInput(f"{self.run}: no intact checkpoint is left: {'; '.join(wrong)}; {again}")
        return None, wrong

    def at(self, round: int) -> Checkpoint:
        """The checkpoint after this round, or a sentence that names those there are."""
        if round not in self.rounds():
            there = ", ".join(map(str, self.rounds())) or "none yet"
            raise BadInput(f"{self.run} has no checkpoint of round {round}, only {there}; keep=N keeps every Nth")
        try:
            return self.read(round)
        except _DAMAGE as error:
            raise BadInput(f"{self.run}: checkpoint {round} is damaged ({_said(error)})") from None

    def read(self, round: int) -> Checkpoint:
        """With every file that its model needs looked at; raises one of many errors where something is wrong."""
        manifest = self.manifest(round)
        files = self._files(manifest)
        messages = {path: found for path, found in files.items() if path.parent == self.transcript}
        for path, expected in files.items():
            if path not in messages:
                self._check(path, expected)
        kept_messages, damaged = self._whole(messages)
        state = decode(read_bytes(self._state(round))).state
        if manifest["shared"]:
            state = state.replace(shared=decode(read_bytes(self._shared_file(manifest["shared"]))))
        kept = ((version_of(path.name), found) for path, found in files.items() if path.parent == self.memories)
        memories = {version[0]: (version[1], found) for version, found in kept if version}
        return Checkpoint(
            round,
            state,
            ledger_of(manifest),
            float(manifest["seconds"]),
            memories,
            kept_messages,
            {file: (rows, digest) for file, (rows, digest) in manifest.get("tables", {}).items()},
            manifest.get("answers"),
            damaged=damaged,
            lost={self.transcript.name: f"the messages from round {int(damaged.stem)} on"} if damaged else {},
        )

    def _whole(self, messages: Mapping[Path, Seal]) -> tuple[dict[str, Seal], Path | None]:
        """Messages up to the first that is damaged, and that one: a gap would hide from an audit what it missed."""
        kept: dict[str, Seal] = {}
        for path in sorted(messages):
            try:
                self._check(path, messages[path])
            except (OSError, ValueError):
                return kept, path
            kept[path.name] = messages[path]
        return kept, None

    def _files(self, manifest: dict[str, Any]) -> dict[Path, Seal]:
        """All that a checkpoint needs; of one from before, memories are what is there."""
        if "files" in manifest:
            return {self.run / path: (length, digest) for path, (length, digest) in manifest["files"].items()}
        own = [(self._state(manifest["round"]), manifest["sha256"])]
        own += [(self._shared_file(manifest["shared"]), manifest["shared"])] if manifest["shared"] else []
        there = newest(self.memories, manifest["round"]).items()
        found = {path: self._look(path) for path in (self.memories / name(*each) for each in there)}
        return {path: (self._look(path)[0], digest) for path, digest in own} | found

    def manifest(self, round: int) -> dict[str, Any]:
        """What a checkpoint says of itself; its own checksum is verified, which one from before has not."""
        data = read_bytes(self._manifest(round))
        seal = _SEAL.fullmatch(data, max(0, len(data) - _SEAL_LENGTH))
        if seal and hashlib.sha256(data[: seal.start()]).hexdigest() != seal[1].decode():
            raise ValueError(f"{self._manifest(round).name}: its checksum differs")
        try:
            manifest = parse_json(data)
        except ValueError:
            raise ValueError(f"{self._manifest(round).name} is not JSON") from None
        if not isinstance(manifest, dict) or ("files" in manifest) != bool(seal):
            raise ValueError(f"{self._manifest(round).name} is no manifest")
        if manifest["round"] != round:
            raise ValueError(f"{self._manifest(round).name} is of another round")
        return manifest

    def _check(self, path: Path, expected: Seal) -> None:
        found = self._look(path)
        shown = path.relative_to(self.run).as_posix()
        if found[0] != expected[0]:
            raise ValueError(f"{shown} has {found[0]} bytes, not {expected[0]}")
        if found[1] != expected[1]:
            raise ValueError(f"{shown}: its checksum differs")

    def _look(self, path: Path) -> Seal:
        """Length and checksum; remembered as long as the file is the same."""
        try:
            now = os.stat(path)
        except FileNotFoundError:
            raise ValueError(f"{path.relative_to(self.run).as_posix()} is missing") from None
        if not stat.S_ISREG(now.st_mode):
            raise ValueError(f"{path.relative_to(self.run).as_posix()} is no file")
        stamp = now.st_mtime_ns, now.st_size, now.st_ino
        if path not in self._seen or self._seen[path][0] != stamp:
            self._seen[path] = stamp, seal(read_bytes(path))
        return self._seen[path][1]

    def _with_rows(self, checkpoint: Checkpoint) -> Checkpoint:
        """The same, with what is known of the rows of damaged tables."""
        rows, lost = {}, dict(checkpoint.lost)
        for file, expected in checkpoint.tables.items():
            if self._rows_are(file, checkpoint.round, expected):
                continue
            where = self.run / file, self.copy(file), _TABLES[file]
            rows[file], gone = tables.recovered(*where, checkpoint.round, expected)
            if gone:
                lost[file] = f"the rows of {tables.spans(gone)} in {file}"
        return replace(checkpoint, rows=rows, lost=lost)

    def _rows_are(self, file: str, round: int, expected: Seal) -> bool:
        try:
            return tables.Digest(tables.until(self.run / file, _TABLES[file], round)).seal() == expected
        except BadInput:
            return False

    # ---- places ----
    def copy(self, table: str) -> Path:
        return self.folder / f"{table}.copy"

    def _manifest(self, round: int) -> Path:
        return self.folder / f"{round:06d}.json"

    def _state(self, round: int) -> Path:
        return self.folder / f"{round:06d}.safetensors"

    def _shared_file(self, digest: str) -> Path:
        return self.folder / f"shared-{digest[:16]}.safetensors"


def lost(run: Path) -> dict[str, str]:
    """What damage has taken from a run for good, by its file or folder, in words."""
    try:
        return {str(file): str(what) for file, what in read_json(run / LOST).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError):
        raise BadInput(f"{run / LOST} is damaged: it should say what the run has lost") from None


def _listed(lost: Mapping[str, str]) -> str:
    return " and ".join(lost.values())


def _mended(checkpoint: Checkpoint) -> list[str]:
    return [f"{file} was damaged and is restored from its copy" for file in checkpoint.rows]


def _sealed(manifest: dict[str, Any]) -> bytes:
    """As JSON whose last entry is the checksum of all before it."""
    body = json.dumps(manifest).encode()[:-1]
    return body + f', "seal": "{hashlib.sha256(body).hexdigest()}"}}'.encode()


def _said(error: Exception) -> str:
    """A library's words mean nothing here."""
    named = isinstance(error, BadInput) or type(error) is ValueError
    return str(error) if named else f"its manifest cannot be read: {type(error).__name__}"


def ledger_of(manifest: dict[str, Any]) -> Ledger:
    holders = {version: set(clients) for version, clients in manifest["holders"].items()}
    return Ledger(holders, manifest["bytes_up"], manifest["bytes_down"])
