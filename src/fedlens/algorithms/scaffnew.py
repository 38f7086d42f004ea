from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.algorithm import Algorithm
from ..core.cohort import Everyone
from ..core.errors import BadInput
from ..core.objective import uniformly
from ..core.optimizer import Sgd


@dataclass(frozen=True)
class Scaffnew(Algorithm):
    """Mishchenko et al., 2022: control variates that a client works out from what it sent and what came back.

    With equal steps of all clients it is SCAFFOLD's option II at half the traffic, to rounding. The paper ends local
    training by a coin that all toss together; here it has a fixed number of steps.

    It is refused where the controls would no longer add up to nothing: momentum, unequal steps, other weights, a part
    of the clients, faults that lose replies. Should one be missing, the round leaves model and controls as they were.

    down: done, model; up: delta, weight; memory: control, done, left, pace
    """

    default_weighting = uniformly
    wants_momentum = False
    needs_every_reply = True
    described_with: ClassVar = ("local.momentum=0", "local.steps=10", "cohort=everyone")

    def __post_init__(self):
        if self.server_lr != 1:
            raise BadInput("scaffnew has no server_lr: its controls are about the mean itself")

    def stages(self, plan):
        lacks = {
            "local.optimizer=sgd": not isinstance(plan.optimizer, Sgd),
            "local.momentum=0": bool(getattr(plan.optimizer, "momentum", 0)),
            "local.steps=10": plan.steps is None,
            "cohort=everyone": not isinstance(plan.cohort, Everyone),
            "weighting=uniform": plan.weighting not in (None, uniformly),
        }
        if give := " ".join(word for word, lacking in lacks.items() if lacking):
            asked = "all clients in every round, with equal plain steps and weights"
            raise BadInput(f"scaffnew needs {asked}: give {give}")
        if used := " and ".join(key for key in ("uplink", "defences") if getattr(plan, key)):
            raise BadInput(f"scaffnew learns its controls from the mean of the updates as trained: leave out {used}")
        yield from super().stages(plan)

    def setup(self, server):
        return super().setup(server).replace(done=torch.tensor(0))  # rounds that counted

    def broadcast(self, server):
        return super().broadcast(server).replace(done=server.state.done)

    def aggregate(self, server, uploads):
        if len(uploads) < server.population:
            return server.state
        return super().aggregate(server, uploads).replace(done=server.state.done + 1)

    def notes(self, replies):
        silent = (*getattr(replies, "missing", ()), *getattr(replies, "late", ()), *getattr(replies, "refused", ()))
        return ["scaffnew needs a reply of every client: this round leaves the model as it was"] if silent else []

    def initial_memory(self, client):
        """left: the weights when it sent them; pace: rate times steps of that round, zero before the first."""
        model, none = client.received.model.params, torch.zeros((), dtype=torch.float64)
        known = {"control": model.zeros(), "left": model, "pace": none, "done": torch.tensor(0)}
        return super().initial_memory(client).replace(**known)

    def begin(self, client):
        """The control moves here, by the round that the client was in last, if that counted."""
        control, pace = client.memory.control, float(client.memory.pace)
        if pace and int(client.received.done) > int(client.memory.done):
            control = control + (client.received.model.params - client.memory.left) / pace
        return super().begin(client).replace(control=control)

    def gradient(self, client, local, batch):
        return super().gradient(client, local, batch).plus(local.control * -1.0)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        pace = torch.tensor(client.optimizer.lr * client.steps, dtype=torch.float64)
        left = self.shared_part(client.net, local).params
        return upload, memory.replace(control=local.control, left=left, pace=pace, done=client.received.done)
