"""How many images each client trains on, whatever a method does in a round: what makes rounds of methods comparable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ..algorithms import FedAvg
from ..core.algorithm import Server
from ..core.batches import Dataset
from ..core.cohort import Everyone
from ..core.dry_run import PUBLIC, blank_clients
from ..core.network import Network
from ..core.replies import decode_upload
from ..core.rng import key, seeded
from ..core.run import Turn, initial_state, job_of, timetable
from ..core.tree import Tree
from ..engines.process import threads
from ..engines.sequential import Sequential
from ..experiment import Experiment


class Counting(Network):
    """Counts the images that pass through it with a gradient."""

    seen = 0

    def apply(self, weights: Tree, f: Any, *inputs: Any, **how: Any) -> Any:
        if torch.is_grad_enabled():
            self.seen += len(inputs[0])
        return super().apply(weights, f, *inputs, **how)


class Passes(NamedTuple):
    """How often a client trains on each of its images when it takes part in a stage: at first, again, and later."""

    first: float
    second: float
    later: float

    def expected(self, rounds: int, share: float) -> float:
        """In all, of a client that each of these rounds asks with this probability."""
        never = (1 - share) ** rounds
        once = rounds * share * (1 - share) ** (rounds - 1)
        return (
            self.later * rounds * share
            + (self.first - self.later) * (1 - never)
            + (self.second - self.later) * (1 - never - once)
        )


_TIMES, _IMAGES = 3, 8  # rounds of a stage, and images of a client, that it is found out by


def passes(experiment: Experiment) -> list[Passes]:
    """For each stage of a run: how often a client that takes part trains on each of its images.

    Found out by rounds of two clients with a batch of blank images each. Passes without a gradient do not count.
    """
    images = experiment.data.load()
    shape = len(images.classes), *images.x.shape[1:3]
    size = min(experiment.local.batch_size, _IMAGES)
    plan = replace(experiment.plan, rounds=_TIMES, size=size, cohort=Everyone())
    with threads(1):  # more would wait for cores that runs side by side are using
        return list(_passes(experiment.algorithm, plan, experiment.model, shape, size))


@cache
def _passes(recipe: Any, plan: Any, model: Any, shape: tuple[int, int, int], batch: int) -> tuple[Passes, ...]:
    classes, channels, size = shape
    with seeded(key(0, "init")):
        net = Counting(model.build(classes, channels, size))
    data = Dataset(torch.zeros(1, channels, size, size), torch.zeros(1, dtype=torch.long))
    federation = blank_clients(data, batch, classes)
    found: list[list[float]] = []
    for turn, each in _rounds(timetable(recipe, plan), net, federation, batch):
        if turn.at == 0:
            found.append([])
        found[-1].append(each)
    return tuple(Passes(*(each + each[-1:] * _TIMES)[:_TIMES]) for each in found)


def _rounds(turns: list[Turn], net: Counting, federation: Any, batch: int) -> Iterator[tuple[Turn, float]]:
    """The first rounds of every stage, and what each of two clients trained in them."""
    engine = Sequential(net, federation)
    public = Dataset(federation.data.x[:1].expand(PUBLIC, -1, -1, -1), torch.zeros(PUBLIC, dtype=torch.long))
    server = Server(net, Tree(), 2, auxiliary=public)
    for round, turn in enumerate(turns):
        if turn.at >= _TIMES:
            continue
        stage = replace(turn.stage, algorithm=turn.stage.algorithm.brief(), cohort=Everyone())
        if turn.at == 0:
            server = replace(server, state=initial_state(stage, server))
        server = replace(server, round=round)
        net.seen = 0
        replies = engine.run(job_of(server, turn._replace(stage=stage), 0), [0, 1])
        yield turn, net.seen / (2 * batch)
        uploads = [decode_upload(server, stage, reply.upload) for reply in replies]
        server = replace(server, state=stage.algorithm.aggregate(server, uploads))


def trained(experiment: Experiment, each: list[Passes] | None = None) -> float:
    """How often a client trains on each of its images in the whole run, on average over clients.

    `each` is what `passes` found for this experiment with any number of rounds.
    """
    each, timetable = passes(experiment) if each is None else each, experiment.timetable()
    stages, number = [[turn.stage, 0] for turn in timetable if turn.at == 0], -1
    for turn in timetable:
        number += turn.at == 0
        stages[number][1] += 1
    return sum(
        one.expected(rounds, stage.cohort.size(experiment.clients) / experiment.clients)
        for one, (stage, rounds) in zip(each, stages, strict=True)
    )


def rounds_within(experiment: Experiment) -> tuple[int, float, float]:
    """(rounds that this method may have, what it trains in them, what FedAvg trains in the rounds that are asked for).

    The most rounds with which a client trains on no more images than under FedAvg; one at least.
    """
    budget, each = trained(replace(experiment, algorithm=FedAvg())), passes(experiment)

    def images(rounds: int) -> float:
        return trained(replace(experiment, rounds=rounds), each)

    if images(2) <= images(1):  # rounds that train nothing are not many
        return experiment.rounds, images(experiment.rounds), budget
    low, high = 1, experiment.rounds + 1
    while images(high) <= budget + 1e-9:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if images(middle) <= budget + 1e-9 else (low, middle)
    return low, images(low), budget
