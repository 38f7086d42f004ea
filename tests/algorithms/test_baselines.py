"""FedDISCO, FedDF, FedGen, FedFTG, FedFed and FedAux against plain loops over modules and torch.optim.

Shared with the package are first weights, the rows that `plan` draws and the numbers that keys draw; nothing else.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens import config
from fedlens.algorithms import (
    PSE,
    FedAux,
    FedAvg,
    FedDF,
    FedDISCO,
    FedDyn,
    FedFed,
    FedFTG,
    FedGen,
    FedProx,
    FedXDS,
    FineTuned,
    Local,
    Moon,
    Scaffold,
)
from fedlens.algorithms.fedaux import ScorePublicImages, WeightedDistillation, contrast, logistic, pretrained, view
from fedlens.algorithms.feddisco import discrepancy, weighed
from fedlens.algorithms.fedfed import Distil, ResidualExchange
from fedlens.algorithms.fedftg import labels_like
from fedlens.algorithms.fedgen import class_shares
from fedlens.core.algorithm import Server
from fedlens.core.batches import identity, plan
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.objective import by_examples
from fedlens.core.optimizer import Adam
from fedlens.core.rng import fold, generator, key, normal, numpy_generator, seeded, uniform
from fedlens.core.run import Turn, run, timetable
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.experiment import resized
from fedlens.models.generators import ImageGenerator, LatentGenerator, Vae, diversity, first_weights
from fedlens.papers.fedxds import tables
from fedlens.privacy.gaussian import gaussian_delta
from fedlens.privacy.report import Disclosure
from fedlens.runs.diff import differences
from fedlens.simulate import run as simulate
from fedlens.simulate.describe import describe
from fedlens.simulate.timing import work_of
from recipes import public_data
from small import PLAN, SIZES, Net, federation, network, same

CLASSES, WIDTH = 3, 64
DATA = federation(prepare=identity)
PUBLIC = public_data()
ROUNDS = PLAN.rounds


# ---- a plain federation ----------------------------------------------------------------------------------------------
def carried_out(recipe, norm=True, plan=PLAN, auxiliary=PUBLIC):
    """(server state, all jobs and replies) of a run."""
    seen, engine = [], Sequential(network(norm), DATA, checked=True)

    def observe(server, job, replies):
        seen.append((job, replies))

    return run(recipe, network(norm), engine, plan, auxiliary=auxiliary, observe=observe).state, seen


def cohort(round: int) -> list[int]:
    return list(PLAN.cohort(len(SIZES), key(0, "cohort", round)))


def fresh(norm=True) -> nn.Module:
    with seeded(7):
        return Net(norm).double()


def cross_entropy(model, x, y, weight, seed) -> Tensor:
    return (F.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum()


def trained(model: nn.Module, round: int, client: int, loss: Callable = cross_entropy, begun: int = 0) -> nn.Module:
    """A copy of the model after a client's local training, in a stage that began in round `begun`."""
    model = copy.deepcopy(model).train()
    descent = torch.optim.SGD(model.parameters(), 0.1 * 0.9 ** (round - begun), momentum=0.9, weight_decay=1e-3)
    mine = DATA.train[client]
    rows, weights, _ = plan(len(mine), 4, key(0, "batches", round, client), epochs=2)
    for t, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        descent.zero_grad()
        seed = torch.tensor(key(0, "step", round, client, t))
        loss(model, DATA.data.x[mine[row]], DATA.data.y[mine[row]], weight, seed).backward()
        descent.step()
    return model.eval()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in model.state_dict().items() if leaf.is_floating_point()}


def averaged(models: list[nn.Module], weights: list[float]) -> nn.Module:
    new, shares = copy.deepcopy(models[0]), [weight / sum(weights) for weight in weights]
    for name, leaf in values(new).items():
        leaf.copy_(sum(share * values(model)[name] for model, share in zip(models, shares, strict=True)))
    return new.eval()


def counts(client: int) -> list[int]:
    labels = DATA.data.y[DATA.train[client]].tolist()
    return [labels.count(c) for c in range(CLASSES)]


def apart(model: nn.Module, found: Tree) -> float:
    named = {**found.params, **found.buffers}
    mine = values(model)
    assert mine.keys() == named.keys()
    return max(float((named[name] - leaf).abs().max()) for name, leaf in mine.items())


def loaded(module: nn.Module, weights: Tree) -> nn.Module:
    named = {**weights.params, **weights.buffers}
    module.double().load_state_dict(named, strict=False)
    assert values(module).keys() == named.keys()
    return module


# ---- FedDISCO --------------------------------------------------------------------------------------------------------
def shares_by_hand(clients, a, b, kind, target):
    n = [sum(counts(k)) for k in clients]
    d = []
    for k, size in zip(clients, n, strict=True):
        p = [c / size for c in counts(k)]
        if kind == "kl":
            d.append(sum(x * math.log(x / q) for x, q in zip(p, target, strict=True) if x > 0))
        elif kind == "l1":
            d.append(sum(abs(x - q) for x, q in zip(p, target, strict=True)))
        elif kind == "l2":
            d.append(math.sqrt(sum((x - q) ** 2 for x, q in zip(p, target, strict=True))))
        else:
            inner = sum(x * q for x, q in zip(p, target, strict=True))
            d.append(1 - inner / math.sqrt(sum(x * x for x in p)) / math.sqrt(sum(q * q for q in target)))
    scale = sum(d) if kind == "kl" else 1.0
    return [max(0.0, size / sum(n) - a * apart / scale + b) for size, apart in zip(n, d, strict=True)]


@pytest.mark.parametrize(
    ("kind", "target"),
    [("kl", "uniform"), ("kl", "global"), ("l1", "global"), ("l2", "uniform"), ("cosine", "uniform")],
)
def test_feddisco_by_hand(kind, target):
    recipe = FedDISCO(a=0.5, b=0.1, discrepancy=kind, target=target)
    found, seen = carried_out(recipe)
    late = int(target == "global")  # a round in which labels are counted
    assert len(seen) == ROUNDS + late
    pooled = [sum(counts(k)[c] for k in range(len(SIZES))) for c in range(CLASSES)]
    aim = [c / sum(pooled) for c in pooled] if target == "global" else [1 / CLASSES] * CLASSES
    model = fresh()
    for round in range(late, ROUNDS + late):
        who = cohort(round)
        models = [trained(model, round, k, begun=late) for k in who]
        model = averaged(models, shares_by_hand(who, 0.5, 0.1, kind, aim))
    assert apart(model, found.model) < 1e-12
    if target == "uniform":
        assert {name for _, replies in seen for r in replies for name in r.upload} == {"delta", "weight", "discrepancy"}


def test_feddisco_weights_on_paper():
    """Two clients of 30 and 10 examples, the first of one class of two: KL log 2 and 0, normalised to 1 and 0."""
    d = [
        float(discrepancy("kl", torch.tensor(c).double(), torch.tensor([0.5, 0.5]).double())) for c in ([30, 0], [5, 5])
    ]
    assert d == pytest.approx([math.log(2), 0.0])
    assert weighed([30, 10], d, FedDISCO(a=0.5, b=0.1)) == pytest.approx([0.75 - 0.5 + 0.1, 0.25 + 0.1])
    assert weighed([30, 10], d, FedDISCO(a=1.0, b=0.1)) == pytest.approx([0.0, 0.35])  # clipped
    assert weighed([30, 10], d, FedDISCO(a=9.0, b=0.0))[0] == 0
    assert weighed([30, 30], [1.0, 1.0], FedDISCO(a=9.0, b=0.1)) == [30, 30]  # nobody is left: as many as examples
    assert weighed([30, 10], [0.0, 0.0], FedDISCO(a=0.5, b=0.1)) == [30, 10]
    assert weighed([0, 10], [0.0, 0.3], FedDISCO(a=0.5, b=0.7))[0] == 0
    assert float(discrepancy("kl", torch.zeros(2).double(), torch.tensor([0.5, 0.5]).double())) == 0


@pytest.mark.parametrize("base", [FedAvg(), FedProx(0.1), Moon(), Scaffold(), FedDyn()])
def test_feddisco_without_a_and_b_is_its_base(base):
    found, _ = carried_out(FedDISCO(base, a=0, b=0))
    expected, _ = carried_out(base, plan=replace(PLAN, weighting=by_examples))
    for (path, leaf), other in zip(expected.paths(), found.leaves(expected), strict=True):
        torch.testing.assert_close(other, leaf, rtol=0, atol=1e-13, msg=path)
    moved, _ = carried_out(FedDISCO(base))
    assert not same(moved.model, found.model)


def test_feddisco_refuses_what_it_cannot_weigh():
    with pytest.raises(BadInput, match="local averages nothing by weight"):
        carried_out(FedDISCO(Local()))


# ---- FedDF -----------------------------------------------------------------------------------------------------------
def distilled_by_hand(model, target, rows, weights, lr, x):
    descent = torch.optim.Adam(model.parameters(), lr)
    steps = len(rows)
    for t, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        descent.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * t / max(steps - 1, 1))) / 2
        descent.zero_grad()
        p, q = target[row].softmax(1), model(x[row]).softmax(1)
        (((p * (p.log() - q.log())).sum(1) * weight).sum() / weight.sum()).backward()
        descent.step()


@pytest.mark.parametrize("norm", [True, False])
def test_feddf_by_hand(norm):
    found, _ = carried_out(FedDF(steps=7, batch=8, lr=0.01), norm)  # 20 public images: the third row wraps round
    model, x = fresh(norm), public_data().x
    for round in range(ROUNDS):
        who = cohort(round)
        models = [trained(model, round, k) for k in who]
        with torch.no_grad():
            target = sum(teacher(x) for teacher in models) / len(models)
        model = averaged(models, [SIZES[k] for k in who])
        rows, weights, _ = plan(20, 8, key(key(0, "server", round), "distil"), steps=7)
        assert len(rows) == 7 and weights.sum() < weights.numel()
        distilled_by_hand(model, target, rows, weights, 0.01, x)
    assert apart(model, found.model) < 1e-10


def test_feddf_without_steps_is_fedavg_and_needs_no_public_data():
    assert same(carried_out(FedDF(steps=0), auxiliary=None)[0], carried_out(FedAvg())[0])
    with pytest.raises(BadInput, match=r"feddf distils on public data.*auxiliary="):
        carried_out(FedDF(), auxiliary=None)
    with pytest.raises(BadInput, match="buffers=average"):
        run(
            FedDF(), network(buffers="local"), Sequential(network(buffers="local"), DATA), PLAN, auxiliary=public_data()
        )


def test_feddf_of_identical_teachers_leaves_the_student_as_it_is():
    """One step: Adam divides by its gradients, so that after several even those of rounding would show."""
    net = network()
    state = FedAvg().setup(Server(net, Tree(), 3))
    delta = state.model.map(lambda leaf: 0.1 * torch.ones_like(leaf))
    uploads = [Tree(delta=delta, weight=torch.tensor(float(w)).double()) for w in (1, 2, 5)]
    server = Server(net, state, 3, key=9, auxiliary=public_data())
    student = FedDF(steps=1, batch=8).aggregate(server, uploads).model
    expected = state.model + delta
    assert (
        max(float((a - b).abs().max()) for a, b in zip(student.leaves(), expected.leaves(student), strict=True)) < 1e-10
    )


def test_feddf_moves_the_average_towards_the_ensemble():
    net, state = network(), FedAvg().setup(Server(network(), Tree(), 3))
    noise = [
        state.model.params.map(lambda leaf, s=s: torch.randn(leaf.shape, generator=generator(s)).to(leaf))
        for s in (1, 2)
    ]
    uploads = [Tree(delta=state.model.zeros().replace(params=n), weight=torch.tensor(1.0).double()) for n in noise]
    server, x = Server(net, state, 3, key=9, auxiliary=public_data()), public_data().x
    said = sum(net(state.model + u.delta, x) for u in uploads) / 2

    def distance(model):
        return float(F.kl_div(net(model, x).log_softmax(1), said.softmax(1), reduction="batchmean"))

    before, after = (distance(FedDF(steps=s, batch=10, lr=0.01).aggregate(server, uploads).model) for s in (0, 60))
    assert after < 0.3 * before


# ---- FedGen ----------------------------------------------------------------------------------------------------------
GEN = FedGen(alpha=2.0, beta=3.0, decay=0.5, steps=4, noise=5, hidden=6, batch=7, lr=0.01)


def shares_of(who):
    total = [max(1, sum(counts(k)[c] for k in who)) for c in range(CLASSES)]
    return [torch.tensor([counts(k)[c] / total[c] for c in range(CLASSES)], dtype=torch.float64) for k in who]


def any_labels(seed, count):
    return torch.tensor([int(u * CLASSES) for u in uniform(seed, count).tolist()])


def spread(noise, made) -> Tensor:
    """The diversity term, pair by pair."""
    total = torch.zeros(()).double()
    for i in range(len(noise)):
        for j in range(len(noise)):
            total = total + (noise[i] - noise[j]).pow(2).mean() * (made[i] - made[j]).abs().mean()
    return torch.exp(-total / len(noise) ** 2)


def test_diversity_pair_by_pair():
    noise, made = (torch.randn(5, *shape, generator=generator(1)).double() for shape in ((3,), (2, 4, 4)))
    torch.testing.assert_close(diversity(noise, made), spread(noise, made))


@pytest.mark.parametrize("norm", [True, False])
def test_fedgen_by_hand(norm):
    found, seen = carried_out(GEN, norm)
    model, made_first = fresh(norm), LatentGenerator(CLASSES, WIDTH, 5, 6)
    generator_ = loaded(
        made_first,
        first_weights(
            LatentGenerator,
            CLASSES,
            WIDTH,
            5,
            6,
            seed=key(key(0, "server", 0), "generator"),
            like=torch.zeros(1).double(),
        ),
    )
    for round in range(ROUNDS):
        strength = 0.5**round if round else 0.0
        generator_.eval()

        def loss(model, x, y, weight, seed, strength=strength):
            def head(purpose, labels):
                noise = normal(fold(seed, f"noise for {purpose}"), len(labels), 5).double()
                return model.head(generator_(noise, labels))

            out = model(x)
            own = (F.cross_entropy(out, y, reduction="none") * weight).sum() / weight.sum()
            p, log_q = head("own labels", y).softmax(1).detach(), out.log_softmax(1)
            kl = ((p * (p.log() - log_q)).sum(1) * weight).sum() / weight.sum()
            labels = any_labels(fold(seed, "labels"), 7)
            return own + strength * (3.0 * kl + 2.0 * F.cross_entropy(head("any labels", labels), labels))

        who = cohort(round)
        models = [trained(model, round, k, loss) for k in who]
        descent = torch.optim.Adam(generator_.parameters(), 0.01 * 0.5**round, weight_decay=1e-2)
        generator_.train()
        for step in range(4):
            seed = torch.tensor(key(key(0, "server", round), "features", step))
            y, noise = any_labels(fold(seed, "labels"), 7), normal(fold(seed, "noise"), 7, 5).double()
            made = generator_(noise, y)
            total = spread(noise, made)
            for teacher, share in zip(models, shares_of(who), strict=True):
                for i in range(7):
                    total = total + share[y[i]] * F.cross_entropy(teacher.head(made[i : i + 1]), y[i : i + 1]) / 7
            descent.zero_grad()
            total.backward()
            descent.step()
        model = averaged(models, [SIZES[k] for k in who])
        assert [r.upload.counts.tolist() for r in seen[round][1]] == [counts(k) for k in who]
    assert apart(generator_, found.generator) < 1e-9
    assert apart(model, found.model) < 1e-10
    sent = sum(p.numel() for p in values(generator_).values()) * 8
    assert seen[0][0].download.generator.nbytes == sent


def test_fedgen_without_weights_is_fedavg_to_the_bit():
    found, _ = carried_out(replace(GEN, alpha=0.0, beta=0.0))
    assert same(found.model, carried_out(FedAvg())[0].model)
    for term in ({"alpha": 0.0}, {"beta": 0.0}):
        assert not same(carried_out(replace(GEN, **term))[0].model, found.model)


def test_made_up_features_count_ever_less_and_never_nothing():
    by, net = replace(GEN, decay=0.5, least=0.2), network()
    state = by.setup(Server(net, Tree(), 2))
    turns = [state.replace(turns=torch.tensor(t)) for t in (0, 1, 2, 3, 9)]
    assert [float(by.broadcast(Server(net, one, 2)).strength) for one in turns] == [0, 0.5, 0.25, 0.2, 0.2]


def test_fedgens_generator_learns_what_heads_take_for_a_class():
    by, net = replace(GEN, steps=150, batch=32, decay=1.0), network()
    server = Server(net, by.setup(Server(net, Tree(), 6, key=3)), 6, key=4)
    uploads = [
        Tree(delta=server.state.model.zeros(), counts=torch.tensor(c), weight=torch.tensor(1.0))
        for c in ([5, 0, 1], [0, 9, 1])
    ]
    y, noise = torch.arange(60) % 3, torch.randn(60, 5, generator=generator(0)).double()

    def wrong(generator):
        head = net.apply(server.state.model, lambda m, z: m.head(z), by.made(net, generator, noise, y))
        return float(F.cross_entropy(head, y))

    assert wrong(by.taught(server, uploads)) < 0.3 * wrong(server.state.generator)
    shares = class_shares(uploads)
    assert shares.tolist() == [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]


# ---- FedFTG ----------------------------------------------------------------------------------------------------------
FTG = FedFTG(noise=4, width=3, iterations=3, student_steps=2, batch=6, student_lr=0.05, decay=0.9)


@pytest.mark.parametrize("norm", [True, False])
def test_fedftg_by_hand(norm):
    found, _ = carried_out(FTG, norm)
    model, maker = fresh(norm), None
    for round in range(ROUNDS):
        who, at_server = cohort(round), key(0, "server", round)
        models = [trained(model, round, k) for k in who]
        model, shares = averaged(models, [SIZES[k] for k in who]), shares_of(who)
        if maker is None:
            like = torch.zeros(1).double()
            sizes = CLASSES, (1, 6, 6), 4, 3
            first = first_weights(ImageGenerator, *sizes, seed=key(at_server, "generator"), like=like)
            maker = loaded(ImageGenerator(*sizes), first)
        climb = torch.optim.Adam(maker.parameters(), 0.01 * 0.9**round)
        descent = torch.optim.SGD(model.parameters(), 0.05 * 0.9**round, weight_decay=1e-3)
        pooled = torch.tensor([sum(counts(k)[c] for k in who) for c in range(CLASSES)])
        for iteration in range(3):
            seed = torch.tensor(key(at_server, "images", iteration))
            y, noise = labels_like(pooled, fold(seed, "labels"), 6), normal(fold(seed, "noise"), 6, 4).double()
            maker.train()
            for teacher, share in zip(models, shares, strict=True):
                made = maker(noise, y)
                theirs, ours = teacher(made), model(made)
                total = spread(noise, made) / len(who)
                for i in range(6):
                    far = (ours[i] - theirs[i].detach()).abs().mean()
                    total = total + share[y[i]] * (F.cross_entropy(theirs[i : i + 1], y[i : i + 1]) - far) / 6
                climb.zero_grad()
                total.backward()
                climb.step()
            maker.eval()
            with torch.no_grad():
                made = maker(noise, y)
                pairs = zip(models, shares, strict=True)
                said = sum(share[y][:, None] * teacher(made).softmax(1) for teacher, share in pairs)
            for _ in range(2):
                descent.zero_grad()
                (-(said * model(made).log_softmax(1)).sum() / (6 * CLASSES)).backward()
                descent.step()
    assert maker is not None and apart(maker, found.generator) < 1e-8
    assert apart(model, found.model) < 1e-9


def test_labels_are_as_frequent_as_the_clients_have_them():
    y = labels_like(torch.tensor([10, 0, 30]), torch.tensor(3), 40_000)
    assert torch.bincount(y, minlength=3)[1] == 0
    assert (y == 0).double().mean() == pytest.approx(0.25, abs=0.01)
    assert labels_like(torch.tensor([0, 4, 0]), torch.tensor(3), 100).unique().tolist() == [1]


def test_fedftg_without_iterations_is_fedavg():
    found, seen = carried_out(FedFTG(iterations=0))
    assert same(found.model, carried_out(FedAvg())[0].model)
    assert {tuple(r.upload.shape.tolist()) for _, replies in seen for r in replies} == {(1, 6, 6)}


def test_fedftgs_generator_finds_where_they_disagree():
    """After some climbing, the average and a client disagree more on what is made than at first."""
    net, by = network(), replace(FTG, iterations=25, student_lr=1e-9, batch=30)
    state = by.setup(Server(net, Tree(), 2, key=1))
    noise = state.model.params.map(lambda leaf: 0.3 * torch.randn(leaf.shape, generator=generator(2)).to(leaf))
    uploads = [
        Tree(
            delta=state.model.zeros().replace(params=noise * sign),
            counts=torch.tensor([5, 5, 5]),
            shape=torch.tensor([1, 6, 6]),
            weight=torch.tensor(1.0).double(),
        )
        for sign in (1.0, -1.0)
    ]
    server = Server(net, state, 2, key=7)
    z, y = torch.randn(60, 4, generator=generator(1)).double(), torch.arange(60) % 3

    def far(generator_):
        made = loaded(ImageGenerator(CLASSES, (1, 6, 6), 4, 3), generator_).train()(z, y)
        return float((net(state.model, made) - net(state.model + uploads[0].delta, made)).abs().mean().detach())

    once, often = (replace(by, iterations=n).aggregate(server, uploads).generator for n in (1, 25))
    assert far(often) > 1.05 * far(once)


# ---- FedFed ----------------------------------------------------------------------------------------------------------
FED = FedFed(distil_rounds=3, latent=4, width=4, sigma1=0.1, sigma2=0.3)


def test_fedfeds_autoencoder_by_hand():
    state, seen = carried_out(Distil(by=FED), plan=replace(PLAN, optimizer=Adam(1e-3)))
    vae = loaded(
        Vae((1, 6, 6), 4, 4),
        first_weights(Vae, (1, 6, 6), 4, 4, seed=key(0, "server", 0), like=torch.zeros(1).double()),
    )
    model = fresh()
    for round in range(ROUNDS):
        who, ends = cohort(round), []
        for client in who:
            mine = DATA.train[client]
            local, coder = copy.deepcopy(model).train(), copy.deepcopy(vae)
            descent = torch.optim.Adam([*local.parameters(), *coder.parameters()], 1e-3)
            rows, weights, _ = plan(len(mine), 4, key(0, "batches", round, client), epochs=2)
            for t, (row, weight) in enumerate(zip(rows, weights, strict=True)):
                x, y = DATA.data.x[mine[row]], DATA.data.y[mine[row]]
                seed, share = torch.tensor(key(0, "step", round, client, t)), weight / weight.sum()
                again, mu, log_variance = coder(x, normal(fold(seed, "code"), len(x), 4).double())
                rest = x - again
                noisy = [
                    rest + sigma * normal(fold(seed, name), *x.shape).double()
                    for name, sigma in (("first noise", 0.1), ("second noise", 0.3))
                ]
                out = local(torch.cat([*noisy, x])).log_softmax(1)
                total = torch.zeros(()).double()
                for i in range(len(x)):
                    both = (-out[i, y[i]] - out[len(x) + i, y[i]]) / 2
                    alone = -out[2 * len(x) + i, y[i]]
                    kl = 0.5 * (mu[i] ** 2 + log_variance[i].exp() - 1 - log_variance[i]).sum() / (1 * 4)
                    term = 50 * (rest[i] ** 2).mean() + 2 * both + 0.005 * kl + 0.4 * alone
                    total = total + share[i] * term
                descent.zero_grad()
                total.backward()
                descent.step()
            ends.append((local, coder))
        n = [SIZES[k] for k in who]
        model, vae = averaged([m for m, _ in ends], n), averaged([v for _, v in ends], n)
    assert apart(model, state.model) < 1e-9 and apart(vae, state.vae) < 1e-9
    assert "vae" not in seen[0][0].download and "seed" not in seen[1][0].download
    assert [float(job.download.pull) for job, _ in seen] == [50.0] * 3


def test_reconstruction_counts_less_later():
    net = network()
    state = Distil(by=FED).setup(Server(net, Tree(), 2))
    pulls = [
        float(Distil(by=FED).broadcast(Server(net, state.replace(turns=torch.tensor(t)), 2)).pull)
        for t in (9, 10, 19, 20)
    ]
    assert pulls == [50.0, 25.0, 25.0, 5.0]


def test_residual_and_reconstruction_are_the_image_and_noise_is_exact():
    by = replace(FED, sigma1=0.0, sigma2=0.3)
    x, y = torch.randn(400, 1, 6, 6, generator=generator(0)).double(), torch.arange(400) % 3
    vae = first_weights(Vae, (1, 6, 6), 4, 4, seed=1, like=x)
    shared = by.released(vae, x, y, torch.tensor(5))
    again = loaded(Vae((1, 6, 6), 4, 4), vae)(x, torch.zeros(400, 4).double())[0].detach()
    torch.testing.assert_close(shared.x[:400].double() + again, x, rtol=0, atol=1e-6)  # sent as float32
    noise = (shared.x[400:] - shared.x[:400]).double()
    assert float(noise.std()) == pytest.approx(0.3, rel=0.02) and abs(float(noise.mean())) < 0.01
    expected = 0.3 * normal(fold(torch.tensor(5), "second noise"), *x.shape)
    torch.testing.assert_close(noise.float(), expected, rtol=0, atol=1e-6)
    assert shared.y.tolist() == y.tolist() * 2


@pytest.mark.parametrize(("name", "at", "sigma"), [("first noise", 0, 0.1), ("second noise", 400, 0.3)])
def test_both_noises_of_a_residual_are_exact(name, at, sigma):
    x, seed = torch.randn(400, 1, 6, 6, generator=generator(0)).double(), torch.tensor(5)
    vae = first_weights(Vae, (1, 6, 6), 4, 4, seed=1, like=x)
    noisy, plain = (by.released(vae, x, torch.arange(400) % 3, seed).x[at : at + 400].double()
                    for by in (FED, replace(FED, sigma1=0.0, sigma2=0.0)))  # fmt: skip
    torch.testing.assert_close(noisy - plain, sigma * normal(fold(seed, name), *x.shape).double(), rtol=0, atol=1e-6)
    assert float((noisy - plain).std()) == pytest.approx(sigma, rel=0.02)
    details = FED.statement().details
    assert (details["sigma1"], details["sigma2"]) == (0.1, 0.3) and "0.1 and 0.3" in FED.statement().mechanism


def test_fedfed_shares_all_residuals_once_and_then_trains_afresh():
    recipe = replace(FED, base=Scaffold())
    state, seen = carried_out(recipe)
    kinds = [type(job.stage.algorithm).__name__ for job, _ in seen]
    assert kinds == ["Distil"] * 3 + ["ResidualExchange"] + ["Scaffold"] * 3
    uploads = [reply.upload for reply in seen[3][1]]
    assert [len(u.y) for u in uploads] == [2 * n for n in SIZES] and len(state.shared.y) == 2 * sum(SIZES)
    assert set(seen[3][0].download) == {"vae"} and seen[4][0].stage.fresh and "vae" not in state
    objective = seen[4][0].stage.objective
    assert (objective.weight, objective.size, objective.mix) == (2 / 3, 2 * PLAN.size, "convex")
    said = seen[3][0].stage.algorithm.statement()
    assert said.epsilon is None and not said.holds


@pytest.mark.parametrize(
    ("base", "match"),
    [(FedXDS(), "shares data itself"), (PSE(), "cannot be pse"), (FineTuned(FedAux()), "cannot be fedaux, whose")],
)
def test_fedfed_refuses_bases_that_cannot_share(base, match):
    with pytest.raises(BadInput, match=match):
        timetable(FedFed(base), PLAN)


# ---- FedAux ----------------------------------------------------------------------------------------------------------
AUX = FedAux(pretrain_steps=0, steps=5, batch=6, lr=0.01, epsilon=5.0)


def test_regression_against_other_solvers():
    x = F.normalize(torch.randn(60, 7, generator=generator(1)).double())
    sign = torch.where(torch.arange(60) < 20, 1.0, -1.0).double()
    w = logistic(x, sign, 0.01).requires_grad_()
    value = sum(torch.log1p(torch.exp(-s * (row @ w))) for row, s in zip(x, sign, strict=True)) / 60
    (slope,) = torch.autograd.grad(value + 0.005 * w.square().sum(), w)
    assert slope.norm() < 1e-11  # strictly convex: there is one such point
    optimize = pytest.importorskip("scipy.optimize")
    numbers = x.numpy(), sign.numpy()

    def by_numpy(v):
        return np.logaddexp(0, -numbers[1] * (numbers[0] @ v)).mean() + 0.005 * v @ v

    other = optimize.minimize(by_numpy, np.zeros(7), tol=1e-14).x
    np.testing.assert_allclose(w.detach().numpy(), other, atol=1e-4)
    far = logistic(x * 1000, sign, 1e-9)  # separable and hardly held: line search keeps it finite
    assert far.isfinite().all()


def test_noise_of_scores_by_hand():
    by = FedAux()
    assert by.sigma(11_000) == pytest.approx(math.sqrt(2 * math.log(1.25 / 1e-5)) * 2 / (11_000 * 0.01) / 0.1)
    large = replace(by, epsilon=5.0)
    assert gaussian_delta(large.sigma(100), 5.0, 2 / (100 * 0.01)) == pytest.approx(1e-5)
    own, negatives, others = (
        F.normalize(torch.randn(n, 5, generator=generator(n)).double() + shift)
        for n, shift in ((9, 1.0), (12, 0.0), (4, 0.5))
    )
    seed = torch.tensor(3)
    w = logistic(torch.cat([own, negatives]), torch.tensor([1.0] * 9 + [-1.0] * 12).double(), 0.01)
    w = w + large.sigma(21) * normal(seed, 5).double()
    expected = [1 / (1 + math.exp(-float(row @ w))) for row in others]
    assert large.scores(own, negatives, others, seed).tolist() == pytest.approx(expected, rel=1e-6)
    probe = 1e-3 * torch.eye(5).double()  # small, so that scores stay near one half
    drawn = (
        1000 * torch.stack([large.scores(own, negatives, probe, torch.tensor(s)) for s in range(400)]).double().logit()
    )
    clean = logistic(torch.cat([own, negatives]), torch.tensor([1.0] * 9 + [-1.0] * 12).double(), 0.01)
    assert float((drawn - clean).std()) == pytest.approx(large.sigma(21), rel=0.05)


def test_regression_moves_no_more_than_its_sensitivity():
    """One image replaced by any other, here by the worst of many: |w - w'| <= 2/(n lambda)."""
    x = F.normalize(torch.randn(30, 3, generator=generator(4)).double())
    sign = torch.tensor([1.0] * 10 + [-1.0] * 20).double()
    w, worst = logistic(x, sign, 0.1), 0.0
    for other in F.normalize(torch.randn(50, 3, generator=generator(5)).double()):
        moved = x.clone()
        moved[0] = other
        worst = max(worst, float((logistic(moved, sign, 0.1) - w).norm()))
    assert 0.05 * 2 / (30 * 0.1) < worst <= 2 / (30 * 0.1)


def test_fedaux_by_hand():
    found, seen = carried_out(AUX)
    job, replies = seen[0]
    x, first = public_data().x, fresh().eval()
    at_server = key(0, "server", 0)
    order = torch.randperm(20, generator=generator(key(at_server, "public")))
    negatives, others = order[:4], order[4:]
    scores, tickets = [], []
    with torch.no_grad():
        for client in range(len(SIZES)):
            own = F.normalize(first.features(DATA.data.x[DATA.train[client]]))
            seed = key(0, "client", 0, client)
            public = F.normalize(first.features(x))
            noise = fold(torch.tensor(seed), "noise")
            scores.append(AUX.scores(own, public[negatives], public[others], noise).double())
            tickets.append(key(seed, "ticket"))
    assert [int(r.upload.ticket) for r in replies] == tickets and "shared" not in found
    assert all(torch.allclose(r.upload.scores.double(), s, atol=1e-6) for r, s in zip(replies, scores, strict=True))
    assert job.shared.nbytes == 20 * WIDTH * 8 and replies[0].upload.scores.nbytes == 16 * 4
    model = fresh()
    for round in range(1, ROUNDS + 1):
        who = cohort(round)
        models = [trained(model, round, k, begun=1) for k in who]
        with torch.no_grad():
            weight = torch.stack([scores[k] for k in who])
            said = torch.stack([teacher(x[others]) for teacher in models])
            target = (weight[:, :, None] * said).sum(0) / weight.sum(0)[:, None]
        model = averaged(models, [SIZES[k] for k in who])
        rows, weights, _ = plan(16, 6, key(key(0, "server", round), "distil"), steps=5)
        distilled_by_hand(model, target, rows, weights, 0.01, x[others])
    assert apart(model, found.model) < 1e-7  # scores travel as float32


def test_a_ticket_links_messages_and_does_not_lead_to_the_noise():
    _, seen = carried_out(AUX)
    tickets = {reply.client: int(reply.upload.ticket) for reply in seen[0][1]}
    assert len(set(tickets.values())) == len(SIZES)
    assert all(tickets[reply.client] == int(reply.upload.ticket) for _, replies in seen[1:] for reply in replies)
    by, own, public = replace(AUX, epsilon=0.1), *(torch.eye(9).double()[part] for part in (slice(5), slice(5, 9)))
    for client, ticket in tickets.items():
        secret, told = (fold(torch.tensor(number), "noise") for number in (key(0, "client", 0, client), ticket))
        clean = logistic(torch.cat([own, public]), torch.tensor([1.0] * 5 + [-1.0] * 4).double(), 0.01)
        sent = by.scores(own, public, 1e-6 * torch.eye(9).double(), secret).double().logit() * 1e6
        noise = [by.sigma(9) * normal(seed, 9).double() for seed in (secret, told)]
        guesses = [float((sent - each - clean).norm()) for each in noise]
        assert guesses[0] < by.sigma(9) / 100 and guesses[1] > by.sigma(9)  # who has the key has the regression
    said = ScorePublicImages(by=AUX).statement()
    assert any("ticket" in each for each in said.not_covered) and "nodes draw it from the run's seed" in said.randomness


@pytest.mark.parametrize("negatives", [0.1, 0.5])
def test_some_public_images_are_negatives(negatives):
    """The others are scored and distilled on."""
    state = ScorePublicImages(by=replace(AUX, negatives=negatives)).setup(
        Server(network(), Tree(), 2, auxiliary=public_data())
    )
    apart = round(20 * negatives)
    assert [len(state.shared[name]) for name in ("negatives", "others")] == [apart, 20 - apart]
    assert len(state.distil.unique()) == 20 - apart


@pytest.mark.parametrize(("negatives", "count"), [(0.01, 0), (0.99, 20)])
def test_all_or_no_public_images_as_negatives_are_refused(negatives, count):
    with pytest.raises(BadInput, match=f"makes {count} of 20 public images negatives: some must"):
        carried_out(replace(AUX, negatives=negatives))


def test_what_is_released_twice_is_stated_twice(tmp_path):
    score, written = PLAN.errand(ScorePublicImages(by=AUX)), {}
    rounds = [score, replace(PLAN, algorithm=FedAvg()), score]
    said = Disclosure(tmp_path / "privacy.json", [Turn(stage) for stage in rounds], len(SIZES), 0)
    for done, releases in ((1, 1), (2, 1), (3, 2)):
        said.write(done, written.__setitem__)
        assert [one["epsilon"] for one in written["privacy.json"]["statements"]] == [5.0] * releases


def test_equal_scores_are_feddf():
    """Where all clients are equally sure, their logits count alike."""
    net = network()
    state = FedAvg().setup(Server(net, Tree(), 2))
    deltas = [
        state.model.map(lambda leaf, s=s: 0.1 * torch.randn(leaf.shape, generator=generator(s)).to(leaf).abs())
        for s in (1, 2)
    ]
    uploads = [
        Tree(delta=d, weight=torch.tensor(1.0).double(), ticket=torch.tensor(t))
        for d, t in zip(deltas, (8, 3), strict=True)
    ]
    scored = state.replace(scores=torch.full((2, 20), 0.3), tickets=torch.tensor([3, 8]), distil=torch.arange(20))
    server = Server(net, scored, 2, key=4, auxiliary=public_data())
    options = {"steps": 6, "batch": 8, "lr": 0.01}
    one, other = (rule(**options).aggregate(server, uploads).model for rule in (WeightedDistillation, FedDF))
    assert max(float((a - b).abs().max()) for a, b in zip(one.leaves(), other.leaves(one), strict=True)) < 1e-9
    swayed = replace(server, state=scored.replace(scores=torch.tensor([[0.9], [0.1]]).expand(2, 20)))
    assert not same(WeightedDistillation(**options).aggregate(swayed, uploads).model, one)


def test_contrast_pair_by_pair_and_views():
    seen = torch.randn(8, 5, generator=generator(0)).double()
    unit = [row / row.norm() for row in seen]
    total = 0.0
    for i in range(8):
        to = {j: math.exp(float(unit[i] @ unit[j]) / 0.5) for j in range(8) if j != i}
        total -= math.log(to[(i + 4) % 8] / sum(to.values())) / 8
    assert float(contrast(seen)) == pytest.approx(total)
    x = torch.rand(50, 3, 8, 8, generator=generator(1)).double()
    one, other = (view(x, torch.tensor(s)) for s in (1, 2))
    assert one.shape == x.shape and one.isfinite().all() and not torch.equal(one, other)
    assert torch.equal(one, view(x, torch.tensor(1)))
    grey = ((one - one.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-12).double().mean()
    assert 0.05 < float(grey) < 0.4


def test_pretraining_tells_images_apart_and_leaves_the_head():
    net, data = network(), public_data(40)
    start = net.initial_weights()
    server = Server(net, Tree(), 2, key=5)
    by = FedAux(pretrain_steps=100, pretrain_batch=40, pretrain_lr=0.01)
    model = pretrained(server, start, data, by)
    assert torch.equal(model.params["head.weight"], start.params["head.weight"])
    assert same(start, net.initial_weights())  # what it was given is not written

    def alike(weights):
        pair = torch.cat([view(data.x, torch.tensor(s)) for s in (101, 102)])
        return float(contrast(net.forward(weights, pair).features))

    assert alike(model) < alike(start) - 0.05


def test_fedaux_refuses_a_run_without_public_data():
    with pytest.raises(BadInput, match=r"fedaux distils on public data.*auxiliary="):
        carried_out(FedAux(), auxiliary=None)
    said = ScorePublicImages(by=replace(AUX, delta=1e-4, regularisation=0.5)).statement()
    assert (said.epsilon, said.delta, said.holds) == (5.0, 1e-4, True) and "lambda is 0.5" in said.sensitivity
    assert said.details["sigma_of_10000_images"] == replace(AUX, delta=1e-4, regularisation=0.5).sigma(10_000)
    assert ResidualExchange(by=FED).statement().epsilon is None


# ---- runs ------------------------------------------------------------------------------------------------------------
def write_images(path, count, side, channels, seed):
    draw = np.random.Generator(np.random.Philox(seed))
    y = np.arange(count) % 3
    x = draw.integers(0, 120, (count, side, side, channels)) + 40 * y[:, None, None, None]
    np.savez(path, x_train=x.astype(np.uint8), y_train=y, x_test=x[:30].astype(np.uint8), y_test=y[:30])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("images")
    write_images(where / "own.npz", 120, 8, 1, 0)
    write_images(where / "public.npz", 60, 12, 3, 1)  # other sides and colours
    return where


def words(folder, name, *more):
    return [
        f"data={folder / 'own.npz'}",
        f"auxiliary={folder / 'public.npz'}",
        "partition=iid",
        "clients=4",
        "cohort=2",
        "rounds=2",
        "model=mlp",
        "model.hidden=8",
        "local.batch_size=8",
        "picture=false",
        "engine=sequential",
        f"algorithm={name}",
        *more,
    ]


SHORT = {
    "feddf": ("algorithm.steps=3",),
    "fedaux": ("algorithm.steps=3", "algorithm.pretrain_steps=2", "algorithm.pretrain_batch=8"),
    "fedgen": ("algorithm.steps=2",),
    "fedfed": ("algorithm.distil_rounds=1", "algorithm.latent=4", "algorithm.width=4"),
    "fedftg": ("algorithm.iterations=1", "algorithm.width=2"),
    "feddisco": ("algorithm.base=scaffold",),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_run_from_words_is_the_same_after_a_stop(name, folder, tmp_path):
    """Stopped before its last round and resumed: the same to the bit."""
    asked = words(folder, name, *SHORT[name])
    whole = simulate.run(config.read(None, [*asked, f"out={tmp_path / 'whole'}"]))
    assert whole.rounds == len(config.read(None, asked).timetable())

    class Stopped(Exception):
        pass

    class Stops(simulate.Nobody):
        def round(self, progress):
            if progress.round == whole.rounds - 1:
                raise Stopped

    with pytest.raises(Stopped):
        simulate.run(config.read(None, [*asked, f"out={tmp_path / 'part'}"]), watcher=Stops())
    simulate.resume(tmp_path / "part")
    assert not list(differences(tmp_path / "whole", tmp_path / "part"))
    passport = json.loads((tmp_path / "whole" / "passport.json").read_text())
    assert ("auxiliary" in passport) == (name in ("feddf", "fedaux"))
    if name in ("fedaux", "fedfed"):
        said = json.loads((tmp_path / "whole" / "privacy.json").read_text())["statements"]
        assert [s["holds"] for s in said] == [name == "fedaux"]
        assert said[0]["epsilon"] == (0.1 if name == "fedaux" else None)


@pytest.mark.parametrize("setting", ["fedgen.batch", "fedftg.batch", "fedaux.pretrain_batch"])
def test_what_is_normalised_or_told_apart_within_a_batch_needs_two(setting, folder, tmp_path):
    name, _, field = setting.partition(".")
    asked = words(folder, name, *SHORT[name], f"out={tmp_path / 'run'}")
    with pytest.raises(BadInput, match=f"algorithm.{field} is 1, but it should be greater than or equal to 2"):
        config.read(None, [*asked, f"algorithm.{field}=1"])
    simulate.run(config.read(None, [*asked, f"algorithm.{field}=2"]))


@pytest.mark.parametrize("name", ["feddf", "fedaux"])
def test_one_public_image_at_a_time(name, folder, tmp_path):
    simulate.run(config.read(None, words(folder, name, *SHORT[name], "algorithm.batch=1", f"out={tmp_path / 'run'}")))


@pytest.mark.parametrize("name", ["feddf", "fedaux"])
def test_public_data_are_refused_by_name_when_missing(name, folder, tmp_path):
    asked = [word for word in words(folder, name, f"out={tmp_path / 'run'}") if not word.startswith("auxiliary=")]
    with pytest.raises(BadInput, match=f"{name} needs public data that no client owns: set auxiliary"):
        simulate.run(config.read(None, asked))
    with pytest.raises(BadInput, match="auxiliary 'cifar1000' is unknown; did you mean 'cifar100'"):
        config.read(None, [*asked, "auxiliary=cifar1000"])
    with pytest.raises(BadInput, match=r"nowhere\.npz"):
        simulate.run(config.read(None, [*asked, f"auxiliary={tmp_path / 'nowhere.npz'}"]))
    assert not (tmp_path / "run").exists()


def test_public_images_need_no_labels(folder, tmp_path):
    x = numpy_generator(3).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(tmp_path / "one_class.npz", x=x, y=np.zeros(40, int))
    public = f"auxiliary={tmp_path / 'one_class.npz'}"
    simulate.run(config.read(None, [*words(folder, "feddf", *SHORT["feddf"]), public, f"out={tmp_path / 'run'}"]))
    clients = f"data={tmp_path / 'one_class.npz'}"
    with pytest.raises(BadInput, match="npz has one class only"):  # read before, and clients learn from them
        simulate.run(config.read(None, [*words(folder, "feddf"), clients, f"out={tmp_path / 'other'}"]))


def test_public_images_are_nobodys(folder, tmp_path):
    (tmp_path / "again.npz").write_bytes((folder / "own.npz").read_bytes())
    for name in (folder / "own.npz", tmp_path / "again.npz"):
        asked = [*words(folder, "feddf", *SHORT["feddf"]), f"auxiliary={name}", f"out={tmp_path / 'run'}"]
        with pytest.raises(BadInput, match="auxiliary and data are the same images"):
            simulate.run(config.read(None, asked))


def test_the_part_that_needs_public_data_is_named():
    asked = ["algorithm=fedfed", "algorithm.base=feddisco", "algorithm.base.base=feddf"]
    with pytest.raises(BadInput, match=r"^feddf needs public data"):
        assert config.read(None, asked).needs_public_data
    assert not config.read(None, [*asked, "algorithm.base.base.steps=0"]).needs_public_data


@pytest.mark.parametrize("name", ["feddf", "fedgen"])
def test_public_data_that_nobody_needs_are_noted(name, folder, tmp_path):
    simulate.run(config.read(None, [*words(folder, name, *SHORT[name]), f"out={tmp_path / 'run'}"]))
    note = f"auxiliary is not used: {name} needs no public data"
    told = json.loads((tmp_path / "run" / "passport.json").read_text())["split_notes"]
    assert (note in told) == (name == "fedgen")


def test_fedaux_under_dp_is_refused_before_scores_leave(folder, tmp_path):
    asked = [*words(folder, "fedaux", *SHORT["fedaux"]), "uplink=dp", f"out={tmp_path / 'run'}"]
    with pytest.raises(BadInput, match="uplink dp protects delta alone, but fedaux also uploads scores and a ticket"):
        simulate.run(config.read(None, asked))
    assert not (tmp_path / "run").exists()


def test_messages_and_work_are_those_of_some_public_images(folder):
    """No training at the server: two thousand steps of SimCLR would change neither."""
    experiment = config.read(None, [*words(folder, "fedaux"), "algorithm.negatives=0.001"])
    leaves = {
        (leaf.where, leaf.name): leaf for leaf in describe(experiment, 3, 1, 8) if leaf.stage == "ScorePublicImages"
    }
    assert leaves["shared", "negatives"].shape == (1, 8) and leaves["shared", "others"].shape == (9, 8)
    assert leaves["up", "scores"].bytes == 9 * 4
    assert list(work_of(experiment, experiment.data.load())) == [
        stage for stage, at, _ in experiment.timetable() if at == 0
    ]


def test_public_images_take_the_shape_of_the_clients():
    x = torch.randint(0, 256, (3, 3, 6, 6), generator=generator(0)).to(torch.uint8)
    assert torch.equal(resized(x, (3, 6, 6)), x)
    assert torch.equal(resized(x, (1, 6, 6))[:, 0], x.double().mean(1).round().to(torch.uint8))
    assert resized(x[:, :1], (3, 6, 6)).shape == (3, 3, 6, 6)
    small = resized(x, (3, 3, 3))
    assert small.shape == (3, 3, 3, 3) and small.dtype == torch.uint8
    flat = torch.full((1, 3, 6, 6), 77, dtype=torch.uint8)
    assert (resized(flat, (3, 12, 12)) == 77).all()


def test_every_row_of_the_papers_tables_can_be_run():
    grids = {grid.name: grid for grid in tables.tables()}
    there = {row for name in ("fedxds/table1", "fedxds/public") for row in grids[name].rows}
    assert there >= {row for row, _ in grids["fedxds/table1"].paper}
    for name in ("fedxds/table1", "fedxds/public", "fedxds/public_rounds"):
        for cell in grids[name].cells():
            experiment = config.read(None, cell.words)
            assert experiment.timetable() and (experiment.auxiliary is not None) == experiment.needs_public_data


def test_small_networks_take_images_of_any_size():
    for side in (5, 6, 8, 28):
        x = torch.rand(2, 3, side, side)
        assert Vae((3, side, side), 4, 4)(x, torch.zeros(2, 4))[0].shape == x.shape
        assert ImageGenerator(4, (3, side, side), 5, 2)(torch.zeros(2, 5), torch.tensor([0, 3])).shape == x.shape
    with pytest.raises(BadInput, match="fedgen needs a model whose head has a linear layer"):

        class Bare(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(4, 3), nn.Identity()

            def features(self, x):
                return self.body(x)

        FedGen().setup(Server(Network(Bare()), Tree(), 2))
