from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Lt

from ..core.algorithm import Algorithm, Server
from ..core.errors import BadInput
from ..core.fields import NonNegative
from ..core.objective import uniformly
from ..core.rng import generator, key
from ..core.tree import Tree, mean


@dataclass(frozen=True)
class L2GD(Algorithm):
    """Hanzely & Richtarik, 2020: every iteration a coin says whether clients train alone or move to their mean.

    down: upload; up: model, weight; memory: own

    A round is one local iteration and the aggregations that follow it until the next: coins of the server's key. These
    leave the mean where it is, so they are one move. Models are uploaded after a round that any follow, and then the
    next download also holds model and times. Without one, nothing but the coin is sent.

    How strong: the paper's theory takes p = lambda / (L + lambda) and the step eta = n / (2 (L + lambda)). Then a local
    step has the rate 1 / (2 L), and every aggregation moves a client half way to the mean, whatever lambda is. That is
    pull=None; p says how much of a compromise it is. FedRep's code, where baselines of this name come from, moves
    a twentieth of the way (rate 0.1, lambda 0.5) at the same p.

    Differs from the paper: a local iteration is all of a round's local training, and local.lr is the rate that it
    really has, eta / (n (1 - p)). Clients that were away move to the last mean alone. Differs from FedRep's code: its
    mean counts the first client twice, and its rate is a setting of its own. Not compared with code of the authors.
    """

    p: Annotated[float, Gt(0), Lt(1)] = 0.9  # of an aggregation
    pull: NonNegative | None = None  # lambda; None: such that an aggregation moves a client half way to the mean

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "weak": {"pull": 0.5},  # what the runs of results/pse_details.md and docs/methods.md had
    }

    default_weighting = uniformly

    def __post_init__(self):
        if self.server_lr != 1:
            raise BadInput("l2gd has no server_lr: the server only takes the mean")

    def stages(self, plan):
        if self.share(plan.optimizer.lr) > 1:
            raise BadInput(
                f"l2gd: pull={self.pull} with p={self.p} and local.lr={plan.optimizer.lr} carries clients beyond "
                "their mean; lower pull"
            )
        yield from super().stages(plan)

    def share(self, lr: float) -> float:
        """How far one aggregation moves a client to the mean: eta lambda / (n p), where eta is lr n (1 - p)."""
        return 0.5 if self.pull is None else lr * self.pull * (1 - self.p) / self.p

    def aggregations(self, server: Server) -> int:
        """Coins in a row that say aggregate, before this round's successor."""
        drawn = 1 - torch.rand((), generator=generator(key(server.key, "coins")), dtype=torch.float64).item()
        return int(math.log(drawn) / math.log(self.p))

    def setup(self, server):
        return super().setup(server).replace(times=torch.tensor(0))

    def broadcast(self, server):
        upload = Tree(upload=torch.tensor(self.aggregations(server) > 0))
        if not int(server.state.times):
            return upload
        return upload.replace(model=server.state.model, times=server.state.times)

    def aggregate(self, server, uploads):
        if not self.aggregations(server):
            return server.state.replace(times=torch.tensor(0))
        model = mean([u.model for u in uploads], [u.weight for u in uploads])
        return server.state.replace(model=model, times=torch.tensor(self.aggregations(server)))

    def initial_memory(self, client):
        return Tree(own=client.net.initial_weights())

    def start(self, client):
        own, received = client.memory.own, client.received
        if "model" not in received:
            return own
        left = (1 - self.share(client.optimizer.lr)) ** received.times.double()
        return own | (own.within(received.model) * left + received.model * (1 - left))

    def finish(self, client, local):
        memory = Tree(own=Tree(params=local.params, buffers=local.buffers))
        if not bool(client.received.upload):
            return Tree(), memory
        weight = torch.as_tensor(client.weighting(client), dtype=torch.float64)
        return Tree(model=self.shared_part(client.net, local), weight=weight), memory
