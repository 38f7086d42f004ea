"""A run's folder: configuration, passport, tables, checkpoints, client memories, log."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import torch

from .. import __version__, config
from ..core.errors import BadInput
from ..core.files import read_json, write_atomic, write_json
from ..core.ledger import Ledger
from ..core.memories import Memories, prune
from ..core.tree import Tree
from ..core.wire import decode, encode
from ..data import Images, Names, Split
from ..data.client_names import NUMBERS
from ..experiment import Experiment
from . import tables
from .rounds import Rounds

FORMAT = 2  # of a run folder; 1, in whose passports it is not written, had other names of some settings
_KEPT = 2  # checkpoints: a damaged last one costs rounds, not the run
_DAMAGE = (BadInput, OSError, ValueError, KeyError)


@dataclass(frozen=True)
class Checkpoint:
    """All that a run is made of after `round` rounds, but the memories, which lie beside it."""

    round: int
    state: Tree
    ledger: Ledger
    seconds: float


class RunFolder:
    """Reads and writes one run. Nothing is ever half-written: files appear whole, under their final name."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.memories, self.checkpoints = self.path / "clients", self.path / "checkpoints"
        self._shared: tuple[Tree, str] | None = None  # the last common payload, and its checksum
        self.figures = self.path / "figures"
        self._is_new = False

    # ---- beginning and ending ----
    @classmethod
    def create(cls, experiment: Experiment) -> RunFolder:
        folder = cls(experiment.execution.out or _free_name(experiment))
        folder._is_new = not folder.path.exists() or (folder.path.is_dir() and not any(folder.path.iterdir()))
        if (folder.path / "config.yaml").exists():
            raise BadInput(
                f"{folder.path} already holds a run; resume it with `fedlens resume`, or choose another out="
            )
        try:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            write_atomic(folder.path / "config.yaml", config.to_yaml(experiment).encode())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise BadInput(f"out: {folder.path} cannot be a folder ({error.strerror})") from None
        return folder

    def withdraw(self) -> None:
        """Leave no trace of a run that was refused in its first round: the same out= may be tried again.

        Only of one that made its folder, or found it empty: what was there before is somebody's.
        """
        log = self.path / "log.txt"
        began = log.exists() and any(line.startswith("round ") for line in log.read_text("utf-8").splitlines())
        if self._is_new and not began:
            shutil.rmtree(self.path, ignore_errors=True)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        folder = cls(path)
        if not (folder.path / "config.yaml").is_file():
            raise BadInput(f"{path} holds no run: there is no config.yaml in it")
        number = folder._format()
        if number > FORMAT:
            raise BadInput(f"{path} has format {number}, and this fedlens reads up to {FORMAT}: install a newer one")
        return folder

    def _format(self) -> int:
        """1 where a passport does not say, is damaged or not there yet: that is said where it is needed."""
        try:
            return int(read_json(self.path / "passport.json").get("format", 1))
        except (OSError, ValueError, AttributeError, TypeError):
            return 1

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def passport(self) -> dict[str, Any]:
        return self.read_json("passport.json")

    def names(self) -> Names:
        """What its clients and classes are called; nothing where a run from before does not say."""
        if not (self.path / "passport.json").exists():  # written when the data has been read
            return NUMBERS
        try:
            stored = self.passport().get("names", {})
            return Names(*(tuple(map(str, stored.get(kind, ()))) for kind in ("clients", "classes")))
        except (AttributeError, TypeError):
            raise BadInput(f"{self.path / 'passport.json'} is damaged: names should hold two lists") from None

    def result(self) -> dict[str, Any] | None:
        """The summary of a complete run."""
        return self.read_json("result.json") if (self.path / "result.json").exists() else None

    def change(self, experiment: Experiment) -> None:
        """Other settings for the rest of the run."""
        new = {"config_hash": config_hash(experiment), "rounds": Rounds.of(experiment.timetable()).plain()}
        self.write_json("passport.json", {**self.passport(), **new})
        write_atomic(self.config, config.to_yaml(experiment).encode())

    def write_json(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time: two would write over each other. A lock dies with its process."""
        with open(self.path / "lock", "a", encoding="utf-8") as file:
            # The live page holds it for a moment, to see whether the run runs.
            if not any(_lock(file) or time.sleep(0.05) for _ in range(4)):
                raise BadInput(f"{self.path} is being run by another process")
            yield

    def log(self, line: str) -> None:
        with open(self.path / "log.txt", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def metrics(self) -> pa.Table:
        return tables.read(self.path / "metrics.parquet", tables.METRICS)

    def bytes(self) -> pa.Table:
        return tables.read(self.path / "bytes.parquet", tables.BYTES)

    def tables(self) -> tuple[tables.GrowingTable, tables.GrowingTable]:
        """metrics and bytes, to write to."""
        return (
            tables.GrowingTable(self.path / "metrics.parquet", tables.METRICS),
            tables.GrowingTable(self.path / "bytes.parquet", tables.BYTES),
        )

    def client_memories(self, round: int) -> dict[int, Tree]:
        """What clients knew after `round` rounds."""
        store = Memories(self.memories, limit=0, round=round)
        return {client: store.get(client) for client in store}

    # ---- checkpoints ----
    def save(self, checkpoint: Checkpoint, keep: int = 0, ends: Collection[int] = ()) -> None:
        """The manifest is written last: a checkpoint without one does not exist.

        One stays every `keep` rounds, and after each round of `ends`.
        """
        common = checkpoint.state.get("shared", Tree())
        changing = Tree({part: value for part, value in checkpoint.state.items() if part != "shared"})
        name, data = f"{checkpoint.round:06d}", encode(Tree(state=changing))
        manifest = {
            "round": checkpoint.round,
            "sha256": hashlib.sha256(data).hexdigest(),
            "shared": self._store(common) if common else None,
            "seconds": checkpoint.seconds,
            "bytes_up": checkpoint.ledger.up,
            "bytes_down": checkpoint.ledger.down,
            "holders": {version: sorted(clients) for version, clients in checkpoint.ledger.holders.items()},
        }
        write_atomic(self.checkpoints / f"{name}.safetensors", data, durable=True)
        write_atomic(self.checkpoints / f"{name}.json", json.dumps(manifest).encode(), durable=True)
        rounds = self.rounds()
        stay = [round for round in rounds[:-_KEPT] if round in ends or (keep and round % keep == 0)]
        for round in rounds[:-_KEPT]:
            for kind in ("json", "safetensors") if round not in stay else ():
                (self.checkpoints / f"{round:06d}.{kind}").unlink(missing_ok=True)
        if self.memories.exists():
            prune(self.memories, before=min(rounds[-_KEPT:]), after=checkpoint.round, keep=stay)

    def _store(self, shared: Tree) -> str:
        """The common payload, once: it can be as large as the data and stays the same."""
        if self._shared is None or self._shared[0] is not shared:
            data = encode(shared)
            self._shared = shared, hashlib.sha256(data).hexdigest()
            if not (file := self._shared_file(self._shared[1])).exists():
                write_atomic(file, data, durable=True)
        return self._shared[1]

    def common_payload(self, round: int) -> list[Path]:
        """The file beside this round's checkpoint that others may need, too, if it has one."""
        digest = self.read_json(f"checkpoints/{round:06d}.json")["shared"]
        return [self._shared_file(digest)] if digest else []

    def _shared_file(self, digest: str) -> Path:
        return self.checkpoints / f"shared-{digest[:16]}.safetensors"

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint (None: start from the beginning), and what was wrong with newer ones."""
        wrong, found = [], self.rounds()[::-1]
        for round in found:
            try:
                return self._load(round), wrong
            except _DAMAGE as error:
                wrong.append(f"checkpoint {round} is damaged ({error})")
        if found:
            raise BadInput(f"{self.path}: no intact checkpoint is left: {'; '.join(wrong)}")
        return None, wrong

    def at(self, round: int) -> Checkpoint:
        """The checkpoint after this round, or a sentence that names those there are."""
        if round not in self.rounds():
            there = ", ".join(map(str, self.rounds())) or "none yet"
            raise BadInput(f"{self.path} has no checkpoint of round {round}, only {there}; keep=N keeps every Nth")
        try:
            return self._load(round)
        except _DAMAGE as error:
            raise BadInput(f"{self.path}: checkpoint {round} is damaged ({error})") from None

    def rounds(self) -> list[int]:
        """After which rounds there is a checkpoint."""
        return sorted(int(path.stem) for path in self.checkpoints.glob("??????.json"))

    def _load(self, round: int) -> Checkpoint:
        manifest = self.read_json(f"checkpoints/{round:06d}.json")
        state = self._checked(self.checkpoints / f"{round:06d}.safetensors", manifest["sha256"]).state
        if manifest["shared"]:
            state = state.replace(shared=self._checked(self._shared_file(manifest["shared"]), manifest["shared"]))
        holders = {version: set(clients) for version, clients in manifest["holders"].items()}
        ledger = Ledger(holders, manifest["bytes_up"], manifest["bytes_down"])
        return Checkpoint(manifest["round"], state, ledger, manifest["seconds"])

    def _checked(self, path: Path, digest: str) -> Tree:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("its checksum differs")
        return decode(data)

    def read_json(self, name: str) -> Any:
        try:
            return read_json(self.path / name)
        except FileNotFoundError:
            raise BadInput(f"{self.path} is incomplete: {name} is missing") from None
        except ValueError:
            raise BadInput(f"{self.path / name} is damaged: it is not JSON") from None


def _free_name(experiment: Experiment) -> Path:
    stem = "-".join(config.to_dict(part)["is"].rpartition(":")[2] for part in (experiment.data, experiment.algorithm))
    taken = (Path("runs") / f"{stem}-{number:03d}" for number in range(1, 100_000))
    return next(path for path in taken if not path.exists())


def config_hash(experiment: Experiment) -> str:
    """Of all that can change a result: not of where and how it runs."""
    return _digest(json.dumps(config.science(experiment), sort_keys=True).encode())


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def passport(experiment: Experiment, images: Images, split: Split) -> dict[str, Any]:
    """Who this run is: enough to defend a number, or to find out why two differ."""
    names = Names.of(images, split)
    if len(split) != experiment.clients:  # nodes have data of their own, and this is the server's alone
        names = Names(classes=names.classes)
    where = experiment.execution
    return {
        "format": FORMAT,
        "config_hash": config_hash(experiment),
        "split_hash": split.hash,
        "split_notes": list(split.notes),
        "data": {"name": images.name, "origin": images.origin, "sha256": images.checksum, "images": len(images.y)},
        "names": asdict(names),
        "seed": experiment.seed,
        "rounds": Rounds.of(experiment.timetable()).plain(),  # which of them count
        "code": {"version": __version__, "sha256": code_hash()},
        "libraries": {name: _version(name) for name in ("torch", "numpy", "pyarrow", "safetensors", "pydantic")},
        "python": platform.python_version(),
        "machine": {"system": platform.system(), "processor": _processor(), "cores": os.cpu_count()},
        "device": where.device,
        "device_name": device_name(where.device),
        "precision": where.precision,
        "threads_per_process": 1,
        "engine": where.engine,
        "workers": where.workers,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def code_hash() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return "not installed"


def _processor() -> str:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()


def _lock(file: IO[str]) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on this system
        pass
    except BlockingIOError:
        return False
    return True
