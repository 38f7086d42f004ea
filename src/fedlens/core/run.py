"""The round loop. Evaluation, checkpoints, ledger and logging observe it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from .algorithm import Recipe, Server, Stage
from .check import Check
from .network import Network
from .policy import EVERY_REPLY, RoundPolicy, capped
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
    attempt: int = 0  # those who were silent may be asked again


@dataclass(frozen=True)
class Reply:
    client: int
    upload: Tree
    seconds: float = 0.0  # until it came
    round: int | None = None  # that it answers; None: the one that was asked
    damage: str = ""  # why nothing could be read of it


class Replies(list[Reply]):
    """The replies that count, in client order; and what became of the others."""

    def __init__(self, replies: Iterable[Reply] = ()):
        super().__init__(replies)
        self.missing: list[int] = []  # asked and silent
        self.late: list[Reply] = []
        self.refused: list[tuple[Reply, str]] = []  # and why
        self.void = ""  # why the round does not count

    @property
    def received(self) -> list[Reply]:
        """All that crossed."""
        return [*self, *self.late, *(reply for reply, _ in self.refused)]


OnProgress = Callable[
    [int, int], None
]  # so many clients of so many have answered: engines tell it, a round may be long


def ignore(answered: int, asked: int) -> None:
    pass


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


class EngineWrapper:
    """Another engine, whose answers are changed on their way: a subclass says how in `run`."""

    def __init__(self, engine: Engine):
        self.engine, self.population = engine, engine.population

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        return self.engine.run(job, cohort)

    def measure(self, weights: Tree) -> list[Tree]:
        return self.engine.measure(weights)

    def save(self, round: int) -> None:
        self.engine.save(round)

    def close(self) -> None:
        self.engine.close()


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


def opened(server: Server, turn: Turn, seed: int) -> Server:
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


def ask(
    engine: Engine, server: Server, job: Job, cohort: Sequence[int], policy: RoundPolicy, check: Check | None
) -> tuple[Replies, list[Tree]]:
    """The cohort's answers, and decoded uploads of those that count; none where the round is not to count."""
    answers, uploads, counts, silent = Replies(), {}, check is None, list(cohort)
    for attempt in range(1 + policy.retries):
        if not silent or len(uploads) >= policy.min_replies:
            break
        replies = engine.run(replace(job, attempt=attempt) if attempt else job, silent)
        found = {reply.client: reply for reply in accepted(server, job, silent, replies, answers, policy, check)}
        decoded = {client: decode(server, job.stage, reply.upload) for client, reply in found.items()}
        if check:
            objections, weighs = check.values(job, list(decoded.values()))
            wrong = {client: said for client, said in zip(decoded, objections, strict=True) if said}
            answers.refused += [(found.pop(client), said) for client, said in wrong.items()]
            counts |= weighs
        answers += found.values()
        uploads |= {client: decoded[client] for client in found}
        heard = {reply.client for reply in replies}
        silent = [client for client in silent if client not in heard]
    answers.sort(key=lambda reply: reply.client)
    answers.missing = silent
    if len(answers) < policy.min_replies or not counts:
        few = f"it has {len(answers)} usable replies, and policy.min_replies is {policy.min_replies}"
        answers.void = few if len(answers) < policy.min_replies else "its replies count for nothing"
    return answers, [] if answers.void else [uploads[reply.client] for reply in answers]


def accepted(
    server: Server,
    job: Job,
    asked: Sequence[int],
    replies: Sequence[Reply],
    answers: Replies,
    policy: RoundPolicy,
    check: Check | None,
) -> Iterator[Reply]:
    """The replies in client order that can be taken apart; the others are booked as late or refused."""
    waiting = set(asked)
    for reply in sorted(replies, key=lambda reply: reply.client):
        if reply.round is not None and reply.round != job.round:
            objection = f"it answers round {reply.round + 1}"
        elif reply.client not in waiting:
            objection = "it has answered already" if reply.client in asked else "nobody asked it"
        else:
            waiting.discard(reply.client)
            if policy.deadline is not None and reply.seconds > policy.deadline:
                answers.late.append(reply)
                continue
            objection = reply.damage or (check.form(server, job, reply.upload) if check else "")
        if objection:
            answers.refused.append((reply, objection))
        else:
            yield reply


def decode(server: Server, stage: Stage, upload: Tree) -> Tree:
    for transform in reversed(stage.uplink):
        upload = transform.decode(server, upload)
    return upload


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
        server, stage = opened(server, turn, seed), turn.stage
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


def bounded(uploads: list[Tree], share: float) -> list[Tree]:
    """What clients say they weigh is a claim: none gets more than this share."""
    claims = [float(upload.get("weight", math.nan)) for upload in uploads]
    if not all(0 <= claim < math.inf for claim in claims):  # no method's, or one that copes with such itself
        return uploads
    lower = [torch.tensor(weight, dtype=torch.float64) for weight in capped(claims, share)]
    return [upload.replace(weight=weight) for upload, weight in zip(uploads, lower, strict=True)]
