"""Any image data set of the Hugging Face hub, by its id and column names."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import os
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import BadInput, nearest
from ...core.fields import Number, Part
from ...core.rng import key
from ..formats import stratified
from ..images import Decoded, Found
from ..pictures import pictures
from ..source import OwnData

HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Hub(OwnData):
    """Downloaded once; afterwards the decoded copy needs neither the network nor the library."""

    id: str = ""  # of the data set, such as ylecun/mnist
    image: str = "image"  # columns
    label: str = "label"  # column of classes
    user: str = ""  # column of who made an example; empty: nobody knows
    domain: str = ""  # column of domains; empty: there are none
    train: str = "train"  # splits
    test: str = "test"  # one that does not exist: a share of the training part is held out
    holdout: Part = 0.2  # of the training part, for the test
    config: str = ""  # of the data set, where it has several
    revision: str = "main"  # branch, tag or commit of the data set
    size: Number = 0  # pixels; 0: as they are
    name = "hub"

    def find(self) -> Found:
        if not self.id:
            raise BadInput("data.id is empty; set it to an id of the hub, e.g. data.id=ylecun/mnist")
        return Found((), f"hub {self.id}@{self.revision}", self.read)

    def read(self, otherwise: str = "") -> Decoded:
        """Download and decode; `otherwise` is the sentence for when that cannot be."""
        if not importlib.util.find_spec("datasets"):
            raise BadInput(otherwise or f"reading {self.id} from the hub needs: pip install 'fedlens[hub]'")
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]

        try:
            with _at_once():
                parts = load_dataset(self.id, self.config or None, revision=self.revision)
        except Exception as error:  # of many kinds: offline, no such id, no access, a damaged download
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BadInput(otherwise or f"{self.id} cannot be had from the hub ({reason})") from None
        if self.train not in parts:
            raise BadInput(
                f"data.train is {self.train!r}, but {self.id} has no such split; {nearest(self.train, map(str, parts))}"
            )
        return self._decoded([parts[name] for name in (self.train, self.test) if name in parts])

    def _decoded(self, parts: list[Any]) -> Decoded:
        columns = [name for name in (self.image, self.label, self.user, self.domain) if name]
        for name in columns:
            if name not in parts[0].column_names:
                raise BadInput(f"{self.id} has no column {name!r}; {nearest(name, parts[0].column_names)}")
        names, y = self._numbers(parts, self.label)
        sizes = [len(part) for part in parts]
        x = self._pictures(parts)
        (user_names, users), (domain_names, domains) = (
            self._numbers(parts, name) if name else ((), None) for name in (self.user, self.domain)
        )
        if len(parts) == 2:
            train, test = np.split(np.arange(len(y)), [sizes[0]])
        else:
            groups = y if users is None else users
            train, test = stratified(groups, self.holdout, key("hub", "test part"))
        return Decoded(x, y, train, test, names, users, domains, owner_names=user_names or domain_names)

    def _numbers(self, parts: list[Any], column: str) -> tuple[tuple[str, ...], np.ndarray]:
        """Names and one number per example, of whole numbers or words."""
        values = np.concatenate([np.asarray(part[column]) for part in parts])
        known = getattr(parts[0].features[column], "names", None)
        if known:
            return tuple(known), values.astype(np.int64)
        found, number = np.unique(values, return_inverse=True)
        return tuple(map(str, found)), number.astype(np.int64)

    def _pictures(self, parts: list[Any]) -> np.ndarray:
        """Through the raw bytes, so that one reader decodes all images of the package."""
        from datasets import Image  # pyright: ignore[reportMissingImports]

        only = [part.select_columns([self.image]).cast_column(self.image, Image(decode=False)) for part in parts]
        count = sum(map(len, parts))

        def contents() -> Iterator[bytes | Path]:
            """One at a time: all of them might not fit in memory."""
            return (_content(row[self.image]) for part in only for row in part)

        names = [Path(f"{self.id}, image {index}") for index in range(count)]
        mode, inorder = _mode(itertools.islice(contents(), 0, None, max(1, count // 100))), contents()
        return pictures(names, mode, self.size or None, lambda index: _opened(next(inorder)))


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Where the hub cannot even be looked up, the library looks only at what it has; it would try for half a minute."""
    there = ("huggingface_hub.constants", "datasets.config")
    switches: list[Any] = [sys.modules[name] for name in there if name in sys.modules]
    before = [getattr(module, "HF_HUB_OFFLINE", False) for module in switches]
    offline = not urllib.request.getproxies() and not _known_host(os.environ.get("HF_ENDPOINT", HUB))
    try:
        for module, was in zip(switches, before, strict=True):
            module.HF_HUB_OFFLINE = was or offline
        yield
    finally:
        for module, was in zip(switches, before, strict=True):
            module.HF_HUB_OFFLINE = was


def _known_host(address: str) -> bool:
    try:
        return bool(socket.getaddrinfo(urllib.parse.urlsplit(address).hostname, 443))
    except OSError:
        return False


def _content(cell: dict[str, Any] | None) -> bytes | Path:
    """What a row holds: the bytes of a file, or where it is."""
    if not cell or not (cell.get("bytes") or cell.get("path")):
        return b""
    return cell["bytes"] or Path(cell["path"])


def _opened(content: bytes | Path) -> io.BytesIO | Path:
    return io.BytesIO(content) if isinstance(content, bytes) else content


def _mode(some: Iterable[bytes | Path]) -> str:
    """Grey when all of some images are, as in MNIST; else colour."""
    from PIL import Image

    modes = set()
    for content in some:
        # One that is no image is named by the reader that comes next.
        with contextlib.suppress(OSError), Image.open(_opened(content)) as image:
            modes.add(image.mode)
    return "L" if modes <= {"L", "1", "I", "I;16", "I;16B"} else "RGB"
