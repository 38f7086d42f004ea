from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Server
from ..core.fields import Positive
from ..core.objective import by_examples, uniformly
from ..core.tree import Tree, clipped, mean

UNEVEN = 10  # times as many local steps at one client as at another


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Karimireddy et al., 2020, option II: control variates take out what makes a client drift.

    down: model, control; up: delta, control, weight; memory: control

    Differs from the paper: with momentum the local path is divided by its reach instead of the number of steps.
    With by=samples clients count by size, in the model and in the control alike. Where sizes differ much, an epoch
    each gives unequal steps, and the uniform mean of the paper can fall far behind FedAvg.
    """

    clip: Positive | None = None  # of a mini-batch gradient's norm, before the correction: keeps controls from growing
    by: Literal["uniform", "samples"] = "uniform"  # how clients count, in model and control; one alone diverges

    default_weighting = uniformly
    needs_effective_steps = True

    def stages(self, plan):
        if self.by == "samples":
            plan = replace(plan, weighting=plan.weighting or by_examples)
        yield from super().stages(plan)

    def start_notes(self, steps):
        return uneven(steps, "algorithm.by=samples") if self.by == "uniform" else []

    def setup(self, server):
        state = super().setup(server)
        state = state.replace(control=state.model.params.zeros())
        return state if self.by == "uniform" else state.replace(total=zero(state.control), joined=zero(state.control))

    def broadcast(self, server):
        return super().broadcast(server).replace(control=server.state.control)

    def initial_memory(self, client):
        memory = super().initial_memory(client).replace(control=client.received.control.zeros())
        return memory if self.by == "uniform" else memory.replace(joined=torch.tensor(0))

    def gradient(self, client, local, batch):
        grads = super().gradient(client, local, batch)
        grads = grads if self.clip is None else clipped(grads, self.clip)
        return grads.plus(client.received.control - client.memory.control)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        moved = client.received.control.zeros()
        if client.steps:
            pace = upload.delta.params / (-client.optimizer.lr * client.optimizer.effective_steps(client.steps))
            moved = pace - client.received.control
        upload, memory = upload.replace(control=moved), memory.replace(control=client.memory.control + moved)
        if self.by == "samples":
            upload = upload.replace(first=1 - client.memory.joined)
            memory = memory.replace(joined=torch.ones_like(client.memory.joined))
        return upload, memory

    def aggregate(self, server, uploads):
        weights = [float(u.weight) for u in uploads]
        state = self.advance(server, mean([u.delta for u in uploads], weights))
        if self.by == "samples":
            return self.weighted_control(server, uploads, weights, state)
        moved = mean([u.control for u in uploads], [1.0] * len(uploads)) * (len(uploads) / server.population)
        return state.replace(control=server.state.control + moved)

    def weighted_control(self, server: Server, uploads: Sequence[Tree], weights: Sequence[float], state: Tree) -> Tree:
        """The mean of all clients' controls by their weights. Those never seen yet have none, and a usual weight."""
        firsts = [float(u.first) for u in uploads]
        total = float(state.total) + sum(w * first for w, first in zip(weights, firsts, strict=True))
        joined = float(state.joined) + sum(firsts)
        before = float(state.total) * server.population / max(float(state.joined), 1.0)
        after = total * server.population / joined
        moved = mean([u.control for u in uploads], weights) * (sum(weights) / after)
        known = {"total": state.total.new_tensor(total), "joined": state.joined.new_tensor(joined)}
        return state.replace(control=server.state.control * (before / after) + moved, **known)


def zero(like: Tree) -> Tensor:
    """A number that lies where this tree does."""
    return next(iter(like.leaves()), torch.zeros(())).new_zeros((), dtype=torch.float64)


def uneven(steps: Sequence[int], *remedies: str) -> list[str]:
    """What to say where clients' steps differ too much for control variates, with what mends it."""
    some = [count for count in steps if count]
    if not some or max(some) <= UNEVEN * min(some):
        return []
    usual = ", or ".join([*remedies, f"local.steps={round(sum(some) / len(some))}"])
    return [
        f"clients take {min(some)} to {max(some)} local steps a round, and control variates do badly where these "
        f"differ more than tenfold: try {usual}"
    ]
