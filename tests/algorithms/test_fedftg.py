"""FedFTG against a plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from baselines import (
    CLASSES,
    ROUNDS,
    apart,
    averaged,
    carried_out,
    cohort,
    counts,
    fresh,
    loaded,
    shares_of,
    spread,
    trained,
)
from fedlens.algorithms import (
    FedAvg,
    FedFTG,
)
from fedlens.algorithms.fedftg import labels_like
from fedlens.core.algorithm import Server
from fedlens.core.rng import fold, generator, key, normal
from fedlens.core.tree import Tree
from fedlens.models.generators import ImageGenerator, first_weights
from small import SIZES, network, same

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
