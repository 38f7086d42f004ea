"""PSE against loops that follow the paper channel by channel, and the properties its parts must have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fedlens.algorithms import PSE, FedAvg, FedPer, FedRep
from fedlens.algorithms.fedper import is_extractor
from fedlens.core.algorithm import Server, Stage
from fedlens.core.batches import Dataset, Federation, plan
from fedlens.core.cohort import Everyone
from fedlens.core.engine import Job, Reply
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import generator, key, seeded
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.lanes import Lanes
from fedlens.engines.sequential import Sequential
from fedlens.models import pse_net
from fedlens.models.pse_net import PseNet
from small import network as small_network
from small import same

TOLERANCE = 1e-12
SEED, BATCH, RATE, MOMENTUM, WEIGHT_DECAY, EPOCHS, ROUNDS = 5, 4, 0.05, 0.5, 1e-3, 2, 2
SIZES = (6, 3, 5)  # 2, 1 and 2 batches an epoch; all of them wrap round
CLASSES, SIDE = 3, 16

Weights = dict[str, Tensor]


def tiny(
    config: PseNet | None = None, widths: tuple[int, ...] = (3, 4, 4), side: int = SIDE, scale: float = 2.0, **how: Any
) -> Network:
    """The network of PSE with few channels, in double precision; weights so large that sums of gradients saturate."""
    with mock.patch.object(pse_net, "WIDTHS", widths), seeded(7), torch.no_grad():
        module = (config or PseNet(count=2, hidden=5)).build(CLASSES, 1, side)
        for parameter in module.parameters():
            parameter *= scale
    return Network(module, **{"precision": "fp64", **how})


def federation(sizes: tuple[int, ...] = SIZES, side: int = SIDE, classes: int = CLASSES) -> Federation:
    draw, total = generator(3), sum(sizes)
    y = torch.randint(0, classes, (total,), generator=draw)
    x = torch.randn(total, 1, side, side, generator=draw, dtype=torch.float64) + y[:, None, None, None]
    parts = torch.arange(total).split(list(sizes))
    return Federation(Dataset(x, y), dict(enumerate(parts)), dict(enumerate(parts)), torch.arange(total))


STAGE = Stage(
    None,
    ROUNDS,
    Everyone(),
    Sgd(RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
    epochs=EPOCHS,
    size=BATCH,
)


# ---- the paper, channel by channel -----------------------------------------------------------------------------------
def extract(p: Weights, x: Tensor, tap: str = "relu") -> tuple[Tensor, list[Tensor]]:
    """F, and the maps of the three convolutions."""
    seen = []
    for at in (1, 2, 3):
        before = F.conv2d(x, p[f"extractor.conv{at}.weight"], p[f"extractor.conv{at}.bias"], padding=1)
        after = F.relu(before)
        seen.append(after if tap == "relu" else before)
        x = F.max_pool2d(after, 2)
    return x, seen


def attend(p: Weights, asking: Tensor, answering: Tensor, heads: int) -> Tensor:
    """softmax((Q K' + Q P') / sqrt(hw)) V with the queries of one model and the keys and values of another."""
    Q, K, V = (
        torch.einsum("oc,bchw->bohw", p[f"{name}.conv.weight"][:, :, 0, 0], maps).flatten(2)
        for name, maps in (("query", asking), ("key", answering), ("value", answering))
    )
    out, width = [], Q.shape[1] // heads
    for j in range(len(Q)):
        rows = []
        for head in range(heads):
            mine = slice(head * width, (head + 1) * width)
            scores = Q[j, mine] @ K[j, mine].T
            if "position" in p:
                scores = scores + Q[j, mine] @ p["position"].flatten(1)[mine].T
            rows.append(torch.softmax(scores / math.sqrt(Q.shape[2]), 1) @ V[j, mine])
        out.append(torch.cat(rows).view_as(answering[j]))
    return torch.stack(out)


def classify(p: Weights, attended: Tensor) -> Tensor:
    pooled = F.max_pool2d(attended, 2) if attended.shape[-1] > 1 else attended
    hidden = F.relu(pooled.flatten(1) @ p["hidden.weight"].T + p["hidden.bias"])
    return hidden @ p["head.weight"].T + p["head.bias"]


def both(p: Weights, ours: Tensor, theirs: Tensor, heads: int, cross: bool) -> tuple[Tensor, Tensor]:
    """Logits of the local and the global branch; `p` is the client's own classifier for both."""
    if cross:
        return classify(p, attend(p, theirs, ours, heads)), classify(p, attend(p, ours, theirs, heads))
    return classify(p, attend(p, ours, ours, heads)), classify(p, attend(p, theirs, theirs, heads))


def of_truth(method: PSE, logits: Tensor, y: Tensor) -> Tensor:
    return (logits if method.score == "logit" else logits.softmax(1))[range(len(y)), y]


def gradient_evidence(
    method: PSE, score: Tensor, seen: list[Tensor], weight: Tensor, *, plus: bool
) -> list[list[float]]:
    """a_k of every layer: sums or means over images and places, one channel at a time."""
    found = []
    for maps, g in zip(seen, torch.autograd.grad(score, seen, retain_graph=True), strict=True):
        sums = []
        for k in range(maps.shape[1]):
            total = 0.0
            for j in range(len(maps)):
                here = g[j, k]
                if plus:
                    below = 2 * here**2 + maps[j, k].sum() * here**3
                    alpha = torch.where(here != 0, here**2 / below, 0)
                    here = alpha * here.clamp(min=0)
                total += here.sum().item()
            sums.append(total / float(weight.sum() * maps[0, 0].numel()) if method.reduce == "mean" else total)
        found.append(sums)
    return found


def masked_evidence(
    method: PSE, seen: list[Tensor], x: Tensor, y: Tensor, weight: Tensor, logits: Callable
) -> list[list[float]]:
    """a_k of Score-CAM: every image through every channel's map, one at a time."""
    found = []
    for maps in seen:
        sums = []
        for k in range(maps.shape[1]):
            total = 0.0
            for j in range(len(x)):
                m = maps[j, k].detach()
                up = F.interpolate(m[None, None], x.shape[-2:], mode="bilinear", align_corners=False)[0]
                spread = float(up.max() - up.min())
                up = (up - up.min()) / spread if spread > 1e-12 else torch.zeros_like(up)
                with torch.no_grad():
                    through, empty = of_truth(method, logits(torch.stack([x[j] * up, 0 * x[j]])), y[[j, j]])
                total += float(weight[j] * (through - empty))
            sums.append(total / float(weight.sum()) if method.reduce == "mean" else total)
        found.append(sums)
    return found


def masks(method: PSE, ours: list[list[float]], theirs: list[list[float]]) -> list[list[bool]]:
    sigmoid = lambda a: 1 / (1 + math.exp(-a))  # noqa: E731
    D = [
        [max(0.0, sigmoid(b) - sigmoid(a)) for a, b in zip(*layer, strict=True)]
        for layer in zip(ours, theirs, strict=True)
    ]
    everywhere = sum(map(sum, D)) / sum(map(len, D))
    limits = [everywhere if method.threshold_scope == "global" else sum(layer) / len(layer) for layer in D]
    # A mean of equal numbers may round above them; the package's mean rounds in its own way.
    assert all(abs(d - limit) > 1e-15 or d == 0 for layer, limit in zip(D, limits, strict=True) for d in layer)
    return [[d >= limit and d > 0 for d in layer] for layer, limit in zip(D, limits, strict=True)]


def pse(method: PSE, net: Network, data: Federation, heads: int = 2) -> tuple[Weights, dict[int, Weights], list[float]]:
    """(server's extractor, what clients remember, share of excited channels in every step)."""
    first = {n: v.clone() for n, v in net.initial_weights().params.items()}
    is_shared = lambda name: name.startswith("extractor.") or method.private == "none"  # noqa: E731
    server, kept, shares = {n: v for n, v in first.items() if is_shared(n)}, {}, []
    cross = method.attention != "self"
    for round in range(ROUNDS):
        ends, counts = {}, {k: len(index) for k, index in data.train.items()}
        for k, mine in data.train.items():
            start = first | kept.get(k, {}) if method.local_init == "persistent" else first | server | kept.get(k, {})
            p = {n: v.clone().requires_grad_() for n, v in start.items()}
            descent = torch.optim.SGD(p.values(), RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
            rows, weights, _ = plan(len(mine), BATCH, key(SEED, "batches", round, k), epochs=EPOCHS)
            for row, weight in zip(rows, weights, strict=True):
                x, y = data.data.x[mine[row]], data.data.y[mine[row]]
                frozen = {n: v for n, v in server.items() if n.startswith("extractor.")}
                ours, seen = extract(p, x, method.tap)
                still = {n: v.clone().requires_grad_() for n, v in frozen.items()}
                theirs, other = extract(still, x, method.tap)
                outs = both(p, ours, theirs, heads, cross)
                loss = sum((F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum() for out in outs)
                chosen: list[list[bool]] = []
                if method.excite != "none":
                    path = cross and method.score_path == "cross"
                    evidence = []
                    for at, maps in ((0, seen), (1, other)):
                        if method.cam == "scorecam":
                            logits = lambda x, at=at, p=p, f=frozen, path=path: both(  # noqa: E731
                                p, extract(p, x)[0], extract(f, x)[0], heads, path
                            )[at]
                            evidence.append(masked_evidence(method, maps, x, y, weight, logits))
                        else:
                            asked = both(p, ours, theirs, heads, path)[at]
                            score = (of_truth(method, asked, y) * weight).sum()
                            plus = method.cam == "gradcam++"
                            evidence.append(gradient_evidence(method, score, maps, weight, plus=plus))
                    chosen = masks(method, *evidence)
                    shares.append(sum(map(sum, chosen)) / sum(map(len, chosen)))
                if method.excite == "penalty":
                    for at, layer in enumerate(chosen, 1):
                        for part in ("weight", "bias"):
                            name = f"extractor.conv{at}.{part}"
                            far = [((p[name][c] - frozen[name][c]) ** 2).sum() for c, on in enumerate(layer) if on]
                            loss = loss + method.xi / 2 * sum(far)
                descent.zero_grad()
                loss.backward()
                descent.step()
                if method.excite == "direct":
                    with torch.no_grad():
                        for at, layer in enumerate(chosen, 1):
                            for part in ("weight", "bias"):
                                name = f"extractor.conv{at}.{part}"
                                for channel, on in enumerate(layer):
                                    if on:
                                        p[name][channel] += method.xi * (frozen[name][channel] - p[name][channel])
            ends[k] = {n: v.detach().clone() for n, v in p.items()}
        n = sum(counts.values())
        server = {name: torch.stack([counts[k] / n * ends[k][name] for k in ends]).sum(0) for name in server}
        whole = method.local_init == "persistent"
        kept = {k: {n: v for n, v in end.items() if whole or not is_shared(n)} for k, end in ends.items()}
    return server, kept, shares


CHECKED = partial(Sequential, checked=True)


def by_package(
    recipe: Any, net: Network, data: Federation, engine: Any = CHECKED, stage: Stage = STAGE
) -> tuple[Tree, Any, list[Job], list[Reply]]:
    jobs, replies = [], []

    def observe(server, job, answers):
        jobs.append(job)
        replies.extend(answers)

    clients = engine(net, data)
    server = run(recipe, net, clients, stage, seed=SEED, observe=observe)
    return server.state, clients, jobs, replies


@cache
def usual(recipe: Any) -> tuple[Tree, Any, list[Job], list[Reply]]:
    """What the package makes of it in the usual world, once for all tests."""
    return by_package(recipe, tiny(), federation())


@cache
def strong_by_hand() -> Weights:
    return pse(PSE(xi=0.5), tiny(), federation())[0]


def assert_close(found: Tree, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= TOLERANCE, name


VARIANTS = {
    "as in the paper": PSE(),
    "strong": PSE(xi=0.5),
    "penalty": PSE(xi=0.5, excite="penalty"),
    "means": PSE(xi=0.5, reduce="mean"),
    "probabilities": PSE(xi=0.5, score="prob"),
    "each alone": PSE(xi=0.5, score_path="self"),
    "one threshold": PSE(xi=0.5, threshold_scope="global"),
    "gradcam++": PSE(xi=0.5, cam="gradcam++"),
    "gradcam++, means": PSE(xi=0.5, cam="gradcam++", reduce="mean", score_path="self"),
    "scorecam": PSE(xi=0.5, cam="scorecam"),
    "scorecam, each alone": PSE(xi=0.5, cam="scorecam", reduce="sum", score_path="self", score="prob"),
    "before the ReLU": PSE(xi=0.5, tap="conv"),
    "persistent": PSE(xi=0.5, local_init="persistent"),
    "shared classifier": PSE(xi=0.5, private="none"),
    "v1": PSE(excite="none"),
    "v2": PSE(xi=0.5, attention="self"),
    "v1 and v2": PSE(excite="none", attention="self"),
}
variants = pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_pse_by_hand(method):
    if method.cam == "scorecam":  # one image, one channel at a time
        net, data = tiny(), federation((4, 2))
        state, clients, _, _ = by_package(method, net, data)
    else:
        net, data, (state, clients, _, _) = tiny(), federation(), usual(method)
    server, kept, shares = pse(method, net, data)
    assert_close(state.model.params, server)
    for k, values in kept.items():
        memory = clients.memories.get(k)
        assert_close(memory.private.params if "private" in memory else Tree(), values)
    if shares and method.cam != "scorecam":
        assert 0 < sum(shares) / len(shares) < 1  # channels were excited, and not all of them


def test_pse_by_hand_at_full_width():
    """The paper's widths and heads, on 24 x 24 images (maps of 3 x 3)."""
    net = tiny(PseNet(hidden=8), widths=(32, 64, 128), side=24, scale=1.0)
    data, method = federation((5, 4), side=24), PSE(xi=0.5)
    state, clients, _, _ = by_package(method, net, data)
    server, kept, shares = pse(method, net, data, heads=4)
    assert_close(state.model.params, server)
    for k, values in kept.items():
        assert_close(clients.memories.get(k).private.params, values)
    assert 0 < max(shares) < 1


def test_v3_has_no_position():
    net, data, method = tiny(PseNet(count=2, hidden=5, position=False)), federation(), PSE(xi=0.5)
    state, _, _, _ = by_package(method, net, data)
    assert "position" not in net.initial_weights().params
    assert_close(state.model.params, pse(method, net, data)[0])


def test_the_switches_matter():
    """No two variants end at the same extractor, or one of the comparisons above would be of nothing."""
    ends = [torch.cat([p.flatten() for n, p in sorted(usual(m)[0].model.params.items())]) for m in VARIANTS.values()]
    for i, a in enumerate(ends):
        assert all(a.shape != b.shape or (a - b).abs().max() > 1e-9 for b in ends[:i]), list(VARIANTS)[i]


# ---- oracles of the fact sheet ---------------------------------------------------------------------------------------
def looked(method: PSE, net: Network, ours: Tree, theirs: Tree, batch: Tree) -> tuple[list[Tree], tuple[Tree, Tree]]:
    taps = method.tap_of(net, ours), method.tap_of(net, theirs)
    with torch.enable_grad():
        seen = method.look(net, (ours, theirs), batch.x, batch.key, taps)
        return seen.outs, method.evidence(net, (ours, theirs), batch, taps, seen)


def some_batch(side: int = SIDE) -> Tree:
    data = federation(side=side).data
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    return Tree(x=data.x[:4], y=data.y[:4], weight=weight, key=torch.tensor(3))


def moved(weights: Tree, by: float = 0.3) -> Tree:
    """Another extractor under the same classifier."""
    with seeded(11):
        other = {
            n: v + by * torch.randn_like(v) if n.startswith("extractor.") else v for n, v in weights.params.items()
        }
    return weights.replace(params=Tree(other))


@pytest.mark.parametrize("cam", ["gradcam", "gradcam++", "scorecam"])
@pytest.mark.parametrize("path", ["cross", "self"])
def test_equal_extractors_excite_nothing(cam, path):
    net, method = tiny(), PSE(cam=cam, score_path=path)
    weights = net.initial_weights()
    outs, evidence = looked(method, net, weights, weights, some_batch())
    assert torch.equal(outs[0].logits, outs[1].logits) and torch.equal(outs[0].features, outs[1].features)
    assert not any(chosen.any() for chosen in method.excited(*evidence).values())
    _, evidence = looked(method, net, weights, moved(weights), some_batch())
    assert any(chosen.any() for chosen in method.excited(*evidence).values())


@dataclass(frozen=True)
class ExcitesAll(PSE):
    def excited(self, ours, theirs):
        return ours.map(torch.ones_like)


def test_excitation_in_full_copies_the_global_filters():
    net, data = tiny(), federation()
    _, _, jobs, replies = by_package(ExcitesAll(xi=1.0), net, data)
    assert all(not leaf.any() for reply in replies for leaf in reply.upload.delta.leaves())
    assert {name for reply in replies for name in reply.upload.delta.params} == {
        f"extractor.conv{at}.{part}" for at in (1, 2, 3) for part in ("weight", "bias")
    }
    assert len(jobs) == ROUNDS


@pytest.mark.parametrize("excite", ["direct", "penalty"])
def test_excitation_by_nothing_is_none(excite):
    net, data = tiny(), federation()
    without = by_package(PSE(excite="none"), net, data)
    found = by_package(PSE(xi=0.0, excite=excite), net, data)
    assert same(found[0], without[0])
    assert all(same(found[1].memories.get(k), without[1].memories.get(k)) for k in range(3))


gaps = st.lists(st.floats(-3, 3), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(gaps, st.randoms(use_true_random=False)), min_size=1, max_size=3),
    st.sampled_from(["layer", "global"]),
)
def test_excited_channels_by_their_definition(layers, scope):
    """D = max(0, s - s~); chosen are those that reach the mean, and more than zero."""
    ours, theirs = {}, {}
    for at, (values, draw) in enumerate(layers):
        ours[str(at)] = torch.tensor(values, dtype=torch.float64)
        theirs[str(at)] = torch.tensor([v + draw.choice([0, 0, 0.25, -0.5, 1.5]) for v in values], dtype=torch.float64)
    found = PSE(threshold_scope=scope).excited(Tree(ours), Tree(theirs))
    D = {n: [max(0.0, float(b.sigmoid() - a.sigmoid())) for a, b in zip(ours[n], theirs[n], strict=True)] for n in ours}
    every = [d for layer in D.values() for d in layer]
    for name, layer in D.items():
        usual = sum(every) / len(every) if scope == "global" else sum(layer) / len(layer)
        for d, chosen in zip(layer, found[name].bool().tolist(), strict=True):
            if abs(d - usual) > 1e-12:
                assert chosen == (d >= usual and d > 0)
            assert d > 0 or not chosen
    if any(d > 0 for d in every):
        assert any(chosen.any() for chosen in found.values())


@pytest.mark.parametrize(
    ("side", "tokens"), [(24, "channel"), (32, "channel"), (8, "channel"), (24, "spatial"), (32, "spatial")]
)
@pytest.mark.parametrize("heads", ["groups", "projection"])
@pytest.mark.parametrize("residual", [False, True])
def test_exchange_between_equal_models_is_self_attention(side, tokens, heads, residual):
    """Maps of 3 x 3, 4 x 4 and 1 x 1."""
    net = tiny(PseNet(tokens=tokens, heads=heads, count=2, hidden=5, residual=residual), side=side)
    weights, batch, method = net.initial_weights(), some_batch(side), PSE(attention="cross")
    outs = method.look(net, (weights, weights), batch.x).outs
    alone = net.forward(weights, batch.x)
    for out in outs:
        torch.testing.assert_close(out.logits, alone.logits, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(out.features, alone.features, rtol=1e-12, atol=1e-14)
    module: Any = net.module
    maps = module.maps(batch.x)
    _, k, v = module.project(maps)
    other = module.project(module.maps(batch.x + 1))[0]
    rows = module.attention(other, k).sum(-1)
    assert maps.shape[-2:] == (side // 8, side // 8) and module.attend(other, k, v, maps).shape == maps.shape
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=1e-12, atol=0)
    crossed = method.look(net, (weights, moved(weights)), batch.x).outs
    assert (crossed[0].logits - crossed[1].logits).abs().max() > 1e-6


def test_queries_are_exchanged_and_not_keys():
    """The local branch reads local values: with the global maps' queries alone changed, it moves a little."""
    net, batch = tiny(), some_batch()
    ours = net.initial_weights()
    theirs = moved(ours)
    p, other = dict(ours.params), dict(theirs.params)
    f, g = extract(p, batch.x)[0], extract(other, batch.x)[0]
    outs = PSE(attention="cross").look(net, (ours, theirs), batch.x).outs
    torch.testing.assert_close(outs[0].logits, classify(p, attend(p, g, f, 2)), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(outs[1].logits, classify(p, attend(p, f, g, 2)), rtol=1e-12, atol=1e-14)


def test_the_global_extractor_is_frozen():
    """No gradient reaches it, and not a bit of it changes; the classifier learns from both branches."""
    net, data, method = tiny(), federation(), PSE(xi=0.5)
    server = Server(net, Tree(), 3)
    state = method.setup(server)
    received = state.model.map(lambda leaf: leaf.clone().requires_grad_())
    before = received.map(lambda leaf: leaf.detach().clone())
    engine = Sequential(net, data)
    job = Job(next(iter(method.stages(STAGE))), Tree(model=received), Tree(), 0, 0, 0, SEED)
    client, batches = engine.open(job, 0)
    local = engine.local_training(job, 0, client, batches)
    assert all(leaf.grad is None for leaf in received.leaves())
    assert same(received.map(torch.detach), before)
    assert not torch.equal(local.params["extractor.conv1.weight"], before.params["extractor.conv1.weight"])


@pytest.mark.parametrize("method", [PSE(), PSE(local_init="persistent")], ids=["global", "persistent"])
def test_inference_uses_no_global_tensor(method):
    """After local training the model is the client's: what was received could be anything by then."""
    net, data = tiny(), federation()
    _, engine, jobs, _ = by_package(method, net, data)
    client, batches = engine.open(replace(jobs[-1], round=ROUNDS), 0)
    local = engine.local_training(jobs[-1], 0, client, batches)
    lost = replace(client, received=client.received.map(lambda leaf: torch.full_like(leaf, math.nan)))
    answers = net(method.personal(lost, local), data.data.x)
    p = dict(local.params)
    f = extract(p, data.data.x)[0]
    torch.testing.assert_close(answers, classify(p, attend(p, f, f, 2)), rtol=1e-12, atol=1e-13)
    if method.local_init == "persistent":
        assert net(method.personal(lost), data.data.x).isfinite().all()


@variants
def test_private_tensors_never_leave(method):
    net, (state, engine, jobs, replies) = tiny(), usual(method)
    allowed = {n for n in net.initial_weights().params if n.startswith("extractor.") or method.private == "none"}
    for message in (*(job.download for job in jobs), *(reply.upload for reply in replies), state):
        names = {path.rpartition("/")[2] for path, _ in message.paths()} - {"weight"}
        assert names == allowed
    if method.private != "none":
        private = set(engine.memories.get(0).private.params)
        assert private == (
            set(net.initial_weights().params) if method.local_init == "persistent" else private - allowed
        )
        assert {"position", "head.weight", "hidden.bias", "query.conv.weight"} <= private


# ---- what it is a case of, and what it needs -------------------------------------------------------------------------
def test_the_first_step_without_excitation_and_exchange():
    """Both branches are one: the classifier moves twice as far as in FedPer, the extractor as far."""
    net, data = tiny(), federation((4, 4, 4))
    stage = replace(STAGE, rounds=1, epochs=1, optimizer=Sgd(RATE))
    ends = {}
    for recipe in (FedPer(private="classifier"), PSE(excite="none", attention="self")):
        _, engine, _, replies = by_package(recipe, net, data, stage=stage)
        ends[type(recipe)] = replies[0].upload.delta.params, engine.memories.get(0).private.params
    first = net.initial_weights().params
    for name, delta in ends[FedPer][0].items():
        torch.testing.assert_close(ends[PSE][0][name], delta, rtol=1e-10, atol=1e-14)
    for name, value in ends[FedPer][1].items():
        torch.testing.assert_close(ends[PSE][1][name] - first[name], 2 * (value - first[name]), rtol=1e-9, atol=1e-13)


def test_the_split_of_pse_is_there_for_others():
    net = tiny()
    names = set(net.initial_weights().params)
    extractor = {n for n in names if n.startswith("extractor.")}
    for recipe in (FedPer(private="classifier"), FedRep(private="classifier"), PSE()):
        assert {n for n in names if not recipe.is_private(net, n)} == extractor
    assert {n for n in names if FedPer().is_private(net, n)} == {"head.weight", "head.bias"}
    plain = small_network()  # without an extractor the classifier is the head
    assert {n for n in plain.initial_weights().params if not is_extractor(plain, n)} == {"head.weight", "head.bias"}


def test_a_network_without_attention():
    """Refused in one sentence, unless excitation alone is asked for."""
    from fedlens.models import MODELS

    with seeded(0):
        net = Network(MODELS["cnn2"]().build(CLASSES, 1, SIDE), "fp64")
    with pytest.raises(
        BadInput, match=r"lacks maps, project, attend, embed, extractor: use model=pse_net, or .*attention=self"
    ):
        by_package(PSE(), net, federation())
    excited, not_excited = (
        by_package(PSE(xi=0.5, attention="self", excite=how), net, federation((3, 2)))[0] for how in ("direct", "none")
    )
    assert not same(excited, not_excited)


def test_what_is_no_part_of_an_extractor_never_leaves():
    """With the parts of attention but no extractor to tell them from, all but the head would be sent."""
    net = tiny()
    module: Any = net.module
    module.body = module.extractor
    del module.extractor
    for extractor in (None, module.body.forward):  # a method is no part
        module.__dict__["extractor"] = extractor
        with pytest.raises(BadInput, match=r"this one lacks extractor: use model=pse_net"):
            by_package(PSE(), net, federation())


def test_places_need_a_second_one_to_attend_to():
    with pytest.raises(BadInput, match=r"images of 8 pixels leave one; take model\.tokens=channel"):
        tiny(PseNet(tokens="spatial"), side=8)
    tiny(PseNet(tokens="spatial"), side=16)


def test_how_far_a_filter_can_move():
    with pytest.raises(BadInput, match=r"algorithm\.xi is 2, and a filter cannot move further"):
        PSE(xi=2)
    assert PSE(xi=2, excite="penalty").xi == 2  # xi divided by a small rate: the penalty that pulls as far


def test_a_network_without_convolutions():
    from fedlens.models import MODELS

    with seeded(0):
        net = Network(MODELS["mlp"](hidden=4).build(CLASSES, 1, SIDE), "fp64")
    for tap, advice in (("relu", r"algorithm\.tap=conv, or"), ("conv", "another model, or")):
        with pytest.raises(BadInput, match=rf"this network has none with a {tap} to tap; .*{advice} algorithm\.excite"):
            by_package(PSE(attention="self", tap=tap), net, federation())
    state, *_ = by_package(PSE(attention="self", excite="none"), net, federation())
    assert all(leaf.isfinite().all() for leaf in state.leaves())


@pytest.mark.parametrize(
    ("method", "side"),
    [(PSE(xi=0.5), 8), (PSE(xi=0.5), 16), (PSE(xi=0.5, cam="gradcam++"), 8), (PSE(xi=0.5, cam="scorecam"), 8)],
)
def test_one_image_one_class_and_maps_of_one_place(method, side):
    """Clients of one image and of one class among them; at 8 x 8 the last maps have a single place."""
    net, data = tiny(side=side), federation((1, 4, 2), side=side, classes=1)
    state, engine, _, _ = by_package(method, net, data)
    assert all(leaf.isfinite().all() for leaf in state.leaves())
    assert all(leaf.isfinite().all() for k in range(3) for leaf in engine.memories.get(k).private.leaves())
    server, _, _ = pse(method, net, data)
    assert_close(state.model.params, server)


def test_wrapped_examples_are_no_evidence():
    net, method = tiny(), PSE()
    ours = net.initial_weights()
    theirs, batch = moved(ours), some_batch()
    short = batch.replace(x=batch.x[:3], y=batch.y[:3], weight=batch.weight[:3])
    for cam in ("gradcam", "gradcam++", "scorecam"):
        method = PSE(cam=cam)
        for a, b in zip(
            looked(method, net, ours, theirs, batch)[1], looked(method, net, ours, theirs, short)[1], strict=True
        ):
            assert max((a[layer] - b[layer]).abs().max() for layer in a) < 1e-13


def test_sums_are_means_times_what_they_are_over():
    """Images that count times places for gradients; images alone for Score-CAM, whose scores have no places."""
    net, batch = tiny(), some_batch()
    ours = net.initial_weights()
    places = dict(zip(("extractor.conv1", "extractor.conv2", "extractor.conv3"), (256, 64, 16), strict=True))
    for cam, per_place in (("gradcam", True), ("gradcam++", True), ("scorecam", False)):
        sums, means = (looked(PSE(cam=cam, reduce=how), net, ours, moved(ours), batch)[1][0] for how in ("sum", "mean"))
        for layer in means:
            factor = 3 * (places[layer] if per_place else 1)
            torch.testing.assert_close(sums[layer], means[layer] * factor, rtol=1e-12, atol=1e-15)


# ---- engines ---------------------------------------------------------------------------------------------------------
@variants
def test_lanes_equal_sequential(method):
    """With attention, which the network of the other engine tests lacks."""
    expected = usual(method)
    found = by_package(method, tiny(), federation(), engine=partial(Lanes, lanes=2))
    assert same(expected[0], found[0])
    assert all(same(expected[1].memories.get(k), found[1].memories.get(k)) for k in range(3))


@variants
def test_a_step_is_recordable(method):
    """On tensors without values: a step that looks at one on the host fails."""
    net, engine = tiny(), Sequential(tiny(), federation())
    server = Server(net, Tree(), 3)
    job = Job(next(iter(method.stages(STAGE))), Tree(model=method.setup(server).model), Tree(), 0, 0, 0, SEED)
    client, _ = engine.open(job, 0)
    batch = engine.federation.data.batch(client.data.index[:BATCH], torch.ones(BATCH), torch.tensor(7))
    local = method.begin(client).clone()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = lambda tree: tree.map(mode.from_tensor)  # noqa: E731
        view = client.inside(received=fake(client.received), memory=fake(client.memory), phase="")
        method.step(view, fake(local), fake(batch))


def test_half_precision_still_tells_channels_apart():
    """Means of gradients are small: their sigmoids in bfloat16 would all be one half, and nothing ever excited."""
    net = tiny(PseNet(hidden=32), widths=(32, 64, 128), side=32, scale=1.0, precision="bf16")
    weights = net.initial_weights()
    batch = some_batch(32)
    batch = batch.replace(x=batch.x.float(), weight=batch.weight.float())
    ours, theirs = looked(PSE(), net, weights, moved(weights, 0.05), batch)[1]
    assert {leaf.dtype for leaf in (*ours.leaves(), *theirs.leaves())} == {torch.float32}
    apart = [(theirs[layer].sigmoid() != ours[layer].sigmoid()).double().mean().item() for layer in ours]
    assert min(apart) > 0.5
    assert all((leaf.bfloat16().sigmoid() == 0.5).double().mean() > 0.5 for leaf in ours.leaves())


# ---- mutants ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Loose(PSE):
    """Without the strict test: where all gaps are zero, all are chosen."""

    def excited(self, ours, theirs):
        return Tree({layer: (theirs[layer] >= ours[layer]).to(ours[layer]) for layer in ours})


@dataclass(frozen=True)
class Reversed(PSE):
    """Pulls where the local evidence is larger."""

    def excited(self, ours, theirs):
        return super().excited(theirs, ours)


@dataclass(frozen=True)
class BeforeTheStep(PSE):
    """Excites with what momentum will carry on: the pull is part of the gradient at the full rate."""

    def step(self, client, local, batch):
        pulled = replace(self, excite="penalty", xi=self.xi / RATE)
        return PSE.step(pulled, client, local, batch)


@pytest.mark.parametrize("wrong", [Loose, Reversed, BeforeTheStep, ExcitesAll], ids=lambda kind: kind.__name__)
def test_the_loops_notice(wrong):
    state, *_ = by_package(wrong(xi=0.5), tiny(), federation())
    assert max((state.model.params[n] - v).abs().max() for n, v in strong_by_hand().items()) > 1e-6


def test_without_anything_of_its_own_it_is_not_fedavg_either():
    """Two losses: even with a shared classifier and no excitation the classifier sees every batch twice."""
    a, b = (usual(r)[0].model for r in (PSE(excite="none", attention="self", private="none"), FedAvg()))
    assert max((a.params[n] - b.params[n]).abs().max() for n in a.params) > 1e-4
