"""What a run's models look at, drawn: images x methods, for the global model or for single clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from . import config
from .attribution.gallery import USUAL, explain
from .core.algorithm import Server
from .core.batches import Federation, Shard
from .core.errors import BadInput
from .core.memories import Memories
from .core.network import Network
from .core.run import Job
from .core.tree import Tree
from .data import Images
from .engines.sequential import Sequential
from .experiment import Experiment
from .models import load_weights
from .runs import RunFolder


def explain_run(
    path: str | Path,
    out: Path | None = None,
    *,
    clients: Sequence[int] = (),
    count: int = 6,
    methods: Sequence[str] = USUAL,
) -> Path:
    """The models of a run at its newest checkpoint: the global one, or those that these clients predict with."""
    folder = RunFolder.open(path)
    experiment = replace(config.read(folder.config), device="cpu", precision="fp32")
    checkpoint, _ = folder.load()
    if checkpoint is None:
        raise BadInput(f"{path} has no checkpoint yet")
    images = experiment.data.load()
    net, (federation, _) = experiment.network(images), experiment.federation(images)
    stage, at, since = experiment.timetable()[checkpoint.round - 1]
    server = Server(net, checkpoint.state, len(federation.train), checkpoint.round)
    if not clients:
        model = stage.algorithm.global_model(checkpoint.state)
        if model.params.keys() != net.initial_weights().params.keys():
            raise BadInput(f"{path} has no whole global model: clients keep a part; name some with --clients 0,1")
        shown = spread(images, federation.pool, count)
        return _draw(net, model, federation, images, shown, out or folder.figures / "explain.png", methods)
    engine = Sequential(net, federation, memories=Memories(folder.memories, round=checkpoint.round))
    job = Job(stage, stage.algorithm.broadcast(server), Tree(), checkpoint.round, at, since, experiment.seed)
    models: dict[str, Tree] = {}
    for client in clients:
        if client not in federation.train:
            raise BadInput(f"client {client} does not exist: there are {len(federation.train)}, counted from 0")
        models[f"client {client}"] = stage.algorithm.personal(engine.open(job, client)[0])
    shown = spread(images, torch.cat([federation.test[client] for client in clients]), count)
    return _draw(net, models, federation, images, shown, out or folder.figures / "explain-clients.png", methods)


def explain_model(
    experiment: Experiment, weights: str, out: Path, *, count: int = 6, methods: Sequence[str] = USUAL
) -> Path:
    """A model with weights from a file, on test images of a data set."""
    images = experiment.data.load()
    federation, _ = experiment.federation(images)
    net = experiment.network(images)
    if weights:
        load_weights(net.module, weights)
    return _draw(net, net.initial_weights(), federation, images, spread(images, federation.pool, count), out, methods)


def spread(images: Images, index: torch.Tensor, count: int) -> torch.Tensor:
    """Some of these images, of as many classes as there are, the first of each."""
    labels = images.y[index].tolist()
    turns: dict[int, int] = {}
    order = []
    for position, label in enumerate(labels):
        turns[label] = turns.get(label, 0) + 1
        order.append((turns[label], label, position))
    return index[torch.tensor([position for _, _, position in sorted(order)[:count]])]


def _draw(
    net: Network,
    weights: Tree | dict[str, Tree],
    federation: Federation,
    images: Images,
    shown: torch.Tensor,
    out: Path,
    methods: Sequence[str],
) -> Path:
    x, y = Shard(federation.data, shown).x, images.y[shown]
    titles = [images.classes[label] for label in y.tolist()]
    explain(net, weights, x, y, out, methods=methods, pictures=images.x[shown].float() / 255, titles=titles)
    return out
