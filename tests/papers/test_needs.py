"""What a machine lacks is named before anything starts."""

from importlib.util import find_spec

import pytest

from fedlens import config
from fedlens.models.weights import STAND_IN
from fedlens.papers.fedsls import tables as fedsls
from fedlens.papers.fedsls.figures import FIGURES, judge_of
from fedlens.papers.figure_runs import Wanted
from fedlens.papers.needs import is_part, lacking, partial, remarks, standing_in
from fedlens.papers.table import gather


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


def test_a_stand_in_is_named_with_what_it_stands_for(bare):
    (bare / "cifar100").mkdir()
    for name in ("train.npz", "test.npz"):
        (bare / "cifar100" / name).touch()
    words = ("data=cifar100", "model=resnet18", "model.weights=stand-in")
    assert remarks(config.read(None, words)) == ["not run here: needs the weights stand-in"]
    (bare / "weights").mkdir()
    (bare / STAND_IN).touch()
    part, weights = remarks(config.read(None, words))
    assert part == "on a part of the images here: for the paper's needs all of cifar100"
    assert weights == "from stand-in weights here: for the paper's needs ImageNet weights of resnet18"
    assert standing_in(config.read(None, ["data=mnist5k", "model=resnet18"])) == []
    assert remarks(config.read(None, ["data=mnist5k"])) == []


def test_no_papers_number_beside_a_stand_in_that_was_asked_for(tmp_path, monkeypatch):
    """A machine that has PyTorch's weights may still be told to take the stand-in."""
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    table, where = fedsls.tables()[0], ("fedsls", "cifar10/0.1")
    assert table.columns[where[1]].instead == () and gather(table, tmp_path, ()).paper(*where).mean == 70.51
    assert gather(table, tmp_path, ("model.weights=stand-in",)).paper(*where) is None


def test_figure_5_asks_for_all_three_data_sets(bare):
    work = next(figure.work for figure in FIGURES if figure.name == "fedsls/figure5")
    efforts = work(Wanted((), 10_000, bare / "figure5"))
    passes = {each.experiment.data.name: each.images(None) for each in efforts}
    assert passes == {"cifar10": 15_000, "cifar100": 15_000, "tiny_imagenet": 30_000}  # six of each image
    assert all("needs" in said for each in efforts for said in remarks(each.experiment))


def test_figure_5_names_the_network_of_its_cosine(bare):
    figure = next(one for one in FIGURES if one.name == "fedsls/figure5")
    wanted = Wanted((), 10, bare / "figure5")
    assert "not run here: needs cifar10, the weights timm/resnet50.tv_in1k" in remarks(figure.needs(wanted)[0])
    assert judge_of(wanted, config.read(None, ["data=mnist5k", "model=resnet18"]))[1].startswith("the same resnet18 (")


def test_a_count_of_operations_takes_no_stand_in(bare):
    """The paper's number stands beside it."""
    (bare / "weights").mkdir()
    (bare / STAND_IN).touch()
    work = {figure.name: figure.work(Wanted((), 10, bare / "figure")) for figure in FIGURES}
    assert standing_in(work["fedsls/figure3"][0].experiment) and not standing_in(work["fedsls/cost"][0].experiment)
