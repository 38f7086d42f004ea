"""A recipe's own hooks once, on blank images: what it sends, keeps and computes, before anything is trained.

The engine that runs the clients' hooks is passed in: a class that is made of a network and a federation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .algorithm import Server
from .batches import Dataset, Federation
from .cohort import Everyone
from .engine import Engine, Job, Reply
from .network import Network
from .objective import by_batches, uniformly
from .replies import decode_upload
from .run import Turn, initial_state, job_of
from .tree import Tree

PUBLIC = 10  # images that the server has of its own, where a method asks for some
_SMALL = 64  # entries of a leaf whose values stay: of the others shape and type are all that matters


class Rehearsed(NamedTuple):
    """A stage's first round."""

    turn: Turn  # as the run has it
    server: Server
    job: Job  # for clients that train nothing, with hardly any training at the server
    replies: list[Reply]


def dry_run(
    turns: Sequence[Turn], net: Network, shape: Sequence[int], engine: Engine, *, to_the_end: bool = False
) -> Iterator[Rehearsed]:
    """The first round of every stage with clients 0 and 1 of the engine, over images of this shape.

    to_the_end: the last aggregate is tried, too. It changes no leaf, and a server can be long at it.
    """
    public = Dataset(torch.zeros(PUBLIC, *shape), torch.zeros(PUBLIC, dtype=torch.long))
    server = Server(net, Tree(), 2, auxiliary=public)
    firsts = [(round, turn) for round, turn in enumerate(turns) if turn.at == 0]
    for round, turn in firsts:
        stage = replace(turn.stage, algorithm=turn.stage.algorithm.brief(), epochs=0, steps=None, cohort=Everyone())
        if stage.weighting is by_batches:  # who trains nothing has none to be counted by
            stage = replace(stage, weighting=uniformly)
        server = replace(server, state=initial_state(stage, server), round=round)
        job = job_of(server, turn._replace(stage=stage), 0)
        replies = engine.run(job, [0, 1])
        yield Rehearsed(turn, server, job, replies)
        if to_the_end or round < firsts[-1][0]:
            uploads = [decode_upload(server, stage, reply.upload) for reply in replies]
            server = replace(server, state=stage.algorithm.aggregate(server, uploads))


def blank_clients(data: Dataset, count: int = 1, classes: int = 1) -> Federation:
    """Two clients with so many blank images each, of all classes, stored and prepared like those of `data`."""
    x, device = data.x if isinstance(data.x, Tensor) else data.x.stored, data.x.device
    blank = torch.zeros(2 * count, *x.shape[1:], dtype=x.dtype, device=device)
    whole = torch.arange(2 * count, device=device)
    own = {0: whole[:count], 1: whole[count:]}
    return Federation(Dataset(blank, whole % classes, data.prepare), own, own, whole)


class Rehearsal:
    """A client with one blank image that trains nothing: its upload has the names, types and shapes of everyone's."""

    def __init__(self, engine: Callable[[Network, Federation], Any], net: Network, data: Dataset):
        """`data`: any of the run's, for the shape of an image and how it is prepared."""
        self.engine, self.net, self.federation = engine, net, blank_clients(data)

    def __call__(self, job: Job) -> Tree:
        job = replace(job, stage=replace(job.stage, epochs=0, steps=None))
        (reply,) = self.engine(self.net, self.federation).run(job, [0])  # a new one, whose clients remember nothing
        return reply.upload.map(lambda leaf: leaf if leaf.numel() <= _SMALL else leaf.to("meta"))
