"""FedDISCO against a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from baselines import CLASSES, ROUNDS, apart, averaged, carried_out, cohort, counts, fresh, trained
from fedlens.algorithms import (
    FedAvg,
    FedDISCO,
    FedDyn,
    FedProx,
    Local,
    Moon,
    Scaffold,
)
from fedlens.algorithms.feddisco import discrepancy, weighed
from fedlens.core.errors import BadInput
from fedlens.core.objective import by_examples
from small import PLAN, SIZES, same


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
