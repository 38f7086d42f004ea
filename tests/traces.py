"""What the reference engine does with every recipe, computed once a session: what other engines are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from fedlens.core.algorithm import Stage
from fedlens.core.engine import Job
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from recipes import CASES, Late
from small import federation, network, same


@dataclass
class Trace:
    """A run of `Sequential`. With norms it begins late, so that one engine can make all of them one after the other."""

    recipe: Late
    plan: Stage
    norm: bool
    state: Tree = field(default_factory=Tree)
    memories: dict[int, Tree] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    replies: list[list] = field(default_factory=list)  # of every job

    def again(self, engine, **more):
        """The same run in another engine; returns the server at its end."""
        return run(self.recipe, network(self.norm), engine, self.plan, round=self.recipe.begin, **more)

    def agrees(self, state: Tree, memories) -> None:
        """State and memories are the same to the bit."""
        assert same(self.state, state)
        assert list(self.memories) == list(memories)
        for client, memory in self.memories.items():
            assert same(memory, memories.get(client)), f"memory of client {client}"


@cache
def trace(name: str, norm: bool = True) -> Trace:
    recipe, plan = CASES[name]
    begin = 10 * list(CASES).index(name) if norm else 0  # a pool of processes remembers what was before
    found = Trace(Late(recipe, begin), plan, norm)
    engine = Sequential(network(norm), federation(), checked=True)

    def observe(server, job, replies):
        found.jobs.append(job)
        found.replies.append(replies)

    found.state = found.again(engine, observe=observe).state
    found.memories = {client: engine.memories.get(client) for client in engine.memories}
    return found
