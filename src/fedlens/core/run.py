"""The round loop. Evaluation, checkpoints, ledger and logging observe it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from .algorithm import Recipe, Server, Stage
from .check import Check
from .engine import Engine, Job
from .network import Network
from .policy import EVERY_REPLY, RoundPolicy
from .replies import Replies, ask, bounded
from .rng import key
from .tree import Tree


class Turn(NamedTuple):
    """What a round of the run does."""

    stage: Stage
    at: int = 0  # its number in the stage
    since: int = 0  # the round since which memories count


def timetable(recipe: Recipe, plan: Stage) -> list[Turn]:
    """A turn for every round of the run."""
    turns, since = [], 0
    for stage in recipe.stages(plan):
        since = len(turns) if stage.fresh else since
        turns += [Turn(stage, at, since) for at in range(stage.rounds)]
    return turns


def open_round(server: Server, turn: Turn, seed: int) -> Server:
    """The server as this round begins: with the round's randomness, and what a new stage sets up."""
    server = replace(server, key=key(seed, "server", server.round))
    return server if turn.at else replace(server, state=initial_state(turn.stage, server))


def job_of(server: Server, turn: Turn, seed: int) -> Job:
    """The work order of the round that the server is in."""
    shared = server.state.get("shared", Tree())
    return Job(turn.stage, turn.stage.algorithm.broadcast(server), shared, server.round, turn.at, turn.since, seed)


def initial_state(stage: Stage, server: Server) -> Tree:
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
    observe: Callable[[Server, Job, Replies], None] = lambda server, job, answers: None,
    policy: RoundPolicy = EVERY_REPLY,
    check: Check | None = None,
) -> Server:
    """From the beginning, or on from the (state, round) of a checkpoint whose memories are back in the engine."""
    server = Server(net, state or Tree(), engine.population, round, auxiliary=auxiliary)
    client_status = server.state.get("standing", policy.first_status(server.population)).map(lambda leaf: leaf.cpu())
    for turn in timetable(recipe, plan)[round:]:
        server, stage = open_round(server, turn, seed), turn.stage
        cohort = stage.cohort(server.population, key(seed, "cohort", server.round))
        more = key(seed, "oversample", server.round)
        cohort = policy.asked(cohort, server.population, client_status, server.round, more)
        job = job_of(server, turn, seed)
        answers, uploads = ask(engine, server, job, cohort, policy, check)
        if policy.max_weight_share is not None:
            uploads = bounded(uploads, policy.max_weight_share)
        for defence in stage.defences if uploads else ():
            uploads = defence(server, uploads)
        after = stage.algorithm.aggregate(server, uploads) if uploads else server.state
        if client_status:
            usable = {reply.client for reply in answers}
            client_status = policy.next_status(client_status, server.round, cohort, usable)
            after = after.replace(standing=client_status)
        server = replace(server, state=after, round=server.round + 1)
        observe(server, job, answers)
    return server
