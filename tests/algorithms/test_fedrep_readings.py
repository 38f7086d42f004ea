"""FedRep closes a run with the head alone, and can be asked for the paper's epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedlens import config
from fedlens.algorithms import FedPer, FedRep, FineTuned
from fedlens.core.algorithm import Algorithm
from fedlens.core.errors import BadInput
from fedlens.core.evaluate import Evaluate
from fedlens.core.run import Job, run
from fedlens.engines.lanes import Lanes
from fedlens.engines.sequential import Sequential
from fedlens.engines.worker import Storage
from fedlens.engines.workers import Workers
from personal import Outcome, by_package, head_then_body, is_head, loaded, partly_private, weights
from small import PLAN, SIZES, build, federation, network, same
from textbook import World, loss, sgd


def closing(outcome: Outcome, recipe: Algorithm, epochs: int) -> Job:
    """The pass after the last round, as a run asks for it."""
    last = outcome.jobs[-1]
    stage = last.stage.errand(Evaluate(base=recipe), epochs=epochs)
    return Job(
        stage, recipe.broadcast(outcome.server), last.shared, outcome.server.round, last.at, last.since, last.seed
    )


def by_hand(world: World, outcome: Outcome, client: int, epochs: int, at: int):
    """Only the head descends; the body is frozen and reads its statistics."""
    own = {n.split(" ", 3)[3]: v for n, v in outcome.values.items() if n.startswith(f"private of {client} ")}
    body = {n.split(" ", 1)[1]: v for n, v in outcome.values.items() if n.startswith("model ")}
    model = loaded(world, body | own).eval()
    descent = sgd(world, world.rate(at), model.head.parameters())  # pyright: ignore
    for batch in world.batches(outcome.server.round, client, epochs):
        model.zero_grad()
        loss(model, *batch).backward()
        descent.step()
    return weights(model)


@pytest.mark.parametrize("epochs", [2, 3])
def test_the_closing_training_is_of_the_head_alone(epochs):
    world = replace(World(), epochs=epochs)
    outcome = by_package(world, FedRep())
    recipe = outcome.jobs[-1].stage.algorithm
    job = closing(outcome, recipe, recipe.closing_epochs(epochs))
    for client in range(3):
        view, batches = outcome.engine.open(job, client)
        local = outcome.engine.local_training(job, client, view, batches)
        found = {n: v for n, v in {**local.params, **local.buffers}.items() if v.is_floating_point()}
        expected = by_hand(world, outcome, client, epochs, job.at)
        assert found.keys() == expected.keys()
        assert max((found[n] - expected[n]).abs().max() for n in found) <= 1e-12
        for name, value in job.download.model.params.items():
            assert torch.equal(local.params[name], value)  # the body is as it came
        assert any(
            (local.params[n] - view.memory.private.params[n]).abs().max() > 1e-3 for n in view.memory.private.params
        )


def test_rounds_are_as_they_were():
    world = World()
    found = by_package(world, FedRep()).values
    expected = partly_private(world, is_head, head_then_body(1))
    assert max((found[n] - expected[n]).abs().max() for n in expected) <= 1e-12


def test_a_whole_round_can_close_a_run():
    """As in the runs of results/pse_details.md, and where nothing is private."""
    before, whole, nothing = (
        FedRep(head_epochs=1),
        FedRep(head_epochs=1, closing="round"),
        FedRep(head_epochs=0, private="none"),
    )
    assert [Evaluate(base=before).phase(epoch) for epoch in range(3)] == ["head"] * 3
    assert [Evaluate(base=whole).phase(epoch) for epoch in range(3)] == ["head", "body", "body"]
    assert [Evaluate(base=nothing).phase(epoch) for epoch in range(3)] == ["body"] * 3
    assert FedRep(**FedRep.presets["closing_round"]) == FedRep(closing="round")
    (stage, tune) = FineTuned(FedRep(head_epochs=1)).stages(World().stage())
    assert Evaluate(base=tune.algorithm).phase(0) == "" and Evaluate(base=stage.algorithm).phase(0) == "head"
    assert [Evaluate(base=FedPer()).phase(epoch) for epoch in range(2)] == ["", ""]


def test_the_papers_epochs_can_be_asked_for():
    """Ten of the head and one of the body in a round, ten of the head to close, whatever local.epochs says."""
    experiment = config.read(None, ("algorithm=fedrep/paper", "local.epochs=5"))
    (stage,) = experiment.algorithm.stages(experiment.plan)
    assert stage.epochs == 11 and [stage.algorithm.phase(epoch) for epoch in range(11)] == ["head"] * 10 + ["body"]
    assert stage.algorithm.closing_epochs(5) == 10
    assert [FedRep().closing_epochs(5), FedRep(closing="round").closing_epochs(5)] == [5, 5]
    assert FedRep(head_epochs=3, body_epochs=2, closing="round").closing_epochs(9) == 5


def test_what_does_not_fit_is_refused():
    with pytest.raises(BadInput, match="body_epochs needs head_epochs"):
        FedRep(body_epochs=1)
    with pytest.raises(BadInput, match=r"leave local\.steps empty"):
        list(FedRep(head_epochs=10, body_epochs=1).stages(replace(World().stage(), steps=4)))


def test_the_closing_training_in_every_engine(tmp_path):
    """The same answers, to the bit, and nothing is remembered of it."""
    found = []
    for engine in (
        Sequential(network(), federation(), checked=True),
        Lanes(network(), federation(), lanes=2),
        Workers(build, SIZES, 2, Storage(tmp_path)),
    ):
        jobs: list[Job] = []
        try:
            server = run(
                FedRep(), network(), engine, PLAN, observe=lambda server, job, answers, to=jobs: to.append(job)
            )
            last, recipe = jobs[-1], jobs[-1].stage.algorithm
            stage = last.stage.errand(Evaluate(base=recipe), epochs=recipe.closing_epochs(2))
            look = replace(last, stage=stage, download=recipe.broadcast(server), round=server.round)
            found.append([sorted(engine.run(look, range(6)), key=lambda reply: reply.client) for _ in range(2)])
        finally:
            engine.close()
    for replies in (replies for twice in found for replies in twice):
        assert [reply.client for reply in replies] == list(range(6))
        assert all(same(a.upload, b.upload) for a, b in zip(found[0][0], replies, strict=True))
