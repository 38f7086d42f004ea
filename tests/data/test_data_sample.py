"""A part of a data set: its classes in their proportions, the same images every time."""

import numpy as np
import pytest

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.data import DATASETS


def sample(*words):
    return config.read(None, ["data=sample", "data.base=mnist5k", *words]).data


def test_classes_keep_their_shares():
    whole, part = DATASETS["mnist5k"]().load(), sample("data.train=777", "data.test=103").load()
    assert (len(part.train), len(part.test), len(part)) == (777, 103, 880)
    for name, count in (("train", 777), ("test", 103)):
        mine = np.bincount(part.y[getattr(part, name)], minlength=10)
        all_of = np.bincount(whole.y[getattr(whole, name)], minlength=10)
        assert np.abs(mine - all_of * count / all_of.sum()).max() <= 1
    assert (part.mean, part.std, part.classes) == (whole.mean, whole.std, whole.classes)


def test_images_are_those_of_the_whole_in_their_parts():
    whole, part = DATASETS["mnist5k"]().load(), sample("data.train=50", "data.test=20").load()
    for name in ("train", "test"):
        known = {(x.numpy().tobytes(), int(y)) for x, y in zip(whole.x, whole.y, strict=True)}
        index = getattr(part, name)
        found = [(x.numpy().tobytes(), int(y)) for x, y in zip(part.x[index], part.y[index], strict=True)]
        assert len(set(found)) == len(found) and set(found) <= known
    assert sample("data.train=50", "data.test=20").load().checksum == part.checksum
    assert sample("data.train=51", "data.test=20").load().checksum != part.checksum


def test_more_than_there_are_is_all_of_them():
    whole, part = DATASETS["mnist5k"]().load(), sample("data.train=100000", "data.test=100000").load()
    assert (len(part.train), len(part.test)) == (len(whole.train), len(whole.test))
    with pytest.raises(BadInput, match=r"data\.train"):
        sample("data.train=0")
