"""benchmarks/pse_looks.py: what it measures of maps, and that runs of one split are compared client by client."""

import json
from types import SimpleNamespace

import pytest
import torch

import fedlens
from fedlens.algorithms import PSE
from fedlens.algorithms.finetune import FineTuned
from fedlens.core.errors import BadInput
from fedlens.models.pse_net import PseNet
from scripts import script

looks = script("benchmarks/pse_looks.py")


class Some(SimpleNamespace):
    """Images."""

    def __len__(self):
        return len(self.y)


def test_a_partner_is_another_image_of_the_class():
    truth = torch.tensor([1, 0, 1, 2, 1])
    assert looks.partners(truth).tolist() == [2, 1, 4, 3, 0]


def test_a_map_on_the_object_is_all_on_it():
    objects = torch.zeros(2, 8, 8, dtype=torch.bool)
    objects[0, :, :4], objects[1, :4, :2] = True, True
    left, flat = torch.zeros(4, 4), torch.ones(4, 4)
    left[:, 0] = 1
    share = looks.on_object(torch.stack([left, flat]), objects)
    assert share[0] > 0.99 and share[1] == pytest.approx(8 / 64)


def test_objects_are_those_of_the_gray_twin():
    gray = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    gray[1, 0, 0, 0] = 9
    x = torch.cat([gray.expand(3, 3, 2, 2), torch.full((3, 3, 2, 2), 200, dtype=torch.uint8)])
    y, domains = torch.tensor([0, 1, 0]).repeat(2), torch.tensor([0, 0, 0, 1, 1, 1])
    images = Some(x=x, y=y, domains=domains, owner_names=("gray", "added"))
    seen = looks.objects_of(images, torch.tensor([4, 5]))
    assert seen.tolist() == [[[True, False], [False, False]], [[False] * 2] * 2]
    images.y = torch.tensor([0, 1, 0, 0, 0, 1])  # not the same images twice
    assert looks.objects_of(images, torch.tensor([4, 5])) is None


def test_measures_are_of_images_that_all_models_have_maps_of():
    images = Some(x=torch.ones(4, 1, 2, 2), y=torch.tensor([0, 0, 1, 1]), domains=None)
    maps = torch.tensor([[[1.0, 2], [3, 4]], [[4, 3], [2, 1]], [[0, 0], [0, 0]], [[1, 2], [4, 3]]])
    theirs = torch.tensor([[[1.0, 2], [3, 4]], [[1, 3], [2, 4]], [[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    mine = looks.Seen(maps, torch.tensor([0, 1, 1, 0]))
    whole = looks.Seen(theirs, torch.tensor([0, 0, 1, 0]))
    found = looks.measured(images, torch.arange(4), {"whole": whole, "mine": mine}, "whole")
    assert found["whole"]["kept"] == found["whole"]["alike"] == 1 and found["whole"]["lost"] == 0
    one = found["mine"]
    covered = [1, (1 + 3 + 2 + 1) / 10, (1 + 2 + 3 + 3) / 10]  # the third has no map
    assert one["kept"] == pytest.approx(sum(covered) / 3, abs=1e-4) and one["kept, lost"] == pytest.approx(0.7)
    # Class 0 alone: of class 1 one map is empty. Ranks 1 2 3 4 with 1 2 3 4, and 4 3 2 1 with 1 3 2 4.
    assert one["alike"] == pytest.approx((1 - 0.8) / 2, abs=1e-4)
    assert one["other image"] == pytest.approx((0.8 - 1) / 2, abs=1e-4)
    assert (one["empty"], one["lost"], one["accuracy"]) == (25, pytest.approx(100 / 3, abs=1e-4), 50)
    assert (one["on object"], one["area"]) == (100, 100)


def test_runs_of_one_split_are_compared(tmp_path):
    what = dict(rounds=1, clients=3, cohort=2, model=PseNet(ceil=True), seed=0, local=fedlens.LocalTraining(steps=2))
    for name, method in (("pse", PSE()), ("ft", FineTuned())):
        experiment = fedlens.Experiment(algorithm=method, **what)
        fedlens.run(experiment.with_execution(out=str(tmp_path / name), engine="sequential", picture=False))
    found = looks.looks([tmp_path / "pse", tmp_path / "ft"], 2)
    assert [row["model"] for row in found] == ["global of fedavg+ft", "pse", "fedavg+ft"]
    assert {row["beside"] for row in found} == {"fedavg+ft"}
    assert all(one["kept"] in (None, pytest.approx(1)) for one in found[0]["clients"].values())
    assert json.loads(json.dumps(found)) and "kept" in looks.told(found[0])
    few = fedlens.Experiment(algorithm=FineTuned(), **what | dict(model=PseNet()))
    fedlens.run(few.with_execution(out=str(tmp_path / "drops"), engine="sequential", picture=False))
    with pytest.raises(BadInput, match="does not see all of 28 pixels"):
        looks.looks([tmp_path / "drops"], 1)
