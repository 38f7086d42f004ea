"""FedDF against a plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baselines import DATA, ROUNDS, apart, averaged, carried_out, cohort, distilled_by_hand, fresh, trained
from fedlens.algorithms import (
    FedAvg,
    FedDF,
)
from fedlens.core.algorithm import Server
from fedlens.core.batches import plan
from fedlens.core.errors import BadInput
from fedlens.core.rng import generator, key
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from recipes import public_data
from small import PLAN, SIZES, network, same


@pytest.mark.parametrize("norm", [True, False])
def test_feddf_by_hand(norm):
    earlier = FedDF(**FedDF.presets["earlier"] | {"steps": 7, "batch": 8, "lr": 0.01})
    found, _ = carried_out(earlier, norm)  # 20 public images: the third row wraps round
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
