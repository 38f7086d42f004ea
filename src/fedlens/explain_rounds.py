"""Which models of a run are looked at: of which rounds, the global one or single clients' own."""

from __future__ import annotations

from collections.abc import Sequence

from .core.algorithm import Server
from .core.batches import Federation
from .core.errors import BadInput
from .core.memories import Memories
from .core.network import Network
from .core.run import Job
from .core.tree import Tree
from .engines.sequential import Sequential
from .experiment import Experiment
from .runs import Checkpoint, RunFolder


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
    for checkpoint in [folder.at(round) for round in rounds] or [_newest(folder)]:
        when = f"round {checkpoint.round}" if rounds else ""
        stage, at, since = experiment.timetable()[checkpoint.round - 1]
        if not clients:
            model = stage.algorithm.global_model(checkpoint.state)
            if model.params.keys() != net.initial_weights().params.keys():
                raise BadInput(
                    f"{folder.path} has no whole global model: clients keep a part; name some with --clients 0,1"
                )
            found[when] = model
            continue
        server = Server(net, checkpoint.state, len(federation.train), checkpoint.round)
        engine = Sequential(net, federation, memories=Memories(folder.memories, round=checkpoint.round))
        shared = checkpoint.state.get("shared", Tree())
        job = Job(stage, stage.algorithm.broadcast(server), shared, checkpoint.round, at, since, experiment.seed)
        for client in clients:
            name = f"client {client}, {when}" if when else f"client {client}"
            found[name] = stage.algorithm.personal(engine.open(job, client)[0])
    return found


def _newest(folder: RunFolder) -> Checkpoint:
    checkpoint, _ = folder.load()
    if checkpoint is None:
        raise BadInput(f"{folder.path} has no checkpoint yet")
    return checkpoint
