"""Layer saliency and channel gradients against slow loops that keep every map, and a network small enough for paper."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fedlens.attribution import ChannelTaps, attribute, channel_gradients, layer_names, layer_saliency
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import seeded
from fedlens.core.tree import Tree
from fedlens.models import MODELS
from test_attribution import LABELS, Residual, images, residual

# ---- slow: one image, every map kept, the guided rule applied step by step -------------------------------------------


def guided_maps(module: Residual, x: Tensor, y: int, guided: bool, tap: str) -> list[tuple[Tensor, Tensor]]:
    """(gradient, activation) at every tap of one image, in the order they run; the way back is walked by hand."""
    kept: list[tuple[str, Tensor, Tensor]] = []  # kind, input, output

    def seen(kind: str, part, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = part(x)
        kept.append((kind, x, out))
        return out.detach()

    def block(part, x: Tensor) -> Tensor:
        z = seen("bn", part.bn1, seen("conv", part.conv1, x))
        z = seen("bn", part.bn2, seen("conv", part.conv2, seen("relu", torch.relu, z)))
        is_plain = isinstance(part.downsample, nn.Identity)
        shortcut = x if is_plain else seen("conv shortcut", part.downsample, x)
        kept.append(("add" if is_plain else "add shortcut", z, shortcut))
        return seen("relu", torch.relu, z + shortcut)

    m = module
    z = seen("bn", m.bn, seen("conv", m.stem, x[None]))
    z = seen("pool", m.pool, seen("relu", torch.relu, z))
    z = block(m.second, block(m.first, z))
    logits = seen("head", lambda t: m.head(t.mean((2, 3))), z)
    g = torch.zeros_like(logits)
    g[0, y] = 1
    found: list[tuple[Tensor, Tensor]] = []
    pending: Tensor | None = None  # what the shortcut adds where its block began
    after_first_conv = 0
    for kind, value, out in reversed(kept):
        if kind.startswith("add"):
            pending, after_first_conv = g, 2
            continue
        if kind == "conv shortcut":
            assert pending is not None
            found += [(pending, out.detach())] if tap == "conv" else []
            pending = torch.autograd.grad(out, value, pending)[0]
            continue
        if kind == ("conv" if tap == "conv" else "relu"):
            found.append((g, out.detach()))
        is_guided = kind == "relu" and guided
        g = g * (value > 0) * (g > 0) if is_guided else torch.autograd.grad(out, value, g)[0]
        if kind == "conv" and pending is not None:
            after_first_conv -= 1
            if after_first_conv == 0:
                g, pending = g + pending, None
    return found[::-1]


def slow_saliency(module: Residual, x: Tensor, y: Tensor, guided=True, times_activation=True, norm="l2", tap="conv"):
    rows = []
    for image, label in zip(x, y, strict=True):
        row = []
        for g, out in guided_maps(module, image, int(label), guided, tap):
            total = torch.zeros(out.shape[2:], dtype=torch.float64)
            for c in range(out.shape[1]):
                total += g[0, c] * (out[0, c].clamp(min=0) if times_activation else 1)
            mean = total / out.shape[1]
            l2 = float(sum(float(v) ** 2 for v in mean.flatten())) ** 0.5
            row.append({"l2": l2, "sqrt_l2": l2**0.5, "l2sq": l2**2, "l1": float(mean.abs().sum())}[norm])
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("tap", ["conv", "relu"])
@pytest.mark.parametrize("norm", ["l2", "sqrt_l2", "l1", "l2sq"])
def test_layer_saliency_against_the_slow_loop(norm, tap):
    net, weights = residual()
    x, y = images(3), LABELS[1:4]
    for guided, times_activation in ((True, True), (True, False), (False, True)):
        options = dict(guided=guided, times_activation=times_activation, norm=norm, tap=tap)
        found = layer_saliency(net, weights, x, y, **options)
        expected = slow_saliency(net.module, x, y, **options)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    assert layer_names(net, weights, x)[:3] == ["stem", "first.conv1", "first.conv2"]
    assert len(layer_names(net, weights, x, tap="relu")) == 5


def test_two_layers_on_paper():
    """One image of 1 x 1, conv 2 -> 2, ReLU, conv 2 -> 1, ReLU, logit 3 h."""

    class Paper(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 1, bias=False), nn.Conv2d(2, 2, 1, bias=False)
            self.r, self.s = nn.ReLU(), nn.ReLU()
            self.head = nn.Linear(2, 2, bias=False)

        def features(self, x):
            return self.s(self.b(self.r(self.a(x)))).flatten(1)

    net = Network(Paper(), precision="fp64")
    weights = net.initial_weights()
    for name, value in (
        ("a", [[1.0, 1.0], [2.0, -1.0]]),
        ("b", [[1.0, -2.0], [1.0, 1.0]]),
        ("head", [[3.0, -1.0], [0.0, 1.0]]),
    ):
        weights.params[f"{name}.weight"].copy_(torch.tensor(value).view(weights.params[f"{name}.weight"].shape))
    x = torch.tensor([2.0, 1.0], dtype=torch.float64).view(1, 2, 1, 1)
    # a: (3, 3); both active. b: (3 - 6, 3 + 3) = (-3, 6); only the second is active. Logit 0: 3 * 0 - 6 = -6.
    # At b's output: gradient (3, -1) meets the ReLU: (3 with z = -3: stopped), (-1 < 0: stopped under the rule).
    found = layer_saliency(net, weights, x, 0, target="given")
    torch.testing.assert_close(found, torch.zeros(1, 2, dtype=torch.float64))
    plain = layer_saliency(net, weights, x, 0, target="given", guided=False)
    # Plain: g at b = (0, -1), times (0, 6) = (0, -6), mean 3. g at a = -(1, 1) through active units: -3, -3, mean 3.
    torch.testing.assert_close(plain, torch.tensor([[3.0, 3.0]], dtype=torch.float64))
    # Logit 1: g at b = (0, 1), (0, 6), mean 3; at a (1, 1) * (3, 3), mean 3: positive everywhere, so guided as plain.
    for guided in (True, False):
        found = layer_saliency(net, weights, x, 1, target="given", guided=guided)
        torch.testing.assert_close(found, torch.tensor([[3.0, 3.0]], dtype=torch.float64))


def test_all_positive_networks_need_no_guide():
    """ALGORITHMS 7: with positive weights and images the guided gradient is the gradient."""
    net, weights = residual("modules", False)
    weights = weights.map(torch.abs)
    x, y = images(3).abs(), LABELS[:3]
    a, b = (attribute(method, net, weights, x, y) for method in ("guided_backprop", "gradient"))
    torch.testing.assert_close(a, b)
    a, b = (layer_saliency(net, weights, x, y, guided=guided) for guided in (True, False))
    torch.testing.assert_close(a, b)


def test_saliency_is_per_image_and_scales_with_the_score():
    net, weights = residual()
    x, y = images(64), LABELS
    whole = layer_saliency(net, weights, x, y, chunk=64)
    for chunk in (1, 7):
        torch.testing.assert_close(layer_saliency(net, weights, x, y, chunk=chunk), whole, rtol=1e-10, atol=1e-14)
    doubled = weights | Tree(params=Tree({n: 2 * weights.params[n] for n in ("head.weight", "head.bias")}))
    torch.testing.assert_close(layer_saliency(net, doubled, x, y), 2 * whole)
    assert (whole >= 0).all()


# ---- channels --------------------------------------------------------------------------------------------------------


def plain_maps(net: Network, weights: Tree, batch: Tree, tap: str, score: str) -> dict[str, tuple[Tensor, Tensor]]:
    """(gradient, map) of PSE's three layers by functional code."""
    p, x, kept = weights.params, batch.x, {}
    for at in (1, 2, 3):
        z = F.conv2d(x, p[f"extractor.conv{at}.weight"], p[f"extractor.conv{at}.bias"], padding=1)
        z.retain_grad() if z.requires_grad else z.requires_grad_()
        a = z.relu()
        a.retain_grad()
        kept[f"extractor.conv{at}"] = z if tap == "conv" else a
        x = F.max_pool2d(a, 2)
    module = net.module
    logits = torch.func.functional_call(
        _Rest(module), {f"m.{n}": v for n, v in weights.params.items() if not n.startswith("extractor")}, (x,)
    )
    scores = logits if score == "logit" else logits.softmax(1)
    (scores.gather(1, batch.y[:, None])[:, 0] * batch.weight).sum().backward()
    return {name: (value.grad, value.detach()) for name, value in kept.items()}


class _Rest(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.m = module

    def forward(self, maps: Tensor) -> Tensor:
        return self.m.head(self.m.embed(self.m.attend(*self.m.project(maps), maps)))


@pytest.mark.parametrize("score", ["logit", "prob"])
@pytest.mark.parametrize("tap", ["relu", "conv"])
def test_channel_gradients_of_the_pse_network(tap, score):
    with seeded(2):
        net = Network(MODELS["pse_net"]().build(4, 3, 32), precision="fp64")
    weights = net.initial_weights()
    batch = Tree(x=images(4, 32), y=LABELS[:4], weight=torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    maps = plain_maps(net, weights, batch, tap, score)
    for cam in ("gradcam", "gradcam++"):
        found = channel_gradients(net, weights, batch, tap=tap, reduce="sum", cam=cam, score=score)
        means = channel_gradients(net, weights, batch, tap=tap, reduce="mean", cam=cam, score=score)
        for layer, (g, out) in maps.items():
            expected = torch.zeros(out.shape[1], dtype=torch.float64)
            for j in range(4):
                for k in range(out.shape[1]):
                    if cam == "gradcam":
                        expected[k] += g[j, k].sum()
                        continue
                    below = 2 * g[j, k] ** 2 + out[j, k].sum() * g[j, k] ** 3
                    alpha = torch.where(g[j, k] != 0, g[j, k] ** 2 / below, 0)
                    expected[k] += (alpha * g[j, k].clamp(min=0)).sum()
            torch.testing.assert_close(found[layer], expected, rtol=1e-8, atol=1e-13)
            torch.testing.assert_close(means[layer], expected / (3 * out[0, 0].numel()), rtol=1e-8, atol=1e-15)
    names = {"extractor.conv1", "extractor.conv2", "extractor.conv3"}
    assert (set(found) == names) if tap == "relu" else (names < set(found))


def test_examples_of_weight_zero_do_not_count():
    net, weights = residual()
    x, y = images(6), LABELS[:6]
    padded = Tree(x=x, y=y, weight=torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64))
    short = Tree(x=x[:4], y=y[:4], weight=torch.ones(4, dtype=torch.float64))
    for tap in ("conv", "relu"):
        a, b = (channel_gradients(net, weights, batch, tap=tap) for batch in (padded, short))
        assert a.keys() == b.keys()
        for layer in a:
            torch.testing.assert_close(a[layer], b[layer], rtol=1e-10, atol=1e-14)


def test_taps_take_a_score_that_mixes_two_networks():
    """As in PSE: features of one model, the score of both; each one's taps are read from the same scores."""
    net, ours = residual()
    theirs = ours.map(lambda t: t * 1.1)
    x = images(3)
    with torch.enable_grad():
        with ChannelTaps(net, ours) as mine:
            a = net.forward(ours, x).features
        with ChannelTaps(net, theirs) as other:
            b = net.forward(theirs, x).features
        score = (a * b).sum()
    found, seen = mine.gradients(score), other.gradients(score)
    assert set(found) == set(seen) == set(layer_names(net, ours, x))
    torch.testing.assert_close(found["first.conv2"], found["first.downsample.0"])  # added before their ReLU
    # With the other side held constant, the same numbers come from a pass of its own.
    with torch.enable_grad(), ChannelTaps(net, ours) as alone:
        score = (net.forward(ours, x).features * b.detach()).sum()
    for layer, value in alone.gradients(score).items():
        torch.testing.assert_close(found[layer], value)


class _Sides(TorchFunctionMode):
    """Notes the sides of the maps that ReLUs get, and does not mind their order."""

    any_order = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ == "relu" and args[0].dim() == 4:
            self.seen.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tap", ["conv", "relu"])
@pytest.mark.parametrize("cam", ["gradcam", "gradcam++"])
def test_pools_run_before_relus_where_a_tap_cannot_tell(tap, cam):
    """The bits are those of the model's own order, and with tap=conv ReLUs get the pooled maps."""
    first = Network(MODELS["pse_net"]().build(10, 3, 16))
    plain, weights = first.copy(), first.initial_weights()
    plain.module.extractor.__class__ = nn.Sequential
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    batch = Tree(x=x, y=LABELS[:4], weight=torch.ones(4))
    with _Sides() as sides:
        found = channel_gradients(first, weights, batch, tap=tap, cam=cam)
    wanted = channel_gradients(plain, weights, batch, tap=tap, cam=cam)
    assert all(torch.equal(found[layer], wanted[layer]) for layer in wanted) and any(map(torch.any, wanted.leaves()))
    assert sides.seen == ([8, 4, 2] if tap == "conv" else [16, 8, 4])


def test_a_step_can_be_recorded():
    """No host reads and no shapes that depend on values: the pass runs on tensors that have none."""
    net, weights = residual()
    x, y = images(4), LABELS[:4]
    batch = Tree(x=x, y=y, weight=torch.ones(4, dtype=torch.float64))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, seen = (tree.map(mode.from_tensor) for tree in (weights, batch))
        for cam in ("gradcam", "gradcam++"):
            for tap in ("conv", "relu"):
                found = channel_gradients(net, fake, seen, tap=tap, cam=cam)
                assert all(value.shape == (len(fake.params[f"{layer}.weight"]),) for layer, value in found.items())


def test_bad_input():
    net, weights = residual()
    x, y = images(2), LABELS[:2]
    batch = Tree(x=x, y=y, weight=torch.ones(2))
    for options, message in (
        (dict(norm="l3"), "norm=l3 is not known"),
        (dict(tap="relus"), "did you mean 'relu'"),
        (dict(target="all", score="prob"), "always one"),
    ):
        with pytest.raises(BadInput, match=message):
            layer_saliency(net, weights, x, y, **options)
    for options, message in ((dict(cam="gradcamm"), "did you mean"), (dict(reduce="men"), "did you mean 'mean'")):
        with pytest.raises(BadInput, match=message):
            channel_gradients(net, weights, batch, **options)

    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 4)

        def features(self, x):
            return torch.relu(self.conv(torch.relu(self.conv(x)))).mean((2, 3))

    twice = Network(Reused(), precision="fp64")
    with pytest.raises(BadInput, match="conv runs twice in one pass"):
        channel_gradients(twice, twice.initial_weights(), batch)
    assert layer_saliency(twice, twice.initial_weights(), x, y).shape == (2, 2)  # a row per call is no trouble
    with seeded(0):
        mlp = Network(MODELS["mlp"]().build(4, 3, 12), precision="fp64")
    with pytest.raises(BadInput, match="need a convolution"):
        channel_gradients(mlp, mlp.initial_weights(), batch)
    with pytest.raises(BadInput, match="needs a convolution"):
        layer_saliency(mlp, mlp.initial_weights(), x, y)
