from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.fields import Positive
from ..core.objective import uniformly
from ..core.tree import clipped, mean


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Karimireddy et al., 2020, option II: control variates take out what makes a client drift.

    down: model, control; up: delta, control, weight; memory: control

    Differs from the paper: with momentum the local path is divided by its reach instead of the number of steps.
    """

    clip: Positive | None = None  # of a mini-batch gradient's norm, before the correction: keeps controls from growing

    default_weighting = uniformly
    needs_effective_steps = True

    def setup(self, server):
        state = super().setup(server)
        return state.replace(control=state.model.params.zeros())

    def broadcast(self, server):
        return super().broadcast(server).replace(control=server.state.control)

    def initial_memory(self, client):
        return super().initial_memory(client).replace(control=client.received.control.zeros())

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
        return upload.replace(control=moved), memory.replace(control=client.memory.control + moved)

    def aggregate(self, server, uploads):
        moved = mean([u.control for u in uploads], [1.0] * len(uploads)) * (len(uploads) / server.population)
        return super().aggregate(server, uploads).replace(control=server.state.control + moved)
