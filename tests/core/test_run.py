"""Turns, jobs and dry runs: what opens a round outside the loop is what the loop does."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from fedlens.algorithms import SPATL, FedAvg, FedFTG, FedXDS, FineTuned, Scaffold
from fedlens.core.algorithm import Algorithm, Errand, Server, chain
from fedlens.core.batches import Dataset
from fedlens.core.dry_run import Rehearsal, blank_clients, dry_run
from fedlens.core.errors import RunFailed
from fedlens.core.rng import key
from fedlens.core.run import job_of, open_round, run, timetable
from fedlens.core.tree import Tree
from fedlens.core.wire import raw, tensor
from fedlens.engines.sequential import Sequential
from fedlens.simulate.describe import usual_model
from small import PLAN, federation, network, same

TWO = replace(PLAN, rounds=2)


def test_chain_goes_down_to_the_innermost():
    recipe = FineTuned(FedXDS(Scaffold()))
    assert [type(part) for part in chain(recipe)] == [FineTuned, FedXDS, Scaffold]
    assert list(chain(FedAvg())) == [FedAvg()] and list(chain(None)) == []


def test_turns_count_memories_since_the_last_fresh_start():
    turns = timetable(FedXDS(warmup_rounds=2), TWO)
    assert [turn.at for turn in turns] == [0, 1, 0, 0, 1]
    assert [turn.since for turn in turns] == [0, 0, 0, 3, 3]
    assert all(stage is turn.stage for turn, (stage, _, _) in zip(turns, turns, strict=True))


def test_a_round_opened_outside_is_that_of_the_loop():
    """Every job of a run, made again from the server's state before it."""
    net, seen = network(), []
    engine = Sequential(net, federation())
    before = [Server(net, Tree(), engine.population)]

    def observe(server, job, replies):
        seen.append((before[-1], job))
        before.append(server)

    recipe = FedXDS(Scaffold(), warmup_rounds=1)
    run(recipe, net, engine, TWO, seed=3, observe=observe)
    turns = timetable(recipe, TWO)
    assert len(seen) == len(turns) == 4
    for turn, (left, job) in zip(turns, seen, strict=True):
        server = open_round(left, turn, 3)
        assert (server.state is left.state) == (turn.at > 0)  # a stage is set up once
        again = job_of(server, turn, 3)
        assert server.key == key(3, "server", job.round)
        assert same(again.download, job.download) and same(again.shared, job.shared)
        assert (again.stage, again.round, again.at, again.since, again.seed) == (
            job.stage, job.round, job.at, job.since, job.seed,
        )  # fmt: skip
    assert seen[-1][1].shared and not seen[0][1].shared


# ---- dry runs ----
def test_a_dry_run_visits_every_stage_once():
    net = network()
    shape = federation().data.x.shape[1:]
    engine = Sequential(net, blank_clients(Dataset(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))))
    turns = timetable(FedXDS(warmup_rounds=2), TWO)
    found = list(dry_run(turns, net, shape, engine))
    assert [each.turn for each in found] == [turn for turn in turns if turn.at == 0]
    assert [each.job.round for each in found] == [0, 2, 3] == [each.server.round for each in found]
    assert all(each.job.stage.epochs == 0 and len(each.replies) == 2 for each in found)
    assert len(found[-1].job.shared.y) == 2  # what both clients gave in the stage before


@dataclass(frozen=True)
class Long(Algorithm):
    """Its last aggregate is not wanted."""

    def aggregate(self, server, uploads):
        raise RunFailed("long")


@pytest.mark.parametrize("to_the_end", [False, True])
def test_the_last_aggregate_is_tried_where_that_is_asked_for(to_the_end):
    net, data = network(), federation().data
    engine = Sequential(net, blank_clients(data))
    rounds = dry_run(timetable(Long(), PLAN)[:1], net, data.x.shape[1:], engine, to_the_end=to_the_end)
    with pytest.raises(RunFailed) if to_the_end else nullcontext():
        assert len([each.job for each in rounds]) == 1


def test_blank_clients_own_as_many_images_of_all_classes():
    found = blank_clients(federation().data, 3, classes=2)
    assert [index.tolist() for index in found.train.values()] == [[0, 1, 2], [3, 4, 5]]
    assert found.data.y.tolist() == [0, 1, 0, 1, 0, 1] and not found.data.x.any()


def test_a_rehearsal_has_everyones_names_and_shapes_and_small_values():
    net, data = network(), federation()
    turn = timetable(Scaffold(), PLAN)[0]
    server = open_round(Server(net, Tree(), 3), turn, 0)
    job = job_of(server, turn, 0)
    expected, honest = Rehearsal(Sequential, net, data.data)(job), Sequential(net, data).run(job, [1])[0].upload
    shapes = {path: (leaf.shape, leaf.dtype) for path, leaf in honest.paths()}
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in expected.paths()} == shapes
    assert all(leaf.is_meta == (leaf.numel() > 64) for leaf in expected.leaves())


def test_brief_reaches_through_errands():
    found = Errand(FedFTG(iterations=3, student_steps=7)).brief().base
    assert (found.iterations, found.student_steps, found.batch) == (1, 1, 2)
    assert FedFTG(iterations=0).brief().iterations == 0 and SPATL().brief() == SPATL()


def test_a_method_says_its_usual_model():
    assert [usual_model(name) for name in ("pse", "pse+ft", "fedsls", "mine:Own")] == [
        "pse_net",
        "pse_net",
        "cnn",
        "cnn",
    ]


# ---- trees ----
def test_plus_adds_where_both_have_a_leaf():
    some, other = (Tree(a=torch.full((2,), a), b=torch.full((2,), 1.0)) for a in (1.0, 5.0))
    found = some.plus(Tree(a=other.a, c=torch.zeros(3)))
    assert found.keys() == {"a", "b"} and found.a.tolist() == [6, 6] and found.b.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3)], ids=str)
def test_bytes_of_a_leaf_are_its_values(dtype, shape):
    leaf = torch.arange(6)[: torch.Size(shape).numel()].to(dtype).view(shape)
    again = tensor(raw(leaf).tobytes(), dtype, shape)
    assert again.dtype == dtype and again.shape == shape and torch.equal(again, leaf)
    assert raw(torch.arange(6).view(2, 3).t()).tobytes() == raw(torch.tensor([[0, 3], [1, 4], [2, 5]])).tobytes()
    with pytest.raises(ValueError, match="broadcast"):
        tensor(bytes(5), torch.int32, (2,))
