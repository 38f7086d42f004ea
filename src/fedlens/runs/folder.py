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
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import torch
import yaml

from .. import __version__, config
from ..core.errors import BadInput, nearest
from ..core.files import Unsynced, append_line, json_bytes, read_bytes, read_json
from ..core.ledger import Ledger
from ..core.located import portable
from ..core.memories import Memories
from ..core.tree import Tree
from ..core.yaml_dialect import read_yaml
from ..data import Images, Names, Split
from ..data.client_names import NUMBERS
from ..experiment import Experiment
from . import tables
from .checkpoints import Checkpoint, CheckpointStore, ledger_of, lost
from .rounds import Rounds

# Of a run folder: 1, in whose passports it is not written, had other names of some settings; in 2, manifests of
# checkpoints listed no files.
FORMAT = 3
_COPIED = ("config.yaml", "passport.json")


class RunFolder:
    """Reads and writes one run. Nothing is ever half-written: files appear whole, under their final name."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.memories, self.checkpoints = self.path / "clients", self.path / "checkpoints"
        self.unsynced = Unsynced()
        self._store = CheckpointStore(self.path, self.unsynced)
        self.figures = self.path / "figures"
        self.is_new = False

    # ---- beginning and ending ----
    @classmethod
    def create(cls, experiment: Experiment) -> RunFolder:
        folder = cls(experiment.execution.out or _free_name(experiment))
        folder.is_new = not folder.path.exists() or (folder.path.is_dir() and not any(folder.path.iterdir()))
        if (folder.path / "config.yaml").exists():
            raise BadInput(
                f"{folder.path} already holds a run; resume it with `fedlens resume`, or choose another out="
            )
        try:
            folder.unsynced.durable = experiment.execution.durable
            folder.unsynced.mkdir(folder.checkpoints)
            folder._write_twice("config.yaml", config.to_yaml(experiment).encode())
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
        began = log.exists() and any(line.startswith(b"round ") for line in log.read_bytes().splitlines())
        if self.is_new and not began:
            shutil.rmtree(self.path, ignore_errors=True)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        folder = cls(path)
        if not (folder.path / "config.yaml").is_file():
            raise BadInput(_no_run(folder.path))
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
        card = self.read_json("passport.json")
        if not isinstance(card, dict):
            raise BadInput(f"{self.path / 'passport.json'} is damaged: it does not say what the run is")
        return card

    def full_passport(self) -> dict[str, Any]:
        """Refuses one without what a resumed run relies on."""
        card = self.passport()
        try:
            relied = [card["config_hash"], card["code"]["sha256"]]
            for part in {"data", "auxiliary"} & {"data", *card}:
                relied += [card[part]["name"], card[part]["sha256"]]
            if not all(isinstance(each, str) for each in (*relied, card["split_hash"] or "")):
                raise TypeError
        except (KeyError, TypeError):
            raise BadInput(f"{self.path / 'passport.json'} is damaged: it does not say what the run is") from None
        return card

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
        if not (self.path / "result.json").exists():
            return None
        found = self.read_json("result.json")
        if not isinstance(found, dict) or type(found.get("rounds")) is not int:
            raise BadInput(f"{self.path / 'result.json'} is damaged: it does not say how the run ended")
        return found

    def register(self, card: dict[str, Any], split: Split | None, counts: list[list[int]]) -> None:
        """Who this run is; the passport comes last, because it is what a resumed run looks for."""
        if split is not None:
            split.save(self.path / "split.json")
            self.unsynced.note(self.path / "split.json")
            self.write_json("label_counts.json", counts)
            self.sync()
        self._write_twice("passport.json", json_bytes(card))

    def change(self, experiment: Experiment) -> None:
        """Other settings for the rest of the run. A power cut in between leaves settings that the passport knows."""
        card, changed = self.passport(), config_hash(experiment)
        before = [*card.get("earlier_hashes", []), card["config_hash"]]
        earlier = [each for each in dict.fromkeys(before) if each != changed]
        card |= {"config_hash": changed, "earlier_hashes": earlier}
        card |= {"rounds": Rounds.of(experiment.timetable()).plain()}
        self._write_twice("passport.json", json_bytes(card))
        self._write_twice("config.yaml", config.to_yaml(experiment).encode())

    def _write_twice(self, name: str, data: bytes) -> None:
        """With a copy, from which `mend` brings it back; durable when it returns."""
        self.unsynced.write(self._copy(name), data)
        self.sync()
        self.unsynced.write(self.path / name, data)
        self.sync()

    def _copy(self, name: str) -> Path:
        return self.checkpoints / f"{name}.copy"

    def mend(self) -> list[str]:
        """Bring back settings and passport that cannot be read, from their copies; what was done, in sentences."""
        notes = []
        for name in _COPIED:
            path, copy = self.path / name, self._copy(name)
            if _readable(path) or not _readable(copy):
                continue
            if path.is_file():
                self.unsynced.rename(path, path.with_name(f"{name}.damaged"))
            self.unsynced.write(path, read_bytes(copy))
            self.sync()
            notes.append(f"{name} could not be read and was restored from its copy")
        return notes

    def write_json(self, name: str, value: Any) -> None:
        """Durable with the next checkpoint, or `sync`."""
        self.unsynced.write(self.path / name, json_bytes(value))

    def sync(self) -> None:
        self.unsynced.sync()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time: two would write over each other. A lock dies with its process."""
        for name in ("lock", "log.txt"):  # a pipe might take nothing, for ever
            if os.path.lexists(self.path / name) and not os.path.isfile(self.path / name):
                raise BadInput(f"{self.path / name} is damaged: it is not a regular file")
        with open(self.path / "lock", "a", encoding="utf-8") as file:
            # The live page holds it for a moment, to see whether the run runs.
            if not any(_lock(file) or time.sleep(0.05) for _ in range(4)):
                raise BadInput(f"{self.path} is being run by another process")
            yield

    def log(self, line: str) -> None:
        append_line(self.path / "log.txt", line)

    def _end_line(self) -> None:
        """A power cut may have left half a line, which must not become the beginning of another."""
        with contextlib.suppress(OSError), open(self.path / "log.txt", "rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                self.log("")

    def metrics(self, partly: bool = False) -> pa.Table:
        """`partly`: also of a run that has lost rows, of which others would make wrong sums and curves."""
        return self._rows("metrics.parquet", tables.METRICS, partly)

    def bytes(self, partly: bool = False) -> pa.Table:
        return self._rows("bytes.parquet", tables.BYTES, partly)

    @property
    def has_all_rows(self) -> bool:
        """Whether damage has taken none of its tables."""
        return not lost(self.path).keys() & {"metrics.parquet", "bytes.parquet"}

    def _rows(self, name: str, schema: pa.Schema, partly: bool) -> pa.Table:
        if not partly and (gone := lost(self.path).get(name)):
            raise BadInput(
                f"{self.path} has lost {gone} to damage; its models are whole, and its settings can run again"
            )
        try:
            return tables.read(self.path / name, schema)
        except BadInput as error:
            if not self._store.copy(name).is_file():
                raise
            raise BadInput(f"{error}; `fedlens resume` restores it from its copy") from None

    def tables(self) -> tuple[tables.GrowingTable, tables.GrowingTable]:
        """metrics and bytes, to write to."""
        metrics, sent = (
            tables.GrowingTable(self.path / name, schema, self.unsynced, self._store.copy(name))
            for name, schema in (("metrics.parquet", tables.METRICS), ("bytes.parquet", tables.BYTES))
        )
        return metrics, sent

    def client_memories(self, round: int) -> dict[int, Tree]:
        """What clients knew after `round` rounds."""
        store = Memories(self.memories, limit=0, versions=self.at(round).versions)
        return {client: store.get(client) for client in store}

    # ---- checkpoints ----
    def save(self, checkpoint: Checkpoint, keep: int = 0, ends: Collection[int] = ()) -> None:
        """Durable when it returns. One stays every `keep` rounds, and after each round of `ends`."""
        self._store.save(checkpoint, keep, ends)

    def load(self, rows: bool = True) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint (None: start from the beginning), and what was wrong with newer ones.

        `rows`: False leaves out of account what a model does not need.
        """
        return self._store.load(rows)

    def mend_tables(self, start: Checkpoint) -> None:
        """What `load` has found of damaged tables, in their place."""
        self._store.mend(start)

    def at(self, round: int) -> Checkpoint:
        """The checkpoint after this round, or a sentence that names those there are."""
        return self._store.at(round)

    def rounds(self) -> list[int]:
        """After which rounds there is a checkpoint."""
        return self._store.rounds()

    def tidy(self, start: Checkpoint) -> None:
        """Before a run goes on from this checkpoint: nothing later stays, and nothing half-written."""
        self._store.tidy(start)
        self._end_line()

    def totals(self) -> tuple[Ledger, float]:
        """What has crossed, and seconds, by the newest checkpoint."""
        manifest = self._store.manifest(self.rounds()[-1])
        return ledger_of(manifest), manifest["seconds"]

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


def _readable(path: Path) -> bool:
    """Whether a file holds settings or a passport."""
    try:
        return isinstance(read_yaml(path) if path.name.startswith("config") else read_json(path), dict)
    except (OSError, ValueError, yaml.YAMLError):
        return False


def config_hash(experiment: Experiment) -> str:
    """Of all that can change a result: not of where and how it runs, nor of where its files lie."""
    return _digest(json.dumps(portable(config.science(experiment)), sort_keys=True).encode())


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
        "compile": where.compile is True,
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


def _no_run(path: Path) -> str:
    """With the nearest name that is a run's, where the folder itself is not there."""
    if path.is_dir():
        return f"{path} holds no run: there is no config.yaml in it"
    close = nearest(str(path), (str(each.parent) for each in path.parent.glob("*/config.yaml")))
    return f"there is no run {path}; {close if close.startswith('did') else '`fedlens list` shows those there are'}"
