"""Every method that captum has, against captum, on networks that captum can handle."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

from fedlens.attribution import attribute
from fedlens.attribution.attribute import SmoothGrad
from fedlens.core.network import Network
from fedlens.core.rng import seeded
from fedlens.core.tree import Tree
from fedlens.models import MODELS
from test_attribution import LABELS, images, residual

captum = pytest.importorskip("captum.attr", reason="captum is the oracle here")
rules = pytest.importorskip("captum.attr._utils.lrp_rules")

CLOSE = dict(rtol=1e-5, atol=1e-9)


class Written(nn.Module):
    """The layers of a sequence as captum takes them: nothing but what it has rules for, flattened by hand."""

    def __init__(self, module: nn.Module):
        super().__init__()
        leaves = [part for part in module.modules() if not list(part.children())]
        known = (nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Linear)
        layers = [part for part in leaves if isinstance(part, known)]
        at = next(i for i, part in enumerate(layers) if isinstance(part, nn.Linear))
        self.maps, self.vectors = nn.Sequential(*layers[:at]), nn.Sequential(*layers[at:])

    def forward(self, x: Tensor) -> Tensor:
        return self.vectors(self.maps(x).flatten(1))


@functools.cache
def vgg(bias: bool = True) -> tuple[Network, Tree, nn.Module]:
    """VGG-11 whose biases are not all zero, or all are."""
    with seeded(1):
        module = MODELS["vgg11"]().build(4, 3, 32)
        for name, value in module.named_parameters():
            if name.endswith("bias"):
                value.data.uniform_(-0.1, 0.1) if bias else value.data.zero_()
        net = Network(module, precision="fp64")
    written = Written(net.module).eval()
    weights, x = net.initial_weights(), images(2, 32)
    torch.testing.assert_close(written(x), net(weights, x))
    return net, weights, written


def pair(name: str) -> tuple[Network, Tree, nn.Module, int]:
    if name == "vgg":
        return *vgg(), 32
    net, weights = residual()
    return net, weights, net.module.eval(), 12


def theirs(oracle, x: Tensor, **options) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # captum says that it sets hooks
        options = {"target": LABELS[: len(x)], **options}
        return oracle.attribute(x.clone().requires_grad_(), **options).detach()


@pytest.mark.parametrize("name", ["vgg", "residual"])
def test_gradients(name):
    net, weights, module, side = pair(name)
    x, y = images(3, side), LABELS[:3]
    saliency = theirs(captum.Saliency(module), x, abs=False)
    torch.testing.assert_close(attribute("gradient", net, weights, x, y), saliency, **CLOSE)
    product = theirs(captum.InputXGradient(module), x)
    torch.testing.assert_close(attribute("input_x_gradient", net, weights, x, y), product, **CLOSE)
    guided = theirs(captum.GuidedBackprop(module), x)
    torch.testing.assert_close(attribute("guided_backprop", net, weights, x, y), guided, **CLOSE)
    assert not torch.allclose(guided, saliency, rtol=0.1)


@pytest.mark.parametrize(
    "ours, rule", [("midpoint", "riemann_middle"), ("right", "riemann_right"), ("legendre", "gausslegendre")]
)
@pytest.mark.parametrize("name", ["vgg", "residual"])
def test_integrated_gradients(name, ours, rule):
    net, weights, module, side = pair(name)
    x, baseline = images(2, side), images(1, side, seed=8)
    expected = theirs(captum.IntegratedGradients(module), x, baselines=baseline, n_steps=7, method=rule)
    options = dict(steps=7, baseline=baseline[0], rule=ours)
    found = attribute("integrated_gradients", net, weights, x, LABELS[:2], **options)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("name", ["vgg", "residual"])
def test_smoothgrad_with_the_same_noise(name, monkeypatch):
    net, weights, module, side = pair(name)
    x, y = images(2, side), LABELS[:2]
    draws = torch.stack([SmoothGrad(seed=4).draw(s, x[0]) for s in range(5)])
    spread = 0.1 * (x.flatten(1).amax(1) - x.flatten(1).amin(1))

    def normal(mean, std):  # captum asks for [image 0 sample 0, image 0 sample 1, ...] all at once
        return draws.repeat(2, 1, 1, 1) * spread.repeat_interleave(5).view(-1, 1, 1, 1)

    monkeypatch.setattr(torch, "normal", normal)
    tunnel = captum.NoiseTunnel(captum.Saliency(module))
    expected = theirs(tunnel, x, nt_type="smoothgrad", nt_samples=5, stdevs=1.0, abs=False)
    found = attribute("smoothgrad", net, weights, x, y, samples=5, seed=4)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("name", ["vgg", "residual"])
def test_grad_cam(name):
    net, weights, module, side = pair(name)
    x, y = images(3, side), LABELS[:3]
    layer = "second" if name == "residual" else next(n for n, _ in net.module.named_modules() if n.endswith("relu4_2"))
    oracle = captum.LayerGradCam(module, net.module.get_submodule(layer))  # the same part in both
    expected = theirs(oracle, x, relu_attributions=True)[:, 0]
    found = attribute("grad_cam", net, weights, x, y, layer=layer, upsample=False)
    assert expected.any() and expected.shape[-1] > 1
    torch.testing.assert_close(found, expected, **CLOSE)
    if name == "residual":  # the last ReLU that gives a map is that block's
        torch.testing.assert_close(attribute("grad_cam", net, weights, x, y, upsample=False), expected, **CLOSE)
    large = captum.LayerAttribution.interpolate(expected[:, None], (side, side), "bilinear")[:, 0]
    torch.testing.assert_close(attribute("grad_cam", net, weights, x, y, layer=layer), large, **CLOSE)


@pytest.mark.parametrize(
    "composite, rule",
    [
        ("epsilon", lambda: rules.EpsilonRule(epsilon=1e-6)),
        ("gamma", lambda: rules.GammaRule(gamma=0.25)),
        ("z_plus", lambda: rules.Alpha1_Beta0_Rule()),
    ],
)
def test_lrp_on_a_vgg(composite, rule):
    """captum's z-plus takes inputs for positive, and both it and gamma leave the bias as it is: so images, no bias."""
    net, weights, module = vgg(bias=composite == "epsilon")
    x = images(2, 32).abs()
    y = net(weights, x).argmax(1)  # a positive logit: for negative ones our gamma is the generalised rule
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            part.rule = rule()
        elif isinstance(part, (nn.MaxPool2d, nn.AdaptiveAvgPool2d)):
            part.rule = rules.EpsilonRule(epsilon=1e-12)
    expected = theirs(captum.LRP(module), x, target=y)
    epsilon = 1e-6 if composite == "epsilon" else 1e-9
    found = attribute("lrp", net, weights, x, y, composite=composite, epsilon=epsilon)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert float(expected.abs().max()) > 1e-6
