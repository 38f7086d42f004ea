"""FedAux against a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from baselines import (
    DATA,
    FED,
    ROUNDS,
    SHORT,
    WIDTH,
    apart,
    averaged,
    carried_out,
    cohort,
    distilled_by_hand,
    fresh,
    trained,
    words,
)
from fedlens import config
from fedlens.algorithms import (
    FedAux,
    FedAvg,
    FedDF,
)
from fedlens.algorithms.fedaux import ScorePublicImages, WeightedDistillation, contrast, logistic, pretrained, view
from fedlens.algorithms.fedfed import ResidualExchange
from fedlens.core.algorithm import Server
from fedlens.core.batches import plan
from fedlens.core.errors import BadInput
from fedlens.core.rng import fold, generator, key, normal
from fedlens.core.run import Turn
from fedlens.core.tree import Tree
from fedlens.privacy.gaussian import gaussian_delta
from fedlens.privacy.report import Disclosure
from fedlens.simulate import run as simulate
from recipes import public_data
from small import PLAN, SIZES, network, same

# ---- FedAux ----------------------------------------------------------------------------------------------------------
AUX = FedAux(**FedAux.presets["earlier"] | {"pretrain_steps": 0, "steps": 5, "batch": 6, "lr": 0.01, "epsilon": 5.0})


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
    assert any("ticket" in each for each in said.not_covered)


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
    options = {"steps": 6, "batch": 8, "lr": 0.01, "validation": 0}
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


def test_fedaux_under_dp_is_refused_before_scores_leave(folder, tmp_path):
    asked = [*words(folder, "fedaux", *SHORT["fedaux"]), "uplink=dp", f"out={tmp_path / 'run'}"]
    with pytest.raises(BadInput, match="uplink dp protects delta alone, but fedaux also uploads scores and a ticket"):
        simulate.run(config.read(None, asked))
    assert not (tmp_path / "run").exists()
