"""A round's replies: who is asked, which of their replies count, and what became of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from .algorithm import Server, Stage
from .check import Check
from .engine import Engine, Job, Reply
from .policy import RoundPolicy
from .tree import Tree


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
        decoded = {client: decode_upload(server, job.stage, reply.upload) for client, reply in found.items()}
        if check:
            objections, weighs = check.check_values(job, list(decoded.values()))
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
            objection = reply.damage or (check.check_structure(server, job, reply.upload) if check else "")
        if objection:
            answers.refused.append((reply, objection))
        else:
            yield reply


def decode_upload(server: Server, stage: Stage, upload: Tree) -> Tree:
    for transform in reversed(stage.uplink):
        upload = transform.decode(server, upload)
    return upload


def bounded(uploads: list[Tree], share: float) -> list[Tree]:
    """What clients say they weigh is a claim: none gets more than this share."""
    claims = [float(upload.get("weight", math.nan)) for upload in uploads]
    if not all(0 <= claim < math.inf for claim in claims):  # no method's, or one that copes with such itself
        return uploads
    lower = [torch.tensor(weight, dtype=torch.float64) for weight in capped(claims, share)]
    return [upload.replace(weight=weight) for upload, weight in zip(uploads, lower, strict=True)]


def capped(weights: Sequence[float], share: float) -> list[float]:
    """The same weights, the largest lowered until none has more than this share of their sum; where none can: equal."""
    rest, cap = sorted(weights), min((weight for weight in weights if weight), default=0.0)
    if share * len(weights) > 1:
        for lowered in range(len(weights)):
            cap = share * sum(rest) / (1 - share * lowered)
            if rest[-1] <= cap:
                break
            rest.pop()
    return [min(weight, cap) for weight in weights]
