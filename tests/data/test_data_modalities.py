"""Views of images against slow loops, and a data set seen through several of them."""

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from fedlens.core.errors import BadInput
from fedlens.core.rng import numpy_generator
from fedlens.data.partition.base import Domains
from fedlens.data.partition.label_skew import Shards
from fedlens.data.sources.folders import Npz
from fedlens.data.sources.modalities import (
    VIEWS,
    Colour,
    Edge,
    Gray,
    Modalities,
    Noisy,
    Rotated,
    View,
    canny,
    find_photographs,
    grey,
    patches,
)
from fedlens.data.sources.small import FashionMnist, Mnist5k

RANDOM = np.random.default_rng(0)
REAL = os.environ.get("FEDLENS_DATA", "")


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    """A data folder with three photographs where BSDS500 leaves them, and an empty cache."""
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    monkeypatch.setenv("FEDLENS_CACHE", str(tmp_path / "cache"))
    made = []
    for number, (height, width) in enumerate(((40, 60), (60, 40), (30, 30))):
        place = tmp_path / "BSR" / "BSDS500" / "data" / "images" / "train" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        made.append(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8))
        Image.fromarray(made[-1]).save(place)
    return made


def textbook_canny(image, low, high):
    """Pixel by pixel: Sobel with the border repeated, maxima along the gradient, then a search from strong pixels."""
    height, width = image.shape
    at = lambda i, j: int(image[min(max(i, 0), height - 1), min(max(j, 0), width - 1)])  # noqa: E731
    dx, dy, size = (np.zeros((height, width), int) for _ in range(3))
    for i in range(height):
        for j in range(width):
            dx[i, j] = sum(w * (at(i + k, j + 1) - at(i + k, j - 1)) for k, w in ((-1, 1), (0, 2), (1, 1)))
            dy[i, j] = sum(w * (at(i + 1, j + k) - at(i - 1, j + k)) for k, w in ((-1, 1), (0, 2), (1, 1)))
            size[i, j] = abs(dx[i, j]) + abs(dy[i, j])
    beyond = lambda i, j: size[i, j] if 0 <= i < height and 0 <= j < width else 0  # noqa: E731
    weak, found, queue = set(), set(), []
    for i in range(height):
        for j in range(width):
            x, y, here = abs(dx[i, j]), abs(dy[i, j]), size[i, j]
            if here <= low:
                continue
            if y < x * np.tan(np.pi / 8):
                is_ridge = here > beyond(i, j - 1) and here >= beyond(i, j + 1)
            elif y > x * np.tan(3 * np.pi / 8):
                is_ridge = here > beyond(i - 1, j) and here >= beyond(i + 1, j)
            else:
                side = -1 if (dx[i, j] < 0) != (dy[i, j] < 0) else 1
                is_ridge = here > beyond(i - 1, j - side) and here > beyond(i + 1, j + side)
            if is_ridge:
                weak.add((i, j))
                if here > high:
                    queue.append((i, j))
    while queue:
        i, j = queue.pop()
        if (i, j) in weak and (i, j) not in found:
            found.add((i, j))
            queue += [(i + k, j + m) for k in (-1, 0, 1) for m in (-1, 0, 1)]
    edges = np.zeros((height, width), np.uint8)
    for place in found:
        edges[place] = 255
    return edges


@pytest.mark.parametrize(("low", "high"), [(100.0, 200.0), (30.0, 600.0)])
def test_canny_against_the_textbook_on_real_digits_and_noise(low, high):
    digits = Mnist5k().load().x[::500, 0].numpy()
    smooth = RANDOM.integers(0, 256, (6, 7, 8)).repeat(3, 1).repeat(3, 2).astype(np.uint8)
    noise = RANDOM.integers(0, 256, (4, 20, 15), dtype=np.uint8)
    for images in (digits, smooth, noise):
        got = canny(torch.from_numpy(images[:, None]), low, high)[:, 0].numpy()
        expected = np.stack([textbook_canny(image, low, high) for image in images])
        assert (got == expected).all() and 0 < (expected > 0).mean() < 0.6


def test_edges_find_the_outline_of_a_square():
    x = np.zeros((1, 1, 20, 20), np.uint8)
    x[:, :, 6:14, 6:14] = 255
    edges = Edge()(x, numpy_generator(0))[0, 0] > 0
    assert edges[6:14, 5:7].any(1).all() and edges[6:14, 13:15].any(1).all() and not edges[8:12, 8:12].any()


def test_grey_against_pillow():
    x = RANDOM.integers(0, 256, (5, 3, 9, 9), dtype=np.uint8)
    pillow = [np.asarray(Image.fromarray(image.transpose(1, 2, 0)).convert("L")) for image in x]
    assert np.abs(grey(x)[:, 0].astype(int) - np.stack(pillow)).max() <= 1  # it rounds its weights to 16 bits
    assert grey(x[:, :1]) is not None and (grey(x[:, :1]) == x[:, :1]).all()


def test_patches_are_pieces_of_the_photographs(photographs):
    cut = patches(60, (28, 28), numpy_generator(0)).transpose(0, 2, 3, 1)
    seen = set()
    for piece in cut:
        places = [
            (number, top, left)
            for number, photo in enumerate(photographs)
            for top in range(photo.shape[0] - 27)
            for left in range(photo.shape[1] - 27)
            if (photo[top, left] == piece[0, 0]).all() and (photo[top : top + 28, left : left + 28] == piece).all()
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert {number for number, _, _ in seen} == {0, 1, 2} and len(seen) > 30
    assert (patches(60, (28, 28), numpy_generator(0)).transpose(0, 2, 3, 1) == cut).all()
    with pytest.raises(BadInput, match="no photograph for the view colour is as large as the images, 99x99"):
        patches(1, (99, 99), numpy_generator(0))


@pytest.mark.parametrize("mix", ["difference", "sum"])
def test_colour_is_photograph_and_digit(photographs, mix):
    x = RANDOM.integers(0, 256, (7, 1, 12, 12), dtype=np.uint8)
    got = Colour(mix)(x, numpy_generator(3))
    behind = patches(7, (12, 12), numpy_generator(3)).astype(int)
    expected = abs(behind - x) if mix == "difference" else np.clip(behind + x, 0, 255)
    assert got.dtype == np.uint8 and (got == expected).all()
    named = {"difference": "colour", "sum": "added"}[mix]
    assert (VIEWS[named]()(x, numpy_generator(3)) == expected).all()


def test_without_photographs_others_are_taken_or_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLENS_DATA", str(tmp_path))
    with pytest.raises(BadInput, match="put BSDS500 into a folder bsds500"):
        find_photographs()
    for place in ("train/n01/images", "val/n01"):
        (tmp_path / "tiny-imagenet-200" / place).mkdir(parents=True)
        file = tmp_path / "tiny-imagenet-200" / place / "a.JPEG"
        Image.fromarray(RANDOM.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file)
    assert find_photographs()[1] == "tiny_imagenet, as BSDS500 is not there"


def some_digits(folder, count=60):
    x, y = RANDOM.integers(0, 256, (count, 16, 16), dtype=np.uint8), np.arange(count) % 3
    np.savez(folder / "digits.npz", x=x, y=y)
    return x, Npz(str(folder / "digits.npz"))


def test_every_view_shows_every_image(photographs, tmp_path):
    x, base = some_digits(tmp_path)
    images, plain = Modalities(base, ("gray", "colour", "edge")).load(), base.load()
    assert images.x.shape == (180, 3, 16, 16) and images.domains.tolist() == [0] * 60 + [1] * 60 + [2] * 60
    assert (images.x[:60].numpy() == x[:, None]).all()  # grey in three equal channels
    assert (images.x[120:].numpy() == Edge()(x[:, None], numpy_generator(0))).all()
    assert (images.y.reshape(3, 60) == plain.y).all()
    for domain in range(3):
        inside = images.train[images.domains[images.train] == domain] - 60 * domain
        assert inside.tolist() == plain.train.tolist()
    assert "backgrounds: BSDS500" in images.origin
    assert torch.equal(Modalities(base, ("gray", "colour", "edge")).load().x, images.x)


def test_each_image_in_one_view_only(photographs, tmp_path):
    x, base = some_digits(tmp_path)
    images = Modalities(base, ("gray", "inverted"), images="own").load()
    assert images.x.shape == (60, 1, 16, 16)
    shown = np.where(images.domains.numpy()[:, None, None] == 0, images.x[:, 0].numpy(), 255 - images.x[:, 0].numpy())
    assert {image.tobytes() for image in shown} == {image.tobytes() for image in x}
    assert np.bincount(images.domains.numpy()).tolist() == [30, 30]


@dataclass(frozen=True)
class Shifted(View):
    """A transform of the user's own."""

    by: int = 5
    name = "shifted"

    def __call__(self, x, draw):
        return np.roll(x, self.by, axis=3)


def test_views_of_ones_own_with_their_settings(photographs, tmp_path):
    x, base = some_digits(tmp_path)
    for by in (2, 5):
        images = Modalities(base, (Shifted(by), "original")).load()
        assert (images.x[:60, 0].numpy() == np.roll(x, by, axis=2)).all()
    turned = Modalities(base, (Rotated(2), Noisy(0.0))).load()
    assert (turned.x[:60, 0].numpy() == x[:, ::-1, ::-1]).all() and (turned.x[60:, 0].numpy() == x).all()


def test_half_of_the_clients_see_each_modality(photographs, tmp_path):
    _, base = some_digits(tmp_path, 300)
    images = Modalities(base, ("gray", "colour")).load()
    split = Domains(Shards(2)).split(images, 6, 0)
    domains = [set(images.domains[np.concatenate(pair)].tolist()) for pair in zip(split.train, split.test, strict=True)]
    assert domains == [{0}, {0}, {0}, {1}, {1}, {1}]


def test_unknown_and_too_few_views():
    with pytest.raises(BadInput, match=r"data.views names 'grey'; did you mean 'gray'\?"):
        Modalities(views=("grey", "colour")).load()
    with pytest.raises(BadInput, match=r"data\.views has 1 views"):
        Modalities(views=("gray",)).load()
    assert all(view.name == name for name, view in VIEWS.items()) and Gray().name == "gray"


@pytest.mark.skipif(
    not any(os.path.exists(os.path.join(root, "bsds500", "images_half.parquet")) for root in REAL.split(os.pathsep)),
    reason="bsds500 is in no folder of FEDLENS_DATA",
)
def test_real_photographs_behind_real_digits(tmp_path):
    x = FashionMnist().load().x[:50].numpy()
    seen = Colour()(x, numpy_generator(0))
    behind = seen[:, :, :2, :2]  # most corners of the clothes are black: there the photograph shows as it is
    black = x[:, :, :2, :2].repeat(3, 1) == 0
    patch = patches(50, (28, 28), numpy_generator(0))[:, :, :2, :2]
    assert (behind[black] == patch[black]).all() and black.mean() > 0.5
    colourful = seen.astype(int).transpose(1, 0, 2, 3).reshape(3, -1)
    assert np.abs(colourful[0] - colourful[2]).mean() > 5
