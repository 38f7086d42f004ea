"""FedLC against a plain loop, and its loss by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from fedlens import config
from fedlens.algorithms import FedAvg, FedDecorr, FedLC, FedProx, FedRS, FineTuned
from fedlens.algorithms.feddecorr import Decorrelated
from fedlens.algorithms.fedlc import Calibrated
from fedlens.core.errors import BadInput
from fedlens.core.objective import cross_entropy
from logits import WORLD, counts, plain, plain_loop, value
from textbook import assert_same, far


def calibrated(tau: float, min_count: float = 0.0, others: bool = False):
    """Class by class: -log(exp u_y / sum of exp u_c over classes that count)."""

    def loss(z, y, counts):
        u = {c: z[c] - tau / max(n, min_count) ** 0.25 for c, n in enumerate(counts) if n or min_count}
        below = sum(u[c].exp() for c in u if not (others and c == y))
        return -(u[y].exp() / below).log()

    return loss


def test_fedlc():
    assert any(0 in counts(WORLD, k) for k in range(3)) and 0 not in counts(WORLD, 0)
    assert_same(WORLD.run(FedLC(tau=0.7)).values, plain_loop(WORLD, calibrated(0.7)))


def test_as_printed():
    """The preset, in a short world: its loss has no lower bound and runs away."""
    recipe, world = FedLC(tau=0.05, **FedLC.presets["paper"]), replace(WORLD, momentum=0.0, steps=2)
    assert_same(world.run(recipe).values, plain_loop(world, calibrated(0.05, 1e-8, others=True)))


def test_without_tau_it_is_its_base():
    found, base = WORLD.run(FedLC(FedProx(mu=0.3), tau=0)).values, WORLD.run(FedProx(mu=0.3)).values
    assert all(torch.equal(found[name], base[name]) for name in base)
    assert max(far(WORLD.run(FedLC()).values, WORLD.run(FedAvg()).values).values()) > 1e-4


def test_by_hand():
    assert value(Calibrated(), [0, 0], 0, [1, 16])[0] == pytest.approx(0.974076984180107, abs=1e-15)
    assert value(Calibrated(denominator="others", min_count=1e-8), [0, 0], 0, [1, 16])[0] == pytest.approx(
        0.5, abs=1e-15
    )
    assert plain([0, 0], 0) == pytest.approx(math.log(2))


def test_equal_counts_change_nothing():
    found, slope = value(Calibrated(), [0.3, -1.2, 2], 1, [7, 7, 7])
    expected, usual = value(cross_entropy, [0.3, -1.2, 2], 1, [7, 7, 7])
    assert float(found) == pytest.approx(float(expected), abs=1e-14) and (slope - usual).abs().max() < 1e-14


def test_a_missing_class_is_left_out():
    found, slope = value(Calibrated(), [0.3, -1.2, 5.0], 1, [16, 16, 0])
    assert float(found) == pytest.approx(plain([0.3, -1.2], 1)) and slope[2] == 0 and slope.isfinite().all()


def test_an_image_of_a_missing_class_has_a_finite_loss():
    """Held back from training, it may be the only one of its class."""
    found, slope = value(Calibrated(), [0.3, -1.2, 5.0], 2, [16, 16, 0])
    assert found.isfinite() and slope.isfinite().all()


@dataclass(frozen=True)
class EveryonesCounts(Calibrated):
    """As one public code does: margins from the counts of all clients."""

    def margins(self, counts, truth):
        everyone = [sum(c) for c in zip(*(globals()["counts"](WORLD, k) for k in range(3)), strict=True)]
        return super().margins(torch.tensor(everyone).to(counts), truth)


class Mutant(FedLC):
    def stages(self, plan):
        yield from self.base.stages(replace(plan, objective=EveryonesCounts(plan.objective, self.tau)))


def test_the_textbook_notices_margins_that_all_share():
    assert max(far(WORLD.run(Mutant(tau=0.7)).values, plain_loop(WORLD, calibrated(0.7))).values()) > 1e-4


def test_other_objectives_see_the_lowered_logits():
    plan = WORLD.stage()
    (stage,) = FedLC(FedDecorr(beta=0.2)).stages(plan)
    assert stage.objective == Decorrelated(0.2, Calibrated()) and len(stage.parts) == 5
    (stage,) = FedDecorr(FedLC(), beta=0.2).stages(plan)
    assert stage.objective == Calibrated(Decorrelated(0.2))
    assert_same(WORLD.run(FedLC(FedDecorr(beta=0.2))).values, WORLD.run(FedDecorr(FedLC(), beta=0.2)).values)


@pytest.mark.parametrize("recipe", [FineTuned(FedLC()), FedLC(FineTuned(FedAvg())), FineTuned(FedLC(FedDecorr()))])
def test_fine_tuning_uses_plain_logits(recipe):
    *_, before, last = recipe.stages(WORLD.stage())
    assert Calibrated() in (before.objective, getattr(before.objective, "base", None))
    assert last.objective in (cross_entropy, Decorrelated(0.1))


def test_refused():
    with pytest.raises(BadInput, match="needs min_count above 0"):
        config.read(None, ["algorithm=fedlc", "algorithm.denominator=others"])
    with pytest.raises(BadInput, match="name one of them, and once"):
        list(FedLC(FedRS()).stages(WORLD.stage()))
    assert config.read(None, ["algorithm=fedlc/paper"]).algorithm == FedLC(denominator="others", min_count=1e-8)
