"""Layer graphs, sub-models and the agent that chooses them, each against something slower and plainer."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from decimal import ROUND_HALF_EVEN, Decimal
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from costs import describe_model
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import generator, key, normal, seeded
from fedlens.core.tree import Tree, grad
from fedlens.models import Dropout, model_named
from fedlens.models.model import Classifier
from fedlens.models.vgg import Vgg11
from fedlens.selection import agent as ppo
from fedlens.selection import search as searching
from fedlens.selection.graph import layer_graph
from fedlens.selection.pruning import (
    Choice,
    Costs,
    every,
    kept_count,
    listed,
    masked,
    packed,
    ranked,
    settled,
    sliced,
    unpacked,
)


# ---- networks of all kinds -------------------------------------------------------------------------------------------
class Odd(nn.Module):
    """Two convolutions of six filters, put together by `join`, then a vector."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def features(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.vector(self.join(x, self.second(x)))

    def vector(self, x):
        return x.mean((2, 3))

    def join(self, x, y):
        return F.relu(x + y)


class Added(Odd):
    """A third branch is read before anything is added to it."""

    def join(self, x, y):
        return torch.add(x, y).relu() + y


class Concatenated(Odd):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 4)

    def join(self, x, y):
        return torch.cat([x, y], 1)


class Gated(Odd):
    """Zeros become halves."""

    def join(self, x, y):
        return x * torch.sigmoid(y)


class Shifted(Odd):
    def join(self, x, y):
        return x + y + 1


class PreActivated(Odd):
    """A norm behind a sum makes something of zeros."""

    def __init__(self):
        super().__init__()
        self.later = nn.BatchNorm2d(6)

    def join(self, x, y):
        return F.relu(self.later(x + y))


class Grouped(Odd):
    def __init__(self):
        super().__init__()
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=3)


class GroupNormed(Odd):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 6)


class Plain(Odd):
    """A norm without weights cannot be told to be silent."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6, affine=False)


class Twice(Odd):
    def join(self, x, y):
        return self.second(F.relu(y))


class SharedNorm(Odd):
    def join(self, x, y):
        return F.relu(self.norm(y))


class Viewed(Odd):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6 * 4, 5), nn.ReLU(), nn.Linear(5, 4))

    def vector(self, x):
        x = F.max_pool2d(x, 4)
        return x.reshape(x.size(0), -1)


class Padded(Odd):
    """A shortcut without parameters into more channels."""

    def __init__(self):
        super().__init__()
        self.second = nn.Conv2d(6, 9, 3, padding=1)
        self.head = nn.Linear(9, 4)

    def join(self, x, y):
        return F.relu(y + F.pad(x, (0, 0, 0, 0, 1, 2)))


class Branching(Odd):
    def features(self, x):
        return super().features(x) if x.sum() > 0 else super().features(-x)


ODD = [Odd, Added, Concatenated, Gated, Shifted, PreActivated, Grouped, GroupNormed, Plain, Twice, SharedNorm]
ODD += [Viewed, Padded]
MODELS = {name: model_named(name) for name in ("resnet20", "resnet32", "resnet18", "vgg11", "cnn2", "cnn")}
MODELS["vgg11 with norms"] = Vgg11(norm="batch")


def network(kind: str | type) -> tuple[Network, Tree, int]:
    """In double precision, with statistics and scales that are not those of the first moment; the side of images."""
    size = 8 if isinstance(kind, type) else 32
    with seeded(3):
        net = Network(kind() if isinstance(kind, type) else MODELS[kind].build(4, 3, size), "fp64")
    draw = generator(4)
    weights = net.initial_weights().map(
        lambda leaf: leaf + torch.rand(leaf.shape, generator=draw, dtype=leaf.dtype) / 4
    )
    return net, weights, size


def images(size: int, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=generator(5), dtype=torch.float64)


def choices(net: Network, weights: Tree, size: int, **how) -> Choice:
    layers = layer_graph(net).layers
    return Choice(Costs.of(net, images(size, 1)), layers, ranked(layers, weights), **how)


def silenced(net: Network, weights: Tree, kept: dict[str, int], x: torch.Tensor) -> torch.Tensor:
    """The plain module, with hooks that write zeros over what dropped filters, or the norms behind them, put out."""
    module = copy.deepcopy(net.module).eval()
    values = {**weights.params, **weights.buffers}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        value.data.copy_(values[name])
    for layer in layer_graph(net).layers:
        chosen = torch.tensor([kept[layer.name] >> at & 1 for at in range(layer.filters)], dtype=x.dtype)
        for name in (layer.name, *layer.norms):
            module.get_submodule(name).register_forward_hook(lambda m, i, o, c=chosen: o * c[:, None, None])
    with torch.no_grad():
        return module.head(module.features(x))  # pyright: ignore


@pytest.mark.parametrize("kind", [*MODELS, *ODD], ids=str)
def test_the_smaller_network_predicts_what_the_masked_one_does(kind):
    net, weights, size = network(kind)
    choice = choices(net, weights, size)
    draw = generator(6)
    for _ in range(2):
        ratios = (0.1 + 0.9 * torch.rand(len(choice.layers), generator=draw)).tolist()
        kept, x = choice.kept(ratios), images(size)
        smaller = sliced(net, weights, kept)
        expected = net(masked(weights, kept, choice.costs.graph), x)
        for found in (smaller(x), sliced(net, weights, kept, align=4)(x), silenced(net, weights, kept, x)):
            assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
        assert (smaller(x[:1]) - expected[:1]).abs().max() <= 1e-12 * expected.abs().max()
        assert (net(weights, x) - expected).abs().max() > 1e-6
        counted = describe_model(smaller, 3, size)
        assert counted["flops"] == choice.costs.flops(kept)
        if kind is not PreActivated and kind is not Plain and kind is not SharedNorm:  # a norm that is no layer's own
            assert counted["parameters"] == choice.costs.parameters(kept)


@pytest.mark.parametrize("kind", [*MODELS, *ODD], ids=str)
def test_what_is_computed_anyway_costs_nothing(kind):
    net, weights, size = network(kind)
    choice = choices(net, weights, size)
    costs, kept = choice.costs, choice.kept([0.5] * len(choice.layers))
    more, x = costs.computed(kept), images(size)
    assert all(more[name] & chosen == chosen for name, chosen in kept.items())
    assert (costs.flops(more), costs.parameters(more)) == (costs.flops(kept), costs.parameters(kept))
    assert costs.computed(more) == more
    shapes = [[p.shape for p in sliced(net, weights, each).parameters()] for each in (kept, more)]
    assert shapes[0] == shapes[1]
    smaller = sliced(net, weights, more)
    for layer in costs.graph.layers:  # every one that the smaller network computes
        row = smaller.get_submodule(f"module.{layer.name}").weight  # pyright: ignore
        assert more[layer.name].bit_count() == len(row) and (row != 0).flatten(1).any(1).all()
    expected = net(masked(weights, more, costs.graph), x)
    assert (smaller(x) - expected).abs().max() <= 1e-12 * expected.abs().max()
    joined = any(layer.joins or costs.graph.groups[layer.writes].whole for layer in choice.layers)
    assert (more != kept) == joined


@pytest.mark.parametrize("kind", MODELS)
def test_known_networks_really_shrink(kind):
    net, weights, size = network(kind)
    choice = choices(net, weights, size)
    kept = choice.kept([0.5] * len(choice.layers))
    whole = describe_model(net.module, 3, size)
    assert choice.costs.flops({}) == whole["flops"] and choice.costs.parameters({}) == whole["parameters"]
    assert choice.costs.size("flops", {}) == choice.costs.size("params", {}) == 1
    assert choice.costs.flops(kept) < 0.75 * whole["flops"]
    assert not any(group.whole for group in choice.costs.graph.groups)


def test_silent_channels_fill_up_vectors():
    net, weights, size = network("resnet20")
    choice = choices(net, weights, size)
    kept = choice.kept([0.3] * 19)
    plain, filled = choice.costs.layout(kept), choice.costs.layout(kept, align=8)
    for some, more, group in zip(plain, filled, choice.costs.graph.groups, strict=True):
        assert some & more == some and more.bit_count() in {*range(8, group.size + 1, 8)}
    assert any(more.bit_count() < group.size for more, group in zip(filled, choice.costs.graph.groups, strict=True))


def test_the_graph_of_a_residual_network():
    """Stem, two thin stages of one block each: who feeds whom is written down here by hand."""
    from fedlens.models.resnet import ResidualNetwork, ThinBlock

    with seeded(0):
        graph = layer_graph(Network(ResidualNetwork(ThinBlock, (1, 1, 1), 10, 3, "cifar", "batch", width=16)))
    names = [layer.name for layer in graph.layers]
    blocks = [f"layer{stage}.0.conv{at}" for stage in (1, 2, 3) for at in (1, 2)]
    assert names == ["conv1", *blocks]
    fed = {
        "conv1": set(),
        "layer1.0.conv1": {"conv1"},
        "layer1.0.conv2": {"layer1.0.conv1"},
        "layer2.0.conv1": {"conv1", "layer1.0.conv2"},
        "layer2.0.conv2": {"layer2.0.conv1"},
        "layer3.0.conv1": {"conv1", "layer1.0.conv2", "layer2.0.conv2"},
        "layer3.0.conv2": {"layer3.0.conv1"},
    }
    assert {name: {names[a] for a, b in graph.edges if names[b] == name} for name in names} == fed
    joins = {layer.name for layer in graph.layers if layer.joins}
    assert joins == {"conv1", "layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2"}
    tied = [{layer.name for layer in graph.layers if layer.writes == g} for g in range(len(graph.groups))]
    assert {"conv1", "layer1.0.conv2"} in tied and {"layer2.0.conv2"} in tied
    assert {layer.name: layer.norms for layer in graph.layers}["layer2.0.conv1"] == ("layer2.0.bn1",)


def test_a_network_that_cannot_be_listed_is_refused():
    with seeded(0), pytest.raises(BadInput, match=r"cannot be listed .* must not branch on values"):
        layer_graph(Network(Branching()))


# ---- which filters stay ----------------------------------------------------------------------------------------------
@given(st.integers(1, 512), st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_counts_of_filters(filters, hundredths):
    keep = hundredths / 100
    dropped = (Decimal(100 - hundredths) * filters / 100).quantize(Decimal(1), ROUND_HALF_EVEN)
    assert kept_count(keep, filters) == max(1, filters - int(dropped))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, -2.0]), min_size=2, max_size=12), st.floats(0.05, 1))
@settings(max_examples=100, deadline=None)
def test_the_largest_norms_stay_and_ties_keep_the_first(values, keep):
    with seeded(0):
        net = Network(Classifier(nn.Sequential(nn.Conv2d(1, len(values), 1), nn.Flatten()), nn.Linear(len(values), 2)))
    weights = net.initial_weights()
    weights.params["body.0.weight"] = torch.tensor(values).view(-1, 1, 1, 1)
    layers = layer_graph(net).layers
    choice = Choice(Costs.of(net, torch.zeros(1, 1, 1, 1)), layers, ranked(layers, weights))
    kept = listed(choice.kept([keep])["body.0"])
    order = sorted(range(len(values)), key=lambda at: (-abs(values[at]), at))
    assert kept == sorted(order[: kept_count(keep, len(values))])


def test_the_same_filters_as_torch_prunes():
    net, weights, size = network("cnn2")
    choice = choices(net, weights, size)
    kept = choice.kept([0.5, 0.7])
    for layer, keep in zip(choice.layers, (0.5, 0.7), strict=True):
        conv = nn.Conv2d(layer.inputs, layer.filters, 5).double()
        conv.weight.data.copy_(weights.params[f"{layer.name}.weight"])
        prune.ln_structured(conv, "weight", layer.filters - kept_count(keep, layer.filters), n=2, dim=0)
        assert conv.weight_mask.flatten(1)[:, 0].nonzero().flatten().tolist() == listed(kept[layer.name])


@pytest.mark.parametrize("constraint", ["flops", "params"])
def test_uniform_is_the_largest_ratio_that_fits(constraint):
    net, weights, size = network("resnet20")
    choice = choices(net, weights, size, constraint=constraint, budget=0.7)
    ratios = (max(0.1, 1 - step / 1000) for step in range(1001))
    expected = next(kept for kept in map(lambda r: choice.kept([r] * 19), ratios) if choice.fits(kept))
    assert choice.uniform() == expected
    assert 0.65 < choice.size(expected) <= 0.7


@cache
def choice_of_a_resnet():
    return choices(*network("resnet20"))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.1, 1), min_size=19, max_size=19))
def test_a_spent_budget_takes_as_little_as_it_must(ratios):
    """In the agent's direction: no thousandth less of it would fit, and no layer loses more than the agent said."""
    choice = choice_of_a_resnet()
    wanted = choice.kept(ratios)
    if not choice.fits(wanted):
        ratios = [ratio * 0.6 for ratio in ratios]
        wanted = choice.kept(ratios)
    if choice.fits(wanted):
        shares = (choice.kept([1 - (1 - ratio) * step / 1000 for ratio in ratios]) for step in range(1001))
        kept = choice.spent(ratios)
        assert kept == next(each for each in shares if choice.fits(each))
        assert all(wanted[name] & ~kept[name] == 0 for name in wanted)


def test_a_search_that_spends_its_budget_tries_larger_sub_models():
    choice, seen, agent = scene()
    tried: dict[bool, list[float]] = {}
    for spend in (False, True):
        one = replace(choice, spend=spend)
        episodes = [each for each in searching.explored(seen, agent, one, 40, seed=1) if each.met]
        tried[spend] = [one.size(each.kept) for each in episodes]
    assert len(tried[True]) == len(tried[False]) > 10 and max(tried[True]) <= choice.budget
    assert all(more >= less for less, more in zip(tried[False], tried[True], strict=True))
    assert sum(tried[True]) > sum(tried[False])


def test_smallest_norms_go_first_whatever_their_layer():
    net, weights, size = network("cnn2")
    choice = choices(net, weights, size, budget=0.5)
    kept = {layer.name: every(layer.filters) for layer in choice.layers}
    means = {
        (float(weights.params[f"{layer.name}.weight"][at].pow(2).mean()), layer.name, at): layer
        for layer in choice.layers
        for at in range(layer.filters)
    }
    for _, name, at in sorted(means):
        if choice.size(kept) <= 0.5:
            break
        filters = {layer.name: layer.filters for layer in choice.layers}[name]
        if bin(kept[name]).count("1") > kept_count(0.1, filters):
            kept[name] &= ~(1 << at)
    assert choice.by_norm(weights) == kept


def test_a_budget_that_cannot_be_met_is_refused():
    net, weights, size = network("cnn2")
    with pytest.raises(BadInput, match=r"algorithm.budget=0.2 cannot be met: keep_floor=0.5 .* raise budget or lower"):
        choices(net, weights, size, budget=0.2, floor=0.5).feasible()


@pytest.mark.parametrize("floor", [0.1, 0.0001])
@pytest.mark.parametrize(
    "kind, how, sentence",
    [
        (GroupNormed, {"constraint": "flops"}, "nothing of this network can be cut out; take {params}{all}"),
        (GroupNormed, {"budget": 0.001}, "nothing of this network can be cut out; take {all}"),
        ("cnn2", {"budget": 1e-6}, "one filter in every layer still leaves {left} of the flops; raise budget, {all}"),
        (Odd, {"constraint": "params", "budget": 1e-6}, "one filter in .* {left} of the params; raise budget, {all}"),
    ],
)
def test_advice_helps_where_nothing_can_be_cut(kind, how, sentence, floor):
    net, weights, size = network(kind)
    choice = choices(net, weights, size, floor=floor, **how)
    words = {"params": "algorithm.constraint=params or ", "all": ".*algorithm.selector=all$", "left": r"0\.\d+"}
    with pytest.raises(BadInput, match=sentence.format(**words)):
        choice.feasible()
    if "{params}" in sentence:
        assert replace(choice, constraint="params").feasible()


def test_norms_anew_are_means_over_batches():
    """Of what reaches each norm, by hand for the first; a module that is settled twice does not remember the first."""
    net, weights, size = network("resnet20")
    choice = choices(net, weights, size)
    batches = list(normal(torch.tensor(3), 3, 8, 3, size, size).double())
    module = settled(sliced(net, weights, choice.uniform()), batches)
    conv, norm = (
        next(each for each in module.modules() if isinstance(each, kind)) for kind in (nn.Conv2d, nn.BatchNorm2d)
    )
    seen = [conv(x) for x in batches]
    torch.testing.assert_close(norm.running_mean, torch.stack([y.mean((0, 2, 3)) for y in seen]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([y.var((0, 2, 3)) for y in seen]).mean(0))
    assert not module.training and not norm.training and norm.momentum == 0.1
    again = settled(settled(sliced(net, weights, choice.uniform()), batches[::-1]), [*batches, batches[0][:1]])
    for a, b in zip(module.buffers(), again.buffers(), strict=True):  # one image has no statistics
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    short = settled(sliced(net, weights, choice.uniform()), [batches[0], batches[1][:2]])
    norm = next(each for each in short.modules() if isinstance(each, nn.BatchNorm2d))
    torch.testing.assert_close(norm.running_mean, conv(torch.cat([batches[0], batches[1][:2]])).mean((0, 2, 3)))
    with pytest.raises(RuntimeError):
        settled(short, [batches[0], batches[0][:, :1]])
    assert norm.momentum == 0.1 and not norm.training


def test_a_network_settles_without_dropout_and_writes_nothing():
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.dropout, self.norm = nn.Conv2d(3, 4, 3), Dropout(0.5), nn.BatchNorm2d(4)
            self.head = nn.Linear(4, 2)

        def features(self, x):
            return self.norm(self.dropout(self.first(x))).mean((2, 3))

        def forward(self, x):
            return self.head(self.features(x))

    net = Network(Spread(), "fp64")
    weights, x = net.initial_weights(), images(8)
    seen, before = net.module.first(x), weights.clone()  # pyright: ignore
    found = net.with_batch_statistics(weights, x).buffers
    torch.testing.assert_close(found["norm.running_mean"], seen.mean((0, 2, 3)))
    torch.testing.assert_close(found["norm.running_var"], seen.var((0, 2, 3)))
    assert all(torch.equal(before.buffers[name], weights.buffers[name]) for name in before.buffers)
    assert net.with_batch_statistics(weights, x[:1]) is weights and net.module.norm.momentum == 0.1  # pyright: ignore
    trained = net.forward(weights.clone(), x, train=True, key=torch.tensor(3)).logits
    assert not torch.equal(trained, net(weights, x)) and torch.equal(net(weights, x), net(weights, x))


def test_bits_of_filters():
    net, weights, size = network("cnn2")
    choice = choices(net, weights, size)
    kept = choice.kept([0.5, 0.7])
    flags = [kept[layer.name] >> at & 1 for layer in choice.layers for at in range(layer.filters)]
    assert packed(kept, choice.layers).numpy().tolist() == np.packbits(flags, bitorder="little").tolist()
    assert unpacked(packed(kept, choice.layers), choice.layers) == kept
    assert packed(kept, choice.layers).nbytes == 3  # 6 and 16 filters


# ---- the agent -------------------------------------------------------------------------------------------------------
def scene(kind: str = "resnet20") -> tuple[Choice, ppo.Situation, Tree]:
    net, weights, size = network(kind)
    choice = choices(net, weights, size)
    seen = ppo.situation(choice.costs, choice.layers)
    return choice, seen, ppo.first_agent(7, seen)


def test_an_agent_looks_at_its_neighbours():
    """Messages node by node, in plain loops."""
    _, seen, agent = scene("cnn2")
    weights = agent.weights.map(torch.Tensor.double)
    states = seen.states(torch.tensor([[0.3, 0.9], [1.0, 0.5]], dtype=torch.float64))
    near = {0: [0, 1], 1: [0, 1]}  # the second convolution reads the first, and both look at themselves

    def linear(name, vector):
        return [
            sum(v * float(weights[f"{name}.weight"][i, j]) for i, v in enumerate(vector))
            + float(weights[f"{name}.bias"][j])
            for j in range(weights[f"{name}.bias"].numel())
        ]

    def embedded(who, state):
        rows = [state[i].tolist() for i in near]
        for part in ("near", "far"):
            mixed = [[sum(rows[j][k] for j in near[i]) / 2 for k in range(len(rows[0]))] for i in near]
            rows = [[math.tanh(v) for v in linear(f"{who}.{part}", row)] for row in mixed]
        return [sum(column) / 2 for column in zip(*rows, strict=True)]

    for at, state in enumerate(states):
        hidden = [max(0.0, v) for v in linear("actor.hidden", embedded("actor", state))]
        expected = [math.tanh(v) for v in linear("actor.action", hidden)]
        assert ppo.actions(weights, seen, states)[at].tolist() == pytest.approx(expected, abs=1e-12)
        value = math.tanh(linear("critic.value", embedded("critic", state))[0])
        assert float(ppo.values(weights, seen, states)[at]) == pytest.approx(value, abs=1e-12)


def past(seen: ppo.Situation, weights: Tree, likely_of: Tree | None = None) -> ppo.Experience:
    layers = len(seen.nodes)
    states = seen.states(torch.rand(7, layers, generator=generator(1), dtype=torch.float64))
    middle = ppo.actions(likely_of or weights, seen, states).detach()
    drawn = middle + 0.5 * torch.randn(7, layers, generator=generator(2), dtype=torch.float64)
    rewards = torch.tensor([50.0, 80.0, -100.0, 79.2, 0.0, 60.0, 33.0], dtype=torch.float64)
    return ppo.Experience(states, drawn, ppo.log_probability(middle, drawn), rewards)


def test_the_loss_and_its_gradient_by_hand():
    """One transition after another, with torch's distributions; the old policy is another one, so that clips act."""
    _, seen, agent = scene("cnn2")
    weights = agent.weights.map(torch.Tensor.double)
    before = weights.map(lambda leaf: leaf + 0.03 * torch.rand(leaf.shape, generator=generator(3), dtype=leaf.dtype))
    seen_before = past(seen, weights, before)
    returns = seen_before.returns.tolist()
    average = sum(returns) / 7
    spread = math.sqrt(sum((r - average) ** 2 for r in returns) / 7) + 1e-7
    leaves = weights.map(lambda leaf: leaf.clone().requires_grad_())
    total, clipped = torch.zeros((), dtype=torch.float64), 0
    for t in range(7):
        state, action = seen_before.states[t : t + 1], seen_before.actions[t]
        wanted = (returns[t] - average) / spread
        guess = ppo.values(leaves, seen, state)[0]
        better = wanted - guess.item()
        now = torch.distributions.Normal(ppo.actions(leaves, seen, state)[0], 0.5).log_prob(action).sum()
        ratio = (now - seen_before.likely[t]).exp()
        inside = 0.8 <= ratio.item() <= 1.2
        worse = (
            ratio * better if inside or (ratio.item() - 1) * better < 0 else min(max(ratio.item(), 0.8), 1.2) * better
        )
        clipped += not inside
        total = total - worse / 7 + 0.5 * (guess - wanted) ** 2 / 7
    assert 0 < clipped < 7
    assert ppo.loss(weights, seen, seen_before).item() == pytest.approx(total.item(), abs=1e-12)
    expected = torch.autograd.grad(total, leaves.leaves())
    found = grad(ppo.loss(leaves, seen, seen_before), leaves).leaves()
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= 1e-12
    assert max(float(b.abs().max()) for b in expected) > 1e-3


def test_before_an_update_nothing_is_more_likely_than_it_was():
    _, seen, agent = scene()
    weights = agent.weights.map(torch.Tensor.double)
    known = past(seen, weights)
    now = ppo.log_probability(ppo.actions(weights, seen, known.states), known.actions)
    assert torch.equal((now - known.likely).exp(), torch.ones(7, dtype=torch.float64))


def test_updates_leave_the_agent_they_came_from():
    _, seen, agent = scene("cnn2")
    known = ppo.Experience(*(part.float() for part in past(seen, agent.weights.map(torch.Tensor.double))))
    before = agent.clone()
    after = ppo.updated(agent, seen, known)
    again = ppo.updated(agent, seen, known)
    assert all(torch.equal(a, b) for a, b in zip(agent.leaves(), before.leaves(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after.leaves(), again.leaves(), strict=True))
    assert not torch.equal(after.weights["actor.near.weight"], agent.weights["actor.near.weight"])
    assert float(after.optimizer.steps["actor.action.bias"]) == ppo.EPOCHS


def test_a_head_learns_what_it_would_beside_encoders_that_stay():
    _, seen, agent = scene("cnn2")
    known = ppo.Experience(*(part.float() for part in past(seen, agent.weights.map(torch.Tensor.double))))
    once, head = (ppo.updated(agent, seen, known, 1, learns=learns) for learns in ("all", "head"))
    for name, leaf in head.weights.items():
        encodes = ".near." in name or ".far." in name
        assert torch.equal(leaf, (agent if encodes else once).weights[name])
        assert float(head.optimizer.steps[name]) == float(not encodes)
    assert not torch.equal(head.weights["actor.action.weight"], agent.weights["actor.action.weight"])


def test_returns_are_discounted():
    assert ppo.returns([0.0, 0.0, 80.0]) == pytest.approx([80 * 0.99**2, 80 * 0.99, 80.0])


@pytest.mark.parametrize("seed", range(3))
def test_the_agent_learns_a_made_up_reward_within_forty_updates(seed):
    """-sum (keep - target)^2 over 19 layers, in episodes of one step; judged by what the policy does without noise."""
    _, seen, _ = scene()
    target = torch.tensor([0.3 if at % 2 else 0.8 for at in range(19)])
    agent, rewards = ppo.first_agent(seed, seen), []
    states = seen.states(torch.ones(20, 19))
    for update in range(40):
        middle = ppo.actions(agent.weights, seen, states).detach()
        drawn = middle + 0.5 * normal(torch.tensor(key(seed, update)), *middle.shape)

        def reward(action):
            return -((1 - action.clamp(0, 0.9) - target) ** 2).sum(-1)

        rewards.append(float(reward(middle[0])))
        known = ppo.Experience(states, drawn, ppo.log_probability(middle, drawn), reward(drawn))
        agent = ppo.updated(agent, seen, known)
    assert rewards[0] < -3 and min(rewards[-5:]) > -1


# ---- the search ------------------------------------------------------------------------------------------------------
def by_first_layer(choice: Choice):
    """A judge who likes the first layer whole and does not care for the rest."""
    first = choice.layers[0]
    return lambda tried: [bin(kept[first.name]).count("1") / first.filters for kept in tried]


def test_a_search_keeps_the_best_of_what_fits():
    choice, seen, agent = scene()
    tried: list[dict[str, int]] = []

    def judge(kept):
        tried.extend(kept)
        return by_first_layer(choice)(kept)

    found = searching.search(seen, agent, choice, judge, 30, seed=1)
    assert len(tried) <= 30 and all(choice.size(kept) <= 0.8 for kept in tried)
    scores = by_first_layer(choice)(tried)
    best = [kept for kept, score in zip(tried, scores, strict=True) if score == max(scores)]
    assert found.accuracy == max(scores)
    assert choice.costs.sent(found.kept) == min(choice.costs.sent(kept) for kept in best)
    again = searching.search(seen, agent, choice, by_first_layer(choice), 30, seed=1)
    assert again.kept == found.kept
    assert all(torch.equal(a, b) for a, b in zip(again.agent.leaves(), found.agent.leaves(), strict=True))
    assert searching.search(seen, agent, choice, by_first_layer(choice), 30, seed=2).kept != found.kept
    assert float(found.agent.optimizer.steps["critic.value.bias"]) == 2 * ppo.EPOCHS  # after 20 episodes and after 10


def test_an_agent_that_persists_gets_better():
    choice, seen, agent = scene()
    rewards = []
    for round in range(25):
        found = searching.search(seen, agent, choice, by_first_layer(choice), 20, seed=round)
        agent, rewards = found.agent, [*rewards, found.reward]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 8  # of 100


def test_episodes_end_at_the_budget_or_after_ten_steps():
    choice, seen, agent = scene()
    for episode in searching.explored(seen, agent, choice, 20, seed=3):
        ratios = torch.ones(19)
        for step, (state, action) in enumerate(zip(episode.states, episode.actions, strict=True)):
            assert torch.equal(state[:, -1], ratios) and torch.equal(state[:, :-1], seen.nodes.float())
            ratios = torch.tensor(
                [max(0.1, r * (1 - a)) for r, a in zip(ratios.tolist(), action.clamp(0, 0.9).tolist(), strict=True)]
            )
            fits = choice.fits(choice.kept(ratios.tolist()))
            assert fits == (step == len(episode.states) - 1 and episode.met)
        assert episode.kept == choice.kept(episode.ratios) and episode.rewards == [0.0] * len(episode.states)


def test_without_an_episode_that_fits_the_last_ratios_are_scaled_down(monkeypatch):
    monkeypatch.setattr(searching, "STEPS", 1)
    net, weights, size = network("resnet20")
    choice = choices(net, weights, size, budget=0.15)
    seen = ppo.situation(choice.costs, choice.layers)
    agent = ppo.first_agent(7, seen)
    found = searching.search(seen, agent, choice, lambda tried: pytest.fail("nothing fits"), 4, seed=1)
    assert choice.size(found.kept) <= 0.15 and found.reward == -100 and math.isnan(found.accuracy)
    last = searching.explored(seen, agent, choice, 4, key(1, "wave", 0))[-1].ratios
    factors = (1 - step / 1000 for step in range(1001))
    tried = (choice.kept([max(0.1, ratio * factor) for ratio in last]) for factor in factors)
    assert found.kept == next(kept for kept in tried if choice.fits(kept))


# ---- agents from files -----------------------------------------------------------------------------------------------
def test_agents_travel(tmp_path):
    _, seen, agent = scene()
    other = ppo.first_agent(8, seen)
    ppo.save_agent(other, tmp_path / "agent")
    taken = ppo.pretrained_agent(tmp_path / "agent", agent)
    assert all(torch.equal(taken.weights[name], other.weights[name]) for name in other.weights)
    _, fewer, small = scene("cnn2")
    moved = ppo.pretrained_agent(tmp_path / "agent", small)
    assert torch.equal(moved.weights["actor.far.weight"], other.weights["actor.far.weight"])
    assert torch.equal(moved.weights["actor.action.weight"], small.weights["actor.action.weight"])
    assert ppo.actions(moved.weights, fewer, fewer.states(torch.ones(1, 2))).shape == (1, 2)


def test_files_that_hold_no_agent(tmp_path):
    _, _, agent = scene("cnn2")
    with pytest.raises(BadInput, match=r"algorithm.pretrained=.*nowhere: there is no such file"):
        ppo.pretrained_agent(tmp_path / "nowhere", agent)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BadInput, match="does not hold an agent"):
        ppo.pretrained_agent(tmp_path / "text", agent)
    ppo.save_agent(Tree(weights=Tree(x=torch.ones(2))), tmp_path / "else")
    with pytest.raises(BadInput, match="does not hold an agent that sees what this one sees"):
        ppo.pretrained_agent(tmp_path / "else", agent)
