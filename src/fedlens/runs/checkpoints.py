"""Checkpoints that outlive a power cut: everything they need is on the disk before the manifest that lists it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..core.errors import BadInput
from ..core.files import Seal, Unsynced, parse_json, read_bytes, remove_orphans, seal, write_atomic
from ..core.ledger import Ledger
from ..core.memories import Version, name, newest, prune, version_of, versions
from ..core.tree import Tree
from ..core.wire import decode, encode
from . import tables

_KEPT = 2  # checkpoints: a damaged last one costs rounds, not the run
_DAMAGE = (BadInput, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
_SEAL = re.compile(rb', "seal": "([0-9a-f]{64})"\}')
_SEAL_LENGTH = len(', "seal": ""}') + 64
_TABLES = {"metrics.parquet": tables.METRICS, "bytes.parquet": tables.BYTES}


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
            data = encode(shared)
            self._shared = shared, hashlib.sha256(data).hexdigest()
            file = self._shared_file(self._shared[1])
            if not file.exists() or self._look(file) != seal(data):
                self.unsynced.write(file, data)
        return self._shared[1]

    # ---- taking up ----
    def tidy(self, start: Checkpoint) -> None:
        """Make the folder what it was when this checkpoint was written: nothing later, nothing half-written."""
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

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint (None: start from the beginning), and what was wrong with newer ones."""
        wrong, found = [], self.rounds()[::-1]
        for round in found:
            try:
                checkpoint = self.read(round)
                self._check_tables(checkpoint)
                return checkpoint, wrong
            except _DAMAGE as error:
                wrong.append(f"checkpoint {round} is damaged ({_said(error)})")
        if found:
            raise BadInput(f"{self.run}: no intact checkpoint is left: {'; '.join(wrong)}")
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
        """With every file that it needs looked at; raises one of many errors where something is wrong."""
        manifest = self.manifest(round)
        files = self._files(manifest)
        for path, expected in files.items():
            self._check(path, expected)
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
            {path.name: found for path, found in files.items() if path.parent == self.transcript},
            {file: (rows, digest) for file, (rows, digest) in manifest.get("tables", {}).items()},
            manifest.get("answers"),
        )

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

    def _check_tables(self, checkpoint: Checkpoint) -> None:
        for file, expected in checkpoint.tables.items():
            found = tables.Digest(tables.until(self.run / file, _TABLES[file], checkpoint.round)).seal()
            if found[0] != expected[0]:
                raise ValueError(f"{file} has {found[0]} rows, not {expected[0]}")
            if found != expected:
                raise ValueError(f"{file}: the checksum of its rows differs")

    # ---- places ----
    def _manifest(self, round: int) -> Path:
        return self.folder / f"{round:06d}.json"

    def _state(self, round: int) -> Path:
        return self.folder / f"{round:06d}.safetensors"

    def _shared_file(self, digest: str) -> Path:
        return self.folder / f"shared-{digest[:16]}.safetensors"


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
