"""FedXDS: soft masks of constant maps, integrated gradients as the released code sums them, LRP as printed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedlens.algorithms import FedXDS
from fedlens.attribution.masks import top_share
from fedlens.core.network import Network
from fedlens.core.rng import generator
from fedlens.models import model_named
from small import network

SEED, OFFICIAL = torch.tensor(5), FedXDS(**FedXDS.presets["official"])


def pictures(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 1, 6, 6, generator=generator(2), dtype=torch.float64)


@pytest.mark.parametrize("worth", [0.0, 2.5])
def test_a_soft_mask_of_a_constant_map_keeps_the_first_pixels(worth):
    """As the binary one: 36 - floor(36 * 80 / 100) = 8 of them, as they are. The other image has a map as usual."""
    x, method = pictures(2), FedXDS(mask="soft", sparsity=80, clip_norm=None)
    maps = torch.full((2, 1, 6, 6), worth, dtype=torch.float64)
    maps[1] = torch.randn(1, 6, 6, generator=generator(9), dtype=torch.float64)
    found, keep = method.masked(x, maps, SEED)
    first = torch.zeros(36, dtype=torch.bool)
    first[:8] = True
    assert torch.equal(keep[0].flatten(), first)
    assert torch.equal(found[0].flatten(), torch.where(first, x[0].flatten(), 0))
    flat = maps[1].flatten()
    floor = flat.sort().values[-8]
    expected = [
        float(v * (w - flat.min()) / (flat.max() - flat.min())) if w >= floor else 0.0
        for v, w in zip(x[1].flatten(), flat, strict=True)
    ]
    assert (found[1].flatten() - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 1e-12


def test_no_image_leaves_as_noise_alone():
    x = pictures(1)
    method = FedXDS(mask="soft", sparsity=80, sigma=0.0)
    sent = method.release(x, torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, 6, 6, dtype=torch.float64), SEED)
    assert sent.x.abs().sum() > 0


def by_hand(places: list[float], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x times the mean gradient of the true logits at these shares of the way from zero, summed over colours."""
    net = network()
    weights, total = net.initial_weights(), torch.zeros_like(x)
    for t in places:
        point = (t * x).requires_grad_()
        logits = net(weights, point)
        total += torch.autograd.grad(sum(logits[i, y[i]] for i in range(len(x))), point)[0]
    return (x * total / len(places)).sum(1, keepdim=True)


@pytest.mark.parametrize("rule", ["right", "midpoint"])
def test_integrated_gradients_by_either_sum(rule):
    x, y, net = pictures(), torch.tensor([0, 2, 1]), network()
    places = [(s + (1 if rule == "right" else 0.5)) / 20 for s in range(20)]
    found = FedXDS(attribution="ig", ig=rule).pixel_scores(net, net.initial_weights(), x, y, 64, SEED)
    assert (found - by_hand(places, x, y)).abs().max() <= 1e-12


def test_official_sums_at_the_right_ends():
    assert FedXDS(**FedXDS.presets["official"]).ig == "right" and FedXDS().ig == "midpoint"
    x, y, net = pictures(), torch.tensor([0, 2, 1]), network()
    official = FedXDS(**FedXDS.presets["official"] | {"attribution": "ig", "target": "true"})
    found = official.pixel_scores(net, net.initial_weights(), x, y, 64, SEED)
    assert (found - by_hand([(s + 1) / 20 for s in range(20)], x, y)).abs().max() <= 1e-12


def test_the_printed_rule_of_lrp_keeps_the_pixels_of_input_times_gradient():
    """Equation 6 on a ReLU network with norms, at any weights: all but the odd pixel. The code's rules keep others."""
    net, paper = Network(model_named("resnet8").build(10, 3, 16)), FedXDS(**FedXDS.presets["paper"])
    weights = net.initial_weights().map(lambda w: w + 0.05 * torch.randn(w.shape, generator=generator(3)).abs())
    x, y = torch.randn(8, 3, 16, 16, generator=generator(4)), torch.arange(8)

    def kept(method: FedXDS) -> torch.Tensor:
        return top_share(method.pixel_scores(net, weights, x, y, 64, SEED), drop=70).bool()

    gradient, printed = kept(replace(paper, attribution="inputxgrad")), kept(paper)
    coded = kept(replace(paper, lrp="epsilon_plus_flat"))
    assert (gradient & printed).sum() >= 0.99 * printed.sum() and (gradient & coded).sum() <= 0.6 * coded.sum()
