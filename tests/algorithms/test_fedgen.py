"""FedGen against a plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from baselines import (
    CLASSES,
    ROUNDS,
    WIDTH,
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
    values,
)
from fedlens.algorithms import (
    FedAvg,
    FedGen,
)
from fedlens.algorithms.fedgen import class_shares
from fedlens.core.algorithm import Server
from fedlens.core.rng import fold, generator, key, normal, uniform
from fedlens.core.tree import Tree
from fedlens.models.generators import LatentGenerator, diversity, first_weights
from small import SIZES, network, same

# ---- FedGen ----------------------------------------------------------------------------------------------------------
GEN = FedGen(
    alpha=2.0, beta=3.0, decay=0.5, steps=4, noise=5, hidden=6, batch=7, lr=0.01, labels="all", noise_is="normal"
)


def any_labels(seed, count):
    return torch.tensor([int(u * CLASSES) for u in uniform(seed, count).tolist()])


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
