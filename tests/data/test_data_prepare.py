"""Normalisation, crop and flip against slow loops over single images."""

import pickle

import numpy as np
import pytest
import torch

from fedlens.core.batches import Dataset
from fedlens.core.rng import fold, key, uniform
from fedlens.data import Prepare

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def some(count=12, channels=3, height=7, width=9):
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=draw)


def textbook(x, mean, std, crop, flip, seed):
    """Image by image: a black border, a window at a random place, the mirror, then (pixel / 255 - mean) / std."""
    count, channels, height, width = x.shape
    drawn = uniform(fold(seed, "move"), count, 3).double().tolist()
    out = np.zeros(x.shape)
    for number in range(count):
        image = np.zeros((channels, height + 2 * crop, width + 2 * crop))
        image[:, crop : crop + height, crop : crop + width] = x[number].numpy()
        if crop:
            top, left = (int(share * (2 * crop + 1)) for share in drawn[number][1:])
            image = image[:, top : top + height, left : left + width]
        if flip and drawn[number][0] < 0.5:
            image = image[:, :, ::-1]
        for channel in range(channels):
            out[number, channel] = (image[channel] / 255 - mean[channel]) / std[channel]
    return out


def test_what_an_image_gets_does_not_depend_on_those_after_it():
    """A batch that is not filled up draws the same for its images."""
    x, seed = some(), torch.tensor(key("test"))
    prepare = Prepare(MEAN, STD, 4, True, torch.float64)
    assert torch.equal(prepare(x[:5], seed), prepare(x, seed)[:5])


@pytest.mark.parametrize("crop", [0, 1, 4])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_against_the_textbook(crop, flip, channels):
    x, seed = some(channels=channels), torch.tensor(key("test", crop, flip))
    prepare = Prepare(MEAN[:channels], STD[:channels], crop, flip, torch.float64)
    expected = textbook(x, MEAN, STD, crop, flip, seed)
    assert np.abs(prepare(x, seed).numpy() - expected).max() < 1e-13
    if crop or flip:
        assert np.abs(prepare(x, None).numpy() - expected).max() > 0.1  # the key matters


def test_without_a_key_nothing_is_random():
    x = some()
    plain = Prepare(MEAN, STD, dtype=torch.float64)
    assert torch.equal(Prepare(MEAN, STD, 2, True, torch.float64)(x, None), plain(x, None))
    assert torch.equal(plain(x, torch.tensor(3)), plain(x, None))


def test_all_places_and_both_sides_come_up():
    """A single white pixel shows where the window was; 5 x 5 places x 2 sides, 2,000 images."""
    x = torch.zeros(2000, 1, 9, 9, dtype=torch.uint8)
    x[:, :, 4, 3] = 255
    out = Prepare((0.0,), (1.0,), 2, True)(x, torch.tensor(key("places")))
    where = out.flatten(1).argmax(1)
    places, counts = torch.unique(where, return_counts=True)
    # Mirrored, the pixel of column 3 comes from column 5 on: columns 1 to 5 and 3 to 7 overlap in three.
    columns = {column: 1 / 10 for column in (1, 2, 6, 7)} | {column: 2 / 10 for column in (3, 4, 5)}
    assert len(places) == 5 * 7
    for place, count in zip(places.tolist(), counts.tolist(), strict=True):
        expected = 2000 * columns[place % 9] / 5
        assert abs(count - expected) < 5 * expected**0.5


def test_the_stored_images_are_not_touched():
    x = some()
    before = x.clone()
    Prepare(MEAN, STD, 4, True)(x, torch.tensor(1))
    assert torch.equal(x, before)
    already = x.float()
    Prepare(MEAN, STD)(already, None)
    assert torch.equal(already, x.float())


def test_hashable_picklable_and_part_of_a_batch():
    prepare = Prepare(MEAN, STD, 4, True)
    assert {prepare: 1}[pickle.loads(pickle.dumps(prepare))] == 1
    data = Dataset(some(), torch.arange(12), prepare)
    index, seed = torch.tensor([3, 5, 3]), torch.tensor(key("step"))
    batch = data.batch(index, torch.ones(3), seed)
    assert torch.equal(batch.x, prepare(data.x[index], seed)) and batch.x.dtype == torch.float32


def test_no_host_reads():
    """Runs on tensors without values: nothing in it can look at one."""
    x = torch.empty(4, 3, 8, 8, dtype=torch.uint8, device="meta")
    out = Prepare(MEAN, STD, 2, True)(x, torch.tensor(1).to("meta"))
    assert out.shape == x.shape and out.device.type == "meta"
