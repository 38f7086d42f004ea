"""What a machine lacks is named before anything starts."""

from importlib.util import find_spec

import pytest

from fedlens import config
from fedlens.papers.needs import is_part, lacking, partial


def find_no_hub(name):
    return None if name == "datasets" else find_spec(name)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    monkeypatch.setattr("fedlens.data.sources.base.importlib.util.find_spec", find_no_hub)
    return tmp_path


def needs(*words):
    return lacking(config.read(None, words))


def test_data(bare):
    assert needs("data=mnist5k") == [] and needs("data=cinic10") == ["cinic10"]
    assert needs("data=modalities", "data.base=femnist") == ["femnist"]
    assert needs("data=mnist5k", "algorithm=feddf", "auxiliary=cifar100") == ["cifar100"]
    assert needs("data=mnist5k", "auxiliary=cifar100") == []  # which FedAvg does not use


def test_a_part_is_not_the_whole(bare):
    (bare / "cifar100").mkdir()
    for name in ("train.npz", "test.npz"):
        (bare / "cifar100" / name).touch()
    experiment = config.read(None, ["data=cifar100"])
    assert lacking(experiment) == [] and partial(experiment) == ["cifar100"]
    assert partial(config.read(None, ["data=mnist5k"])) == [] and not is_part("folder cifar100")


def test_weights(bare):
    stock = ("data=mnist5k", "model=resnet18")
    assert needs(*stock) == []
    assert needs(*stock, "model.weights=stand-in") == ["the weights stand-in"]
    assert needs(*stock, "model.weights=timm/nobody-has-this") == ["the weights timm/nobody-has-this"]
    (bare / "mine.safetensors").touch()
    assert needs(*stock, f"model.weights={bare / 'mine.safetensors'}") == []
    assert needs(*stock, f"model.weights={bare / 'other.safetensors'}") != []
