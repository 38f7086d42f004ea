"""FedDecorr against a plain loop, and its correlation against numpy's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlens.algorithms import FedAvg, FedDecorr, FedProx, Moon
from fedlens.algorithms.feddecorr import Decorrelated, correlation
from fedlens.core.objective import weighted
from fedlens.core.rng import generator
from terms import BACK_AGAIN, SMALL, moon, with_term, worlds
from textbook import (
    TWO_OF_THREE,
    World,
    assert_same,
    far,
    total,
)


# ---- FedDecorr -------------------------------------------------------------------------------------------------------
def textbook_correlation(z: Tensor, x: Any, weight: Tensor) -> Tensor:
    """Over the examples that count alone: columns standardised by the unbiased variance, products of pairs of them."""
    z = z[weight > 0]
    if len(z) == 1:
        return torch.zeros(()).double()
    z = (z - z.mean(0)) / (z.var(0) + 1e-8).sqrt()
    c, d = z.T @ z, z.shape[1]
    return c[~torch.eye(d, dtype=torch.bool)].square().mean() / len(z)


def feddecorr(world: World, beta: float) -> dict[str, Tensor]:
    theta, running = world.start()
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        penalty = lambda z, x, weight: beta * textbook_correlation(z, x, weight)  # noqa: E731
        ends = {k: with_term(world, theta, running, round, k, penalty) for k in cohort}
        theta = total(p[k] * ends[k].theta for k in cohort)
        running = total(p[k] * ends[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running}


@worlds
def test_feddecorr(world):
    assert_same(world.run(FedDecorr(beta=0.1)).values, feddecorr(world, 0.1))


def test_feddecorr_with_small_clients():
    """One client has a single example: its penalty is zero, not a division by zero."""
    assert_same(SMALL.run(FedDecorr(beta=0.3)).values, feddecorr(SMALL, 0.3))


@worlds
def test_feddecorr_without_beta_is_fedavg(world):
    found, plain = world.run(FedDecorr(beta=0.0)).values, world.run(FedAvg()).values
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert max(far(world.run(FedDecorr(beta=0.1)).values, plain).values()) > 1e-5


def test_feddecorr_over_moon():
    found = BACK_AGAIN.run(FedDecorr(Moon(mu=0.7), beta=0.1)).values
    penalty = lambda z, x, weight: 0.1 * textbook_correlation(z, x, weight)  # noqa: E731
    assert_same(found, moon(BACK_AGAIN, 0.7, 0.5, extra=penalty))


def test_feddecorr_nests_with_other_objectives():
    """The plan's own objective is kept, and every stage of a base gets the penalty."""

    def doubled(client, weights, batch, out):
        return 2 * weighted(F.cross_entropy(out.logits, batch.y, reduction="none"), batch)

    plan = replace(BACK_AGAIN.stage(), objective=doubled)
    (stage,) = FedDecorr(FedProx(), beta=0.2).stages(plan)
    assert stage.objective == Decorrelated(0.2, doubled)
    assert isinstance(stage.algorithm, FedProx)


class CountsWrapped(FedDecorr):
    """Statistics over the whole row, its wrapped examples with it."""

    def stages(self, plan):
        def objective(client, weights, batch, out):
            ones = torch.ones_like(batch.weight)
            return plan.objective(client, weights, batch, out) + self.beta * correlation(out.features, ones)

        yield from self.base.stages(replace(plan, objective=objective))


def test_the_textbook_notices_wrapped_examples():
    world = World(TWO_OF_THREE)
    assert max(far(world.run(CountsWrapped(beta=0.1)).values, feddecorr(world, 0.1)).values()) > 1e-6


@pytest.mark.parametrize("shape", [(40, 5), (6, 30), (9, 9), (2, 3)], ids=str)
def test_correlation_is_that_of_numpy(shape):
    """Narrow and wide: two ways to the same norm."""
    x = torch.randn(*shape, generator=generator(1), dtype=torch.float64)
    n, d = shape
    corr = np.corrcoef(x.numpy(), rowvar=False)
    expected = sum(((n - 1) * corr[i, j]) ** 2 for i in range(d) for j in range(d) if i != j) / (d * (d - 1)) / n
    assert float(correlation(x, torch.ones(n).double(), epsilon=0.0)) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), n=st.integers(2, 9), d=st.integers(2, 12), wrapped=st.integers(0, 5))
def test_examples_of_weight_zero_do_not_exist(seed, n, d, wrapped):
    x = torch.randn(n + wrapped, d, generator=generator(seed), dtype=torch.float64, requires_grad=True)
    weight = (torch.arange(n + wrapped) < n).double()
    value = correlation(x, weight)
    alone = correlation(x[:n], torch.ones(n).double())
    assert value.item() == pytest.approx(alone.item(), rel=1e-12, abs=1e-15) and value.item() > -1e-12
    (slope,) = torch.autograd.grad(value, x)
    assert not slope[n:].any() and slope[:n].isfinite().all()
    (slope_alone,) = torch.autograd.grad(alone, x)
    assert (slope - slope_alone).abs().max() < 1e-11


def test_a_feature_that_never_moves_is_harmless():
    x = torch.randn(8, 4, generator=generator(2), dtype=torch.float64)
    x[:, 1] = 3.0
    x.requires_grad_()
    value = correlation(x, torch.ones(8).double())
    (slope,) = torch.autograd.grad(value, x)
    assert slope.isfinite().all()
    others = correlation(x[:, [0, 2, 3]], torch.ones(8).double())
    assert value.item() == pytest.approx(others.item() * 6 / 12, rel=1e-12)  # its pairs count with zero


def test_the_correlation_of_one_example_or_one_feature_is_zero():
    for shape in ((1, 5), (6, 1)):
        x = torch.randn(*shape, generator=generator(3), dtype=torch.float64, requires_grad=True)
        value = correlation(x, torch.ones(shape[0]).double())
        (slope,) = torch.autograd.grad(value, x)
        assert abs(value.item()) < 1e-12 and not (slope.abs() > 1e-9).any()
