"""Which models of a run are looked at: of which rounds, the global one or single clients' own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..core.algorithm import Server
from ..core.batches import Federation
from ..core.errors import BadInput
from ..core.evaluate import Evaluate
from ..core.memories import Memories
from ..core.network import Network
from ..core.rng import key
from ..core.run import job_of
from ..core.tree import Tree
from ..engines.sequential import Sequential
from ..experiment import Experiment
from .folder import Checkpoint, RunFolder


def models(
    folder: RunFolder,
    experiment: Experiment,
    net: Network,
    federation: Federation,
    *,
    clients: Sequence[int] = (),
    rounds: Sequence[int] = (),
) -> dict[str, Tree]:
    """By what they are called in a picture; without `rounds` those of the newest checkpoint."""
    for client in clients:
        if client not in federation.train:
            raise BadInput(f"client {client} does not exist: there are {len(federation.train)}, counted from 0")
    found: dict[str, Tree] = {}
    names = folder.names()
    for checkpoint in [folder.at(round) for round in rounds] or [newest(folder)]:
        when = f"round {checkpoint.round}" if rounds else ""
        if not clients:
            model = global_model(experiment, net, checkpoint)
            if model is None:
                raise BadInput(
                    f"{folder.path} has no whole global model: clients keep a part; name some with --clients 0,1"
                )
            found[when] = model
            continue
        for client, model in own_models(folder, experiment, net, federation, checkpoint, clients):
            found[f"{names.title(client)}, {when}" if when else names.title(client)] = model
    return found


def global_model(experiment: Experiment, net: Network, checkpoint: Checkpoint) -> Tree | None:
    """None when clients keep a part of it."""
    algorithm = experiment.timetable()[checkpoint.round - 1].stage.algorithm
    model, whole = algorithm.global_model(checkpoint.state), net.initial_weights()
    if model.params.keys() != whole.params.keys():
        return None
    device = next(iter(whole.params.values())).device
    return model.map(lambda leaf: leaf.to(device))


def own_models(
    folder: RunFolder,
    experiment: Experiment,
    net: Network,
    federation: Federation,
    checkpoint: Checkpoint,
    clients: Sequence[int],
    *,
    trained: bool = False,
) -> Iterator[tuple[int, Tree]]:
    """What clients predict with; trained: after one more local training, where the run's tables judge that, too."""
    turn = experiment.timetable()[checkpoint.round - 1]
    algorithm, local, device = turn.stage.algorithm, experiment.local, federation.data.x.device
    if trained := trained and "personal after" in algorithm.evaluated_as:
        errand = turn.stage.errand(Evaluate(base=algorithm), epochs=local.epochs, steps=local.steps)
        turn = turn._replace(stage=errand)
    state = checkpoint.state.map(lambda leaf: leaf.to(device))
    last = key(experiment.seed, "server", checkpoint.round - 1)
    server = Server(net, state, len(federation.train), checkpoint.round, last)
    job = job_of(server, turn, experiment.seed)
    engine = Sequential(net, federation, memories=Memories(folder.memories, round=checkpoint.round))
    for number in clients:
        client, batches = engine.open(job, number)
        client = replace(client, memory=client.memory.map(lambda leaf: leaf.to(device)))
        after = engine.local_training(job, number, client, batches) if trained and client.steps else None
        model = algorithm.personal(client, after)
        yield number, Tree(params=model.params, buffers=model.buffers)


def newest(folder: RunFolder) -> Checkpoint:
    checkpoint, _ = folder.load()
    if checkpoint is None:
        raise BadInput(f"{folder.path} has no checkpoint yet")
    return checkpoint
