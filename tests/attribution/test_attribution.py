"""The verb itself: targets, scores, pieces, any module a user may bring, nothing left behind, bad input refused."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.attribution import METHODS, Lrp, attribute, channel_gradients, layer_names, layer_saliency
from fedlens.attribution.attribute import SmoothGrad
from fedlens.attribution.inputs import Inputs, prepare
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import generator, seeded
from fedlens.core.tree import Tree
from fedlens.models import MODELS


class Block(nn.Module):
    """A residual block as people write it: `relu` says how."""

    def __init__(self, inputs: int, width: int, stride: int, relu: str = "modules", norm: bool = True):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=not norm)
        self.bn1 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=not norm)
        self.bn2 = nn.BatchNorm2d(width) if norm else nn.Identity()
        fits = stride == 1 and inputs == width
        self.downsample = nn.Identity() if fits else nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False))
        self.kind = relu
        if relu == "modules":
            self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        elif relu.startswith("reused"):
            self.relu = nn.ReLU(inplace=relu == "reused in place")

    def activate(self, x: Tensor, which: int) -> Tensor:
        if self.kind == "modules":
            return getattr(self, f"relu{which}")(x)
        if self.kind.startswith("reused"):
            return self.relu(x)
        forms = {"F.relu": F.relu, "torch.relu": torch.relu, "method": Tensor.relu, "relu_": Tensor.relu_}
        forms |= {"clamp": lambda x: x.clamp(min=0), "F in place": lambda x: F.relu(x, inplace=True)}
        return forms[self.kind](x)

    def forward(self, x: Tensor) -> Tensor:
        out = self.activate(self.bn1(self.conv1(x)), 1)
        out = self.bn2(self.conv2(out))
        if self.kind.endswith("in place"):
            out += self.downsample(x)
        else:
            out = out + self.downsample(x)
        return self.activate(out, 2)


class Residual(nn.Module):
    """Stem, a block that halves, a block that keeps the size, mean, linear."""

    def __init__(self, relu: str = "modules", norm: bool = True, classes: int = 4, width: int = 4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=not norm)
        self.bn = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.first = Block(width, 2 * width, 2, relu, norm)
        self.second = Block(2 * width, 2 * width, 1, relu, norm)
        self.head = nn.Linear(2 * width, classes)

    def features(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn(self.stem(x))))
        return self.second(self.first(x)).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def stirred(module: nn.Module, seed: int = 0) -> nn.Module:
    """With running statistics, scales and shifts that are neither zero nor one."""
    draw = generator(seed)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            for value, low, high in (
                (part.weight, 0.5, 1.5),
                (part.bias, -0.5, 0.5),
                (part.running_mean, -0.3, 0.3),
                (part.running_var, 0.5, 2.0),
            ):
                assert value is not None
                value.data.copy_(torch.rand(value.shape, generator=draw) * (high - low) + low)
    return module


@functools.cache
def residual(relu: str = "modules", norm: bool = True) -> tuple[Network, Tree]:
    """In double precision; the same weights whatever the form of the ReLUs."""
    with seeded(3):
        net = Network(stirred(Residual(relu, norm)), precision="fp64")
    return net, net.initial_weights()


def images(count: int, side: int = 12, channels: int = 3, seed: int = 7) -> Tensor:
    return torch.randn(count, channels, side, side, generator=generator(seed), dtype=torch.float64)


LABELS = torch.arange(64) % 4
GRADIENT_METHODS = [m for m in METHODS if m != "score_cam"]


# ---- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_maps_do_not_depend_on_the_batch(method):
    """Sizes 1, 7 and 16 at a time, and other company, give the same map."""
    net, weights = residual()
    x, y = images(16), LABELS[:16]
    whole = attribute(method, net, weights, x, y, chunk=16)
    for chunk in (1, 7):
        torch.testing.assert_close(attribute(method, net, weights, x, y, chunk=chunk), whole, rtol=1e-9, atol=1e-12)
    alone = attribute(method, net, weights, x[5:6], y[5:6])
    torch.testing.assert_close(alone[0], whole[5], rtol=1e-9, atol=1e-12)
    reversed_ = attribute(method, net, weights, x.flip(0), y.flip(0))
    torch.testing.assert_close(reversed_.flip(0), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("score", ["logit", "logprob", "prob"])
@pytest.mark.parametrize("target", ["true", "predicted", "given", "all"])
def test_targets_and_scores_by_autograd(target, score):
    net, weights = residual()
    x, y = images(5), LABELS[:5]
    if (target, score) == ("all", "prob"):
        with pytest.raises(BadInput, match="always one"):
            attribute("gradient", net, weights, x, y, target=target, score=score)
        return
    found = attribute("gradient", net, weights, x, y, target=target, score=score)
    for i in range(len(x)):  # one image at a time
        leaf = x[i : i + 1].clone().requires_grad_()
        logits = net(weights, leaf)[0]
        values = {"logit": logits, "logprob": logits.log_softmax(0), "prob": logits.softmax(0)}[score]
        value = {"all": values.sum(), "predicted": values[int(logits.argmax())]}.get(target, values[int(y[i])])
        value.backward()
        assert leaf.grad is not None
        torch.testing.assert_close(found[i], leaf.grad[0], rtol=1e-10, atol=1e-13)


def test_given_targets_may_weigh_classes_or_be_one_number():
    net, weights = residual()
    x, y = images(3), LABELS[:3]
    one = [attribute("lrp", net, weights, x, c, target="given") for c in range(4)]
    both = torch.zeros(3, 4)
    both[:, 1], both[:, 3] = 1, 0.5
    mixed = attribute("gradient", net, weights, x, both, target="given")
    single = [attribute("gradient", net, weights, x, c, target="given") for c in range(4)]
    torch.testing.assert_close(mixed, single[1] + 0.5 * single[3])
    true = attribute("lrp", net, weights, x, y)
    for i, c in enumerate(y):
        torch.testing.assert_close(true[i], one[int(c)][i])


def test_integrated_gradients_of_a_polynomial_are_exact():
    """score = sum of w x^2: the integral of 2 w t x^2 dt is w x^2; the midpoint rule is exact for linear integrands."""

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(12, 2, bias=False)

        def features(self, x):
            return x.flatten(1) ** 2

    with seeded(0):
        net = Network(Square(), precision="fp64")
    weights, x = net.initial_weights(), images(3, side=2)
    expected = (weights.params["head.weight"][1] * x.flatten(1) ** 2).view_as(x)
    for rule in ("midpoint", "legendre"):
        found = attribute("integrated_gradients", net, weights, x, 1, target="given", rule=rule, steps=3)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    right = attribute("integrated_gradients", net, weights, x, 1, target="given", rule="right", steps=4)
    torch.testing.assert_close(right, expected * (1 + 2 + 3 + 4) / 16 * 2)


def test_integrated_gradients_add_up_to_the_change():
    net, weights = residual()
    x, y = images(4), LABELS[:4]
    baseline = images(1, seed=8)[0]
    rows = torch.arange(4)
    change = net(weights, x)[rows, y] - net(weights, baseline[None])[0, y]
    errors = []
    for steps in (10, 100, 1000):
        found = attribute("integrated_gradients", net, weights, x, y, steps=steps, baseline=baseline)
        errors.append(float((found.flatten(1).sum(1) - change).abs().max()))
    assert errors[2] < 5e-3 * float(change.abs().max()) and errors[2] < errors[0]  # ReLU's kinks: first order


def test_smoothgrad_is_the_mean_over_its_draws():
    net, weights = residual()
    x, y = images(3), LABELS[:3]
    method = SmoothGrad(samples=4, noise=0.2, seed=5)
    spread = 0.2 * (x.flatten(1).amax(1) - x.flatten(1).amin(1)).view(-1, 1, 1, 1)
    by_hand = [attribute("gradient", net, weights, x + spread * method.draw(s, x[0]), y) for s in range(4)]
    found = attribute("smoothgrad", net, weights, x, y, samples=4, noise=0.2, seed=5)
    torch.testing.assert_close(found, torch.stack(by_hand).mean(0), rtol=1e-10, atol=1e-13)
    assert not torch.equal(found, attribute("smoothgrad", net, weights, x, y, samples=4, noise=0.2, seed=6))
    draws = torch.stack([SmoothGrad().draw(s, x[0]) for s in range(50)])
    assert abs(float(draws.mean())) < 0.03 and abs(float(draws.std()) - 1) < 0.03


def slow_cam(net: Network, weights: Tree, image: Tensor, y: int, method: str) -> Tensor:
    """Of the last block's maps, one channel at a time."""
    kept: list[Tensor] = []
    handle = net.module.second.register_forward_hook(lambda part, args, out: kept.append(out))
    try:
        logit = net(weights, image[None].clone().requires_grad_())[0, y]
    finally:
        handle.remove()
    maps = kept[0]
    g, a = torch.autograd.grad(logit, maps)[0][0], maps.detach()[0]
    cam = torch.zeros_like(a[0])
    if method == "grad_cam_pp":
        for k in range(len(a)):
            weight = 0.0
            for i in range(a.shape[1]):
                for j in range(a.shape[2]):
                    below = 2 * float(g[k, i, j]) ** 2 + float(a[k].sum()) * float(g[k, i, j]) ** 3
                    alpha = float(g[k, i, j]) ** 2 / below if below else 0.0
                    weight += alpha * max(float(g[k, i, j]), 0)
            cam += weight * a[k]
        return cam.clamp(min=0)
    empty = net(weights, torch.zeros_like(image)[None])[0, y]
    scores = []
    for k in range(len(a)):
        large = F.interpolate(a[k][None, None], image.shape[1:], mode="bilinear", align_corners=False)[0, 0]
        span = large.max() - large.min()
        mask = (large - large.min()) / span if span > 0 else torch.zeros_like(large)
        scores.append(net(weights, (image * mask)[None])[0, y] - empty)
    for k, share in enumerate(torch.stack(scores).softmax(0)):
        cam += share * a[k]
    return cam.clamp(min=0)


@pytest.mark.parametrize("method", ["grad_cam_pp", "score_cam"])
def test_cams_that_no_oracle_has(method):
    net, weights = residual()
    x, y = images(3), LABELS[:3]
    found = attribute(method, net, weights, x, y, upsample=False, chunk=5)
    for i in range(3):
        with torch.enable_grad():
            expected = slow_cam(net, weights, x[i], int(y[i]), method).detach()
        torch.testing.assert_close(found[i], expected, rtol=1e-9, atol=1e-12)
        assert expected.any()


def test_randomised_weights_change_the_maps():
    net, weights = residual()
    x, y = images(4), LABELS[:4]
    with seeded(99):
        other = Network(stirred(Residual(), seed=99), precision="fp64").initial_weights()
    for method in METHODS:
        a, b = (attribute(method, net, w, x, y).flatten(1) for w in (weights, other))
        alike = F.cosine_similarity(a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True))
        assert float(alike.abs().mean()) < 0.9, method


# ---- any module ------------------------------------------------------------------------------------------------------

FORMS = ["F.relu", "torch.relu", "method", "relu_", "clamp", "F in place", "reused", "reused in place"]


@pytest.mark.parametrize("norm", [True, False], ids=["BatchNorm", "no norm"])
@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_a_relu_gives_the_same_maps(form, norm):
    net, weights = residual("modules", norm)
    other, same = residual(form, norm)
    assert all(torch.equal(weights.params[n], same.params[n]) for n in weights.params)
    x, y = images(3), LABELS[:3]
    for method in METHODS:
        expected = attribute(method, net, weights, x, y)
        torch.testing.assert_close(attribute(method, other, same, x, y), expected, rtol=1e-9, atol=1e-12)
    for tap in ("conv", "relu"):
        expected = layer_saliency(net, weights, x, y, tap=tap)
        assert expected.shape == (3, 6 if tap == "conv" else 5)
        torch.testing.assert_close(layer_saliency(other, same, x, y, tap=tap), expected, rtol=1e-9, atol=1e-12)


class Statement(nn.Module):
    """Changes a tensor in place and goes on under its old name."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 4)

    def features(self, x):
        x = self.conv(x)
        x.relu_()
        return x.mean((2, 3))


def test_in_place_statements_are_refused_by_name():
    with seeded(0):
        net = Network(Statement())
    with pytest.raises(BadInput, match=r"changes a tensor in place .* write x = relu\(x\)"):
        attribute("guided_backprop", net, net.initial_weights(), images(2).float(), LABELS[:2])


@pytest.mark.parametrize("name", [n for n in MODELS if n != "custom"])
def test_every_shipped_model(name):
    """All methods run, give finite maps that are not constant, and value and relevance are the network's own."""
    size = 32
    with seeded(0):
        net = Network(MODELS[name]().build(10, 3, size))
    weights = net.initial_weights()
    x, y = images(2, size).float(), torch.tensor([3, 8])
    before = net(weights, x)
    for method in GRADIENT_METHODS:
        options = {"steps": 2} if method == "integrated_gradients" else {"samples": 2} if method == "smoothgrad" else {}
        if "cam" in method and name == "mlp":
            with pytest.raises(BadInput, match="needs a convolution"):
                attribute(method, net, weights, x, y)
            continue
        maps = attribute(method, net, weights, x, y, **options)
        assert maps.shape == (x[:, 0].shape if "cam" in method else x.shape) and maps.isfinite().all()
        assert "cam" in method or float(maps.flatten(1).std(1).min()) > 0, method
    if name != "mlp":
        table = layer_saliency(net, weights, x, y)
        assert table.shape == (2, len(layer_names(net, weights, x))) and (table >= 0).all() and table.isfinite().all()
        batch = Tree(x=x, y=y, weight=torch.ones(2))
        scores = channel_gradients(net, weights, batch, tap="conv")
        assert all(scores[layer].shape == (len(weights.params[f"{layer}.weight"]),) for layer in scores)
    torch.testing.assert_close(net(weights, x), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", [n for n in MODELS if n not in ("custom", "mlp", "cnn", "cnn_small", "cnn2", "pse_net")]
)
def test_lrp_works_with_group_norm(name):
    with seeded(0):
        net = Network(MODELS[name](norm="group").build(10, 3, 32))  # pyright: ignore[reportCallIssue]
    maps = attribute("lrp", net, net.initial_weights(), images(2, 32).float(), torch.tensor([3, 8]))
    assert maps.isfinite().all() and float(maps.flatten(1).std(1).min()) > 0


def test_on_a_gpu_what_is_not_finite_is_refused_at_the_end(monkeypatch):
    """Each look at a number there makes the host wait: one look at the end, the same sentence."""
    with seeded(3):
        net = Network(stirred(Residual("reused in place")))
    weights, x, looks = net.initial_weights(), images(4).float(), []
    expected = attribute("lrp", net, weights, x, LABELS[:4], chunk=1)
    check = Inputs._check
    monkeypatch.setattr(Inputs, "_demand", lambda self, *doubt: self.doubts.append(doubt))
    monkeypatch.setattr(Inputs, "_check", lambda self: looks.append(len(self.doubts)) or check(self))
    assert torch.equal(attribute("lrp", net, weights, x, LABELS[:4], most=1), expected)
    assert looks == [8]  # of four images and of four outputs
    x[2, 0, 0, 0] = torch.nan
    with pytest.raises(BadInput, match="image 2 has values that are not finite"):
        attribute("lrp", net, weights, x, LABELS[:4], most=1)
    with pytest.raises(BadInput, match="the network's output is not finite"):
        layer_saliency(net, weights.map(lambda leaf: leaf * torch.nan), images(4).float(), LABELS[:4])


# ---- nothing left behind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True], ids=["", "even when it fails"])
def test_module_weights_mode_hooks_and_gradients_are_untouched(fails):
    with seeded(3):
        module = stirred(Residual("reused in place"))
    module.train()
    before = copy.deepcopy(module.state_dict())
    net = Network(module)
    weights, x = net.initial_weights(), images(2).float()
    own = {n: v.clone() for n, v in net.module.state_dict().items()}
    given, kept = weights.clone(), x.clone()
    if fails:
        x[1, 0, 0, 0] = kept[1, 0, 0, 0] = torch.inf
    for method in METHODS:
        if fails:
            with pytest.raises(BadInput, match="image 1 has values that are not finite"):
                attribute(method, net, weights, x, LABELS[:2])
        else:
            attribute(method, net, weights, x, LABELS[:2])
    if not fails:
        attribute("grad_cam", net, weights, x, LABELS[:2], layer="first")
        layer_saliency(net, weights, x, LABELS[:2])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()) and module.training
    assert all(torch.equal(value, own[name]) for name, value in net.module.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(weights.leaves(), given.leaves(), strict=True))
    assert torch.equal(x, kept) and not x.requires_grad
    for part in (*module.modules(), *net.module.modules()):
        assert not part._forward_hooks and not part._forward_pre_hooks and not part._backward_hooks
    assert all(p.grad is None for p in (*module.parameters(), *net.module.parameters(), *weights.leaves()))
    assert not any(leaf.requires_grad for leaf in weights.leaves())
    assert torch._C._len_torch_function_stack() == 0


def test_works_where_gradients_are_off_and_weights_ask_for_them():
    net, weights = residual()
    x, y = images(2), LABELS[:2]
    training = weights.map(lambda t: t.clone().requires_grad_())
    for method in METHODS:
        expected = attribute(method, net, weights, x, y)
        with torch.no_grad():
            torch.testing.assert_close(attribute(method, net, training, x, y), expected)
            assert not attribute(method, net, training, x, y).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(layer_saliency(net, training, x, y), layer_saliency(net, weights, x, y))
    assert all(leaf.grad is None for leaf in training.leaves())


def test_half_precision_networks_are_asked_in_full():
    with seeded(3):
        module = stirred(Residual())
    net, half = Network(module), Network(module, precision="bf16")
    x = images(2).float()
    for method in ("gradient", "lrp"):
        a, b = (attribute(method, n, n.initial_weights(), x, LABELS[:2]) for n in (net, half))
        torch.testing.assert_close(a, b)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_images_at_a_time_follow_from_their_size():
    with seeded(0):
        net = Network(MODELS["cnn"]().build(10, 3, 32))
        large = Network(Residual())
    small = prepare(net, net.initial_weights(), images(2, 32).float(), None, "predicted", "logit")
    assert 64 <= small.rows <= 1024
    weights = large.initial_weights()
    megapixel = prepare(large, weights, torch.zeros(3, 3, 1024, 1024), None, "predicted", "logit")
    assert megapixel.rows < 5 and next(len(x) for _, x, _ in megapixel.pieces()) <= megapixel.rows
    assert prepare(large, weights, torch.zeros(3, 3, 64, 64), None, "predicted", "logit", chunk=2).rows == 2


def test_many_images_take_no_more_memory_than_few():
    """What a process of its own needs at its worst moment, beyond images and maps."""
    import subprocess
    import sys

    script = """
import resource, sys, torch
torch.set_num_threads(1)
from torch import nn
from fedlens.attribution import attribute, layer_saliency
from fedlens.core.network import Network
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())
        self.head = nn.Linear(16 * 16, 4)
    def features(self, x): return self.body(x)
net = Network(Net()); w = net.initial_weights()
for n in (2_000, 8_000):
    x = torch.rand(n, 3, 16, 16); y = torch.arange(n) % 4
    maps = attribute("lrp", net, w, x, y)
    layer_saliency(net, w, x, y)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(peak - 2 * x.nbytes / 2**20)
    del x, maps
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    few, many = map(float, said.split())
    # 6,000 more images of 3 x 16 x 16 have 300 MB of activations.
    assert many - few < 40, (few, many)


# ---- bad input -------------------------------------------------------------------------------------------------------


class Deaf(nn.Module):
    """Gives no gradient."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 4)

    def features(self, x):
        with torch.no_grad():
            return self.conv(x).relu().mean((2, 3))


class Odd(nn.Module):
    """Has a layer that no rule of LRP is for."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.strange = layer
        self.head = nn.Linear(4, 4)

    def features(self, x):
        z = self.conv(x)
        if isinstance(self.strange, nn.MultiheadAttention):
            return self.strange(z[:, 0], z[:, 1], z[:, 2])[0].mean(1)[:, :4]
        return self.strange(z).mean((2, 3))


class Squared(nn.Module):
    def forward(self, x):
        return x * x


class Product(nn.Module):
    def forward(self, x):
        return (x.flatten(2) @ x.flatten(2).transpose(1, 2))[..., None]


class Quotient(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, *gradients):
        return 2 * gradients[0]


class Hidden(nn.Module):
    def forward(self, x):
        return _Twice.apply(x)


class Normalised(nn.Module):
    def forward(self, x):
        return F.normalize(x)


@pytest.mark.parametrize(
    "layer, what",
    [
        (nn.Softplus(), "softplus"),
        (nn.LocalResponseNorm(2), "local_response_norm"),
        (Squared(), "mul of two things"),
        (Product(), "matmul of two things"),
        (Quotient(), "norm"),
        (Normalised(), "normalize"),
        (nn.MultiheadAttention(10, 1), "multi_head_attention_forward"),
        (nn.Sequential(nn.ReLU(), nn.Softplus()), "softplus"),
    ],
)
def test_lrp_refuses_layers_by_name(layer, what):
    with seeded(0):
        net = Network(Odd(layer))
    with pytest.raises(BadInput, match=rf"strange(\.1)?: LRP has no rule for {what}"):
        attribute("lrp", net, net.initial_weights(), images(2).float(), LABELS[:2])
    assert attribute("gradient", net, net.initial_weights(), images(2).float(), LABELS[:2]).isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(y=torch.tensor([0, 4])), "labels go from 0 to 4, but the network has classes 0 to 3"),
        (dict(y=torch.tensor([-1, 2])), "labels go from -1 to 2"),
        (dict(y=torch.tensor([0, 1, 2])), "one class number for each of 2 images"),
        (dict(y=torch.tensor([0.0, 1.0])), "one class number"),
        (dict(y=None), "target=true needs y"),
        (dict(target="treu"), "target=treu is not known; did you mean 'true'"),
        (dict(score="logits"), "score=logits is not known; did you mean 'logit'"),
        (dict(method="guided"), "method=guided is not known; did you mean 'guided_backprop'"),
        (dict(method="integrated_gradients", step=3), "has no option step; did you mean 'steps'"),
        (dict(method="integrated_gradients", steps=0), "steps=0"),
        (dict(method="integrated_gradients", rule="midpint"), "did you mean 'midpoint'"),
        (dict(method="integrated_gradients", baseline=torch.zeros(3)), "the baseline is"),
        (dict(method="smoothgrad", samples=0), "samples=0"),
        (dict(method="lrp", composite="epsilon_flat"), "composite=epsilon_flat is not known"),
        (dict(method="lrp", epsilon=0), "epsilon=0"),
        (dict(method="lrp", score="prob"), "LRP shares out the logit"),
        (dict(method="lrp", composite="alpha_beta", alpha=1, beta=1), "alpha = 1 \\+ beta"),
        (dict(method="grad_cam", layer="frist"), "layer=frist is not in the network; did you mean 'first'"),
        (dict(method="grad_cam", layer="head"), "layer=head gives no map"),
        (dict(x=torch.zeros(2, 3, 12, 12, dtype=torch.uint8)), "floating point"),
        (dict(chunk=0), "chunk=0"),
        (dict(x=torch.full((2, 3, 12, 12), torch.nan)), "image 0 has values that are not finite"),
    ],
)
def test_bad_input_is_one_clear_sentence(change, message):
    net, weights = residual()
    usual = dict(method="gradient", x=images(2), y=LABELS[:2])
    with pytest.raises(BadInput, match=message) as error:
        asked = usual | change
        attribute(asked.pop("method"), net, weights, asked.pop("x"), asked.pop("y"), **asked)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore")  # TorchScript says that it is old
def test_models_that_cannot_be_asked_are_refused():
    x, y = images(2).float(), LABELS[:2]
    with seeded(0):
        deaf, leaky = Network(Deaf()), Network(Odd(nn.LeakyReLU()))
        loose = Network(Odd(nn.BatchNorm2d(4, track_running_stats=False)))
        linear = Network(Odd(nn.Identity()))
    for method in GRADIENT_METHODS:
        with pytest.raises(BadInput, match=r"output has no gradient .* use method=score_cam"):
            attribute(method, deaf, deaf.initial_weights(), x, y)
    assert attribute("score_cam", deaf, deaf.initial_weights(), x, y).any()
    with pytest.raises(BadInput, match="strange: guided backpropagation is defined for ReLU, not for leaky_relu"):
        layer_saliency(leaky, leaky.initial_weights(), x, y)
    with pytest.raises(BadInput, match="no ReLU"):
        attribute("guided_backprop", leaky, leaky.initial_weights(), x, y)
    with pytest.raises(BadInput, match="strange keeps no running statistics"):
        attribute("gradient", loose, loose.initial_weights(), x, y)
    hidden = Network(Odd(Hidden()))
    with pytest.raises(BadInput, match=r"LRP has no rule for its input, which something unseen made"):
        attribute("lrp", hidden, hidden.initial_weights(), x, y)
    compiled = Odd(nn.Identity())
    compiled.strange = torch.jit.script(nn.ReLU())
    compiled = Network(compiled)
    with pytest.raises(BadInput, match="strange is TorchScript"):
        attribute("guided_backprop", compiled, compiled.initial_weights(), x, y)
    with pytest.raises(BadInput, match="tap=relu needs a ReLU"):
        layer_saliency(linear, linear.initial_weights(), x, y, tap="relu", guided=False)


def test_no_images_give_no_maps():
    net, weights = residual()
    for method in METHODS:
        assert len(attribute(method, net, weights, images(0), LABELS[:0])) == 0
    assert layer_saliency(net, weights, images(0), LABELS[:0]).shape == (0, 6)


def test_a_method_may_be_given_as_a_value():
    net, weights = residual()
    x, y = images(2), LABELS[:2]
    torch.testing.assert_close(
        attribute(Lrp("epsilon"), net, weights, x, y), attribute("lrp", net, weights, x, y, composite="epsilon")
    )
    with pytest.raises(BadInput, match="belong into the method"):
        attribute(Lrp(), net, weights, x, y, composite="epsilon")
