"""Similarities against scikit-image and scipy, curves against loops, sanity checks, and pictures."""

from __future__ import annotations

import io
import math
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedlens.attribution import (
    attribute,
    cosine,
    draw_grid,
    explain,
    psnr,
    rank_correlation,
    ssim,
)
from fedlens.attribution.figures import coloured, overlay
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import generator, seeded
from fedlens.core.tree import Tree
from fedlens.models.resnet import ResNet18
from quality import agreement, area, blurred, completeness_error, deletion, insertion, randomisation, randomised
from test_attribution import LABELS, images, residual

SOME = settings(deadline=None, max_examples=25)


def pictures(count: int, channels: int, high: int, wide: int, seed: int) -> Tensor:
    return torch.rand(count, channels, high, wide, generator=generator(seed), dtype=torch.float64)


# ---- similarity ------------------------------------------------------------------------------------------------------


@SOME
@given(
    st.integers(11, 20), st.integers(11, 20), st.sampled_from([1, 3]), st.sampled_from([1.0, 255.0]), st.integers(0, 99)
)
def test_ssim_and_psnr_against_scikit_image(high, wide, channels, span, seed):
    metrics = pytest.importorskip("skimage.metrics")
    a = span * pictures(2, channels, high, wide, seed)
    b = (a + 0.2 * span * (pictures(2, channels, high, wide, seed + 100) - 0.5)).clamp(0, span)
    for window, options in (
        ("gaussian", dict(gaussian_weights=True, sigma=1.5, use_sample_covariance=False)),
        ("uniform", dict(win_size=7)),
    ):
        found = ssim(a, b, span, window)
        for i in range(2):
            first, second = a[i].numpy(), b[i].numpy()
            expected = metrics.structural_similarity(first, second, data_range=span, channel_axis=0, **options)
            assert float(found[i]) == pytest.approx(expected, abs=1e-10)
    for i in range(2):
        expected = metrics.peak_signal_noise_ratio(a[i].numpy(), b[i].numpy(), data_range=span)
        assert float(psnr(a, b, span)[i]) == pytest.approx(expected, abs=1e-9)


def test_similarity_at_its_ends():
    a = pictures(2, 3, 16, 16, 0)
    assert ssim(a, a, 1.0).tolist() == pytest.approx([1, 1]) and psnr(a, a, 1.0).tolist() == [math.inf, math.inf]
    flat = torch.zeros(2, 3, 16, 16, dtype=torch.float64)
    assert ssim(flat, flat, 1.0).tolist() == pytest.approx([1, 1])
    each = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(ssim(a, 1 - a, each)[1:], ssim(a[1:], 1 - a[1:], 2.0))
    for bad, message in ((a[:, :, :8], r"11 x 11"), (a[:1], "one shape")):
        with pytest.raises(BadInput, match=message):
            ssim(bad, bad if len(bad) == 2 else a, 1.0)
    with pytest.raises(BadInput, match="did you mean 'uniform'"):
        ssim(a, a, 1.0, "unifrom")  # pyright: ignore[reportArgumentType]


@SOME
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=30))
def test_rank_correlation_against_scipy(pairs):
    stats = pytest.importorskip("scipy.stats")
    a, b = (torch.tensor([[p[i] for p in pairs]], dtype=torch.float64) for i in (0, 1))
    constant = min(len(a.unique()), len(b.unique())) == 1
    expected = 0.0 if constant else stats.spearmanr(a[0].numpy(), b[0].numpy())[0]
    assert float(rank_correlation(a, b)[0]) == pytest.approx(expected, abs=1e-9)


def test_agreement_of_maps():
    maps = attribute("gradient", *residual(), images(3), LABELS[:3])
    same, opposite = agreement(maps, 2 * maps), agreement(maps, -maps)
    for value in same.values():
        torch.testing.assert_close(value.double(), torch.ones(3, dtype=torch.float64))
    assert (opposite["cosine"] < -0.999).all() and (opposite["rank"] < -0.999).all() and (opposite["ssim"] < 0.5).all()
    torch.testing.assert_close(cosine(maps, torch.zeros_like(maps)), torch.zeros(3, dtype=torch.float64))
    small = maps.sum(1)[:, :5, :5]
    assert set(agreement(small, small)) == {"cosine", "rank"}  # too small for a window


# ---- curves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", [deletion, insertion])
def test_curves_against_a_loop(curve):
    net, weights = residual()
    x, y = images(3), LABELS[:3]
    maps = attribute("lrp", net, weights, x, y)
    found = curve(net, weights, x, maps, y, steps=5, chunk=2)
    soft = blurred(x)
    for i in range(3):
        order = sorted(range(144), key=lambda p: (-float(maps[i].sum(0).flatten()[p]), p))
        for s in range(6):
            image = (x if curve is deletion else soft)[i].clone()
            for p in order[: 144 * s // 5]:
                image[:, p // 12, p % 12] = 0 if curve is deletion else x[i, :, p // 12, p % 12]
            expected = net(weights, image[None]).softmax(1)[0, y[i]]
            torch.testing.assert_close(found[i, s], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(area(found), torch.trapezoid(found, dx=0.2, dim=1))


def test_curves_tell_good_maps_from_bad():
    """On a score that is the sum of known pixels, those pixels make the steepest curves."""

    class Corner(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(144, 2, bias=False)
            self.head.weight.data.zero_()
            self.head.weight.data[0].view(12, 12)[:4, :4] = 1

        def features(self, x):
            return x.mean(1).flatten(1)

    net = Network(Corner(), precision="fp64")
    weights, x = net.initial_weights(), images(4).abs() + 1
    good = attribute("input_x_gradient", net, weights, x, 0, target="given")
    random = torch.randn(4, 12, 12, generator=generator(0), dtype=torch.float64)
    how = dict(target="given", score="logit", steps=12)
    assert (area(deletion(net, weights, x, good, 0, **how)) < area(deletion(net, weights, x, random, 0, **how))).all()
    insert = dict(how, fill="zero")
    assert (
        area(insertion(net, weights, x, good, 0, **insert)) > area(insertion(net, weights, x, random, 0, **insert))
    ).all()
    whole = net(weights, x)[:, 0]
    torch.testing.assert_close(deletion(net, weights, x, good, 0, **how)[:, 0], whole)
    assert not deletion(net, weights, x, good, 0, **how)[:, -1].any()
    with pytest.raises(BadInput, match="do not lie on the images"):
        deletion(net, weights, x, random[:, :6], 0)


def test_blur_keeps_the_mean_colour():
    flat = torch.full((1, 3, 12, 12), 0.7, dtype=torch.float64)
    torch.testing.assert_close(blurred(flat), flat)
    x = images(2)
    assert (blurred(x).flatten(1).std(1) < 0.5 * x.flatten(1).std(1)).all()


# ---- sanity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gradient", "input_x_gradient", "lrp", "grad_cam"])
def test_maps_depend_on_the_weights(method):
    """Adebayo et al., 2018: with every layer shuffled little is left of the map."""
    net, weights = residual()
    x, y = images(6), LABELS[:6]
    alike = randomisation(method, net, weights, x, y)
    assert next(iter(alike)) == "head" and len(alike) == 7 and all(len(v) == 6 for v in alike.values())
    assert float(list(alike.values())[-1].mean()) < 0.6
    same = randomised(weights, set())
    assert all(torch.equal(a, b) for a, b in zip(same.leaves(), weights.leaves(), strict=True))
    other = randomised(weights, {"head.weight"})
    assert sorted(other.params["head.weight"].flatten().tolist()) == sorted(
        weights.params["head.weight"].flatten().tolist()
    )
    assert not torch.equal(other.params["head.weight"], weights.params["head.weight"])


def test_a_map_that_ignores_the_network_fails_the_check():
    net, weights = residual()
    x, y = images(2), LABELS[:2]
    alike = randomisation(lambda inputs, x, wanted: x, net, weights, x, y)
    assert all(float(v.min()) > 0.999 for v in alike.values())


def test_completeness():
    relevance = torch.tensor([[[1.0, 2.0]], [[0.5, 0.5]]])
    assert completeness_error(relevance, torch.tensor([3.0, 2.0])).tolist() == [0, 0.5]


def _tiny_imagenet(count: int) -> tuple[Network, Tree, Tensor, Tensor]:
    """The stand-in ResNet18, and images that it gets right."""
    if not os.environ.get("FEDLENS_DATA"):
        pytest.skip("needs the weights and Tiny-ImageNet of FEDLENS_DATA")
    parquet, pillow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("PIL.Image")
    net = Network(ResNet18(weights="stand-in").build(200, 3, 32))
    table = parquet.read_table(Path(os.environ["FEDLENS_DATA"]) / "tiny_imagenet" / "val.parquet")[::5][:200]
    small = [pillow.open(io.BytesIO(b)).convert("RGB").resize((32, 32), pillow.BOX) for b in table["jpeg"].to_pylist()]
    pixels = torch.stack([torch.frombuffer(bytearray(s.tobytes()), dtype=torch.uint8) for s in small])
    mean, spread = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x = (pixels.view(-1, 32, 32, 3).movedim(-1, 1) / 255 - mean) / spread
    weights, y = net.initial_weights(), torch.tensor(table["label"].to_pylist())
    with torch.no_grad():
        sure = net(weights, x).softmax(1)[torch.arange(len(y)), y] > 0.3
    return net, weights, x[sure][:count], y[sure][:count]


@pytest.mark.data
def test_on_a_trained_network():
    """Known results hold on real images: which maps find what the network uses, and which depend on its weights."""
    net, weights, x, y = _tiny_imagenet(16)
    random = torch.randn(len(x), 32, 32, generator=generator(0))
    base = (
        float(area(deletion(net, weights, x, random, y)).mean()),
        float(area(insertion(net, weights, x, random, y)).mean()),
    )
    for method in ("lrp", "integrated_gradients", "input_x_gradient"):
        maps = attribute(method, net, weights, x, y)
        assert float(area(deletion(net, weights, x, maps, y)).mean()) < 0.8 * base[0], method
        assert float(area(insertion(net, weights, x, maps, y)).mean()) > 1.2 * base[1], method
    # Adebayo et al., 2018; Nie et al., 2018: guided backpropagation hardly notices another head, gradients do.
    head = randomised(weights, {"fc.weight"})
    for method, low, high in (("guided_backprop", 0.9, 1.0), ("gradient", -0.5, 0.5), ("lrp", -1.0, 0.5)):
        alike = rank_correlation(*(attribute(method, net, w, x[:4], y[:4]) for w in (weights, head)))
        assert low <= float(alike.mean()) <= high, method


# ---- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_grid_is_written(tmp_path, kind):
    with seeded(1):
        net, weights = residual()
    path = tmp_path / "sub" / f"grid.{kind}"
    maps = explain(
        net, {"round 1": weights, "round 9": weights}, images(3), LABELS[:3], path, methods=["lrp", "grad_cam"]
    )
    assert list(maps) == ["round 1\nLRP", "round 9\nLRP", "round 1\ngrad-CAM", "round 9\ngrad-CAM"]
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if kind == "png" else b"<?xml") and len(data) > 5000
    if kind == "png":
        Image = pytest.importorskip("PIL.Image")
        wide, high = Image.open(path).size
        assert wide > high  # five columns, three rows


def test_the_line_below_a_grid_says_what_its_colours_are(tmp_path, monkeypatch):
    """About those kinds of maps alone that are drawn."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    both, heat = torch.tensor([[[1.0, -1.0], [0.0, 3.0]]]), torch.tensor([[[1.0, 1.0], [0.0, 3.0]]])

    def below(maps):
        text = draw_grid(pictures(1, 1, 2, 2, 0), maps, tmp_path / "a.svg", asked="the dog").read_text()
        return " ".join(re.findall(r">([^<]+)</text>", text))

    signs, warmth = "red speaks for the dog, blue against it", "black to yellow: how much a place speaks for "
    assert signs in below({"a": both, "b": both}) and warmth not in below({"a": both})
    assert f"{warmth}the dog" in below({"a": heat}) and signs not in below({"a": heat})
    assert f"{signs}; {warmth}it; each map is scaled" in below({"a": both, "b": heat})


def test_gray_images_and_constant_maps_can_be_drawn(tmp_path):
    draw_grid(
        pictures(2, 1, 8, 8, 0), {"zero": torch.zeros(2, 8, 8), "rgb": torch.ones(2, 3, 8, 8)}, tmp_path / "a.png"
    )
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_colours():
    signed = torch.from_numpy(coloured(torch.tensor([[[1.0, 0.0, -1.0]]]), 1.0))[0]
    heat = torch.from_numpy(coloured(torch.tensor([[[1.0, 0.0, 0.5]]]), 1.0))[0]
    torch.testing.assert_close(signed[0], torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 1]]))
    assert heat[0, 1].tolist() == [0, 0, 0] and heat[0, 0, 0] == 1 and heat[0, 0, 1] == 1
    assert heat[0, 2, 0] - heat[0, 2, 1] < 0.1  # not red, which says "for" in signed maps
    image = torch.full((1, 3, 2, 2), 0.5)
    over = overlay(image, torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]]))
    assert over.shape == (1, 3, 2, 2) and over[0, :, 0, 1].tolist() == pytest.approx([0.5] * 3)
    assert over[0, 0, 0, 0] > 0.7 and over.min() >= 0 and over.max() <= 1


def test_pictures_refuse_what_does_not_fit(tmp_path):
    x = pictures(2, 3, 8, 8, 0)
    for images_, maps, name, titles, message in (
        (x, {}, "a.jpg", None, "a.jpg: pictures are saved as"),
        (x, {"m": x[:1]}, "a.png", None, "m has 1 maps for 2 images"),
        (x, {}, "a.png", ["one"], "1 titles do not fit 2 images"),
        (x[:0], {}, "a.png", None, "no images"),
    ):
        with pytest.raises(BadInput, match=message):
            draw_grid(images_, maps, tmp_path / name, titles)
