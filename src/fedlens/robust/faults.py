"""What goes wrong between clients and server, injected into a simulation by a seeded schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..core.engine import Engine, EngineWrapper, Job, Reply
from ..core.fields import Positive, Share
from ..core.rng import generator, key
from ..core.tree import Tree

_FLIPPED = 8  # entries of a leaf whose bits are damaged, one bit each
_TIMES = 16  # how much an oversized leaf is too long


@dataclass(frozen=True)
class Faults:
    """Shares of clients that a fault befalls, drawn anew in every round by (seed, round, client): by nothing else.

    A client that drops out has not begun: it remembers what it did before. All others have trained, and their memory
    has moved on, whatever becomes of their reply.
    """

    dropout: Share = 0.0  # never answers
    straggler: Share = 0.0  # answers `delay` seconds late, which matters where there is a policy.deadline
    delay: Positive = 60.0  # seconds that a straggler is late
    duplicate: Share = 0.0  # answers twice
    stale: Share = 0.0  # answers the round before
    corrupt: Share = 0.0  # bits, numbers, shapes, names or types are damaged, all equally likely
    oversized: Share = 0.0  # a leaf is many times too long

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self) if field.name != "delay")

    def befalls(self, kind: str, job: Job, client: int) -> bool:
        share = getattr(self, kind)
        return share > 0 and torch.rand((), generator=_draw(kind, job, client), dtype=torch.float64).item() < share

    def sent(self, job: Job, reply: Reply) -> Iterator[Reply]:
        """What arrives of a reply, in this order."""
        if self.befalls("straggler", job, reply.client):
            reply = replace(reply, seconds=reply.seconds + self.delay)
        if self.befalls("corrupt", job, reply.client):
            reply = replace(reply, upload=corrupted(reply.upload, _draw("damage", job, reply.client)))
        if self.befalls("oversized", job, reply.client):
            reply = replace(reply, upload=_changed(reply.upload, _draw("leaf", job, reply.client), _longer))
        if self.befalls("stale", job, reply.client):
            reply = replace(reply, round=job.round - 1)
        yield reply
        if self.befalls("duplicate", job, reply.client):
            yield reply


class Faulty(EngineWrapper):
    """Another engine, whose clients and network are not to be relied on. Measurements are spared."""

    def __init__(self, engine: Engine, faults: Faults):
        super().__init__(engine)
        self.faults = faults

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        there = [client for client in cohort if not self.faults.befalls("dropout", job, client)]
        replies = sorted(self.engine.run(job, there), key=lambda reply: reply.client) if there else []
        return [sent for reply in replies for sent in self.faults.sent(job, reply)]


def _draw(purpose: str, job: Job, client: int) -> torch.Generator:
    return generator(key(job.seed, "fault", purpose, job.round, job.attempt, client))


# ---- damage ----------------------------------------------------------------------------------------------------------
def corrupted(upload: Tree, draw: torch.Generator) -> Tree:
    """The upload with one thing wrong with it. Damaged bits may be harmless, and are then not seen by anyone."""
    return _changed(upload, draw, _DAMAGES[_one_of(len(_DAMAGES), draw)])


def _bits(leaf: Tensor, draw: torch.Generator) -> Tensor:
    if not leaf.numel():
        return leaf
    damaged = leaf.detach().cpu().contiguous().reshape(-1).clone()
    raw = damaged.view(torch.uint8).view(len(damaged), -1)
    for _ in range(_FLIPPED):
        entry, bit = _one_of(len(raw), draw), _one_of(8 * raw.shape[1], draw)
        raw[entry, bit // 8] ^= 1 << bit % 8
    return damaged.reshape(leaf.shape).to(leaf.device)


def _longer(leaf: Tensor, draw: torch.Generator) -> Tensor:
    return leaf.expand(_TIMES, *leaf.shape)  # takes no memory here, and all of it where it arrives


def _no_numbers(leaf: Tensor, draw: torch.Generator) -> Tensor:
    return leaf * (torch.nan if _one_of(2, draw) else torch.inf) if leaf.is_floating_point() else leaf.double() * 0.5


_Damage = Callable[[Tensor, torch.Generator], Tensor | Tree | None]
_DAMAGES: tuple[_Damage, ...] = (
    _bits,
    _no_numbers,
    lambda leaf, draw: torch.cat([leaf, leaf[:1]]) if leaf.dim() else leaf.expand(2),  # another shape
    lambda leaf, draw: leaf.to(torch.float16 if leaf.dtype != torch.float16 else torch.float32),  # another type
    lambda leaf, draw: None,  # left out
    lambda leaf, draw: Tree(leaf=leaf, more=leaf),
)


def _changed(upload: Tree, draw: torch.Generator, damage: _Damage) -> Tree:
    """The tree with another value, or a branch, or nothing in the place of one leaf."""
    paths = sorted(path for path, _ in upload.paths())
    return _put(upload, paths[_one_of(len(paths), draw)].split("/"), draw, damage) if paths else upload


def _put(tree: Tree, path: Sequence[str], draw: torch.Generator, damage: _Damage) -> Tree:
    name, *rest = path
    new = _put(tree[name], rest, draw, damage) if rest else damage(tree[name], draw)
    return Tree({k: new if k == name else v for k, v in tree.items() if k != name or new is not None})


def _one_of(count: int, draw: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=draw))
