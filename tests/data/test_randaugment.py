"""RandAugment against Pillow, change by change, and its draws."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from fedlens.core.errors import BadInput
from fedlens.core.rng import key
from fedlens.data import Prepare, federate
from fedlens.data.randaugment import CHANGES, Drawn, changed, cut_out, randaugment

STRENGTHS = range(1, 10)


def some(count=6, channels=3, height=32, width=32, seed=0):
    """Pictures with slopes, flat parts and few levels; noise alone would hide what moves where."""
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 256, (count, channels, height, width))
    x[1] = np.linspace(3, 200, height * width).reshape(height, width)
    x[2] = 80
    x[3] = x[3] // 64 * 20 + 30
    x[4, :, 5:20, 4:9] = 255
    return torch.from_numpy(x.astype(np.uint8))


def by_pillow(name, image, v, sign):
    """One image by the operations of Pillow, as code that follows FixMatch calls them."""
    share, part, (width, height) = 0.9 * v / 10 + 0.05, sign * 0.3 * v / 10, image.size
    return {
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(share),
        "color": lambda: ImageEnhance.Color(image).enhance(share),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(share),
        "equalize": lambda: ImageOps.equalize(image),
        "identity": lambda: image,
        "posterize": lambda: ImageOps.posterize(image, int(4 * v / 10) + 4),
        "rotate": lambda: image.rotate(sign * int(30 * v / 10)),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(share),
        "solarize": lambda: ImageOps.solarize(image, 256 - int(256 * v / 10)),
        "shear_x": lambda: image.transform(image.size, Image.Transform.AFFINE, (1, part, 0, 0, 1, 0)),
        "shear_y": lambda: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, part, 1, 0)),
        "translate_x": lambda: image.transform(image.size, Image.Transform.AFFINE, (1, 0, int(part * width), 0, 1, 0)),
        "translate_y": lambda: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, 0, 1, int(part * height))),
    }[name]()


def pictures(x):
    return [Image.fromarray((one[0] if len(one) == 1 else one.transpose(1, 2, 0)).astype(np.uint8)) for one in x]


def arrays(images):
    found = [np.asarray(image).astype(int) for image in images]
    return np.stack([one[None] if one.ndim == 2 else one.transpose(2, 0, 1) for one in found])


@pytest.mark.parametrize("channels, height, width", [(3, 32, 32), (1, 28, 28), (3, 17, 23)])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_pillows(name, channels, height, width):
    x = some(channels=channels, height=height, width=width)
    off = []
    for v in STRENGTHS:
        for turned, sign in enumerate((1, -1)):
            full = [torch.full((len(x),), value) for value in (CHANGES.index(name), v, turned)]
            ours = changed(x.int(), Drawn(*full)).numpy()
            theirs = arrays([by_pillow(name, image, v, sign) for image in pictures(x.numpy())])
            off.append(np.abs(ours - theirs))
    off = np.stack(off)
    # Pillow's shares are floats of 32 bits: 0.14 of 50 is 7 or just below it. All else is the same to the bit.
    blended = name in ("brightness", "color", "contrast", "sharpness", "autocontrast")
    assert off.max() <= (1 if blended else 0)
    assert (off > 0).mean() < (0.02 if blended else 1e-12)


def test_every_image_has_a_change_of_its_own():
    x = some()
    which = torch.tensor(
        [CHANGES.index(n) for n in ("rotate", "solarize", "color", "equalize", "identity", "contrast")]
    )
    drawn = Drawn(which, torch.tensor([9, 3, 1, 1, 5, 2]), torch.tensor([1, 0, 0, 1, 0, 0]))
    together = changed(x.int(), drawn)
    for i in range(len(x)):
        alone = changed(x[i : i + 1].int(), Drawn(*(part[i : i + 1] for part in drawn)))
        assert torch.equal(alone[0], together[i])
    assert torch.equal(together[4], x[4].int())


@pytest.mark.parametrize("side", [32, 28])
def test_the_square_is_pillows_rectangle(side):
    x, places = some(height=side, width=side), torch.tensor([0, 0.1, 0.26, 0.5, 0.77, 1 - 2**-24]).double()
    theirs = []
    for image, u, w in zip(pictures(x.numpy()), places.tolist(), places.flip(0).tolist(), strict=True):
        left, top = (int(max(0, share * side - side // 2 / 2)) for share in (u, w))
        ends = int(min(side, left + side // 2)), int(min(side, top + side // 2))
        ImageDraw.Draw(image).rectangle((left, top, *ends), (127, 127, 127))
        theirs.append(image)
    assert np.array_equal(cut_out(x.int(), places, places.flip(0)).numpy(), arrays(theirs))


def test_draws():
    """A change that is drawn happens half of the time; on noise two of 14 show nothing, two others at strength 1."""
    x = torch.randint(0, 256, (1, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    x = x.expand(4000, -1, -1, -1)
    out = randaugment(x, torch.tensor(key("draws")))
    gray = (out == 127).all(1)
    untouched = ((out == x).all(1) | gray).flatten(1).all(1).double().mean()
    expected = (0.5 + 0.5 * (2 + 2 / 9) / 14) ** 2  # identity and autocontrast; 0.96 of a pixel
    assert abs(untouched - expected) < 0.03
    squares = gray.flatten(1).sum(1)
    assert squares.min() >= 81 and squares.max() < 17 * 17 + 20
    assert not torch.equal(out, randaugment(x, torch.tensor(key("others"))))


def test_in_a_batch():
    """Only where a key is given; the same for an image whatever follows it; nothing is read back."""
    x, seed = some(), torch.tensor(key("test"))
    prepare = Prepare((0.5,) * 3, (0.25,) * 3, 4, True, torch.float64, True)
    plain = Prepare((0.5,) * 3, (0.25,) * 3, dtype=torch.float64)
    assert torch.equal(prepare(x, None), plain(x, None))
    assert torch.equal(prepare(x[:4], seed), prepare(x, seed)[:4])
    moved = Prepare((0.0,) * 3, (1 / 255,) * 3, 4, True, torch.float64)(x, seed).round().to(torch.uint8)
    assert torch.equal(prepare(x, seed), plain(randaugment(moved, seed), None))
    meta = prepare(torch.empty(4, 3, 8, 8, dtype=torch.uint8, device="meta"), torch.tensor(1).to("meta"))
    assert meta.shape == (4, 3, 8, 8)


def test_two_channels_are_refused():
    images: Any = SimpleNamespace(x=torch.zeros(4, 2, 8, 8, dtype=torch.uint8))
    nobody: Any = None
    with pytest.raises(BadInput, match="augment=randaugment needs images of 1 or 3 channels, but these have 2"):
        federate(images, nobody, 2, 0, augment="randaugment")
