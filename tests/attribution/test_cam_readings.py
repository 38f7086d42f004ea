"""Grad-CAM++ and Score-CAM against the papers' own formulas, one number at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.algorithms import PSE
from fedlens.attribution import attribute
from fedlens.attribution.cam import plus_plus
from fedlens.core.network import Network
from fedlens.core.rng import generator, seeded
from fedlens.core.tree import Tree


class Small(nn.Module):
    """Maps of 3 x 4 under images of 7 x 9: up-sampling does not keep the largest value."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, stride=2)
        self.relu = nn.ReLU()
        self.flat = nn.Flatten()
        self.head = nn.Linear(60, 3)

    def features(self, x):
        return self.flat(self.relu(self.conv(x)))

    def forward(self, x):
        return self.head(self.features(x))


def small() -> tuple[Network, Tree]:
    with seeded(3):
        net = Network(Small(), "fp64")
    return net, net.initial_weights()


def images(count: int = 4) -> tuple[Tensor, Tensor]:
    draw = generator(8)
    return torch.randn(count, 2, 7, 9, generator=draw, dtype=torch.float64), torch.arange(count) % 3


def seen(net: Network, weights: Tree, image: Tensor, y: int) -> tuple[Tensor, Tensor]:
    """The maps of one image and the gradient of its logit there."""
    w = weights.params
    maps = F.conv2d(image[None], w["conv.weight"], w["conv.bias"], stride=2).relu().detach().requires_grad_()
    logit = F.linear(maps.flatten(1), w["head.weight"], w["head.bias"])[0, y]
    return maps.detach()[0], torch.autograd.grad(logit, maps)[0][0]


def equation_19(a: Tensor, g: Tensor) -> list[list[list[float]]]:
    """alpha of every place of every channel."""
    alphas = []
    for k in range(len(a)):
        total = sum(float(v) for v in a[k].flatten())
        below = [[2 * float(v) ** 2 + total * float(v) ** 3 for v in row] for row in g[k]]
        alphas.append(
            [[float(v) ** 2 / b for v, b in zip(*rows, strict=True)] for rows in zip(g[k], below, strict=True)]
        )
    return alphas


def test_grad_cam_plus_plus_is_equation_19():
    net, weights = small()
    x, y = images()
    found = attribute("grad_cam_pp", net, weights, x, y, upsample=False)
    for i in range(len(x)):
        a, g = seen(net, weights, x[i], int(y[i]))
        alphas, cam = equation_19(a, g), torch.zeros_like(a[0])
        for k in range(len(a)):
            positive = [[max(float(v), 0.0) for v in row] for row in g[k]]
            cam += a[k] * sum(
                sum(p * q for p, q in zip(*rows, strict=True)) for rows in zip(alphas[k], positive, strict=True)
            )
        assert (found[i] - cam.clamp(min=0)).abs().max() <= 1e-12
        assert cam.max() > 1e-3


def test_alphas_lie_between_zero_and_one_half_where_the_gradient_is_positive():
    """Of maps after a ReLU: 1 / (2 + a sum that is not negative times a positive gradient)."""
    draw = generator(1)
    maps = torch.randn(6, 4, 5, 5, generator=draw, dtype=torch.float64).relu()
    gradient = torch.randn(6, 4, 5, 5, generator=draw, dtype=torch.float64)
    there = gradient > 0
    alphas = plus_plus(maps, gradient)[there] / gradient[there]
    assert alphas.min() > 0 and alphas.max() <= 0.5
    assert not plus_plus(maps, gradient)[~there].any()


def test_small_gradients_do_not_vanish():
    """Squares of 1e-25 are zero in float32; alpha is one half there, as the equation's limit."""
    maps, gradient = torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 1e-25)
    torch.testing.assert_close(plus_plus(maps, gradient), gradient / 2, rtol=1e-6, atol=0)


def test_score_cam_stretches_what_is_up_sampled():
    net, weights = small()
    x, y = images()
    found = attribute("score_cam", net, weights, x, y, upsample=False)
    for i in range(len(x)):
        a, _ = seen(net, weights, x[i], int(y[i]))
        rises = []
        with torch.no_grad():
            empty = float(net(weights, torch.zeros_like(x[:1]))[0, y[i]])
            for k in range(len(a)):
                large = F.interpolate(a[k][None, None], x.shape[-2:], mode="bilinear", align_corners=False)[0, 0]
                low, high = float(large.min()), float(large.max())
                mask = (large - low) / (high - low) if high > low else torch.zeros_like(large)
                assert high == low or (float(mask.min()), float(mask.max())) == (0.0, 1.0)
                rises.append(float(net(weights, x[i : i + 1] * mask)[0, y[i]]) - empty)
        share = torch.tensor(rises, dtype=torch.float64).softmax(0)
        assert (found[i] - (share[:, None, None] * a).sum(0).clamp(min=0)).abs().max() <= 1e-12


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_evidence_of_pse_by_score_cam(reduce):
    """The same for a channel's evidence, of the local network alone."""
    net, weights = small()
    x, y = images()
    weight = torch.tensor([1.0, 1, 0, 1], dtype=torch.float64)
    method = PSE(attention="self", cam="scorecam", reduce=reduce)
    a = torch.stack([seen(net, weights, x[i], int(y[i]))[0] for i in range(len(x))])
    batch = Tree(x=x, y=y, weight=weight)
    found = method.score_cam(net, (weights, weights), batch, 0, {"conv": a})["conv"]
    large = F.interpolate(a, x.shape[-2:], mode="bilinear", align_corners=False)
    for k in range(a.shape[1]):
        total = 0.0
        for i in range(len(x)):
            low, high = float(large[i, k].min()), float(large[i, k].max())
            mask = (large[i, k] - low) / (high - low) if high > low else torch.zeros_like(large[i, k])
            with torch.no_grad():
                through, empty = net(weights, torch.stack([x[i] * mask, 0 * x[i]]))[:, y[i]].tolist()
            total += float(weight[i]) * (through - empty)
        assert abs(float(found[k]) - (total / 3 if reduce == "mean" else total)) <= 1e-12
