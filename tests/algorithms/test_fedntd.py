"""FedNTD against a plain loop, and its term by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlens import config
from fedlens.algorithms import FedAvg, FedNTD
from fedlens.algorithms.fedntd import not_true
from fedlens.core.errors import BadInput
from fedlens.core.objective import weighted
from terms import worlds
from textbook import TWO_OF_THREE, World, assert_same, far, sgd, statistics, total, vector

WORLD = World(TWO_OF_THREE)


def term(student: Tensor, teacher: Tensor, y: int, tau: float) -> Tensor:
    """One image: KL of the two distributions over the other classes, which are picked out one by one."""
    others = [c for c in range(len(student)) if c != y]
    p, q = (F.softmax(logits[others] / tau, 0) for logits in (teacher, student))
    return tau * tau * sum(p[i] * (p[i].log() - q[i].log()) for i in range(len(others)))


def fedntd(world: World, beta: float, tau: float, server_lr: float = 1.0) -> dict[str, Tensor]:
    theta, running = world.start()
    for round, cohort in enumerate(world.cohorts):
        p, ends = world.shares(cohort), {}
        for k in cohort:
            model, teacher = world.at(theta, running).train(), world.at(theta, running).eval()
            optimizer = sgd(world, world.rate(round), model.parameters())
            for x, y, weight in world.batches(round, k):
                optimizer.zero_grad()
                logits, told = model(x), teacher(x).detach()
                more = torch.stack([term(logits[i], told[i], int(y[i]), tau) for i in range(len(y))])
                losses = F.cross_entropy(logits, y, reduction="none") + beta * more
                ((losses * weight).sum() / weight.sum()).backward()
                optimizer.step()
            ends[k] = vector(model), statistics(model)
        theta = theta + server_lr * total(p[k] * (ends[k][0] - theta) for k in cohort)
        running = total(p[k] * ends[k][1] for k in cohort)
    return {"model": theta, "model statistics": running}


@worlds
def test_fedntd(world):
    assert_same(world.run(FedNTD(beta=0.7, tau=2.0)).values, fedntd(world, 0.7, 2.0))


def test_a_slow_server():
    assert_same(WORLD.run(FedNTD(server_lr=0.5)).values, fedntd(WORLD, 1.0, 1.0, 0.5))


def test_without_beta_it_is_fedavg():
    found, usual = WORLD.run(FedNTD(beta=0.0)).values, WORLD.run(FedAvg()).values
    assert all(torch.equal(found[name], usual[name]) for name in usual)
    assert max(far(WORLD.run(FedNTD()).values, usual).values()) > 1e-5


def test_the_first_step_is_that_of_fedavg_without_norms():
    """Both models are the same there."""
    world = World(TWO_OF_THREE[:1], steps=1, norm=False)
    assert_same(world.run(FedNTD(beta=5.0)).values, world.run(FedAvg()).values)


def test_by_hand():
    student, teacher = torch.tensor([[2.0, 1.0, 0.0]]).double().requires_grad_(), torch.zeros(1, 3).double()
    found = not_true(student, teacher, torch.tensor([0]), 1.0)
    assert float(found) == pytest.approx(0.120114506958277, abs=1e-15)
    (slope,) = torch.autograd.grad(found.sum(), student)
    assert slope[0, 0] == 0 and slope.isfinite().all()


def test_with_two_classes_the_term_is_zero():
    logits = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    found = not_true(logits, -logits.detach(), torch.tensor([0, 1, 1, 0]), 3.0)
    assert not found.any() and not torch.autograd.grad(found.sum(), logits)[0].any()


@dataclass(frozen=True)
class AllClasses(FedNTD):
    """Plain distillation: the true class with the others."""

    def loss(self, client, weights, batch, out):
        with torch.no_grad():
            told = (client.net(self.start(client), batch.x) / self.tau).log_softmax(1)
        mine = (out.logits / self.tau).log_softmax(1)
        apart = self.tau**2 * (told.exp() * (told - mine)).sum(1)
        return client.objective(client, weights, batch, out) + self.beta * weighted(apart, batch)


@dataclass(frozen=True)
class TeachesInTraining(FedNTD):
    """The teacher's norms use the batch, as they may in the authors' code."""

    def loss(self, client, weights, batch, out):
        received = self.start(client)
        received = received.replace(buffers=received.buffers.clone())
        with torch.no_grad():
            told = client.net.forward(received, batch.x, train=True, key=batch.key).logits
        apart = not_true(out.logits, told, batch.y, self.tau)
        return client.objective(client, weights, batch, out) + self.beta * weighted(apart, batch)


@pytest.mark.parametrize("mutant", [AllClasses, TeachesInTraining])
def test_the_textbook_notices(mutant):
    assert max(far(WORLD.run(mutant()).values, fedntd(WORLD, 1.0, 1.0)).values()) > 1e-5


def test_refused():
    for word in ("algorithm.beta=-1", "algorithm.tau=0"):
        with pytest.raises(BadInput, match=word.partition("=")[0]):
            config.read(None, ["algorithm=fedntd", word])
    assert config.read(None, ["algorithm=fedntd/soft"]).algorithm == FedNTD(tau=3.0)
