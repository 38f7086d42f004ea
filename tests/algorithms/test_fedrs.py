"""FedRS against a plain loop, and its loss by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from fedlens import config
from fedlens.algorithms import FedAvg, FedRS, FineTuned, Scaffold
from fedlens.algorithms.fedrs import Restricted
from fedlens.core.errors import BadInput
from fedlens.core.objective import cross_entropy
from logits import WORLD, plain, plain_loop, value
from textbook import TWO_OF_THREE, World, assert_same, far


def restricted(alpha: float, share: bool = False):
    def loss(z, y, counts):
        part = [n / max(counts) if share else float(n > 0) for n in counts]
        scaled = torch.stack([(alpha + (1 - alpha) * part[c]) * z[c] for c in range(3)])
        return F.cross_entropy(scaled[None], torch.tensor([y]))

    return loss


@pytest.mark.parametrize("rule", ["missing", "share"])
def test_fedrs(rule):
    found = WORLD.run(FedRS(alpha=0.3, rule=rule)).values
    assert_same(found, plain_loop(WORLD, restricted(0.3, rule == "share")))


def test_where_nothing_is_missing_it_is_its_base():
    world = World(TWO_OF_THREE, sizes=(13, 11, 9))
    found, base = world.run(FedRS(Scaffold())).values, world.run(Scaffold()).values
    assert all(torch.equal(found[name], base[name]) for name in base)
    for recipe in (FedRS(alpha=1.0), FedRS(alpha=1.0, rule="share")):
        one, plainly = WORLD.run(recipe).values, WORLD.run(FedAvg()).values
        assert all(torch.equal(one[name], plainly[name]) for name in plainly)


def test_by_hand():
    assert value(Restricted(), [1, 2], 0, [5, 0])[0] == pytest.approx(math.log(2), abs=1e-15)
    assert plain([1, 2], 0) == pytest.approx(1.313261687518223, abs=1e-15)
    assert value(Restricted(alpha=0), [1, 9], 0, [5, 0])[0] == pytest.approx(plain([1, 0], 0), abs=1e-15)
    assert value(Restricted(rule="share"), [1, 2], 0, [4, 2])[0] == pytest.approx(plain([1, 1.5], 0), abs=1e-15)


@dataclass(frozen=True)
class ScalesPresent(Restricted):
    def __call__(self, client, weights, batch, out):
        factors = (client.memory.labels > 0).to(out.logits) * (self.alpha - 1) + 1
        return self.base(client, weights, batch, out.replace(logits=out.logits * factors))


class Mutant(FedRS):
    def stages(self, plan):
        yield from self.base.stages(replace(plan, objective=ScalesPresent(plan.objective, self.alpha)))


def test_the_textbook_notices_the_wrong_classes():
    assert max(far(WORLD.run(Mutant(alpha=0.3)).values, plain_loop(WORLD, restricted(0.3))).values()) > 1e-4


def test_fine_tuning_uses_plain_logits_and_the_preset_is_the_authors_code():
    *_, last = FineTuned(FedRS()).stages(WORLD.stage())
    assert last.objective == cross_entropy
    assert config.read(None, ["algorithm=fedrs/official"]).algorithm == FedRS(rule="share")
    with pytest.raises(BadInput, match=r"algorithm\.alpha"):
        config.read(None, ["algorithm=fedrs", "algorithm.alpha=1.5"])
