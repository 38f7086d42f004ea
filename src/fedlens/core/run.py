"""The round loop. Evaluation, checkpoints, ledger and logging observe it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .algorithm import Recipe, Server, Stage
from .network import Network
from .rng import key
from .tree import Tree


@dataclass(frozen=True)
class Job:
    """One round's work order: identical for every client of the cohort, and all that it needs."""

    stage: Stage
    download: Tree
    shared: Tree
    round: int  # of the run
    at: int  # of the stage
    since: int  # memories from before this round do not count
    seed: int


@dataclass(frozen=True)
class Reply:
    client: int
    upload: Tree


class Engine(Protocol):
    """Runs client hooks. Owns the clients' data and memories, wherever those live."""

    population: int

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]: ...

    def measure(self, weights: Tree) -> list[Tree]:
        """correct, loss (summed) and examples of each chunk of the pooled test set, in order."""
        ...

    def save(self, round: int) -> None:
        """Make all memories durable as they are before this round."""
        ...

    def close(self) -> None: ...


def timetable(recipe: Recipe, plan: Stage) -> list[tuple[Stage, int, int]]:
    """For every round of the run: its stage, its number in the stage, and the round since which memories count."""
    rounds, since = [], 0
    for stage in recipe.stages(plan):
        since = len(rounds) if stage.fresh else since
        rounds += [(stage, at, since) for at in range(stage.rounds)]
    return rounds


def enter(stage: Stage, server: Server) -> Tree:
    """State at the start of a stage: what it sets up, with the values that earlier stages left under the same names."""
    new, old = stage.algorithm.setup(server), server.state
    if stage.fresh:
        old = Tree({k: v for k, v in old.items() if k == "shared"})
    taken = {k: v | old[k].within(v) if isinstance(v, Tree) else old[k] for k, v in new.items() if k in old}
    return Tree({**old, **new, **taken})


def run(
    recipe: Recipe,
    net: Network,
    engine: Engine,
    plan: Stage,
    *,
    seed: int = 0,
    auxiliary=None,
    state: Tree | None = None,
    round: int = 0,
    observe: Callable[[Server, Job, list[Reply]], None] = lambda server, job, replies: None,
) -> Server:
    """From the beginning, or on from the (state, round) of a checkpoint whose memories are back in the engine."""
    server = Server(net, state or Tree(), engine.population, round, auxiliary=auxiliary)
    for stage, at, since in timetable(recipe, plan)[round:]:
        server = replace(server, key=key(seed, "server", server.round))
        if at == 0:
            server = replace(server, state=enter(stage, server))
        cohort = stage.cohort(server.population, key(seed, "cohort", server.round))
        shared = server.state.get("shared", Tree())
        job = Job(stage, stage.algorithm.broadcast(server), shared, server.round, at, since, seed)
        replies = sorted(engine.run(job, cohort), key=lambda reply: reply.client)
        uploads = [reply.upload for reply in replies]
        for transform in reversed(stage.uplink):
            uploads = [transform.decode(server, upload) for upload in uploads]
        state = stage.algorithm.aggregate(server, uploads) if uploads else server.state
        server = replace(server, state=state, round=server.round + 1)
        observe(server, job, replies)
    return server
