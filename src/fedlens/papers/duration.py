"""About how long runs and figures will take on this machine: a short measured step, times the steps ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..config import to_dict
from ..core.errors import BadInput
from ..core.tree import Tree
from ..data import Images
from ..devices.clock import passes
from ..engines.process import matmuls, threads
from ..experiment import Experiment

_BATCH = 16  # images of the step that is measured
_BEGIN = 0.5  # seconds of a run before its first round and after its last


class Effort(NamedTuple):
    """What a figure computes beside runs: so many images through the network of this experiment, there and back."""

    experiment: Experiment
    images: Callable[[Images], float]  # of the data set that it has


class Pace:
    """Seconds of an image, there and back, through the network of an experiment; measured once for each network."""

    def __init__(self) -> None:
        self.known: dict[str, float] = {}

    def __call__(self, experiment: Experiment, images: Images) -> float:
        where = experiment.execution
        name = str((to_dict(experiment.model), images.x.shape[1:], len(images.classes), where.device, where.precision))
        if name not in self.known:
            self.known[name] = _measured(experiment, images)
        return self.known[name]


def seconds(experiments: Iterable[Experiment], work: Sequence[Effort] = (), pace: Pace | None = None) -> float | None:
    """Of all of them; None where it cannot be known, as data or weights are missing."""
    pace, total, loaded = pace or Pace(), 0.0, {}
    try:
        for experiment in experiments:
            where = experiment.resolved()
            if where.data not in loaded:
                loaded[where.data] = where.data.load()
            images = loaded[where.data]
            total += _BEGIN + images_ahead(where, images) * pace(where, images) / max(where.execution.workers, 1)
        for one in work:
            where = one.experiment.resolved()
            images = where.data.load()
            total += one.images(images) * pace(where, images)
    except BadInput:
        return None
    return total


def images_ahead(experiment: Experiment, images: Images) -> float:
    """How many images pass the network there and back: in training, and a third of that for each in evaluations."""
    size = len(images.train) // experiment.clients
    trained = sum(
        turn.stage.cohort.size(experiment.clients) * passes(turn.stage, size) for turn in experiment.timetable()
    )
    looks, rounds = experiment.evaluate, experiment.rounds
    pooled = (rounds / looks.every if looks.every else 1) + min(looks.closing, rounds)
    models = {"none": 0, "both": 2}.get(looks.personal, 1)
    own = models * (rounds / looks.personal_every if looks.personal_every else 1)
    return trained + (pooled + own) * len(images.test) / 3


def _measured(experiment: Experiment, images: Images) -> float:
    """The faster of two steps of plain training, after one that pays for starting up."""
    device = experiment.execution.device
    net = experiment.network(images).to(device)
    some = images.train[:_BATCH]
    weights, taken = net.initial_weights(), []
    dtype = next(iter(weights.params.values())).dtype
    x, y = images.x[some].to(device, dtype) / 255, images.y[some].to(device)
    with threads(1), matmuls(experiment.execution.precision):
        for _ in range(3):
            params = weights.params.map(lambda leaf: leaf.detach().requires_grad_())
            start = time.perf_counter()
            loss = F.cross_entropy(net(Tree(params=params, buffers=weights.buffers), x), y)
            torch.autograd.grad(loss, [*params.leaves()], materialize_grads=True)
            if device != "cpu":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - start)
    return min(taken[1:]) / len(some)


def about(taken: float) -> str:
    """In words: about 12 minutes."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if taken >= 1.5 * length or (unit == "minute" and taken >= 50):
            count = ceil(taken / length - 0.5)
            return f"about {count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute" if taken > 20 else "some seconds"


def sentence(runs: int, taken: float | None) -> str:
    """What is said before anything starts."""
    what = f"{runs} run{'' if runs == 1 else 's'}: " if runs else ""
    if taken is None:
        return f"{what}how long this takes cannot be told, since data or weights are missing here."
    return f"{what}{about(taken)} on this machine, by a step of plain training; a method's own work comes on top."
