"""benchmarks/pse_looks.py: what it measures of maps, and that runs of one split are compared client by client."""

import json
from types import SimpleNamespace

import pytest
import torch

import fedlens
from fedlens.algorithms import PSE
from fedlens.algorithms.finetune import FineTuned
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


def test_measures_leave_out_maps_without_evidence():
    images = Some(x=torch.ones(4, 1, 2, 2), y=torch.tensor([0, 0, 1, 1]), domains=None)
    maps = torch.tensor([[[1.0, 2], [3, 4]], [[4, 3], [2, 1]], [[0, 0], [0, 0]], [[1, 2], [4, 3]]])
    theirs = torch.tensor([[[1.0, 2], [3, 4]], [[1, 2], [3, 4]], [[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    index, mine, whole = torch.arange(4), torch.tensor([0, 1, 1, 0]), torch.tensor([0, 0, 1, 0])
    found = looks.measured(images, (index, maps, mine), (index, theirs, whole))
    assert found["alike"] == pytest.approx((1 - 1 + 0.8) / 3, abs=1e-4) and found["empty"] == 25
    assert found["by chance"] == pytest.approx(0)  # the pair of class 0 alone: of class 1 one map is empty
    assert found["lost"] == pytest.approx(100 / 3, abs=1e-4) and found["accuracy"] == 50


def test_runs_of_one_split_are_compared(tmp_path):
    what = dict(rounds=1, clients=3, cohort=2, model=PseNet(), seed=0)
    what |= dict(local=fedlens.LocalTraining(steps=2))
    for name, method in (("ft", FineTuned()), ("pse", PSE())):
        experiment = fedlens.Experiment(algorithm=method, **what)
        fedlens.run(experiment.with_execution(out=str(tmp_path / name), engine="sequential", picture=False))
    found = looks.looks([tmp_path / "ft", tmp_path / "pse"], 2)
    assert [row["model"] for row in found] == ["global", "fedavg+ft", "pse"]
    assert all(one["alike"] == 1 for one in found[0]["clients"].values() if one["alike"] is not None)
    assert json.loads(json.dumps(found)) and "alike" in looks.told(found[0])
