"""Splits that other tools made, in files of their format that are made here."""

import json
import pickle

import numpy as np
import pytest

from fedlens.core.errors import BadInput
from fedlens.data import federate
from fedlens.data.partition.base import ByUser
from fedlens.data.partition.external import FlBench, Flwr
from fedlens.data.sources.folders import Npz
from fedlens.data.sources.pfllib import Pfllib

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


class Touch:
    """A pickle that does something when it is opened."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


# ---- PFLlib ---------------------------------------------------------------------------------------------------------


def write_pfllib(folder, sizes=((6, 2), (4, 2), (9, 3)), colour=True):
    """{train,test}/<client>.npz with a pickled dictionary each, pixels normalised with mean and std 0.5."""
    pixels = {}
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for client, counts in enumerate(sizes):
            count = counts[part == "test"]
            x = RANDOM.integers(0, 256, (count, 3 if colour else 1, 8, 8), dtype=np.uint8)
            y = RANDOM.integers(0, 4, count)
            pixels[part, client] = x, y
            scaled = ((x / np.float32(255)) - np.float32(0.5)) / np.float32(0.5)
            with open(folder / part / f"{client}.npz", "wb") as file:
                np.savez_compressed(file, data=np.array({"x": scaled.astype(np.float32), "y": y}, dtype=object))
    (folder / "config.json").write_text(json.dumps({"num_clients": len(sizes)}))
    return pixels


@pytest.mark.parametrize("colour", [True, False])
def test_pfllib_folders_keep_their_clients(tmp_path, colour):
    pixels = write_pfllib(tmp_path / "Cifar10", [(6 + client, 2) for client in range(12)], colour)
    images = Pfllib("Cifar10").load()
    federation, split = federate(images, ByUser(), 12, 0)
    for client in range(12):
        for part, shards in (("train", split.train), ("test", split.test)):
            x, y = pixels[part, client]
            assert (images.x[shards[client]].numpy() == x).all() and (images.y[shards[client]].numpy() == y).all()
    assert len(federation.pool) == 24 and not split.notes


def test_pfllib_folders_that_are_none(tmp_path):
    write_pfllib(tmp_path / "set")
    (tmp_path / "set" / "test" / "1.npz").rename(tmp_path / "set" / "test" / "7.npz")
    with pytest.raises(BadInput, match="for the same clients"):
        Pfllib("set").load()
    (tmp_path / "set" / "test" / "7.npz").rename(tmp_path / "set" / "test" / "1.npz")
    np.savez(tmp_path / "set" / "train" / "1.npz", data=np.array({"a": 1}, dtype=object))
    with pytest.raises(BadInput, match=r"1.npz does not hold x and y under data"):
        Pfllib("set").load()
    np.savez(tmp_path / "set" / "train" / "1.npz", other=np.zeros(3))
    with pytest.raises(BadInput, match=r"1.npz is not a readable .npz file with the key 'data'"):
        Pfllib("set").load()


def test_pfllib_files_run_nothing(tmp_path):
    write_pfllib(tmp_path / "set")
    np.savez(tmp_path / "set" / "train" / "0.npz", data=np.array({"x": Touch(tmp_path / "ran")}, dtype=object))
    with pytest.raises(BadInput, match=r"it names (io|_io)\.open"):
        Pfllib("set").load()
    assert not (tmp_path / "ran").exists()


# ---- FL-bench -------------------------------------------------------------------------------------------------------


def some_images(count=100):
    np.savez("set.npz", x_train=np.zeros((count - 20, 4, 4), np.uint8), y_train=np.arange(count - 20) % 4,
             x_test=np.zeros((20, 4, 4), np.uint8), y_test=np.arange(20) % 4)  # fmt: skip
    return Npz("set.npz").load()


def write_fl_bench(folder, clients, arguments=None, **more):
    folder.mkdir(exist_ok=True)
    (folder / "partition.pkl").write_bytes(
        pickle.dumps({"separation": {"train": [0], "total": len(clients)}, "data_indices": clients, **more})
    )
    if arguments is not None:
        (folder / "args.json").write_text(arguments if isinstance(arguments, str) else json.dumps(arguments))


@pytest.mark.parametrize("as_lists", [True, False])
def test_fl_bench_partitions(tmp_path, as_lists):
    images, order = some_images(), RANDOM.permutation(100).astype(np.int32)
    parts = [{"train": part[5:], "val": part[3:5], "test": part[:3]} for part in np.split(order, 5)]
    stored = [{name: index.tolist() if as_lists else index for name, index in part.items()} for part in parts]
    write_fl_bench(tmp_path / "split", stored, {"dataset": "other", "client_num": 5})
    federation, split = federate(images, FlBench("split"), 5, 0)
    for part, train, test in zip(parts, split.train, split.test, strict=True):
        assert (np.sort(part["train"]) == train).all() and (np.sort(part["test"]) == test).all()
    assert split.notes == ("10 validation examples are unused",)
    # It mixes the canonical parts, so the pooled test part is what no client trains on.
    assert set(federation.pool.tolist()) == {int(index) for part in parts for index in part["test"]}


@pytest.mark.parametrize(
    ("clients", "arguments", "words"),
    [
        ([{"train": [0], "test": [1]}], None, "clients is 2, but"),
        ([{"train": [0], "test": [1]}, {"train": [0], "test": [2]}], None, "gives one example to two owners"),
        ([{"train": [0], "test": [1]}, {"train": [100], "test": [2]}], None, "names example 100"),
        ([{"train": [0], "test": [1]}, {"train": [-3], "test": [2]}], None, "names example -3"),
        ([{"train": ["../../etc/passwd"], "test": [1]}] * 2, None, "does not hold data_indices"),
        ([[0], [1]], None, "does not hold data_indices"),
        ([{"train": [0], "test": [1]}, {"train": [], "test": [2]}], None, "leaves client 1 without training examples"),
        ([{"train": [0], "test": [1]}, {"train": [3], "test": [2]}], {"dataset": "fmnist"}, "was made for fmnist"),
        ([{"train": [0], "test": [1]}, {"train": [3], "test": [2]}], "{", "args.json is not JSON"),
    ],
)
def test_fl_bench_partitions_that_do_not_fit(tmp_path, clients, arguments, words):
    write_fl_bench(tmp_path / "split", clients, arguments)
    with pytest.raises(BadInput) as problem:
        FlBench("split").split(some_images(), 2, 0)
    assert words in str(problem.value)


def test_fl_bench_files_run_nothing(tmp_path):
    write_fl_bench(tmp_path / "split", [], note=Touch(tmp_path / "ran"))
    with pytest.raises(BadInput, match=r"is damaged or not a plain data file \(it names (io|_io)\.open\)"):
        FlBench("split").split(some_images(), 2, 0)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "split" / "partition.pkl").write_bytes(b"\x80\x04junk")
    with pytest.raises(BadInput, match="is damaged"):
        FlBench("split").split(some_images(), 2, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"there is no partition.pkl in it"):
        FlBench("empty").split(some_images(), 2, 0)


# ---- flwr-datasets --------------------------------------------------------------------------------------------------


def test_partitioners_of_flwr_datasets(tmp_path):
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    images = some_images(200)
    split = Flwr("PathologicalPartitioner", {"num_classes_per_partition": 2}).split(images, 10, 0)
    assert all(len(np.unique(images.y[shard].numpy())) == 2 for shard in split.train)
    assert sorted(np.concatenate(split.train).tolist()) == images.train.tolist()
    with pytest.raises(BadInput, match="did you mean 'DirichletPartitioner'"):
        Flwr("DirichletPartitoner").split(images, 10, 0)


def test_flwr_datasets_is_asked_for_when_it_is_not_there(monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flwr_datasets" else find_spec(name))
    with pytest.raises(BadInput, match="partition=flwr needs: pip install flwr-datasets"):
        Flwr().split(some_images(), 5, 0)
