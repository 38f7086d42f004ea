"""FedSLS's weights: what clients counted with, the copies they looked with made again, and what finding them costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...algorithms.fedsls import FedSLS, MeasureSaliency, is_usable, shares
from ...attribution import rank_correlation
from ...core.algorithm import Client, Recipe, Server, chain
from ...core.batches import Federation, Shard
from ...core.engine import Engine, Job, Reply
from ...core.errors import BadInput
from ...core.evaluate import pieces
from ...core.network import Network
from ...core.rng import generator, key
from ...core.run import job_of, open_round
from ...core.run import run as run_rounds
from ...core.tree import Tree
from ...engines.lanes import Lanes
from ...engines.sequential import Sequential
from ...experiment import Experiment
from ...simulate.progress import counted

_ONLY_FEDSLS = "algorithm: clients look at their images before the first round under fedsls alone"


@dataclass(frozen=True)
class Weights:
    """By client: n_k, R_k, and the share of an average over all of them that FedAvg and the server give it."""

    examples: dict[int, float]
    saliency: dict[int, float]
    by_samples: dict[int, float]
    used: dict[int, float]

    @property
    def per_image(self) -> dict[int, float]:
        return {client: total / max(self.examples[client], 1) for client, total in self.saliency.items()}

    @property
    def counted(self) -> float:
        """As how many clients they count: the exponential of the entropy of their shares."""
        return effective(self.used.values())

    @property
    def moved(self) -> float:
        """The part of FedAvg's weight that went to other clients."""
        return sum(abs(share - self.by_samples[client]) for client, share in self.used.items()) / 2

    @property
    def grows(self) -> float:
        """Rank correlation of saliency per image with the number of images."""
        both = ([by[client] for client in self.examples] for by in (self.per_image, self.examples))
        return float(rank_correlation(*(torch.tensor([numbers], dtype=torch.float64) for numbers in both)))


def effective(shares: Iterable[float]) -> float:
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))


def weights_of(memories: Mapping[int, Tree], recipe: Any) -> Weights | None:
    """From what clients remember; none where the method has no saliency weights."""
    kept = {client: memory.saliency for client, memory in memories.items() if "saliency" in memory}
    rule = weighing_rule(recipe)
    if not kept or rule is None:
        return None
    examples = {client: float(saliency.examples) for client, saliency in kept.items()}
    totals = {client: float(saliency.total) for client, saliency in kept.items()}
    return weights_from(examples, totals, rule)


def weights_from(examples: dict[int, float], totals: dict[int, float], rule: Any) -> Weights:
    counted = [total if rule.normalize == "sum" else total / max(examples[c], 1) for c, total in totals.items()]
    by_samples = shares([*examples.values()])
    used = shares(counted) if is_usable(counted) else by_samples
    if blend := getattr(rule, "blend", 0.0):
        others = by_samples if rule.blend_with == "samples" else [1 / len(used)] * len(used)
        used = [(1 - blend) * mine + blend * theirs for mine, theirs in zip(used, others, strict=True)]
    by_client = [dict(zip(totals, values, strict=True)) for values in (by_samples, used)]
    return Weights(examples, totals, *by_client)


def weighing_rule(recipe: Any) -> Any:
    """FedSLS or FedSL, by itself or inside another recipe."""
    return next((part for part in chain(recipe) if hasattr(part, "normalize")), None)


def some_clients(federation: Federation, count: int = 4) -> list[int]:
    """From small to large."""
    by_size = sorted(federation.train, key=lambda client: len(federation.train[client]))
    return list(dict.fromkeys(by_size[len(by_size) * part // (count + 1)] for part in range(1, count + 1)))


def copies(experiment: Experiment, net: Network, federation: Federation, clients: Collection[int]) -> dict[int, Tree]:
    """The weights that these clients looked at their images with before the first round, made again and kept."""
    return {number: copy(experiment, net, federation, number)[1] for number in counted(clients, "clients that train")}


def copy(experiment: Experiment, net: Network, federation: Federation, number: int) -> tuple[Client, Tree]:
    """A client, and the weights it looked at its images with."""
    job, engine = first_job(experiment, net, len(federation.train)), Sequential(net, federation)
    client, batches = engine.open(job, number)
    local = engine.local_training(job, number, client, batches)
    return client, Tree(params=local.params, buffers=local.buffers)


def weights_by_switch(
    experiment: Experiment, net: Network, federation: Federation, switched: Mapping[str, Recipe], images: int
) -> dict[str, Weights]:
    """What clients would count by before the first round, under each way to look; no round is trained.

    A client looks at so many of its images, 0 for all, and is taken to have the same saliency an image on the others.
    """
    ways = {name: recipe for name, recipe in switched.items() if isinstance(recipe, FedSLS)}
    if len(ways) < len(switched):
        raise BadInput(_ONLY_FEDSLS)
    examples = {number: float(len(owned)) for number, owned in federation.train.items()}
    totals: dict[str, dict[int, float]] = {name: {} for name in ways}
    for number, owned in counted(federation.train.items(), "clients that look at their images"):
        order = torch.randperm(len(owned), generator=generator(key(experiment.seed, "figure", number)))
        looked_at = Shard(federation.data, owned[order[: images or None].to(owned.device)])
        trained: dict[int, tuple[Client, Tree]] = {}  # by epochs: nothing else of a way to look changes the copy
        for name, recipe in ways.items():
            if recipe.pretrain_epochs not in trained:
                trained[recipe.pretrain_epochs] = copy(replace(experiment, algorithm=recipe), net, federation, number)
            found = torch.cat(
                [recipe.of_images(*trained[recipe.pretrain_epochs], piece) for piece in pieces(looked_at)]
            )
            totals[name][number] = float(found.mean()) * len(owned)
    return {name: weights_from(examples, totals[name], recipe) for name, recipe in ways.items()}


def first_job(experiment: Experiment, net: Network, population: int) -> Job:
    """The work order by which all clients find their numbers before anything is averaged."""
    turn = experiment.timetable()[0]
    if not isinstance(turn.stage.algorithm, MeasureSaliency):
        raise BadInput(_ONLY_FEDSLS)
    return job_of(open_round(Server(net, Tree(), population), turn, experiment.seed), turn, experiment.seed)


def weights_over_rounds(experiment: Experiment, net: Network, federation: Federation) -> dict[int, Weights]:
    """{training rounds done: weights} of a run that finds them more than once; nothing is written."""
    found: dict[int, Weights] = {}
    trained = 0

    def observe(server: Server, job: Job, replies: list[Reply]) -> None:
        nonlocal trained
        if isinstance(job.stage.algorithm, MeasureSaliency):
            uploads = {reply.client: reply.upload.map(lambda leaf: leaf.cpu()) for reply in replies}
            if (weights := weights_of(uploads, experiment.algorithm)) is not None:
                found[trained] = weights
        else:
            trained += 1

    engine = engine_for(experiment, net, federation)
    try:
        run_rounds(experiment.algorithm, net, engine, experiment.plan, seed=experiment.seed, observe=observe)
    finally:
        engine.close()
    return found


def engine_for(experiment: Experiment, net: Network, federation: Federation) -> Engine:
    if experiment.execution.device == "cpu":
        return Sequential(net, federation)
    return Lanes(net, federation, lanes=experiment.execution.lanes)
