"""Splits that other tools made: FL-bench's files, the partitioners of flwr-datasets."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import BadInput, nearest
from ...core.files import read_bytes, read_json
from ..images import Images
from ..paths import own_path
from ..pickles import unpickled
from ..split import Split
from .base import Partition, check_no_other_test


@dataclass(frozen=True)
class FlBench(Partition):
    """A folder of FL-bench with partition.pkl; its numbers count the training part first, then the test part."""

    path: str = ""  # its partition.pkl
    name = "fl_bench"

    def split(self, images, clients, seed):
        check_no_other_test(self)
        folder = own_path(self.path, "partition.path")
        file = folder / "partition.pkl" if folder.is_dir() else folder
        if not file.is_file():
            raise BadInput(f"partition.path is {self.path!r}, but there is no partition.pkl in it")
        self._check_arguments(file.parent / "args.json", images)
        content = unpickled(read_bytes(file), file)
        try:
            shards = [
                [np.asarray(one[part], np.int64) for part in ("train", "test")] for one in content["data_indices"]
            ]
            unused = sum(len(one.get("val", ())) for one in content["data_indices"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise BadInput(f"{file} does not hold data_indices with train and test, as FL-bench writes them") from None
        if len(shards) != clients:
            raise BadInput(f"clients is {clients}, but {file} has {len(shards)}: set clients={len(shards)}")
        notes = (f"{unused} validation examples are unused",) if unused else ()
        split = Split([np.sort(one[0]) for one in shards], [np.sort(one[1]) for one in shards], notes)
        split.check(len(images), str(file))
        return split

    def _check_arguments(self, file: Path, images: Images) -> None:
        """Where the folder says which data it is for, it must be ours."""
        try:
            made_for = read_json(file).get("dataset") if file.is_file() else None
        except (ValueError, AttributeError):
            raise BadInput(f"{file} is not JSON; make the partition again") from None
        known = "fashion_mnist" if made_for == "fmnist" else made_for
        if (
            known in ("mnist", "fashion_mnist", "cifar10", "cifar100", "cinic10", "tiny_imagenet")
            and known != images.name
        ):
            raise BadInput(f"{file} says that the partition was made for {made_for}, but data is {images.name}")


@dataclass(frozen=True)
class Flwr(Partition):
    """Any partitioner of flwr-datasets, by the name of its class."""

    partitioner: str = "IidPartitioner"  # a class of flwr_datasets.partitioner
    options: dict[str, Any] = field(default_factory=dict)  # of its constructor; clients, labels and seed are filled in
    name = "flwr"

    def check(self, images, clients):
        super().check(images, clients)
        if not importlib.util.find_spec("flwr_datasets"):
            raise BadInput("partition=flwr needs: pip install flwr-datasets")

    def assign(self, images, clients, draw):
        import flwr_datasets.partitioner as theirs  # pyright: ignore[reportMissingImports]

        known = [name for name in dir(theirs) if name.endswith("Partitioner") and name != "Partitioner"]
        if self.partitioner not in known:
            raise BadInput(f"partition.partitioner is {self.partitioner!r}; {nearest(self.partitioner, known)}")
        make = getattr(theirs, self.partitioner)
        ours = {"num_partitions": clients, "partition_by": "label", "seed": int(draw.integers(2**31))}
        accepted = inspect.signature(make).parameters
        try:
            made = make(**{name: value for name, value in ours.items() if name in accepted} | self.options)
            return flwr_shards(made, images, clients), ()
        except (TypeError, ValueError) as error:
            raise BadInput(f"{self.partitioner} of flwr-datasets refused: {str(error).splitlines()[0]}") from None


def flwr_shards(partitioner: Any, images: Images, clients: int) -> list[np.ndarray]:
    """What a partitioner of flwr-datasets gives each client, as indices into images.x."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    columns = {"index": images.train.numpy(), "label": images.y[images.train].numpy()}
    if images.users is not None:
        columns["user"] = images.users[images.train].numpy()
    partitioner.dataset = Dataset.from_dict(columns)
    if partitioner.num_partitions != clients:
        have = partitioner.num_partitions
        raise BadInput(f"clients is {clients}, but the partitioner makes {have} parts: set clients={have}")
    shards = [np.asarray(partitioner.load_partition(client)["index"], np.int64) for client in range(clients)]
    if empty := [client for client, shard in enumerate(shards) if not len(shard)]:
        raise BadInput(
            f"the partitioner of flwr-datasets leaves client {empty[0]} without examples: change its options"
        )
    return shards
