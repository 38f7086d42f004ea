"""FedSLS's weights: what clients counted with, the copies they looked with made again, and what finding them costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..algorithms.fedsls import Weigh, is_usable, shares
from ..core.algorithm import Server
from ..core.batches import Federation
from ..core.errors import BadInput
from ..core.network import Network
from ..core.rng import key
from ..core.run import Engine, Job, Reply, enter
from ..core.run import run as run_rounds
from ..core.tree import Tree
from ..engines.lanes import Lanes
from ..engines.sequential import Sequential
from ..experiment import Experiment


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


def weights_of(memories: Mapping[int, Tree], recipe: Any) -> Weights | None:
    """From what clients remember; none where the method has no saliency weights."""
    kept = {client: memory.saliency for client, memory in memories.items() if "saliency" in memory}
    rule = weighing_rule(recipe)
    if not kept or rule is None:
        return None
    examples = {client: float(saliency.examples) for client, saliency in kept.items()}
    totals = {client: float(saliency.total) for client, saliency in kept.items()}
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
    while recipe is not None and not hasattr(recipe, "normalize"):
        recipe = getattr(recipe, "base", None)
    return recipe


def some_clients(federation: Federation, count: int = 4) -> list[int]:
    """From small to large."""
    by_size = sorted(federation.train, key=lambda client: len(federation.train[client]))
    return list(dict.fromkeys(by_size[len(by_size) * part // (count + 1)] for part in range(1, count + 1)))


def copies(experiment: Experiment, net: Network, federation: Federation, clients: Iterable[int]) -> dict[int, Tree]:
    """The weights that these clients looked at their images with before the first round, made again and kept."""
    job = first_job(experiment, net, len(federation.train))
    engine, found = Sequential(net, federation), {}
    for number in clients:
        client, batches = engine.open(job, number)
        local = engine.local_training(job, number, client, batches)
        found[number] = Tree(params=local.params, buffers=local.buffers)
    return found


def first_job(experiment: Experiment, net: Network, population: int) -> Job:
    """The work order by which all clients find their numbers before anything is averaged."""
    stage, at, since = experiment.timetable()[0]
    if not isinstance(stage.algorithm, Weigh):
        raise BadInput("algorithm: clients look at their images before the first round under fedsls alone")
    server = Server(net, Tree(), population, key=key(experiment.seed, "server", 0))
    server = replace(server, state=enter(stage, server))
    return Job(stage, stage.algorithm.broadcast(server), Tree(), 0, at, since, experiment.seed)


def weights_over_rounds(experiment: Experiment, net: Network, federation: Federation) -> dict[int, Weights]:
    """{training rounds done: weights} of a run that finds them more than once; nothing is written."""
    found: dict[int, Weights] = {}
    trained = 0

    def observe(server: Server, job: Job, replies: list[Reply]) -> None:
        nonlocal trained
        if isinstance(job.stage.algorithm, Weigh):
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
    if experiment.device == "cpu":
        return Sequential(net, federation)
    return Lanes(net, federation, lanes=experiment.lanes)
