"""Who owns which example: a value with a hash, and a file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import BadInput
from ..core.files import read_json, write_atomic
from .images import Images


@dataclass(frozen=True)
class Split:
    """For each client the indices it trains on and is tested on."""

    train: list[np.ndarray]
    test: list[np.ndarray]
    notes: tuple[str, ...] = ()  # what was topped up or left unused, and what was found
    found: tuple[str, ...] = ()  # of them, those on the data: anybody who has it finds them again, so none is saved

    def __len__(self) -> int:
        return len(self.train)

    @property
    def hash(self) -> str:
        """Of the indices alone; the same split has the same hash wherever it came from."""
        digest = hashlib.sha256()
        for shards in (self.train, self.test):
            digest.update(np.array([len(shards), *map(len, shards)], "<i8").tobytes())
            for shard in shards:
                digest.update(np.asarray(shard, "<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: str | Path, images: Images | None = None) -> None:
        """As JSON; with `images` it also says which data it belongs to."""
        about = {"data": images.name, "checksum": images.checksum} if images else {}
        notes = [note for note in self.notes if note not in self.found]
        content = {"format": "fedlens split", "version": 1, "hash": self.hash, **about, "notes": notes}
        content |= {part: [shard.tolist() for shard in getattr(self, part)] for part in ("train", "test")}
        write_atomic(Path(path), json.dumps(content, separators=(",", ":")).encode())

    @classmethod
    def load(cls, path: str | Path, images: Images | None = None) -> Split:
        """From JSON; refused when it was changed, or when it does not fit `images`."""
        try:
            content = read_json(path)
        except OSError as error:
            raise BadInput(f"the split file {path} cannot be read ({error.strerror})") from None
        except ValueError:
            raise BadInput(f"the split file {path} is not JSON") from None
        if not isinstance(content, dict) or content.get("format") != "fedlens split" or content.get("version") != 1:
            raise BadInput(f"{path} is not a split file of this version")
        notes = content.get("notes", [])
        if not isinstance(notes, list):
            raise BadInput(f"the split file {path} has {notes!r:.60} as notes, which should be a list of sentences")
        split = cls(
            _shards(content.get("train"), path),
            _shards(content.get("test"), path),
            tuple(map(str, notes)),
        )
        if split.hash != content.get("hash"):
            raise BadInput(f"the split file {path} was changed after it was saved: its hash does not fit its indices")
        if images is not None:
            if content.get("checksum", images.checksum) != images.checksum:
                raise BadInput(
                    f"the split file {path} was made for other data ({content.get('data')}) than {images.name}"
                )
            split.check(len(images), str(path))
        return split

    def check(self, examples: int, origin: str) -> None:
        """Every index exists and no example is owned twice."""
        if len(self.train) != len(self.test):
            raise BadInput(f"{origin} has {len(self.train)} training shards but {len(self.test)} test shards")
        if not self.train:
            raise BadInput(f"{origin} has no clients")
        owned = np.concatenate([*self.train, *self.test])
        if len(owned) and (owned.min() < 0 or owned.max() >= examples):
            wrong = owned[(owned < 0) | (owned >= examples)][0]
            raise BadInput(f"{origin} names example {wrong}, but the data has only 0 to {examples - 1}")
        if len(np.unique(owned)) != len(owned):
            raise BadInput(f"{origin} gives one example to two owners")
        if empty := [client for client, shard in enumerate(self.train) if not len(shard)]:
            raise BadInput(f"{origin} leaves client {empty[0]} without training examples")


def _shards(value: object, path: str | Path) -> list[np.ndarray]:
    whole = isinstance(value, list) and all(
        isinstance(shard, list) and all(type(index) is int and abs(index) < 2**62 for index in shard) for shard in value
    )
    if not whole:
        raise BadInput(f"the split file {path} must hold lists of indices under train and test")
    return [np.array(shard, np.int64) for shard in value]  # pyright: ignore[reportGeneralTypeIssues]


@dataclass(frozen=True)
class Skew:
    """How far a split is from equal parts of the same mix; means over clients, of the training shards."""

    label_entropy: float  # in bits; log2(classes) when every client holds all classes alike
    size_gini: float  # 0: equal sizes; towards 1: one client has everything
    distance: float  # sum over classes of |client's share - everyone's share|, 0 to 2; the EMD of Zhao et al., 2018
    classes: float  # that a client holds
    smallest: int
    largest: int


def class_counts(split: Split, images: Images) -> np.ndarray:
    """[clients, classes]: training images of each class that each client owns."""
    y = images.y.numpy()
    return np.stack([np.bincount(y[shard], minlength=len(images.classes)) for shard in split.train])


def skew(split: Split, images: Images) -> Skew:
    """Label and quantity skew of a split."""
    counts = class_counts(split, images).astype(float)
    sizes = np.sort(counts.sum(1))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    bits = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
    ranks = np.arange(1, len(sizes) + 1)
    return Skew(
        label_entropy=float(bits.mean()),
        size_gini=float((2 * ranks - len(sizes) - 1) @ sizes / (len(sizes) * max(sizes.sum(), 1))),
        distance=float(np.abs(shares - counts.sum(0) / max(counts.sum(), 1)).sum(1).mean()),
        classes=float((counts > 0).sum(1).mean()),
        smallest=int(sizes[0]),
        largest=int(sizes[-1]),
    )
