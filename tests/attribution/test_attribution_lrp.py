"""Relevance against the textbook: every layer as a dense matrix, every rule as a recursion, in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.attribution import attribute
from fedlens.attribution.rules import Composite, Epsilon, Flat, Gamma, Linear, fold, z_plus
from fedlens.core.network import Network
from fedlens.core.rng import generator, seeded
from fedlens.core.tree import Tree
from quality import completeness_error
from test_attribution import LABELS, Residual, images, residual, stirred

EPSILON = 1e-6


# ---- the textbook: one image, one layer at a time, matrices [inputs, outputs] ----------------------------------------


def dense(layer: Callable[[Tensor], Tensor], shape: torch.Size) -> Tensor:
    """The matrix of a linear map, from its action on every unit vector."""
    units = torch.eye(shape.numel(), dtype=torch.float64).view(-1, *shape)
    return layer(units).flatten(1)


def epsilon_rule(a: Tensor, w: Tensor, b: Tensor, relevance: Tensor) -> Tensor:
    z = a @ w + b
    return a * (w @ (relevance / (z + EPSILON * torch.where(z >= 0, 1.0, -1.0))))


def alpha_beta_rule(a: Tensor, w: Tensor, b: Tensor, relevance: Tensor, alpha=2.0, beta=1.0) -> Tensor:
    contribution = a[:, None] * w
    up, down = contribution.clamp(min=0), contribution.clamp(max=0)
    above, below = up.sum(0) + b.clamp(min=0), down.sum(0) + b.clamp(max=0)
    return alpha * (up @ (relevance / (above + EPSILON))) - beta * (down @ (relevance / (below - EPSILON)))


def z_plus_rule(a: Tensor, w: Tensor, b: Tensor, relevance: Tensor) -> Tensor:
    return alpha_beta_rule(a, w, b, relevance, 1.0, 0.0)


def gamma_rule(a: Tensor, w: Tensor, b: Tensor, relevance: Tensor, gamma=0.25) -> Tensor:
    """Textbook where the output is positive; where it is negative, negative contributions grow instead."""
    z, contribution = a @ w + b, a[:, None] * w
    result = torch.zeros_like(a)
    for k in range(len(z)):
        grown = (lambda t: t.clamp(min=0)) if z[k] >= 0 else (lambda t: t.clamp(max=0))
        c = contribution[:, k] + gamma * grown(contribution[:, k])
        below = c.sum() + b[k] + gamma * grown(b[k])
        result += c * relevance[k] / (below + (EPSILON if below >= 0 else -EPSILON))
    return result


def flat_rule(a: Tensor, w: Tensor, b: Tensor, relevance: Tensor, field: Tensor) -> Tensor:
    return field @ (relevance / field.sum(0))


RULES = {"epsilon": epsilon_rule, "gamma": gamma_rule, "alpha_beta": alpha_beta_rule, "z_plus": z_plus_rule}


class Textbook:
    """Residual of test_attribution, backwards by hand. BatchNorm is folded by its own formula, written out here."""

    def __init__(self, module: Residual, first: str, convolution: str, linear: str):
        self.m, self.first, self.convolution, self.linear = module, first, convolution, linear

    def layer(self, conv: nn.Module, norm: nn.Module | None, x: Tensor) -> tuple[Tensor, Callable]:
        """Output, and the way back for relevance."""
        assert isinstance(conv, nn.Conv2d)
        scale, shift = torch.ones(conv.out_channels).double(), torch.zeros(conv.out_channels).double()
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_var is not None and norm.running_mean is not None
            scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            shift = norm.bias - norm.running_mean * scale
        if conv.bias is not None:
            shift = shift + conv.bias * scale
        run = lambda t: F.conv2d(t, conv.weight * scale.view(-1, 1, 1, 1), None, conv.stride, conv.padding)  # noqa: E731
        out = run(x[None])[0]
        b = shift.repeat_interleave(out[0].numel())
        w = dense(run, x.shape)
        field = dense(lambda t: F.conv2d(t, torch.ones_like(conv.weight), None, conv.stride, conv.padding), x.shape)
        is_first = conv is self.m.stem

        def back(relevance: Tensor) -> Tensor:
            rule = self.first if is_first else self.convolution
            if rule == "flat":
                return flat_rule(x.flatten(), w, b, relevance.flatten(), field).view_as(x)
            return RULES[rule](x.flatten(), w, b, relevance.flatten()).view_as(x)

        return out + shift.view(-1, 1, 1), back

    def block(self, part, x: Tensor) -> tuple[Tensor, Callable]:
        z1, back1 = self.layer(part.conv1, part.bn1, x)
        z2, back2 = self.layer(part.conv2, part.bn2, z1.clamp(min=0))
        if isinstance(part.downsample, nn.Identity):
            shortcut, back3 = x, lambda r: r
        else:
            shortcut, back3 = self.layer(part.downsample[0], None, x)
        total = z2 + shortcut

        def back(relevance: Tensor) -> Tensor:
            share = torch.where(total > 0, relevance / torch.where(total > 0, total, 1), 0)  # behind a ReLU
            through = back1(back2(share * z2))
            return through + back3(share * shortcut)

        return total.clamp(min=0), back

    def relevance(self, x: Tensor, y: int) -> tuple[Tensor, Tensor]:
        m = self.m
        z, back_stem = self.layer(m.stem, m.bn, x)
        active = z.clamp(min=0)
        pooled = F.max_pool2d(active[None], 2)[0]
        a, back_first = self.block(m.first, pooled)
        b, back_second = self.block(m.second, a)
        pixels = b[0].numel()
        mean = b.mean((1, 2))
        logits = m.head.weight @ mean + m.head.bias
        r = torch.zeros_like(logits)
        r[y] = logits[y]
        r = RULES[self.linear](mean, m.head.weight.T, m.head.bias, r)
        share = torch.where(mean > 0, r / torch.where(mean > 0, mean, 1), 0)
        r = back_first(back_second(b / pixels * share[:, None, None]))
        winners = torch.zeros_like(active)  # the largest of each 2 x 2 takes all
        for c in range(len(r)):
            for i in range(r.shape[1]):
                for j in range(r.shape[2]):
                    window = active[c, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
                    at = int(window.argmax())
                    winners[c, 2 * i + at // 2, 2 * j + at % 2] = r[c, i, j]
        return back_stem(torch.where(z > 0, winners, 0)), logits


COMPOSITES = {
    "epsilon_plus_flat": ("flat", "z_plus", "epsilon"),
    "epsilon_plus": ("z_plus", "z_plus", "epsilon"),
    **{rule: (rule, rule, rule) for rule in RULES},
}


@pytest.mark.parametrize("norm", [True, False], ids=["BatchNorm", "no norm"])
@pytest.mark.parametrize("composite", COMPOSITES)
def test_residual_network_against_the_recursion(composite, norm):
    net, weights = residual("modules", norm)
    book = Textbook(net.module, *COMPOSITES[composite])
    x, y = images(2), LABELS[1:3]
    found = attribute("lrp", net, weights, x, y, composite=composite)
    with torch.no_grad():
        for i in range(2):
            expected, logits = book.relevance(x[i], int(y[i]))
            torch.testing.assert_close(net(weights, x)[i], logits, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(
                found[i], expected, rtol=1e-10, atol=1e-10 * float(expected.detach().abs().max())
            )
    assert float(found.abs().max()) > 1e-4


@pytest.mark.parametrize("form", ["reused in place", "F.relu"])
def test_the_recursion_holds_however_the_network_is_written(form):
    net, weights = residual(form)
    x, y = images(1), LABELS[1:2]
    expected, _ = Textbook(residual()[0].module, *COMPOSITES["epsilon_plus_flat"]).relevance(x[0], int(y[0]))
    found = attribute("lrp", net, weights, x, y)
    torch.testing.assert_close(
        found[0], expected.detach(), rtol=1e-10, atol=1e-10 * float(expected.detach().abs().max())
    )


def test_rules_can_be_mixed_freely():
    net, weights = residual()
    mine = Composite(first=Gamma(0.25, EPSILON), convolution=Epsilon(EPSILON), linear=z_plus(EPSILON))
    x, y = images(1), LABELS[1:2]
    expected, _ = Textbook(net.module, "gamma", "epsilon", "z_plus").relevance(x[0], int(y[0]))
    found = attribute("lrp", net, weights, x, y, composite=mine)
    torch.testing.assert_close(
        found[0], expected.detach(), rtol=1e-10, atol=1e-10 * float(expected.detach().abs().max())
    )


# ---- properties ------------------------------------------------------------------------------------------------------


def without_bias(width: int = 4) -> tuple[Network, Tree]:
    with seeded(5):
        module = Residual(norm=False, width=width).double()
    for name, value in module.named_parameters():
        if name.endswith("bias"):
            value.data.zero_()
    net = Network(module, precision="fp64")
    return net, net.initial_weights()


def test_relevance_is_conserved():
    """Always under epsilon; under z-plus where every residual branch has some positive contribution, as here."""
    net, weights = without_bias()
    x, y = images(6), LABELS[:6]
    logit = net(weights, x)[torch.arange(6), y]
    for composite, epsilon, most in (
        ("epsilon", 1e-6, 1e-3),
        ("epsilon", 1e-9, 1e-6),
        ("epsilon_plus_flat", 1e-9, 1e-5),
    ):
        maps = attribute("lrp", net, weights, x, y, composite=composite, epsilon=epsilon)
        assert float(completeness_error(maps, logit).max()) < most, composite


@pytest.mark.parametrize("composite", [c for c in COMPOSITES if c != "alpha_beta"])  # units without negative input
def test_relevance_is_conserved_in_a_sequence(composite):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, bias=False)]
            self.body = nn.Sequential(*layers, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())
            self.head = nn.Linear(8, 4, bias=False)

        def features(self, x):
            return self.body(x)

    with seeded(5):
        net = Network(Sequence(), precision="fp64")
    weights, x, y = net.initial_weights(), images(6), LABELS[:6]
    logit = net(weights, x)[torch.arange(6), y]
    maps = attribute("lrp", net, weights, x, y, composite=composite, epsilon=1e-9)
    if composite == "z_plus":  # a logit made of negative parts alone has no positive share
        good = (net.forward(weights, x).features * weights.params["head.weight"][y] > 0).any(1)
        assert good.sum() >= 3
        maps, logit = maps[good], logit[good]
    assert float(completeness_error(maps, logit).max()) < 1e-5


def test_lrp_without_bias_is_input_times_gradient():
    """ALGORITHMS 7: on a bias-free ReLU network with epsilon to zero."""
    net, weights = without_bias()
    x, y = images(4), LABELS[:4]
    lrp = attribute("lrp", net, weights, x, y, composite="epsilon", epsilon=1e-12)
    torch.testing.assert_close(lrp, attribute("input_x_gradient", net, weights, x, y), rtol=1e-6, atol=1e-9)


def test_flat_gives_all_colours_the_same():
    net, weights = residual()
    maps = attribute("lrp", net, weights, images(3), LABELS[:3])
    torch.testing.assert_close(maps, maps[:, :1].expand_as(maps), rtol=1e-12, atol=1e-15)
    other = attribute("lrp", net, weights, images(3), LABELS[:3], composite="epsilon")
    assert not torch.allclose(other, other[:, :1].expand_as(other))


def test_flat_where_pixels_are_zero():
    """Black pixels get their share too: relevance is not input times gradient there."""
    net, weights = residual()
    x = images(1)
    x[:, :, 4:8, 4:8] = 0
    maps = attribute("lrp", net, weights, x, LABELS[:1])
    assert maps[:, :, 4:8, 4:8].abs().min() > 0


def test_pixels_may_be_normalised_inside_the_network():
    class Shifted(Residual):
        def features(self, x):
            return super().features((x - 0.4) / 0.2)

    with seeded(3):
        net = Network(stirred(Shifted()), precision="fp64")
    plain, weights = residual()
    x, y = images(2), LABELS[:2]
    expected = attribute("lrp", plain, weights, (x - 0.4) / 0.2, y)
    torch.testing.assert_close(attribute("lrp", net, weights, x, y), expected)


def test_flat_needs_a_convolution_on_the_image():
    class Enlarged(Residual):
        def features(self, x):
            return super().features(F.interpolate(x, scale_factor=2))

    net = Network(Enlarged())
    with pytest.raises(Exception, match="no convolution reads the image itself"):
        attribute("lrp", net, net.initial_weights(), images(2).float(), LABELS[:2])
    attribute("lrp", net, net.initial_weights(), images(2).float(), LABELS[:2], composite="epsilon")


# ---- folding, norms, attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["conv2d", "grouped", "linear"])
def test_folding_keeps_the_output(kind, affine, bias):
    draw = generator(1)
    width = 6
    if kind == "linear":
        part, norm, x = (
            nn.Linear(5, width, bias),
            nn.BatchNorm1d(width, affine=affine),
            torch.randn(4, 5, generator=draw),
        )
        layer = Linear(F.linear, part.weight, part.bias, (), {})
    else:
        groups = 2 if kind == "grouped" else 1
        part = nn.Conv2d(4, width, 3, 2, 1, groups=groups, bias=bias)
        norm, x = nn.BatchNorm2d(width, affine=affine, eps=1e-3), torch.randn(4, 4, 9, 9, generator=draw)
        layer = Linear(F.conv2d, part.weight, part.bias, (part.stride, part.padding), {"groups": groups})
    part, norm, x = part.double(), norm.double().eval(), x.double()
    layer = layer._replace(weight=part.weight, bias=part.bias)
    with torch.no_grad():
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.uniform_(-1, 1, generator=draw)
        norm.running_var.uniform_(0.1, 2, generator=draw)
        if affine:
            norm.weight.uniform_(-1, 1, generator=draw)
            norm.bias.uniform_(-1, 1, generator=draw)
        before = [v.clone() for v in (*part.parameters(), *norm.state_dict().values())]
        one = fold(layer, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
        torch.testing.assert_close(one(x, one.weight, one.bias), norm(part(x)), rtol=1e-12, atol=1e-12)
    after = (*part.parameters(), *norm.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_output_of_a_layer_used_twice():
    """A convolution that goes to a BatchNorm and also past it gets its rule in both places."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4)
            self.bn.bias.data.uniform_(-1, 1)

        def features(self, x):
            z = self.conv(x)
            return (torch.relu(self.bn(z)) + torch.relu(z)).mean((2, 3))

    class Apart(nn.Module):
        def __init__(self, twice: Twice):
            super().__init__()
            self.conv1, self.conv2, self.bn, self.head = twice.conv, nn.Conv2d(3, 4, 3), twice.bn, twice.head
            self.conv2.load_state_dict(twice.conv.state_dict())

        def features(self, x):
            return (torch.relu(self.bn(self.conv1(x))) + torch.relu(self.conv2(x))).mean((2, 3))

    with seeded(0):
        module = Twice()
        nets = [Network(m, precision="fp64") for m in (module, Apart(module))]
    x, y = images(2), LABELS[:2]
    for composite in COMPOSITES:
        a, b = (attribute("lrp", n, n.initial_weights(), x, y, composite=composite) for n in nets)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_group_norm_with_its_spread_held_constant():
    """Ali et al., 2022: the norm is then an affine layer, and conserves what its shift does not take."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4 * 9, 3, bias=False)

        def features(self, x):
            return self.norm(x).flatten(1)

    with seeded(0):
        net = Network(Grouped(), precision="fp64")
    weights = net.initial_weights()
    weights.params["norm.weight"].uniform_(0.5, 1.5, generator=generator(1))
    x = images(1, side=3, channels=4)
    rows = x.view(2, -1)
    centre = torch.eye(18, dtype=torch.float64) - 1 / 18
    spread = (rows.var(1, correction=0) + 1e-5).sqrt()
    w = torch.block_diag(*[centre / s for s in spread]) * weights.params["norm.weight"].repeat_interleave(9)
    b = weights.params["norm.bias"].repeat_interleave(9)
    logits = net(weights, x)[0]
    relevance = epsilon_rule(
        x.flatten() @ w + b, weights.params["head.weight"].T, torch.zeros(3), logits * torch.eye(3)[1]
    )
    expected = epsilon_rule(x.flatten(), w, b, relevance)
    found = attribute("lrp", net, weights, x, 1, target="given", composite="epsilon")
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.sum(), logits[1], rtol=1e-4, atol=0)  # the shift is zero here


def test_layer_norm_is_one_group():
    class Norm(nn.Module):
        def __init__(self, norm: nn.Module):
            super().__init__()
            self.norm, self.head = norm, nn.Linear(4 * 9, 3)

        def features(self, x):
            return self.norm(x).flatten(1)

    maps = []
    for norm in (nn.GroupNorm(1, 4), nn.LayerNorm([4, 3, 3])):
        with seeded(0):
            net = Network(Norm(norm), precision="fp64")
        maps.append(attribute("lrp", net, net.initial_weights(), images(2, side=3, channels=4), 1, target="given"))
    torch.testing.assert_close(*maps)


def test_what_is_joined_to_positive_maps_may_be_negative():
    """z-plus takes a short cut where inputs cannot be negative; a constant beside them must end it."""

    class Joined(nn.Module):
        def __init__(self, short_cut: bool):
            super().__init__()
            self.a, self.b, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(5, 4, 3), nn.Linear(4, 4)
            self.plane, self.short_cut = nn.Parameter(torch.full((1, 1, 10, 10), -1.0)), short_cut

        def features(self, x):
            z = torch.relu(self.a(x))
            z = torch.cat([z, self.plane.expand(len(x), -1, -1, -1)], 1)
            if not self.short_cut:
                z = z + 0 * self.plane  # an addition of unknown sign
            return torch.relu(self.b(z)).mean((2, 3))

    maps = []
    for short_cut in (True, False):
        with seeded(0):
            net = Network(Joined(short_cut), precision="fp64")
        maps.append(attribute("lrp", net, net.initial_weights(), images(2), LABELS[:2]))
    torch.testing.assert_close(*maps, rtol=1e-12, atol=1e-15)


def test_attention_weights_count_as_constants():
    """Ali et al., 2022: with the attention frozen at its value, the rest is a network of plain layers."""

    class Attention(nn.Module):
        def __init__(self, way: str):
            super().__init__()
            self.conv, self.q, self.k = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.v, self.head = nn.Conv2d(4, 4, 1), nn.Linear(4, 4)
            self.way, self.frozen = way, None

        def features(self, x):
            x = torch.relu(self.conv(x))
            q, k, v = (part(x).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))
            if self.way == "frozen":
                return (self.frozen @ v).mean(1)
            if self.way == "fused":
                return F.scaled_dot_product_attention(q, k, v).mean(1)
            attention = (q @ k.transpose(1, 2) / 2).softmax(-1)
            self.frozen = attention.detach()
            return (attention @ v).mean(1)

    x, y = images(2, side=6), LABELS[:2]
    maps = {}
    with seeded(0):
        nets = {"written out": Network(Attention("written out"), precision="fp64")}
    weights = nets["written out"].initial_weights()
    for way in ("written out", "fused", "frozen"):
        net = Network(Attention(way), precision="fp64")
        if way == "frozen":
            nets["written out"](weights, x)
            constant, net.module.frozen = nets["written out"].module.frozen, None
            one = []
            for i in range(len(x)):  # the frozen value belongs to one batch: one image at a time
                net.module.frozen = constant[i : i + 1]
                one.append(attribute("lrp", net, weights, x[i : i + 1], y[i : i + 1]))
            maps[way] = torch.cat(one)
        else:
            maps[way] = attribute("lrp", nets.setdefault(way, net), weights, x, y)
    torch.testing.assert_close(maps["written out"], maps["frozen"], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(maps["fused"], maps["frozen"], rtol=1e-8, atol=1e-12)


def test_smooth_activations_pass_relevance_on():
    """In a chain of one unit per layer all of the logit must arrive, whatever the activation between."""

    class Chain(nn.Module):
        def __init__(self, act: nn.Module):
            super().__init__()
            self.a, self.act, self.head = nn.Linear(1, 1, bias=False), act, nn.Linear(1, 1, bias=False)

        def features(self, x):
            return self.act(self.a(x))

    for act in (nn.LeakyReLU(0.2), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.ELU(), nn.Hardswish(), nn.ReLU6(), nn.PReLU()):
        with seeded(1):
            net = Network(Chain(act), precision="fp64")
        weights, x = net.initial_weights(), torch.tensor([[1.5], [-0.7]], dtype=torch.float64)
        found = attribute("lrp", net, weights, x, 0, target="given", composite="epsilon", epsilon=1e-9)
        torch.testing.assert_close(found, net(weights, x), rtol=1e-6, atol=1e-9)


def test_flat_is_not_a_rule_for_values():
    assert isinstance(Composite(Flat(), z_plus(), Epsilon()).first, Flat)
