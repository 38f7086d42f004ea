"""How many images each client trains on, whatever a method does in a round: what makes rounds of methods comparable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

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
from ..engines.sequential import Sequential
from ..experiment import Experiment


class Counting(Network):
    """Counts the images that pass through it with a gradient."""

    seen = 0

    def apply(self, weights: Tree, f: Any, *inputs: Any, **how: Any) -> Any:
        if torch.is_grad_enabled():
            self.seen += len(inputs[0])
        return super().apply(weights, f, *inputs, **how)


def passes(experiment: Experiment) -> list[float]:
    """For each stage of a run: how often a client that takes part trains on each of its images in a round.

    Found out by one round of two clients with a batch of blank images each. Passes without a gradient do not count.
    """
    images = experiment.data.load()
    shape = len(images.classes), *images.x.shape[1:3]
    plan = replace(experiment.plan, rounds=1)
    return list(_passes(experiment.algorithm, plan, experiment.model, shape, experiment.local.batch_size))


@lru_cache
def _passes(recipe: Any, plan: Any, model: Any, shape: tuple[int, int, int], batch: int) -> tuple[float, ...]:
    classes, channels, size = shape
    with seeded(key(0, "init")):
        net = Counting(model.build(classes, channels, size))
    data = Dataset(torch.zeros(1, channels, size, size), torch.zeros(1, dtype=torch.long))
    federation = blank_clients(data, batch, classes)
    return tuple(_stages(timetable(recipe, plan), net, federation, batch))


def _stages(turns: list[Turn], net: Counting, federation: Any, batch: int) -> Iterator[float]:
    engine = Sequential(net, federation)
    public = Dataset(federation.data.x[:1].expand(PUBLIC, -1, -1, -1), torch.zeros(PUBLIC, dtype=torch.long))
    server = Server(net, Tree(), 2, auxiliary=public)
    for round, turn in enumerate(turns):
        if turn.at:
            continue
        stage = replace(turn.stage, algorithm=turn.stage.algorithm.brief(), cohort=Everyone())
        server = replace(server, state=initial_state(stage, server), round=round)
        net.seen = 0
        replies = engine.run(job_of(server, turn._replace(stage=stage), 0), [0, 1])
        yield net.seen / (2 * batch)
        uploads = [decode_upload(server, stage, reply.upload) for reply in replies]
        server = replace(server, state=stage.algorithm.aggregate(server, uploads))


def trained(experiment: Experiment) -> float:
    """How often a client trains on each of its images in the whole run, on average over clients."""
    each, total, stage = passes(experiment), 0.0, -1
    for turn in experiment.timetable():
        stage += turn.at == 0
        total += each[min(stage, len(each) - 1)] * turn.stage.cohort.size(experiment.clients) / experiment.clients
    return total


def rounds_within(experiment: Experiment) -> tuple[int, float, float]:
    """(rounds that this method may have, what it trains in them, what FedAvg trains in the rounds that are asked for).

    The most rounds with which a client trains on no more images than under FedAvg; one at least.
    """
    budget = trained(replace(experiment, algorithm=FedAvg()))
    one, two = (trained(replace(experiment, rounds=rounds)) for rounds in (1, 2))
    step = two - one
    rounds = experiment.rounds if step <= 0 else max(1, 1 + int((budget - one) / step + 1e-9))
    while rounds > 1 and trained(replace(experiment, rounds=rounds)) > budget + 1e-9:
        rounds -= 1
    return rounds, trained(replace(experiment, rounds=rounds)), budget
