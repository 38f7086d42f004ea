"""PSE: equation 3 is a sum, its sigmoids tell small evidence apart, and late joiners have the server's extractor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedlens.algorithms import PSE
from fedlens.core.cohort import Everyone
from fedlens.core.tree import Tree
from fedlens.engines.lanes import Lanes
from fedlens.engines.sequential import Sequential
from small import same
from test_pse import STAGE, both, by_package, extract, federation, looked, moved, of_truth, some_batch, tiny
from textbook import Scripted

LATE = replace(STAGE, rounds=3, cohort=Scripted(((0, 1), (0, 1), (0, 2))))


def test_evidence_is_the_sum_of_equation_3():
    """Over the images that count and all places, of each model's own logit; autograd at the maps, added one by one."""
    net, batch = tiny(), some_batch()
    ours = net.initial_weights()
    theirs = moved(ours)
    found = looked(PSE(), net, ours, theirs, batch)[1]
    p, q = dict(ours.params), dict(theirs.params)
    mine, seen = extract({n: v.clone().requires_grad_() for n, v in p.items()}, batch.x)
    other, frozen = extract({n: v.clone().requires_grad_() for n, v in q.items()}, batch.x)
    for at, maps in ((0, seen), (1, frozen)):
        logits = both(p, mine, other, 2, True)[at]
        score = (of_truth(PSE(), logits, batch.y) * batch.weight).sum()
        for layer, g in zip(found[at], torch.autograd.grad(score, maps, retain_graph=True), strict=True):
            for k in range(g.shape[1]):
                total = math.fsum(float(v) for v in g[:, k].flatten())
                assert abs(float(found[at][layer][k]) - total) <= 1e-12 * max(1.0, abs(total))


def test_small_evidence_is_told_apart():
    """Float32 evidence of about 1e-9: sigmoids of float32 are all one half there, and nothing would be excited."""
    ours = torch.tensor([1e-9, 2e-9, 3e-9, 4e-9])
    theirs = torch.tensor([2e-9, 1e-9, 9e-9, 5e-9])
    gaps = [max(0.0, float(b.double().sigmoid() - a.double().sigmoid())) for a, b in zip(ours, theirs, strict=True)]
    usual = sum(gaps) / 4
    expected = [float(gap > 0 and gap >= usual) for gap in gaps]
    assert expected == [0, 0, 1, 0]
    assert PSE().excited(Tree(conv=ours), Tree(conv=theirs))["conv"].tolist() == expected
    means = PSE(**PSE.presets["means"])  # as results/pse_details.md was run
    assert means.reduce == "mean"
    assert means.excited(Tree(conv=ours), Tree(conv=theirs))["conv"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("private", ["classifier", "none"])
def test_late_joiners_start_from_what_they_downloaded(private):
    """Client 2 first comes in the third round: what it sends is what it would send without a memory of extractors."""
    net, data = tiny(), federation()
    keeps, forgets = (PSE(xi=0.5, local_init=init, private=private) for init in ("persistent", "global"))
    _, _, jobs, replies = by_package(keeps, net, data, stage=LATE)
    sent = next(reply.upload for reply in replies if reply.client == 2)
    job = jobs[-1]
    fresh = Sequential(net, data, checked=True)
    (expected,) = fresh.run(replace(job, stage=replace(job.stage, algorithm=forgets)), [2])
    for name, value in expected.upload.delta.params.items():
        assert (sent.delta.params[name] - value).abs().max() <= 1e-12, name
    view, _ = fresh.open(job, 2)
    start = keeps.start(view)
    for name, value in job.download.model.params.items():
        assert torch.equal(start.params[name], value)


def test_who_has_joined_goes_on_from_its_own():
    net, data = tiny(), federation()
    method = PSE(xi=0.5, local_init="persistent")
    _, engine, jobs, _ = by_package(method, net, data, stage=LATE)
    job = replace(jobs[-1], round=3)
    for client in (0, 1, 2):
        view, _ = engine.open(job, client)
        assert bool(view.memory.joined)
        assert all(torch.equal(v, view.memory.private.params[n]) for n, v in method.start(view).params.items())


@pytest.mark.parametrize("lanes", [1, 2])
def test_late_joiners_in_lanes(lanes):
    method = PSE(xi=0.5, local_init="persistent")
    one = by_package(method, tiny(), federation(), stage=LATE)
    many = by_package(method, tiny(), federation(), engine=lambda net, data: Lanes(net, data, lanes=lanes), stage=LATE)
    assert same(one[0], many[0])
    assert all(same(one[1].memories.get(k), many[1].memories.get(k)) for k in range(3))


def test_means_are_reachable_as_they_were():
    """The preset gives what reduce=mean gave in double precision: there nothing vanishes."""
    net, data = tiny(), federation()
    stage = replace(STAGE, cohort=Everyone())
    a, b = (
        by_package(PSE(xi=0.5, **how), net, data, stage=stage)[0] for how in (PSE.presets["means"], {"reduce": "mean"})
    )
    assert same(a, b)
