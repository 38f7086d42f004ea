"""Runs of one process go on with the lanes of the run before, where they serve: the same bits."""

from dataclasses import replace

import pytest
import torch

from fedlens.algorithms import FedAvg, FedPer, Scaffold
from fedlens.core.batches import Federation
from fedlens.core.network import Network
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import seeded
from fedlens.core.run import run
from fedlens.engines import lanes
from fedlens.engines.lanes import Lanes, recordings_kept
from fedlens.engines.sequential import Sequential
from fedlens.models.cnn import CnnSmall
from small import PLAN, federation, jitter, same


def net(seed: int, classes: int = 3) -> Network:
    with seeded(seed):
        return Network(CnnSmall().build(classes, 1, 28), "fp64")


def clients(sizes=(9, 4, 7, 2), shift: float = 0.0) -> Federation:
    whole = federation(sizes, prepare=jitter)
    x = torch.nn.functional.pad(whole.data.x, [11] * 4) + shift
    return replace(whole, data=replace(whole.data, x=x))


RUNS = [
    (FedAvg(), 1, (9, 4, 7, 2)),
    (FedAvg(), 2, (4, 9, 2, 7)),
    (Scaffold(), 2, (9, 4, 7, 2)),
    (FedPer(), 3, (30, 4, 1, 2)),
]


def states(made: list, shift: float = 0.0):
    plan = replace(PLAN, rounds=2, epochs=1)
    for recipe, seed, sizes in RUNS:
        engine = Lanes(net(seed), clients(sizes, shift), lanes=2)
        made.append(engine.places[0])
        yield run(recipe, engine.net, engine, plan, seed=seed).state
        engine.close()


def test_kept_lanes_give_the_bits_of_new_ones(monkeypatch):
    built, usual = [], lanes.Lane.__init__
    monkeypatch.setattr(lanes.Lane, "__init__", lambda self, *a: built.append(1) or usual(self, *a))
    alone, kept = [], []
    plain = [*states(alone)]
    apart = len(built)
    with recordings_kept():
        again = [*states(kept)]
    assert all(same(a, b) for a, b in zip(plain, again, strict=True))
    # The last has other images.
    assert len({id(place) for place in alone}) == 4
    assert len({id(place) for place in kept[:3]}) == 1
    assert len(built) - apart < apart
    assert lanes._shelf.places == [] and not lanes._shelf.is_open


def test_lanes_of_the_last_run_alone_are_kept():
    """Every rate of a search is a recording of its own: a hundred of them would fill a device."""
    plan, kept = replace(PLAN, rounds=1, epochs=1), []
    with recordings_kept():
        for rate in (0.1, 0.2, 0.3, 0.3):
            engine = Lanes(net(1), clients(), lanes=2)
            run(FedAvg(), engine.net, engine, replace(plan, optimizer=Sgd(rate)))
            engine.close()
            kept.append({stage: [*free] for stage, free in lanes._shelf.places[0].free.items()})
    assert [[stage.optimizer.lr for stage in free] for free in kept] == [[0.1], [0.2], [0.3], [0.3]]
    (before,), (after,) = (free.values() for free in kept[-2:])
    assert {id(lane) for lane in before} == {id(lane) for lane in after}  # the same settings again: the same lanes


@pytest.mark.parametrize(
    "change",
    [
        lambda f: clients(shift=1.0),
        lambda f: replace(f, data=replace(f.data, prepare=lambda x, key: x)),
        lambda f: f.on_host(),
    ],
)
def test_other_images_are_not_served(change):
    place = Lanes(net(1), clients(), lanes=1).places[0]
    assert place.serves(net(2), clients())
    assert not place.serves(net(2), change(clients()))


def test_other_networks_are_not_served():
    place = Lanes(net(1), clients(), lanes=1).places[0]
    compiled = net(2)
    compiled.compile = True
    assert not place.serves(net(2, classes=4), clients()) and not place.serves(compiled, clients())
    assert not place.serves(Network(Own(), "fp64"), clients())


class Own(torch.nn.Module):
    """Of the user: nobody knows what it keeps."""

    def features(self, x):
        return x.flatten(1)


@pytest.mark.parametrize("where", ["measure", "conclude"])
def test_lanes_make_room_for_what_else_needs_memory(where, monkeypatch):
    """A test set, or a client's answer, that finds the device full of lanes: they go, and the run goes on."""
    asked, usual = [], getattr(Sequential, where)

    def full(self, *arguments):
        asked.append(sum(map(len, self.places[0].free.values())))
        if len(asked) == 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return usual(self, *arguments)

    monkeypatch.setattr(Sequential, where, full)
    engine, plan = Lanes(net(1), clients(), lanes=2), replace(PLAN, rounds=3, epochs=1)
    scores = []
    state = run(
        FedAvg(), engine.net, engine, plan, observe=lambda s, *_: scores.append(engine.measure(s.state.model))
    ).state
    plain = Sequential(net(1), clients())
    monkeypatch.undo()
    assert same(state, run(FedAvg(), plain.net, plain, plan).state)
    assert asked[3] == 0 and len(scores) == 3


class Broken:
    """A recording that cannot be ended once a step in it has failed, as CUDA's."""

    failed = False

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"

    def capture_end(self) -> None:
        if self.failed:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_a_step_that_fails_while_it_is_recorded_says_why():
    graph = Broken()
    with pytest.raises(torch.cuda.OutOfMemoryError), lanes._recorded(graph):
        graph.failed = True
        raise torch.cuda.OutOfMemoryError("no room")
    whole = Broken()
    with pytest.raises(RuntimeError, match="previous error"), lanes._recorded(whole):
        whole.failed = True  # nothing was raised inside: the end itself is all that there is to say
