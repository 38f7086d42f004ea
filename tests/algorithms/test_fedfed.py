"""FedFed against a plain loop."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from baselines import DATA, FED, ROUNDS, apart, averaged, carried_out, cohort, fresh, loaded
from fedlens.algorithms import (
    PSE,
    FedAux,
    FedFed,
    FedXDS,
    FineTuned,
    Scaffold,
)
from fedlens.algorithms.fedfed import Distil
from fedlens.core.algorithm import Server
from fedlens.core.batches import plan
from fedlens.core.errors import BadInput
from fedlens.core.optimizer import Adam
from fedlens.core.rng import fold, generator, key, normal
from fedlens.core.run import timetable
from fedlens.core.tree import Tree
from fedlens.models.generators import Vae, first_weights
from small import PLAN, SIZES, network


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
