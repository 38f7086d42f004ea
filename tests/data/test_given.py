"""What a Python program brings: tensors, data sets, modules. Each form is the same experiment, in every process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import fedlens
from fedlens import Execution, Experiment, LocalTraining, config
from fedlens.core.batches import Shard
from fedlens.core.cohort import Everyone
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.data.given import _LIVE
from fedlens.models import given
from fedlens.models.custom import Custom
from fedlens.runs.diff import differences

DRAW = torch.Generator().manual_seed(0)
Y = torch.arange(90) % 3
X = torch.randn(90, 1, 12, 12, generator=DRAW) + 0.8 * Y[:, None, None, None]
BYTES = (X * 40 + 100).clamp(0, 255).to(torch.uint8)
WIDTH = 4


class Net(nn.Module):
    """A plain module: no `features`, a last layer of any name, torch's own dropout."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.conv = nn.Conv2d(1, WIDTH, 3, stride=2)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(WIDTH * 25, num_classes)

    def forward(self, x):
        return self.out(self.drop(self.conv(x).relu().flatten(1)))


def made(classes: int) -> nn.Module:
    return Net(classes)


def short(out: Path, **more) -> Experiment:
    usual = dict(model=Net, data=(X, Y), clients=3, cohort=Everyone(), rounds=2, local=LocalTraining(steps=2))
    usual |= dict(execution=Execution(engine="sequential", picture=False, out=str(out)))
    return Experiment(**{**usual, **more})


class Rows(Dataset):
    classes = ("low", "middle", "high")

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


class Hugging:
    """What a data set of the Hugging Face library looks like from outside."""

    class ClassLabel:
        names = ("low", "middle", "high")

    def __init__(self, x, y, image="picture", label="kind"):
        self.rows = [
            {image: each.numpy(), label: int(k), "id": n} for n, (each, k) in enumerate(zip(x, y, strict=True))
        ]
        self.column_names, self.features = ["id", image, label], {label: self.ClassLabel()}

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


# ---- data ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (X[:, 0], Y),
        (X.double(), Y[:, None]),
        TensorDataset(X, Y),
        Rows(X, Y),
        Subset(Rows(X, Y), range(90)),
        Hugging(X, Y, "image", "label"),
    ],
    ids=["tensors", "arrays", "no channel", "doubles", "TensorDataset", "Dataset", "Subset", "hub"],
)
def test_one_data_set(data):
    images = Experiment(data=data).data.load()
    assert torch.equal(images.x, X) and torch.equal(images.y, Y)
    assert len(images.test) == 18 and len(images.train) == 72 and len(images.classes) == 3
    federation, _ = Experiment(data=data, clients=2).federation(images)
    assert torch.equal(Shard(federation.data, torch.arange(90)).x, X)  # floats reach the network as they are


def test_train_and_test():
    for data in (
        (X[:60], Y[:60], X[60:], Y[60:]),
        ((X[:60], Y[:60]), (X[60:], Y[60:])),
        (Rows(X[:60], Y[:60]), Rows(X[60:], Y[60:])),
    ):
        images = Experiment(data=data).data.load()
        assert torch.equal(images.x, X) and images.test.tolist() == list(range(60, 90))
    hub = {"train": Hugging(X[:60], Y[:60]), "test": Hugging(X[60:], Y[60:])}
    with pytest.raises(BadInput, match="columns id, picture, kind, and none is known to hold images"):
        Experiment(data=hub)
    hub = {"train": Hugging(X[:60], Y[:60], "image"), "test": Hugging(X[60:], Y[60:], "image")}
    images = Experiment(data=hub).data.load()
    assert images.classes == ("low", "middle", "high") and len(images.test) == 30


class Federated:
    """What Flower's FederatedDataset looks like from outside."""

    class _Partitioner:
        num_partitions = 3

    def __init__(self):
        self.partitioners = {"train": self._Partitioner()}

    def load_partition(self, number, split):
        assert split == "train"
        return Hugging(X[number:60:3], Y[number:60:3], "image")

    def load_split(self, split):
        return {"test": Hugging(X[60:], Y[60:], "image")}[split]


def test_one_part_for_each_client():
    pairs = {f"site {n}": (X[n::3], Y[n::3]) for n in range(3)}
    for data in (pairs, [*pairs.values()], [TensorDataset(*pair) for pair in pairs.values()]):
        experiment = Experiment(data=data)
        assert experiment.clients == 3 and experiment.cohort == Everyone()
        images = experiment.data.load()
        federation, _ = experiment.federation(images)
        for client in range(3):
            mine = torch.cat([federation.train[client], federation.test[client]]).sort().values
            assert torch.equal(images.x[mine], X[client::3])
    assert experiment.data.load().owner_names == ("0", "1", "2")
    assert Experiment(data=pairs).data.load().owner_names == ("site 0", "site 1", "site 2")
    chosen = Experiment(data=pairs, partition=config.PARTITIONS["iid"](), clients=2)
    assert chosen.clients == 2 and type(chosen.partition).__name__ == "Iid"
    federated = Experiment(data=Federated())
    images = federated.data.load()
    federation, _ = federated.federation(images)
    assert federated.clients == 3 and torch.equal(images.x[federation.pool], X[60:])


def test_bytes_are_normalised_and_words_are_classes():
    words = np.array(["cat", "dog", "eel"])[Y.numpy()]
    images = Experiment(data=(BYTES, words)).data.load()
    assert images.classes == ("cat", "dog", "eel") and torch.equal(images.y, Y)
    federation, _ = Experiment(data=(BYTES, words), clients=2).federation(images)
    x = Shard(federation.data, images.train).x
    assert abs(float(x.mean())) < 1e-3 and abs(float(x.std()) - 1) < 1e-2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((X, Y[:80]), "90 images and labels of shape (80,)"),
        ((X, Y.float()), "labels of float32"),
        ((X, Y - 1), "label -1; number classes from 0"),
        ((X.long(), Y), "images of int64"),
        ((X.flatten(1), Y), "images of shape (90, 144)"),
        ((X / 0, Y), "NaN or infinite"),
        ((X, Y, X), "has 3 parts"),
        ([X, Y], "give tensors as a tuple (x, y)"),
        ({"a": (X, Y), "b": (X[:, :, :6], Y)}, "should be of one size and type"),
        ({"a": (X, Y), "b": (BYTES, Y)}, "should be of one size and type"),
        ({"a": (X, Y, X, Y), "b": (X, Y)}, "data['b'] has no test part"),
        ({"a": X}, "should be (x, y), a data set"),
        ({}, "data is empty"),
        ((X, Y * 0), "one class only"),
        ((X, [None] * 90), "labels of object"),
        (7, "data is a int"),
    ],
)
def test_mistakes(data, said):
    with pytest.raises(BadInput) as problem:
        Experiment(data=data).data.load()
    assert said in str(problem.value) and "\n" not in str(problem.value)


# ---- modules ---------------------------------------------------------------------------------------------------------
def test_a_class_a_function_a_module(tmp_path):
    """The same first weights, under the author's own names wherever the model comes out."""
    module = Net(3)
    for number, model in enumerate((Net, made, module, lambda: Net(3))):
        out = tmp_path / str(number)
        experiment = short(out, model=model)
        net = experiment.network(experiment.data.load())
        if isinstance(model, nn.Module):
            assert torch.equal(net.initial_weights().params["body.conv.weight"], module.conv.weight)
        result = fedlens.run(experiment)
        back = fedlens.load(out)
        assert [*back.module.state_dict()] == [*module.state_dict()] and isinstance(back.module.drop, nn.Dropout)
        test = back_accuracy(out, back)
        assert test == result.accuracy
    log = (tmp_path / "3/passport.json").read_text()
    assert "cannot be resumed" in log and not [*(tmp_path / "3").glob("model-*")]


def back_accuracy(out: Path, model: fedlens.TrainedModel) -> float:
    images = config.read(out / "config.yaml").data.load()
    said = model.predict(images.x[images.test]).labels
    return sum(a == images.classes[b] for a, b in zip(said, images.y[images.test], strict=True)) / len(said)


def test_of_an_installed_package():
    assert Experiment(model=nn.Identity).model == Custom(path="torch.nn.modules.linear:Identity")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 7)), "gives 7 numbers for each image, but the data have 3"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(100, 3)), "cannot take images of 1 x 12 x 12"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 3), nn.LogSoftmax(1)), "has no head"),
        (lambda: 3, "makes a int, not an nn.Module"),
        (lambda depth: Net(3), "asks for depth"),
    ],
)
def test_mistakes_in_modules(model, said, tmp_path):
    with pytest.raises(BadInput) as problem:
        fedlens.run(short(tmp_path / "out", model=model))
    assert said in str(problem.value) and not (tmp_path / "out").exists()


# ---- other processes -------------------------------------------------------------------------------------------------
PROGRAM = """
import sys

import torch
from torch import nn

import fedlens
from fedlens import Execution, Experiment, LocalTraining

WIDTH = 6


class Block(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, outputs, 3, stride=2), nn.BatchNorm2d(outputs), nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.norm(self.conv(x)).relu())


class Mine(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.block = Block(WIDTH)
        self.last = nn.Linear(WIDTH * 25, classes)

    def forward(self, x):
        return self.last(self.block(x).flatten(1))


draw = torch.Generator().manual_seed(1)
y = torch.randint(0, 3, (240,), generator=draw)
x = torch.randn(240, 1, 12, 12, generator=draw) + y[:, None, None, None] * 0.5
out, kind, workers = sys.argv[1:4]
model = Mine if kind == "class" else Mine(3)
torch.manual_seed(0)
if kind == "module":
    model.last.reset_parameters()
    nn.init.constant_(model.block.conv.weight, 0.1)
    nn.init.constant_(model.block.conv.bias, 0)
execution = Execution(out=out, workers=int(workers), engine="workers" if int(workers) else "sequential", picture=False)
data = {f"site {n}": (x[n::4], y[n::4]) for n in range(4)}
local = LocalTraining(batch_size=10)
fedlens.run(Experiment(model=model, data=data, rounds=12, local=local, execution=execution))
"""


@pytest.mark.parametrize("kind", ["class", "module"])
def test_killed_and_resumed_elsewhere(nursery, tmp_path, kind):
    """Neither the tensors nor the classes of the program are known here: what lies beside the run brings them back."""
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = nursery.program("program.py", "whole", kind, "0", cwd=tmp_path)
    assert ended.code == 0, ended.err
    nursery.begin("killed", kind, "0", cwd=tmp_path, program="program.py")
    wait_for(nursery, tmp_path / "killed/checkpoints", 3)
    nursery.kill()
    known = {*_LIVE, *given._LIVE}
    fedlens.resume(tmp_path / "killed", ["engine=workers", "workers=2"])
    assert not {*_LIVE, *given._LIVE} - known
    assert [*differences(tmp_path / "whole", tmp_path / "killed")] == []
    assert fedlens.load(tmp_path / "killed").classes == ("0", "1", "2")


def wait_for(nursery, checkpoints: Path, rounds: int) -> None:
    while len([*checkpoints.glob("0*.json")]) < min(rounds, 2):
        assert nursery is None or not nursery.over, nursery.err.read_text()
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["class", "module"])
def test_whole_processes_killed_and_resumed(tmp_path, kind):
    """As a user has it: a script with two worker processes, kill -9, and the command line."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(*words: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=subprocess.DEVNULL)

    assert start("program.py", "whole", kind, "2").wait() == 0
    process = start("program.py", "killed", kind, "2")
    wait_for(None, tmp_path / "killed/checkpoints", 3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed/result.json").exists()
    (tmp_path / "program.py").unlink()
    assert start("-m", "fedlens", "resume", "killed").wait() == 0
    assert [*differences(tmp_path / "whole", tmp_path / "killed")] == []


def test_what_is_gone_is_said(nursery, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.replace("rounds=12", "rounds=1"))
    assert nursery.program("program.py", "out", "class", "0", cwd=tmp_path).code == 0
    (data,), (code,) = (tmp_path / "out").glob("data-*"), (tmp_path / "out").glob("model-*.py")
    whole = data.read_bytes()
    for damage, said in (
        (whole[:-9] + b"damaged!!", "its checksum differs"),
        (whole[:50], "cannot be read"),
        (None, "is not beside it"),
    ):
        data.unlink() if damage is None else data.write_bytes(damage)
        with pytest.raises(BadInput, match=said):
            fedlens.load(tmp_path / "out")
    data.write_bytes(whole)
    assert fedlens.load(tmp_path / "out").module
    code.rename(tmp_path / "elsewhere.py")
    with pytest.raises(BadInput, match=r"was given in Python, and model-.* is not beside its run"):
        fedlens.load(tmp_path / "out")


def test_a_file_of_ones_own(tmp_path, monkeypatch):
    """The same door for the command line: model=my_nets.py:Net."""
    monkeypatch.chdir(tmp_path)
    Path("my_nets.py").write_text(
        "from torch import nn\n\n\ndef net(classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(144, classes))\n"
    )
    experiment = short(tmp_path / "out", model=config.read(None, ["model=my_nets.py:net"]).model)
    assert fedlens.run(experiment).rounds == 2
    assert json.loads((tmp_path / "out/result.json").read_text())["rounds"] == 2


def test_networks_find_the_last_layer():
    """Whatever it is called; weights keep their names in a plain module."""
    net = Experiment(model=Net, data=(X, Y)).network(Experiment(data=(X, Y)).data.load())
    assert isinstance(net, Network) and {*net.head} >= {"head.weight", "head.bias"}
