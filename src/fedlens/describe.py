"""What a method sends, keeps and costs, found out by running its own hooks once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .core.algorithm import Server
from .core.batches import Dataset, Federation
from .core.cohort import Everyone
from .core.run import Job, decode, enter, timetable
from .core.tree import Tree
from .core.wire import header
from .engines.sequential import Sequential
from .experiment import Experiment


@dataclass(frozen=True)
class Leaf:
    stage: str  # which algorithm of the recipe
    where: str  # down, shared (once for each client), up, memory, state
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def describe(experiment: Experiment, classes: int, channels: int, size: int) -> list[Leaf]:
    """Every leaf that is sent or kept, stage by stage. Two clients with one blank image each, no training."""
    from .core.network import Network
    from .core.rng import key, seeded

    with seeded(key(experiment.seed, "init")):
        net = Network(experiment.model.build(classes, channels, size), "fp32", experiment.buffers)
    blank = Dataset(torch.zeros(2, channels, size, size), torch.zeros(2, dtype=torch.long))
    one = {0: torch.tensor([0]), 1: torch.tensor([1])}
    engine = Sequential(net, Federation(blank, one, one, torch.tensor([0, 1])))
    nothing = Dataset(torch.zeros(0, channels, size, size), torch.zeros(0, dtype=torch.long))  # public data
    server, leaves = Server(net, Tree(), 2, auxiliary=nothing), []
    rounds = enumerate(timetable(experiment.algorithm, replace(experiment.plan, rounds=1)))
    stages = [(round, stage, since) for round, (stage, at, since) in rounds if at == 0]
    for round, stage, since in stages:
        server = replace(server, state=enter(stage, server), round=round)
        stage = replace(stage, epochs=0, steps=None, cohort=Everyone())
        job = Job(stage, stage.algorithm.broadcast(server), server.state.get("shared", Tree()), round, 0, since, 0)
        replies = engine.run(job, [0, 1])
        name, before = type(stage.algorithm).__name__, {leaf.stage for leaf in leaves}
        name = next(n for n in (name, *(f"{name} ({i})" for i in range(2, 99))) if n not in before)
        memory = Tree({k: v for k, v in engine.memories.get(0).items() if k != "seen"})
        trees = {"down": job.download, "shared": job.shared, "up": replies[0].upload, "memory": memory}
        for where, tree in (trees | {"state": server.state}).items():
            leaves += [Leaf(name, where, path, tuple(t.shape), str(t.dtype)[6:], t.nbytes) for path, t in tree.paths()]
            if where in ("down", "up") or (where == "shared" and tree):
                leaves.append(Leaf(name, where, "(header)", (), "", len(header(tree))))
        if round == stages[-1][0]:
            break  # nothing described comes after it, and a server can be long at its aggregate (FedFTG)
        uploads = [decode(server, stage, reply.upload) for reply in replies]
        server = replace(server, state=stage.algorithm.aggregate(server, uploads))
    return leaves


def traffic(leaves: list[Leaf]) -> dict[str, dict[str, int]]:
    """Bytes by stage and direction."""
    found: dict[str, dict[str, int]] = {}
    for leaf in leaves:
        row = found.setdefault(leaf.stage, {"down": 0, "up": 0, "memory": 0, "state": 0})
        row[leaf.where] = row.get(leaf.where, 0) + leaf.bytes
    return found


def settings(recipe: Any) -> Iterator[tuple[str, Any]]:
    """The recipe's hyper-parameters and their values."""
    from dataclasses import fields

    for f in fields(recipe):
        yield f.name, getattr(recipe, f.name)
