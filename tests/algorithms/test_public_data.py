"""Methods with public data or training at the server, as settings name them: what runs, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from baselines import SHORT, words
from fedlens import config
from fedlens.algorithms import (
    FedGen,
)
from fedlens.core.algorithm import Server
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import generator, numpy_generator
from fedlens.core.tree import Tree
from fedlens.experiment import resized
from fedlens.models.generators import ImageGenerator, Vae
from fedlens.papers.fedxds import tables
from fedlens.runs.diff import differences
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate
from fedlens.simulate.describe import describe
from fedlens.simulate.resume import resume
from fedlens.simulate.timing import work_of

SAID = {  # what is heard while the server works, and of rounds that do not train the model
    "feddf": {"asking the clients' models at the server", "distilling at the server"},
    "fedaux": {"training the first model at the server", "score public images", "distilling at the server"},
    "fedgen": {"training the generator at the server"},
    "fedftg": {"tuning the model at the server"},
    "fedfed": {"distil", "residual exchange", "training"},
}


@pytest.mark.parametrize("name", SHORT)
def test_a_run_from_words_is_the_same_after_a_stop(name, folder, tmp_path):
    """Stopped before its last round and resumed: the same to the bit."""
    asked = words(folder, name, *SHORT[name])
    whole = simulate.run(config.read(None, [*asked, f"out={tmp_path / 'whole'}"]))
    assert whole.rounds == len(config.read(None, asked).timetable())

    class Stopped(Exception):
        pass

    heard = set()

    class Stops(recorder.Nobody):
        def phase(self, name, done, total):
            heard.add(name)

        def round(self, progress):
            if progress.round == whole.rounds - 1:
                raise Stopped

    with pytest.raises(Stopped):
        simulate.run(config.read(None, [*asked, f"out={tmp_path / 'part'}"]), watcher=Stops())
    assert heard >= SAID.get(name, set())
    resume(tmp_path / "part")
    assert not list(differences(tmp_path / "whole", tmp_path / "part"))
    passport = json.loads((tmp_path / "whole" / "passport.json").read_text())
    assert ("auxiliary" in passport) == (name in ("feddf", "fedaux"))
    if name in ("fedaux", "fedfed"):
        said = json.loads((tmp_path / "whole" / "privacy.json").read_text())["statements"]
        assert [s["holds"] for s in said] == [name == "fedaux"]
        assert said[0]["epsilon"] == (0.1 if name == "fedaux" else None)


@pytest.mark.parametrize("setting", ["fedgen.batch", "fedftg.batch", "fedaux.pretrain_batch"])
def test_what_is_normalised_or_told_apart_within_a_batch_needs_two(setting, folder, tmp_path):
    name, _, field = setting.partition(".")
    asked = words(folder, name, *SHORT[name], f"out={tmp_path / 'run'}")
    with pytest.raises(BadInput, match=f"algorithm.{field} is 1, but it should be greater than or equal to 2"):
        config.read(None, [*asked, f"algorithm.{field}=1"])
    simulate.run(config.read(None, [*asked, f"algorithm.{field}=2"]))


@pytest.mark.parametrize("name", ["feddf", "fedaux"])
def test_one_public_image_at_a_time(name, folder, tmp_path):
    simulate.run(config.read(None, words(folder, name, *SHORT[name], "algorithm.batch=1", f"out={tmp_path / 'run'}")))


@pytest.mark.parametrize("name", ["feddf", "fedaux"])
def test_public_data_are_refused_by_name_when_missing(name, folder, tmp_path):
    asked = [word for word in words(folder, name, f"out={tmp_path / 'run'}") if not word.startswith("auxiliary=")]
    with pytest.raises(BadInput, match=f"{name} needs public data that no client owns: set auxiliary"):
        simulate.run(config.read(None, asked))
    with pytest.raises(BadInput, match="auxiliary 'cifar1000' is unknown; did you mean 'cifar100'"):
        config.read(None, [*asked, "auxiliary=cifar1000"])
    with pytest.raises(BadInput, match=r"nowhere\.npz"):
        simulate.run(config.read(None, [*asked, f"auxiliary={tmp_path / 'nowhere.npz'}"]))
    assert not (tmp_path / "run").exists()


def test_public_images_need_no_labels(folder, tmp_path):
    x = numpy_generator(3).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(tmp_path / "one_class.npz", x=x, y=np.zeros(40, int))
    public = f"auxiliary={tmp_path / 'one_class.npz'}"
    simulate.run(config.read(None, [*words(folder, "feddf", *SHORT["feddf"]), public, f"out={tmp_path / 'run'}"]))
    clients = f"data={tmp_path / 'one_class.npz'}"
    with pytest.raises(BadInput, match="npz has one class only"):  # read before, and clients learn from them
        simulate.run(config.read(None, [*words(folder, "feddf"), clients, f"out={tmp_path / 'other'}"]))


def test_public_images_are_nobodys(folder, tmp_path):
    (tmp_path / "again.npz").write_bytes((folder / "own.npz").read_bytes())
    for name in (folder / "own.npz", tmp_path / "again.npz"):
        asked = [*words(folder, "feddf", *SHORT["feddf"]), f"auxiliary={name}", f"out={tmp_path / 'run'}"]
        with pytest.raises(BadInput, match="auxiliary and data are the same images"):
            simulate.run(config.read(None, asked))


def test_the_part_that_needs_public_data_is_named():
    asked = ["algorithm=fedfed", "algorithm.base=feddisco", "algorithm.base.base=feddf"]
    with pytest.raises(BadInput, match=r"^feddf needs public data"):
        assert config.read(None, asked).needs_public_data
    assert not config.read(None, [*asked, "algorithm.base.base.steps=0"]).needs_public_data


@pytest.mark.parametrize("name", ["feddf", "fedgen"])
def test_public_data_that_nobody_needs_are_noted(name, folder, tmp_path):
    simulate.run(config.read(None, [*words(folder, name, *SHORT[name]), f"out={tmp_path / 'run'}"]))
    note = f"auxiliary is not used: {name} needs no public data"
    told = json.loads((tmp_path / "run" / "passport.json").read_text())["split_notes"]
    assert (note in told) == (name == "fedgen")


def test_messages_and_work_are_those_of_some_public_images(folder):
    """No training at the server: two thousand steps of SimCLR would change neither."""
    experiment = config.read(None, [*words(folder, "fedaux"), "algorithm.negatives=0.001"])
    leaves = {
        (leaf.where, leaf.name): leaf for leaf in describe(experiment, 3, 1, 8) if leaf.stage == "ScorePublicImages"
    }
    assert leaves["shared", "negatives"].shape == (1, 8) and leaves["shared", "others"].shape == (9, 8)
    assert leaves["up", "scores"].bytes == 9 * 4
    assert list(work_of(experiment, experiment.data.load())) == [
        stage for stage, at, _ in experiment.timetable() if at == 0
    ]


def test_public_images_take_the_shape_of_the_clients():
    x = torch.randint(0, 256, (3, 3, 6, 6), generator=generator(0)).to(torch.uint8)
    assert torch.equal(resized(x, (3, 6, 6)), x)
    assert torch.equal(resized(x, (1, 6, 6))[:, 0], x.double().mean(1).round().to(torch.uint8))
    assert resized(x[:, :1], (3, 6, 6)).shape == (3, 3, 6, 6)
    small = resized(x, (3, 3, 3))
    assert small.shape == (3, 3, 3, 3) and small.dtype == torch.uint8
    flat = torch.full((1, 3, 6, 6), 77, dtype=torch.uint8)
    assert (resized(flat, (3, 12, 12)) == 77).all()


def test_every_row_of_the_papers_tables_can_be_run():
    grids = {grid.name: grid for grid in tables.tables()}
    there = {row for name in ("fedxds/table1", "fedxds/public") for row in grids[name].rows}
    assert there >= {row for row, _ in grids["fedxds/table1"].paper}
    for name in ("fedxds/table1", "fedxds/public", "fedxds/public_rounds"):
        for cell in grids[name].cells():
            experiment = config.read(None, cell.words)
            assert experiment.timetable() and (experiment.auxiliary is not None) == experiment.needs_public_data


def test_small_networks_take_images_of_any_size():
    for side in (5, 6, 8, 28):
        x = torch.rand(2, 3, side, side)
        assert Vae((3, side, side), 4, 4)(x, torch.zeros(2, 4))[0].shape == x.shape
        assert ImageGenerator(4, (3, side, side), 5, 2)(torch.zeros(2, 5), torch.tensor([0, 3])).shape == x.shape
    with pytest.raises(BadInput, match="fedgen needs a model whose head has a linear layer"):

        class Bare(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(4, 3), nn.Identity()

            def features(self, x):
                return self.body(x)

        FedGen().setup(Server(Network(Bare()), Tree(), 2))
