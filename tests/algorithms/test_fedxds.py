"""FedXDS by hand: masks, noise, what travels, the shared objective, what is promised and where the promise breaks."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fedlens
import fedlens.algorithms.fedxds as fedxds_module
from fedlens import config
from fedlens.algorithms import PSE, FedAvg, FedDecorr, FedFed, FedPer, FedProx, FedXDS, FineTuned, Scaffold
from fedlens.algorithms._sharing import WithSharedData, assembled, packed, unpacked
from fedlens.algorithms.fedxds import MaskedExchange
from fedlens.attribution import attribute
from fedlens.core.algorithm import Client
from fedlens.core.batches import Dataset, Federation
from fedlens.core.cohort import Everyone, Uniform
from fedlens.core.errors import BadInput, RunFailed
from fedlens.core.ledger import Ledger
from fedlens.core.memories import Memories
from fedlens.core.network import Network
from fedlens.core.objective import cross_entropy
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import fold, generator, normal, seeded, uniform
from fedlens.core.run import run, timetable
from fedlens.core.transform import Clip
from fedlens.core.tree import Tree
from fedlens.core.wire import decode, encode
from fedlens.engines.sequential import Sequential
from fedlens.experiment import LocalTraining
from fedlens.models.cnn import Mlp
from fedlens.papers.fedxds import tables as fedxds_tables
from fedlens.privacy.gaussian import gaussian_delta
from fedlens.runs.diff import differences
from fedlens.runs.folder import Checkpoint, RunFolder
from fedlens.simulate import run as simulate
from fedlens.simulate.resume import resume
from small import PLAN, same

PAPER, OFFICIAL, FIG2C, METRIC, BOUNDED = (
    FedXDS(**FedXDS.presets[name]) for name in ("paper", "official", "fig2c", "metric", "bounded")
)
SEED = torch.tensor(11)
CLASSES, SIDE = 4, 6
SHORT = FedXDS(warmup_rounds=2, warmup_epochs=1)


class Colours(nn.Module):
    """Three channels, four classes."""

    def __init__(self, norm=True):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5) if norm else nn.Identity()
        self.relu, self.flat = nn.ReLU(), nn.Flatten()
        self.head = nn.Linear(80, CLASSES)

    def features(self, x):
        return self.flat(self.relu(self.norm(self.conv(x))))

    def forward(self, x):
        return self.head(self.features(x))


def colours(norm=True, buffers="average"):
    with seeded(4):
        return Network(Colours(norm), "fp64", buffers)


def images(count, seed=0):
    draw = generator(seed)
    y = torch.randint(0, CLASSES, (count,), generator=draw)
    return torch.randn(count, 3, SIDE, SIDE, generator=draw, dtype=torch.float64) + y.view(-1, 1, 1, 1) * 0.3, y


def owners(sizes=(7, 4, 9)):
    x, y = images(sum(sizes) + 12)
    ends = np.cumsum(sizes)
    train = {i: torch.arange(end - size, end) for i, (end, size) in enumerate(zip(ends, sizes, strict=True))}
    return Federation(Dataset(x, y), train, {i: torch.arange(3) for i in train}, torch.arange(sum(sizes), len(y)))


def carried_out(recipe, plan=PLAN, net=None, federation=None, **options):
    """(server, all jobs and replies) of a run."""
    seen = []
    net = net or colours()
    engine = Sequential(net, federation or owners(), checked=True)
    plan = replace(plan, cohort=Uniform(2))
    server = run(recipe, net, engine, plan, observe=lambda s, job, replies: seen.append((job, replies)), **options)
    return server, seen


# ---- masks and noise ----
@pytest.mark.parametrize("sparsity", [0, 33, 60, 70, 85, 99.9, 100])
@pytest.mark.parametrize("mask", ["binary", "soft"])
def test_masks_keep_exactly_what_they_should(sparsity, mask):
    (x, y), net = images(5), colours()
    by = FedXDS(sparsity=sparsity, mask=mask, clip_norm=None)
    worth = by.pixel_scores(net, net.initial_weights(), x, y, 64, SEED)
    masked, keep = by.masked(x, worth, SEED)
    expected = SIDE**2 - math.floor(SIDE**2 * sparsity / 100)
    assert keep.shape == (5, 1, SIDE, SIDE) and (keep.sum((1, 2, 3)) == expected).all() and masked.isfinite().all()
    if mask == "binary":  # the same pixels in all colours, untouched
        assert torch.equal(masked, torch.where(keep, x, 0.0))


def test_a_constant_map_is_no_number_trouble():
    x, _ = images(2)
    for mask in ("binary", "soft"):
        masked, keep = FedXDS(mask=mask).masked(x, torch.zeros(2, 1, SIDE, SIDE), SEED)
        assert masked.isfinite().all() and (keep.sum((1, 2, 3)) == SIDE**2 - math.floor(SIDE**2 * 0.7)).all()


@pytest.mark.parametrize(
    "by",
    [
        FedXDS(sigma=0, sparsity=60),
        FedXDS(sigma=0, attribution="ig", mask="soft", clip_norm=1.5),
        FedXDS(sigma=0, attribution="smoothgrad", absolute=True),
        FedXDS(sigma=0, attribution="inputxgrad", target="pred", clip_norm=2.0),
        FedXDS(sigma=0, lrp="epsilon", clip_norm=None),
        FedXDS(sigma=0, target="batch_labels", sparsity=45),
    ],
    ids=lambda by: f"{by.attribution}, {by.lrp}, {by.target}, {by.mask}",
)
def test_what_leaves_by_a_slow_loop(by):
    """One image at a time, pixels ranked by sorting, in plain numpy."""
    (x, y), net = images(9), colours()
    weights = net.initial_weights()
    found = by.released(net, weights, x, y, SEED, batch=4)
    names = {"lrp": "lrp", "ig": "integrated_gradients", "smoothgrad": "smoothgrad", "inputxgrad": "input_x_gradient"}
    options = {"composite": by.lrp} if by.attribution == "lrp" else {}
    for i in range(len(x)):
        target = int(net(weights, x[i : i + 1]).argmax()) if by.target == "pred" else int(y[i])
        asked = [target] if by.target != "batch_labels" else sorted(set(y[i // 4 * 4 : i // 4 * 4 + 4].tolist()))
        maps = 0.0
        for c in asked:  # every method is linear in the logits
            maps = maps + attribute(names[by.attribution], net, weights, x[i : i + 1], c, **options)[0].numpy()
        worth = maps.sum(0)
        worth = np.abs(worth) if by.absolute else worth
        dropped = math.floor(SIDE**2 * by.sparsity / 100)
        ranked = sorted(range(SIDE**2), key=lambda p, worth=worth: (-worth.flat[p], p))
        keep = np.zeros(SIDE**2)
        keep[ranked[: SIDE**2 - dropped]] = 1
        if by.mask == "soft":
            keep *= (worth.ravel() - worth.min()) / (worth.max() - worth.min())
        image = x[i].numpy() * keep.reshape(SIDE, SIDE)
        norm = np.sqrt((image**2).sum())
        if by.clip_norm is not None and norm > by.clip_norm:
            image = image * by.clip_norm / norm
        assert np.allclose(found.x[i], image, atol=1e-6), i  # it travels in single precision
    assert torch.equal(found.y.long(), y)


def test_noise_has_the_deviation_it_should():
    x = torch.zeros(400, 3, 32, 32)
    by = FedXDS(attribution="random")
    found = by.released(colours(), Tree(), x, torch.zeros(400), SEED).x
    assert found.numel() > 1e6 and float(found.std()) == pytest.approx(by.noise, rel=0.01)
    assert by.noise == pytest.approx(0.2422, abs=1e-4) and FedXDS(epsilon=5.0).noise == pytest.approx(0.969, abs=1e-3)
    assert METRIC.noise == pytest.approx(0.82, abs=5e-3) and BOUNDED.noise == pytest.approx(5.80, abs=5e-3)
    assert OFFICIAL.noise == 0.15 and abs(float(found.mean())) < 1e-3


def test_clipping():
    (x, y), net = images(20), colours()
    for by in (FedXDS(sigma=0, clip_norm=2.0, sparsity=0), FedXDS(sigma=0, clip_norm=2.0, mask="soft")):
        norms = by.released(net, net.initial_weights(), x, y, SEED).x.flatten(1).norm(dim=1)
        assert (norms <= 2.0 * (1 + 1e-6)).all() and norms.max() > 1.9


def test_random_masks_and_randomised_response():
    (x, y), net = images(300), colours()
    random = FedXDS(attribution="random", sigma=0, clip_norm=None)
    _, keep = random.masked(x, random.pixel_scores(net, Tree(), x, y, 64, SEED), SEED)
    assert (keep.double().mean(0) - 11 / 36).abs().max() < 0.12  # every pixel as often as another
    turned = replace(random, mask_epsilon=2.0)
    _, other = turned.masked(x, turned.pixel_scores(net, Tree(), x, y, 64, SEED), SEED)
    assert float((keep != other).double().mean()) == pytest.approx(1 / (1 + math.exp(2)), abs=0.01)


# ---- what travels ----
@pytest.mark.parametrize("form", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("sparse", [False, True])
def test_packing(form, sparse):
    x, y = images(12)
    keep = torch.zeros(12, 1, SIDE, SIDE, dtype=torch.bool)
    for i in range(12):
        keep[i, 0].view(-1)[torch.randperm(SIDE**2, generator=generator(i))[:10]] = True
    x = torch.where(keep, x, 0.0) if sparse else x
    shared = packed(x, y, form, keep if sparse else None)
    index = torch.tensor([3, 0, 3, 11])
    back, labels = unpacked(shared, index, x)
    step = float((x.flatten(1).amax(1) - x.flatten(1).amin(1)).max()) / 255
    worst = {"float32": 1e-6, "float16": 4e-3, "uint8": step * 0.51}[form]
    assert back.shape == (4, 3, SIDE, SIDE) and torch.equal(labels, y[index])
    assert float((back - x[index]).abs().max()) <= worst
    if sparse:
        assert (back[~keep[index].expand_as(back)] == 0).all()
    values = {"float32": 4, "float16": 2, "uint8": 1}[form] * 3 * (10 if sparse else SIDE**2)
    extra = (8 if form == "uint8" else 0) + (4 * 10 if sparse else 0)
    assert shared.nbytes == 12 * (values + extra + 2)


def test_nothing_to_pack():
    x, y = images(4)
    for form in ("float32", "uint8"):
        assert len(packed(x[:0], y[:0], form).y) == 0


@pytest.mark.parametrize("form", ["float32", "uint8"])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_exchange_is_charged_once_and_as_it_is_sent(form, sparse):
    ledger, up, down, holders = Ledger(), 0, 0, set()
    recipe = replace(SHORT, share_as=form, sparse=sparse)
    for number, (job, replies) in enumerate(carried_out(recipe)[1], 1):
        ledger.book(job, [r.client for r in replies], replies, round=number)
        for reply in replies:
            up += len(encode(reply.upload))
            down += len(encode(job.download))
            assert same(decode(encode(reply.upload)), reply.upload)
            if job.shared and reply.client not in holders:
                holders.add(reply.client)
                down += len(encode(job.shared))
    assert (ledger.up, ledger.down) == (up, down) and len(holders) >= 2


def test_the_server_puts_together_what_clients_gave():
    """The warm model is FedAvg's after the same rounds; every client gives its own images, in client order."""
    plan = replace(PLAN, epochs=2)
    recipe = FedXDS(warmup_rounds=2, warmup_epochs=3, share_fraction=0.5)
    server, seen = carried_out(recipe, plan)
    assert [len(r) for _, r in seen] == [3, 3, 3, 2, 2, 2]
    warm = carried_out_everyone(replace(plan, rounds=2, epochs=3))
    assert same(seen[2][0].download.model, warm.state.model)
    released = [reply.upload for reply in seen[2][1]]
    assert [len(gift.y) for gift in released] == [4, 2, 5]
    assert torch.equal(server.state.shared.x, torch.cat([gift.x for gift in released]))
    data = owners().data
    for client, gift in enumerate(released):  # real images of that client, each once, under its own label
        given = FedXDS(sparsity=0, sigma=0, clip_norm=None)
        plain = given.released(colours(), warm.state.model, data.x, data.y, SEED)
        raw = carried_out(replace(recipe, sparsity=0, sigma=0, clip_norm=None), plan)[1][2][1][client].upload.x
        own = owners().train[client].tolist()
        matches = [next(i for i in own if torch.equal(plain.x[i], image)) for image in raw]
        assert len(set(matches)) == len(matches) and torch.equal(gift.y.long(), data.y[matches])


@pytest.mark.parametrize(
    "by",
    [
        SHORT,
        replace(SHORT, mask_source="class", accounting="metric"),
        replace(SHORT, attribution="random"),
        replace(SHORT, target="batch_labels", attribution="inputxgrad"),
    ],
    ids=["lrp", "class", "random", "batch labels"],
)
def test_blocks_that_are_attributed_together_are_masked_and_noised_alone(by, monkeypatch):
    asked = []
    attribute_ = fedxds_module.attribute
    monkeypatch.setattr(fedxds_module, "attribute", lambda *a, **o: asked.append(len(a[3])) or attribute_(*a, **o))
    monkeypatch.setattr(fedxds_module, "_BLOCK", 3)
    apart = carried_out(by)[0].state.shared
    each = len(asked)
    monkeypatch.setattr(fedxds_module, "_TOGETHER", {"cpu": 2})
    together = carried_out(by)[0].state.shared
    assert torch.equal(apart.y, together.y) and (apart.x - together.x).abs().max() < 1e-12
    # Clients of 7, 4 and 9 images are 3 + 2 + 3 blocks of three, in passes of six; all of a client's are asked about.
    blocks = {"lrp": (8, 3), "inputxgrad": (8, 8), "random": (0, 0)}[by.attribution]
    assert (each, len(asked) - each) == ((3, 3) if by.mask_source == "class" else blocks)
    if by.attribution == "lrp" and by.mask_source == "image":  # where fewer lie ready, in whole passes
        del asked[:]
        monkeypatch.setattr(fedxds_module, "_HELD", 6 * owners().data.x[0].nbytes)
        fewer = carried_out(by)[0].state.shared
        assert asked == [6, 1, 4, 6, 3] and (apart.x - fewer.x).abs().max() < 1e-12


def carried_out_everyone(plan):
    net = colours()
    return run(FedAvg(), net, Sequential(net, owners()), replace(plan, cohort=Everyone()))


def test_the_local_model_attributes_after_its_own_training():
    plan = replace(PLAN, epochs=2)
    recipe = FedXDS(warmup_rounds=2, warmup_epochs=1, attribution_model="local", sigma=0, clip_norm=None)
    _, seen = carried_out(recipe, plan)
    assert len(seen) == 1 + 1 + 3  # the exchange is the last warm-up round
    job, replies = seen[1]
    net, data = colours(), owners()
    engine = Sequential(net, data)
    for reply in replies:
        client, batches = engine.open(job, reply.client)
        local = engine.local_training(job, reply.client, client, batches)
        assert len(batches.rows) > 0 and not same(local.params, job.download.model.params)
        expected = recipe.released(net, local, client.data.x, client.data.y, SEED)
        assert same(expected, reply.upload)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda u: u.replace(x=u.x * torch.nan), "x has values that are not finite"),
        (lambda u: u.replace(y=u.y + 100), "labels go from 10"),
        (lambda u: u.replace(y=u.y - 9), "labels go from -"),
        (lambda u: u.replace(x=u.x[:, :, :2]), r"x is \[4, 3, 2, 6\] of torch.float32"),
        (lambda u: u.replace(x=u.x[:1]), "x is "),
        (lambda u: u.replace(x=u.x.half()), r"x is \[4, 3, 6, 6\] of torch.float16"),
        (lambda u: Tree(x=u.x), "it holds x, where others hold"),
        (lambda u: Tree(), "it holds nothing"),
    ],
)
def test_damaged_gifts(damage, said):
    x, y = images(4)
    good = packed(x, y)
    with pytest.raises(RunFailed, match=f"shared data of client 2 of 2 are damaged: {said}"):
        assembled([good, damage(good)], CLASSES)


# ---- training with shared data ----
def step_by_hand(mix, lam, norm):
    """One step on the sum of both losses, by torch's own modules and optimizer."""
    module = colours(norm).module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    (x, y), (shared_x, shared_y) = images(5, 1), images(30, 2)
    shared_x = shared_x.float().double()  # as it travelled
    index = [int(u * 30) for u in uniform(fold(SEED, "shared"), 8).double()]
    module.train()
    own = F.cross_entropy(module(x), y)
    shared = F.cross_entropy(module(shared_x[index]), shared_y[index])
    ((1 - lam) * own + lam * shared if mix == "convex" else own + lam * shared).backward()
    optimizer.step()
    return module


@pytest.mark.parametrize(("mix", "lam"), [("additive", 0.5), ("additive", 1.0), ("convex", 0.3), ("convex", 1.0)])
@pytest.mark.parametrize("norm", [True, False])
def test_a_step_by_hand(mix, lam, norm):
    net, (x, y) = colours(norm), images(5, 1)
    weights = net.initial_weights()
    optimizer = Sgd(0.1, momentum=0.9, weight_decay=1e-3)
    objective = WithSharedData(lam, 8, mix)
    client = Client(net, Tree(model=weights), Tree(), packed(*images(30, 2)), objective, optimizer)
    local = FedAvg().begin(client).clone()
    batch = Tree(x=x, y=y, weight=torch.ones(5, dtype=torch.float64), key=SEED)
    local = FedAvg().step(client, local, batch)
    module = step_by_hand(mix, lam, norm)
    for name, expected in module.named_parameters():
        assert torch.allclose(local.params[name], expected, atol=1e-12), name
    for name, expected in module.named_buffers():  # both passes move the statistics, one after the other
        assert torch.allclose(local.buffers[name], expected, atol=1e-12), name


def test_frozen_norms_stay_frozen_in_the_shared_pass():
    net, (x, y) = colours(), images(5, 1)
    weights = net.initial_weights()
    client = Client(net, Tree(), Tree(), packed(*images(30, 2)), WithSharedData(0.5, 8), None)
    params = Tree({n: p.requires_grad_(n.startswith("head")) for n, p in weights.params.items()})
    now = Tree(params=params, buffers=weights.buffers.clone())
    batch = Tree(x=x, y=y, weight=torch.ones(5, dtype=torch.float64), key=SEED)
    client.objective(client, now, batch, Tree(logits=torch.zeros(5, CLASSES, dtype=torch.float64)))
    assert same(now.buffers, weights.buffers)


def test_the_shared_step_is_recordable():
    net, (x, y) = colours(), images(4, 1)
    optimizer = Sgd(0.1, momentum=0.9)
    keep = (torch.arange(36) < 9).view(1, 1, 6, 6).expand(30, -1, -1, -1)
    for shared in (packed(*images(30, 2)), packed(*images(30, 2), "uint8", keep)):
        weights = net.initial_weights()
        client = Client(net, Tree(model=weights), Tree(), shared, WithSharedData(0.5, 8), optimizer)
        local = FedAvg().begin(client).clone()
        batch = Tree(x=x, y=y, weight=torch.ones(4, dtype=torch.float64), key=SEED)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = lambda tree: tree.map(mode.from_tensor)  # noqa: E731
            FedAvg().step(replace(client, shared=fake(shared)), fake(local), fake(batch))


@pytest.mark.parametrize("base", [FedAvg(), FedProx(), Scaffold(), FedPer()], ids=lambda b: type(b).__name__)
@pytest.mark.parametrize("mix", ["additive", "convex"])
def test_without_weight_it_is_its_base_to_the_bit(base, mix):
    recipe = FedXDS(base, warmup_rounds=2, warmup_epochs=1, lam=0, mix=mix)
    found, seen = carried_out(recipe)
    plain, _ = carried_out(After(base, 3))
    assert len(seen) == 6 and len(found.state.shared.y) == 20
    assert same(Tree({k: v for k, v in found.state.items() if k != "shared"}), plain.state)
    moved, _ = carried_out(replace(recipe, lam=0.5))
    assert not same(moved.state.model, plain.state.model)


class After:
    """The same method after so many rounds of which nothing is left: the random numbers of those rounds."""

    def __init__(self, base, rounds):
        self.base, self.rounds = base, rounds

    def stages(self, plan):
        yield replace(plan, algorithm=FedAvg(), rounds=self.rounds, weighting=lambda c: 1.0)
        first, *rest = self.base.stages(plan)
        yield replace(first, fresh=True)
        yield from rest


def test_where_training_starts():
    fresh, seen = carried_out(SHORT)
    first = colours().initial_weights()
    assert same(seen[3][0].download.model, first)
    _, went_on = carried_out(replace(SHORT, continue_from_warmup=True))
    assert same(went_on[3][0].download.model, went_on[2][0].download.model)
    assert not same(went_on[3][0].download.model, first)
    assert "shared" in fresh.state


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_a_warm_up_by_fedavg_below_any_base(preset):
    """Line 1 of algorithm 2."""
    first, *_, last = FedXDS(Scaffold(), **FedXDS.presets[preset]).stages(PLAN)
    assert isinstance(first.algorithm, FedAvg) and isinstance(last.algorithm, Scaffold)
    assert isinstance(next(iter(FedXDS(Scaffold()).stages(PLAN))).algorithm, Scaffold)
    server, _ = carried_out(replace(SHORT, base=Scaffold(), warmup_by="fedavg", continue_from_warmup=True))
    assert "control" in server.state and len(server.state.shared.y) == 20


def test_compositions():
    for recipe in (FedXDS(FineTuned(FedAvg()), 2, 1), FedDecorr(FedXDS(FedDecorr(Scaffold()), 1, None))):
        server, _ = carried_out(recipe)
        assert len(server.state.shared.y) == 20
    stages = [stage for stage, _, _ in timetable(FedDecorr(SHORT), PLAN)]
    assert isinstance(stages[-1].objective, WithSharedData)
    assert not isinstance(stages[0].objective, WithSharedData)


def test_resumed_after_every_round_from_bytes(tmp_path):
    recipe = FedXDS(Scaffold(), warmup_rounds=2, warmup_epochs=1, share_as="float16")
    expected, _ = carried_out(recipe)
    plan = replace(PLAN, cohort=Uniform(2))
    for stop in range(1, 6):
        first = Sequential(colours(), owners(), memories=Memories(tmp_path / str(stop)))

        class Stopped(Exception):
            pass

        def halt(server, job, replies, stop=stop, first=first, stopped=Stopped):
            if server.round == stop:
                first.save(stop)
                raise stopped(encode(server.state))

        with pytest.raises(Stopped) as caught:
            run(recipe, colours(), first, plan, observe=halt)
        second = Sequential(colours(), owners(), memories=Memories(tmp_path / str(stop), round=stop))
        found = run(recipe, colours(), second, plan, state=decode(caught.value.args[0]), round=stop)
        assert same(expected.state, found.state)


# ---- what is promised ----
def pair_at_the_edge(net, weights, by):
    """Two images a hair apart between which the set of kept pixels changes, found by halving the way."""
    (x, y) = images(2)
    y = y[:1]

    def kept_of(image):
        return by.masked(image, by.pixel_scores(net, weights, image, y, 64, SEED), SEED)[1]

    here, there = x[:1], x[1:]
    start = kept_of(here)
    assert not torch.equal(start, kept_of(there))
    while float((here - there).norm()) > 1e-9:
        middle = (here + there) / 2
        here, there = (middle, there) if torch.equal(kept_of(middle), start) else (here, middle)
    return here, there, y


@pytest.mark.parametrize("attribution", ["lrp", "ig", "inputxgrad"])
def test_the_papers_sensitivity_fails_where_the_mask_sees_the_image(attribution):
    """Section 4.3.1 puts the same mask on x and x'. The counterexample: 1e-9 apart, and the releases are told apart."""
    net = colours()
    by = FedXDS(attribution=attribution, sigma=0, clip_norm=None)
    here, there, y = pair_at_the_edge(net, net.initial_weights(), by)
    apart = float((here - there).norm())
    outputs = [
        by.masked(i, by.pixel_scores(net, net.initial_weights(), i, y, 64, SEED), SEED)[0] for i in (here, there)
    ]
    moved = float((outputs[0] - outputs[1]).norm())
    assert apart < 2e-9 and moved > 1e6 * apart
    # At such a distance the budget is nothing, so that delta must be the whole advantage of the best observer.
    true_delta = gaussian_delta(PAPER.noise, PAPER.epsilon * apart, moved)
    assert true_delta > 100 * PAPER.delta


@pytest.mark.parametrize("fixed", [dict(mask_source="class"), dict(attribution="random"), dict(sparsity=100)])
@pytest.mark.parametrize("mask", ["binary", "soft"])
def test_masks_that_do_not_see_the_image_move_nothing_apart(fixed, mask):
    for by in (FedXDS(**fixed, mask=mask, clip_norm=3.0), FedXDS(sparsity=0, clip_norm=3.0)):
        assert by.is_mask_fixed
        (x, y), (other, _) = images(40, 1), images(40, 2)
        for scale in (1e-9, 1e-2, 1.0, 30.0):
            assert moved(by, x, x + scale * (other - x), y).max() <= 1 + 1e-7
        assert moved(by, *worst_neighbours(by)) <= 1 + 1e-7


@pytest.mark.parametrize("attribution", ["lrp", "ig", "inputxgrad"])
def test_a_soft_mask_that_keeps_all_pixels_sees_the_image(attribution):
    """It is the image's own attribution: nothing is dropped, and still two releases move apart."""
    by = FedXDS(attribution=attribution, sparsity=0, mask="soft")
    assert not by.is_mask_fixed and moved(by, *worst_neighbours(by)) > 1.3


def moved(by, x, other, y):
    """How far releases are apart, over the distance of their images."""
    net = colours()
    a, b = (by.masked(i, by.pixel_scores(net, net.initial_weights(), i, y, 64, SEED), SEED)[0] for i in (x, other))
    return (a - b).flatten(1).norm(dim=1) / (x - other).flatten(1).norm(dim=1)


def worst_neighbours(by, step=1e-6):
    """(image, one a hair away, label): in the direction in which the release moves most, by finite differences."""
    net, (x, y) = colours(), images(1, 1)
    weights, pixels = net.initial_weights(), x.numel()
    around = torch.cat([x, x + step * torch.eye(pixels, dtype=x.dtype).view(-1, *x.shape[1:])])
    worth = by.pixel_scores(net, weights, around, y.expand(len(around)), 64, SEED)
    here, *there = by.masked(around, worth, SEED)[0].flatten(1)
    direction = torch.linalg.svd(torch.stack(there) - here)[0][:, 0]
    return x, x + step * direction.view(x.shape), y


def test_class_masks_are_of_the_model_and_the_label_alone():
    net = colours()
    weights = net.initial_weights()
    worth = [METRIC.pixel_scores(net, weights, images(6, seed)[0], torch.arange(6) % 4, 64, SEED) for seed in (1, 2)]
    assert torch.equal(*worth) and torch.equal(worth[0][0], worth[0][4]) and not torch.equal(worth[0][0], worth[0][1])
    with pytest.raises(BadInput, match="all global"):
        carried_out(replace(SHORT, base=FedPer(), mask_source="class"))


@pytest.mark.parametrize(
    ("by", "holds"),
    [
        (PAPER, False),
        (OFFICIAL, True),  # what clip and noise are worth: a large epsilon
        (FIG2C, False),
        (FedXDS(clip_norm=None), False),  # nothing bounds the images
        (FedXDS(sparse=True), False),
        (METRIC, True),
        (BOUNDED, True),
        (FedXDS(accounting="metric"), False),  # enough noise for fixed masks, but the mask sees the image
        (
            FedXDS(mask_source="class", accounting="paper"),
            False,
        ),  # a fixed mask, but too little noise for distant pairs
        (FedXDS(accounting="metric", attribution="random"), True),
        (FedXDS(accounting="metric", sparsity=0), True),
        (FedXDS(accounting="metric", sparsity=0, mask="soft"), False),  # pixels are weighed by what the image shows
        (FedXDS(accounting="metric", sparsity=100, mask="soft"), True),
        (FedXDS(accounting="metric", mask_epsilon=1.0), False),  # the masks tell more than epsilon
        (FedXDS(accounting="metric", sparsity=0, mask_epsilon=1.0), True),
        (FedXDS(accounting="bounded", mask_epsilon=1.0), True),
        (FedXDS(accounting="bounded", sparse=True, sparsity=0, mask="soft"), True),  # all places, whatever the image
        (FedXDS(accounting="bounded", sparse=True), False),  # places of kept pixels are in clear
        (FedXDS(accounting="bounded", sparse=True, mask_source="class"), True),
        (FedXDS(accounting="bounded", sigma=0), False),
        (FedXDS(sigma=0, sparsity=0, clip_norm=None), False),
    ],
)
def test_which_promises_hold(by, holds):
    said = by.statement()
    assert said.holds == holds and bool(said.because) != holds
    assert "labels" in said.not_covered[0] and "seed" in said.randomness
    plain = json.loads(json.dumps(said.plain(), allow_nan=False))
    assert plain["details"]["sigma"] == by.noise


def test_what_a_mask_tells_beyond_epsilon_is_stated():
    said = FedXDS(accounting="metric", mask_epsilon=5.0).statement()
    assert "3 more for each pixel" in said.because and "the mask, which depends" in said.not_covered[-1]
    assert said.details["mask_beyond_epsilon"]["32 x 32"] == 3080
    for covered in (dict(accounting="bounded"), dict(accounting="metric", sparsity=0)):  # with the pixels; fixed
        assert FedXDS(**covered, mask_epsilon=5.0).statement().details["mask_beyond_epsilon"] == {}


@pytest.mark.parametrize("accounting", ["paper", "metric", "bounded"])
def test_the_log_has_a_note_on_masks_that_are_not_covered(accounting):
    by = replace(SHORT, accounting=accounting, mask_epsilon=5.0)
    job, replies = carried_out(by)[1][2]
    notes = " ".join(job.stage.algorithm.notes(replies))
    assert ("another epsilon of 110 about each image" in notes) == (accounting != "bounded")  # 11 of 36 pixels kept


def test_why_the_papers_promise_fails():
    assert "proven for epsilon < 1 alone" in PAPER.statement().because
    small = FedXDS(epsilon=0.9, accounting="paper")
    assert "proven for epsilon" not in small.statement().because + OFFICIAL.statement().because
    for by in (PAPER, METRIC):
        assert "of the same label" in by.statement().adjacency


def test_numbers_of_a_statement():
    said = PAPER.statement().details
    assert said["metric_delta"][1.0] == pytest.approx(1.5e-3, rel=0.03)
    assert said["any_two_images"] is None  # nothing is clipped
    clipped = FedXDS().statement()
    assert clipped.epsilon == clipped.details["any_two_images"] == pytest.approx(3760, rel=0.01)  # (2C / sigma)^2 / 2
    assert BOUNDED.statement().epsilon == pytest.approx(20)
    more = BOUNDED.statement().details["several_images"]
    assert more[10] > 20 * 3 and more[100] > more[10] * 5
    # What a promise of metric privacy means: at every distance that clipped images can have.
    for distance in np.linspace(0.1, 20, 50):
        assert gaussian_delta(METRIC.noise, 20 * distance, distance) <= 1e-5 * (1 + 1e-9)
    raw = FedXDS(sigma=0, sparsity=0, clip_norm=None).statement()
    assert raw.details["any_two_images"] is None


def test_no_observer_beats_the_bounded_promise():
    """The best test between two images that differ as much as they can, on 200,000 draws."""
    by = FedXDS(accounting="bounded", epsilon=1.0, clip_norm=0.5)
    draws = normal(torch.tensor(3), 200_000).double() * by.noise
    for threshold in (-2.0, 0.0, 2.0, 5.0):
        one, other = (float((draws + shift > threshold).double().mean()) for shift in (0.5, -0.5))
        assert one <= math.e * other + 1e-5 + 4 * math.sqrt(one / 200_000)
    weak = by.noise / 3  # and the same test would notice too little noise
    one, other = (float((draws / 3 + shift > 3 * weak).double().mean()) for shift in (0.5, -0.5))
    assert one > math.e * other + 1e-5


# ---- in a run ----
def experiment(tmp_path, name, **settings):
    recipe = FedXDS(warmup_rounds=1, warmup_epochs=None, attribution="inputxgrad")
    small = dict(model=Mlp(), algorithm=recipe, clients=3, cohort=Uniform(2), rounds=2)
    where = fedlens.Execution(engine="sequential", picture=False, out=str(tmp_path / name))
    small |= dict(local=LocalTraining(steps=2), execution=where)
    return fedlens.Experiment(**small | settings)


def test_a_run_says_what_it_promises(tmp_path):
    simulate.run(experiment(tmp_path, "run"))
    said = json.loads((tmp_path / "run/privacy.json").read_text())
    (one,) = said["statements"]
    assert one["holds"] is True and one["epsilon"] > 3000 and said["updates_as_they_are"] == ["FedAvg"]
    assert "4000 images shared with noise 0.2422" in (tmp_path / "run/log.txt").read_text()


def test_a_damaged_gift_stops_the_run_and_nothing_is_lost(tmp_path, monkeypatch):
    simulate.run(experiment(tmp_path, "whole"))
    honest = MaskedExchange.finish

    def damaged(self, client, local):
        upload, memory = honest(self, client, local)
        return upload.replace(x=upload.x / 0), memory

    with monkeypatch.context() as patched:
        patched.setattr(MaskedExchange, "finish", damaged)
        with pytest.raises(RunFailed, match="shared data of client 1 of 3 are damaged: x has values"):
            simulate.run(experiment(tmp_path, "hurt"))
    resume(tmp_path / "hurt")
    assert list(differences(tmp_path / "whole", tmp_path / "hurt")) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("epsilon=0", "algorithm.epsilon is 0, but it should be greater than 0"),
        ("epsilon=-3", "algorithm.epsilon is -3, but it should be greater than 0"),
        ("delta=0", "algorithm.delta is 0, but it should be greater than 0"),
        ("delta=1", "algorithm.delta is 1, but it should be less than 1"),
        ("sparsity=101", "algorithm.sparsity is 101, but it should be less than or equal to 100"),
        ("sparsity=-1", "algorithm.sparsity is -1, but it should be greater than or equal to 0"),
        ("accounting=strict", "algorithm.accounting is 'strict', but it should be 'ordinary', 'paper', 'metric'"),
        ("attribution=lpr", "algorithm.attribution is 'lpr'"),
        ("epsilom=3", "did you mean 'algorithm.epsilon'"),
        ("sigma=-1", "algorithm.sigma is -1"),
    ],
)
def test_bad_settings(word, said):
    with pytest.raises(BadInput, match=said):
        config.read(None, ["algorithm=fedxds", f"algorithm.{word}"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(accounting="bounded", clip_norm=None), "needs clip_norm"),
        (dict(mix="convex", lam=1.5), "lam is 1.5"),
        (dict(mask_source="class", attribution_model="local"), "attribution_model=global"),
        (dict(mask_epsilon=1.0, mask="soft"), "mask=binary"),
        (dict(mask_epsilon=1.0, sparse=True), "sparse=false"),
        (dict(delta=1e-320), "epsilon and delta ask for noise of inf, but share_as=float32 ends at 3.4"),
        (dict(epsilon=1e-300), "epsilon and delta ask for noise of 4.8"),
        (dict(epsilon=1e-5, share_as="float16"), "for noise of 484481, but share_as=float16 ends at 65504"),
        (dict(epsilon=1e-9, accounting="bounded", share_as="float16"), "epsilon, delta and clip_norm ask for noise of"),
        (dict(sigma=1e39, share_as="uint8"), "sigma asks for noise of 1e\\+39, but share_as=uint8 ends at"),
    ],
)
def test_settings_that_contradict_each_other(fields, said):
    with pytest.raises(BadInput, match=said):
        FedXDS(**fields)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (PSE(), "cannot be pse"),
        (SHORT, "shares data itself"),
        (FineTuned(FedDecorr(SHORT)), "shares data itself"),
        (FedFed(), "shares data itself"),
        (FedDecorr(FedFed(Scaffold())), "shares data itself"),
    ],
)
def test_bases_that_cannot_share(base, said):
    with pytest.raises(BadInput, match=said):
        list(FedXDS(base).stages(PLAN))


def test_it_survives_yaml():
    for by in (PAPER, OFFICIAL, FIG2C, METRIC, BOUNDED, FedXDS(Scaffold(), sparse=True, mask_epsilon=None)):
        asked = fedlens.Experiment(algorithm=by, uplink=(Clip(),))
        assert config.resolve(fedlens.Experiment, config.to_dict(asked)) == asked


def test_the_exchange_passes_by_the_uplink():
    """Gifts are sent as the mechanism made them; updates are still clipped."""
    stages = [s for s, _, _ in timetable(SHORT, replace(PLAN, uplink=(Clip(0.1),), objective=cross_entropy))]
    assert [bool(s.uplink) for s in stages] == [True, True, False, True, True, True]


# ---- tables and pictures ----
def test_tables_of_the_paper():
    """Every cell is an experiment; numbers stand where the paper has them."""
    grids = {grid.name: grid for grid in fedxds_tables.tables()}
    for grid in grids.values():
        assert len(grid.cells()) == len(grid.rows) * len(grid.columns)
    assert {f"fedxds/{name}" for name in ("table1", "table2", "table4", "sharing", "public")} <= grids.keys()
    assert grids["fedxds/table1"].paper["fedx_lrp", "cifar10/K10/0.05"].mean == 81.72
    assert grids["fedxds/table1"].paper["fedx_smoothgrad", "tiny_imagenet/K100/0.1"].mean == 31.53
    assert grids["fedxds/table2"].paper["fedx_lrp", "cifar10/K100/0.1"].mean == 23
    assert grids["fedxds/table5"].paper["85", "lrp"].mean == 81.88
    assert grids["fedxds/table6"].paper["5", "inputxgrad"].mean == 70.55
    assert grids["fedxds/table2"].measure({"targets": {"0.7": {"round": 31, "bytes": 5}}}) == 31
    assert grids["fedxds/table2"].measure({"targets": {"0.7": None}}) is None
    real = {cell.column: config.read(None, cell.words).augment for cell in grids["fedxds/table3"].cells()}
    assert real == {"celeba": "crop_flip", "femnist": "none"}  # a mirrored character is another


def test_presets_are_what_the_tables_say():
    rows = {
        "lrp masks (paper)": PAPER,
        "lrp masks (released code)": OFFICIAL,
        "class masks, metric (holds)": METRIC,
        "lrp masks, bounded (holds)": BOUNDED,
    }
    for name, expected in rows.items():
        assert config.read(None, fedxds_tables.SHARED[name]).algorithm == expected, name


def test_the_shared_payload_is_stored_once(tmp_path):
    """Not with every checkpoint: it can be as large as the data."""
    state = Tree(model=Tree(w=torch.ones(2)), shared=Tree(x=torch.arange(1000.0), y=torch.zeros(1000)))
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    for round in (1, 2, 3):
        folder.save(Checkpoint(round, state, Ledger(), 0.0))
    assert len(list(folder.checkpoints.glob("shared-*"))) == 1
    assert max(file.stat().st_size for file in folder.checkpoints.glob("00*")) < 1000
    back, wrong = RunFolder(tmp_path).load()
    assert back is not None and not wrong and same(back.state, state)
    next(folder.checkpoints.glob("shared-*")).write_bytes(b"nothing")
    with pytest.raises(BadInput, match=r"is damaged \(checkpoints/shared-\w+.safetensors has 7 bytes"):
        RunFolder(tmp_path).load()


@pytest.mark.parametrize("accounting", ["ordinary", "paper", "metric", "bounded"])
def test_images_without_noise_are_promised_nothing(accounting):
    said = FedXDS(accounting=accounting, mask_source="class", sigma=0.0, sparsity=0).statement()
    assert (said.epsilon, said.holds, said.because) == (None, False, "there is no noise")
