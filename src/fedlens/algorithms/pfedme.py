from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import Count, NonNegative, Positive
from ..core.objective import uniformly
from ..core.tree import Tree


@dataclass(frozen=True)
class PFedMe(Algorithm):
    """Dinh et al., 2020: every batch moves a personal model near the client's copy, then the copy towards it.

    local.lr is the rate of the copy, which is sent. It means plain steps: give local.momentum=0. Weight decay acts on
    the personal model, and its passes alone move running statistics. server_lr is the paper's beta.

    down: model; up: delta, weight; memory: own
    """

    pull: NonNegative = 15.0  # lambda: how near the personal model stays; 0 leaves the global model where it is
    rate: Positive = 0.01  # of the inner steps: below 2 / (pull + curvature), or they diverge
    inner: Count = 5  # steps of the personal model on each batch
    restart: bool = False  # the personal model starts at the copy on each batch; else it goes on from where it was

    default_weighting = uniformly
    wants_momentum = False

    def stages(self, plan):
        plan.optimizer.effective_steps(1)  # refuses all but sgd, before anything is trained
        if plan.optimizer.lr * self.pull >= 2:
            raise BadInput(
                f"pfedme: local.lr={plan.optimizer.lr:g} times algorithm.pull={self.pull:g} is not below 2, so that "
                "a step takes the copy further from its personal model than it was; lower one of them"
            )
        yield from super().stages(plan)

    def initial_memory(self, client):
        """Before its first round a client predicts with the global model."""
        memory = super().initial_memory(client)
        return memory.replace(own=client.received.model | memory.get("private", Tree()))

    def begin(self, client):
        local = super().begin(client)
        return local.replace(own=local.params.clone())

    def step(self, client, local, batch):
        own = local.params if self.restart else local.own
        for _ in range(self.inner):
            grads = self.gradient(client, local.replace(params=own), batch) + own * client.optimizer.weight_decay
            own = own - (grads + (own - local.params) * self.pull) * self.rate
        plain = replace(client.optimizer, weight_decay=0.0)
        plain.update_(local.params, (local.params - own) * self.pull, local.optimizer)
        return local.replace(own=own)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(own=self.personal(client, local))

    def personal(self, client, local=None):
        return client.memory.own if local is None else Tree(params=local.own, buffers=local.buffers)
