"""benchmarks/submodels.py: rewards and tests are of different images, and a network is trained as it says."""

import os
from dataclasses import replace

import pytest
import torch

from scripts import script


@pytest.mark.skipif("FEDLENS_DATA" not in os.environ, reason="stand-in weights and Tiny-ImageNet need FEDLENS_DATA")
def test_a_pretrained_network_is_rewarded_and_tested_on_different_images():
    submodels = script("benchmarks/submodels.py")
    task = submodels.pretrained(0)
    assert not task.trains and len(task.kept_back[1]) == len(task.test[1]) == 1000
    rewarded, tested = ({image.numpy().tobytes() for image in x} for x, _ in (task.kept_back, task.test))
    assert len(rewarded) == len(tested) == 1000 and not rewarded & tested
    few = task.test[0][:200], task.test[1][:200]
    assert submodels.accuracy(task.net.module, few) == pytest.approx(41, abs=10)  # as these weights were published
    again, other = submodels.pretrained(0), submodels.pretrained(1)
    assert torch.equal(again.test[0], task.test[0]) and not torch.equal(other.test[0], task.test[0])


def test_a_copy_is_trained_where_sub_models_are_looked_at_later():
    submodels = script("benchmarks/submodels.py")
    x, y = torch.randn(8, 1, 4, 4), torch.arange(8) % 2
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    before = module[1].weight.clone()
    task = submodels.Task(None, (x, y), (x, y), (x, y))
    assert [*submodels.later(module, task)] == ["after an epoch"] and torch.equal(module[1].weight, before)
    assert submodels.later(module, replace(task, trains=False)) == {}
