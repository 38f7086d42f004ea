"""What a method sends, keeps and costs, found out by running its own hooks once."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import config
from ..algorithms.fedaux import Score
from ..algorithms.feddf import FedDF
from ..algorithms.fedftg import FedFTG
from ..core.algorithm import Algorithm, Server
from ..core.batches import Dataset, Federation
from ..core.cohort import Everyone
from ..core.errors import BadInput, RunFailed
from ..core.replies import decode
from ..core.run import Turn, initial_state, job_of, timetable
from ..core.tree import Tree
from ..core.wire import header
from ..engines.sequential import Sequential
from ..experiment import Experiment

SERVER_HOOKS = ("setup", "broadcast", "aggregate", "advance")  # a client's hooks are named by its engine
PUBLIC = 10  # images that the server has of its own, where a method asks for some


@dataclass(frozen=True)
class Leaf:
    stage: str  # which algorithm of the recipe
    where: str  # down, shared (once for each client), up, memory, state
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def usual_model(algorithm: str) -> str:
    """What a method's messages are about where no model is named: the default CNN, unless the method needs another."""
    return "pse_net" if algorithm.partition("+")[0] == "pse" else "cnn"


def describe(experiment: Experiment, classes: int, channels: int, size: int, *, to_the_end: bool = False) -> list[Leaf]:
    """Every leaf that is sent or kept, stage by stage. Two clients with one blank image each, no training.

    A server with public data has PUBLIC of them.

    to_the_end: the last aggregate is tried, too. It changes no leaf, and a server can be long at it.
    """
    from ..core.network import Network
    from ..core.rng import key, seeded

    with seeded(key(experiment.seed, "init")):
        net = Network(experiment.model.build(classes, channels, size), "fp32", experiment.buffers)
    blank = Dataset(torch.zeros(2, channels, size, size), torch.zeros(2, dtype=torch.long))
    one = {0: torch.tensor([0]), 1: torch.tensor([1])}
    engine = Sequential(net, Federation(blank, one, one, torch.tensor([0, 1])))
    server, leaves = Server(net, Tree(), 2, auxiliary=blank_public((channels, size, size))), []
    rounds = enumerate(timetable(experiment.algorithm, replace(experiment.plan, rounds=1)))
    stages = [(round, stage, since) for round, (stage, at, since) in rounds if at == 0]
    for round, stage, since in stages:
        stage = replace(stage, algorithm=brief(stage.algorithm), epochs=0, steps=None, cohort=Everyone())
        server = replace(server, state=initial_state(stage, server), round=round)
        job = job_of(server, Turn(stage, 0, since), 0)
        replies = engine.run(job, [0, 1])
        name, before = type(stage.algorithm).__name__, {leaf.stage for leaf in leaves}
        name = next(n for n in (name, *(f"{name} ({i})" for i in range(2, 99))) if n not in before)
        memory = Tree({k: v for k, v in engine.memories.get(0).items() if k != "seen"})
        trees = {"down": job.download, "shared": job.shared, "up": replies[0].upload, "memory": memory}
        for where, tree in (trees | {"state": server.state}).items():
            leaves += [Leaf(name, where, path, tuple(t.shape), str(t.dtype)[6:], t.nbytes) for path, t in tree.paths()]
            if where in ("down", "up") or (where == "shared" and tree):
                leaves.append(Leaf(name, where, "(header)", (), "", len(header(tree))))
        if round < stages[-1][0] or to_the_end:
            uploads = [decode(server, stage, reply.upload) for reply in replies]
            server = replace(server, state=stage.algorithm.aggregate(server, uploads))
    return leaves


def blank_public(shape: Sequence[int]) -> Dataset:
    return Dataset(torch.zeros(PUBLIC, *shape), torch.zeros(PUBLIC, dtype=torch.long))


def brief(algorithm: Algorithm) -> Algorithm:
    """The same with hardly any training at the server: how long it does changes neither a leaf nor a client's work."""
    if isinstance(base := getattr(algorithm, "base", None), Algorithm):
        algorithm = replace(algorithm, base=brief(base))
    if isinstance(algorithm, FedFTG):
        return replace(algorithm, iterations=min(algorithm.iterations, 1), student_steps=1, batch=2)
    if isinstance(algorithm, FedDF):
        return replace(algorithm, steps=min(algorithm.steps, 1))
    if isinstance(algorithm, Score):
        negatives = min(max(algorithm.by.negatives, 0.1), 0.9)  # of few images, too, there are both kinds
        return replace(algorithm, by=replace(algorithm.by, pretrain_steps=0, negatives=negatives))
    return algorithm


@contextmanager
def own_hooks(name: str) -> Iterator[None]:
    """One sentence for what goes wrong in a method of the user's own: its hook, and where in it."""
    try:
        yield
    except (BadInput, RunFailed):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        hooks = [frame for frame in frames if frame.name in SERVER_HOOKS]
        own = [frame for frame in hooks if not Path(frame.filename).is_relative_to(Path(__file__).parents[1])]
        at = (own or hooks or frames)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise BadInput(f"{name}: {at.name} failed with {said} ({Path(at.filename).name}, line {at.lineno})") from None


def traffic(leaves: list[Leaf]) -> dict[str, dict[str, int]]:
    """Bytes by stage and direction."""
    found: dict[str, dict[str, int]] = {}
    for leaf in leaves:
        row = found.setdefault(leaf.stage, {"down": 0, "up": 0, "memory": 0, "state": 0})
        row[leaf.where] = row.get(leaf.where, 0) + leaf.bytes
    return found


def presets(recipe: Any) -> dict[str, str]:
    """Settings that have a name, by what chooses them; empty where they are the defaults."""
    known = getattr(recipe, "presets", {})
    name = config.plain(recipe)["is"] if known else ""
    if ":" in name:  # one of the user's own inherits them, and is not chosen by a short name
        return {}
    return {f"algorithm={name}/{preset}": " ".join(f"{k}={v}" for k, v in to.items()) for preset, to in known.items()}


def settings(recipe: Any) -> Iterator[tuple[str, Any]]:
    """The recipe's hyper-parameters and their values."""
    from dataclasses import fields

    for f in fields(recipe):
        yield f.name, getattr(recipe, f.name)
