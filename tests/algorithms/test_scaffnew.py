"""Scaffnew against a plain loop, against SCAFFOLD, and on a world of one number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedlens import config
from fedlens.algorithms import FedAvg, Scaffnew, Scaffold
from fedlens.core.cohort import Everyone
from fedlens.core.errors import BadInput
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.optimizer import Adam
from fedlens.core.replies import Replies
from fedlens.core.transform import Clip
from fedlens.engines.sequential import Sequential
from fedlens.robust.aggregators import Median
from fedlens.simulate import checks
from fedlens.simulate import run as simulate
from fedlens.simulate.describe import described_with
from scalar import number, scalar_run
from textbook import EVERYONE, World, assert_same, far, local_training, total


@dataclass(frozen=True)
class WithEveryone(World):
    """The same clients, under the name that says so."""

    def stage(self):
        return replace(super().stage(), cohort=Everyone())


WORLD = WithEveryone((*EVERYONE, *EVERYONE[:1]), momentum=0.0, steps=3)


def scaffnew(world: World) -> dict[str, Tensor]:
    """y <- y - eta (g(y) - h_k); x is the mean of all y_k; then h_k <- h_k + (x - y_k) / (eta steps)."""
    (x, running), everyone = world.start(), range(len(world.sizes))
    h, before, y, pace = {k: torch.zeros_like(x) for k in everyone}, {}, {}, 0.0
    for round in range(len(world.cohorts)):
        local = {k: local_training(world, x, running, round, k, lambda w, term=-h[k]: term) for k in everyone}
        before, y, pace = dict(h), {k: local[k].theta for k in everyone}, world.rate(round) * local[0].steps
        x = total(y.values()) / len(y)
        running = total(local[k].statistics for k in everyone) / len(y)
        h = {k: h[k] + (x - y[k]) / pace for k in everyone}
    # A client's control moves when it downloads the next model: after the last round it has the one from before.
    kept = {f"control of {k}": before[k] for k in everyone} | {f"left of {k}": y[k] for k in everyone}
    kept |= {f"pace of {k}": torch.tensor(pace, dtype=torch.float64) for k in everyone}
    rounds = torch.tensor(len(world.cohorts))
    kept |= {f"done of {k}": rounds - 1 for k in everyone}
    return {"model": x, "model statistics": running, "done": rounds} | kept


def test_scaffnew():
    found = WORLD.run(Scaffnew())
    assert_same(found.values, scaffnew(WORLD))
    assert total(found.values[f"control of {k}"] for k in range(3)).abs().max() < 1e-13
    assert max(found.values[f"control of {k}"].abs().max() for k in range(3)) > 1e-2


def test_it_is_scaffold_at_half_the_traffic():
    """h_k = c_k - c. Rates differ from round to round: each path is divided by its own."""
    found, usual = WORLD.run(Scaffnew()), WORLD.run(Scaffold())
    names = ("model", "model statistics")
    assert all((found.values[name] - usual.values[name]).abs().max() < 1e-14 for name in names)
    sent, theirs = (done.jobs[0].download.nbytes + done.replies[0][0].upload.nbytes for done in (found, usual))
    shared = usual.server.state.control.nbytes
    assert theirs - sent == 2 * shared - 8 > 0.9 * sent  # less the number of rounds that counted


def test_with_one_step_it_is_fedavg():
    world = replace(WORLD, steps=1, weighting=uniformly)
    found, usual = world.run(Scaffnew()).values, world.run(FedAvg()).values
    assert all((found[name] - usual[name]).abs().max() < 1e-14 for name in usual)


def test_by_hand():
    """h is (4.3, -4.3) after the first round: clients left at 0.81 and 2.53, the mean is 1.67."""
    first, second = (scalar_run(Scaffnew(), rounds) for rounds in (1, 2))
    assert (number(first), number(second)) == pytest.approx((1.67, 2.1485), abs=1e-14)
    assert pytest.approx(4.3) == (1.67 - 0.81) / 0.2
    assert number(scalar_run(Scaffnew(), 200)) == pytest.approx(3.0, abs=1e-12)
    assert number(scalar_run(FedAvg(), 200)) == pytest.approx(2.914285714285714, abs=1e-12)


@dataclass(frozen=True)
class ThisRoundsPace(Scaffnew):
    """Divides by the rate of the round that begins, not of the one that was left."""

    def begin(self, client):
        now = torch.full_like(client.memory.pace, client.optimizer.lr * client.steps)
        memory = client.memory.replace(pace=torch.where(client.memory.pace > 0, now, client.memory.pace))
        return super().begin(replace(client, memory=memory))


def test_the_textbook_notices():
    assert max(far(WORLD.run(ThisRoundsPace()).values, scaffnew(WORLD)).values()) > 1e-4


class Lossy(Sequential):
    """In the second round one client is not heard of, and in the third the reply of another is lost on its way."""

    def run(self, job, cohort):
        replies = super().run(job, cohort[1:] if job.round == 1 else cohort)
        return replies[1:] if job.round == 2 else replies


def test_a_round_without_everyone_is_as_if_it_had_never_been():
    """Rates fall with the rounds, and batches are of their rounds: these are the two that counted."""
    world = replace(WORLD, cohorts=EVERYONE + EVERYONE)
    found = world.run(Scaffnew(), engine=Lossy)
    assert int(found.values["done"]) == 4
    assert total(found.values[f"control of {k}"] for k in range(3)).abs().max() < 1e-13
    assert max(found.values[f"control of {k}"].abs().max() for k in range(3)) > 1e-2
    assert Scaffnew().notes(Replies()) == []
    lost = Replies()
    lost.missing = [1]
    assert Scaffnew().notes(lost) == ["scaffnew needs a reply of every client: this round leaves the model as it was"]


@dataclass(frozen=True)
class Deaf(Scaffnew):
    """Takes every round for one that counted."""

    def begin(self, client):
        return super().begin(replace(client, received=client.received.replace(done=client.memory.done + 1)))


def test_this_notices():
    found = replace(WORLD, cohorts=EVERYONE + EVERYONE).run(Deaf(), engine=Lossy)
    assert total(found.values[f"control of {k}"] for k in range(3)).abs().max() > 1e-3


def test_refused():
    asked = "scaffnew needs all clients in every round, with equal plain steps and weights: give "
    with pytest.raises(BadInput, match=f"{asked}local.momentum=0 local.steps=10 cohort=everyone$"):
        config.read(None, ["algorithm=scaffnew"]).timetable()
    with pytest.raises(BadInput, match=f"{asked}weighting=uniform$"):
        list(Scaffnew().stages(replace(WORLD.stage(), weighting=by_examples)))
    with pytest.raises(BadInput, match=f"{asked}local.optimizer=sgd$"):
        list(Scaffnew().stages(replace(WORLD.stage(), optimizer=Adam())))
    for key, given in {"uplink": Clip(1.0), "defences": Median()}.items():
        with pytest.raises(BadInput, match=f"the updates as trained: leave out {key}"):
            list(Scaffnew().stages(replace(WORLD.stage(), **{key: (given,)})))
    with pytest.raises(BadInput, match="scaffnew has no server_lr"):
        Scaffnew(server_lr=0.5)
    assert config.read(None, ["algorithm=scaffnew", *described_with("scaffnew")]).timetable()


def test_faults_that_lose_replies_are_refused_before_anything_is_trained(tmp_path):
    words = [*described_with("scaffnew"), "clients=3", "model=mlp", "rounds=1", "faults.dropout=0.1"]
    asked = config.read(None, ["algorithm=scaffnew+ft", *words, "engine=sequential", f"out={tmp_path / 'run'}"])
    with pytest.raises(BadInput, match=r"scaffnew needs a reply of every client in every round, and faults\.dropout"):
        simulate.run(asked)
    assert not (tmp_path / "run").exists()


def test_faults_that_lose_nothing_are_no_reason():
    few = ["clients=2", "rounds=1", "model=mlp", "engine=sequential", "faults.duplicate=0.5", "faults.straggler=0.5"]
    asked = config.read(None, ["algorithm=scaffnew", *described_with("scaffnew"), *few])
    checks.check(asked, asked.data.load())
    with pytest.raises(BadInput, match=r"faults\.straggler loses some"):
        checks.check(replace(asked, policy=replace(asked.policy, deadline=5.0)), asked.data.load())
