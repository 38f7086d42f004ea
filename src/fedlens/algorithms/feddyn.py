from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import Positive
from ..core.objective import uniformly
from ..core.tree import clipped, mean


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Acar et al., 2021: a dual variable at each client makes the local optima agree with the global one.

    down: model; up: delta, weight; memory: dual

    The model that is broadcast is shifted by the server's dual; judged is the mean of the clients' models before it.
    """

    alpha: Positive = 0.01  # weight of the dynamic penalty
    clip: Positive | None = 10.0  # of the gradient's norm; public code needs it, long absences blow up without

    default_weighting = uniformly

    def __post_init__(self):
        if self.server_lr != 1:
            raise BadInput("feddyn has no server_lr: its server step is fixed by alpha")

    def setup(self, server):
        state = super().setup(server)
        return state.replace(dual=state.model.params.zeros(), averaged=state.model)

    def global_model(self, state):
        return state.averaged

    def initial_memory(self, client):
        return super().initial_memory(client).replace(dual=client.received.model.params.zeros())

    def gradient(self, client, local, batch):
        """Of the loss - <dual, w> + alpha/2 |w - received|^2, over what is shared."""
        grads, received = super().gradient(client, local, batch), client.received.model.params
        pull = (self.shared_part(client.net, local).params - received) * self.alpha - client.memory.dual
        grads = grads.plus(pull)
        return grads if self.clip is None else clipped(grads, self.clip)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload, memory.replace(dual=client.memory.dual - upload.delta.params * self.alpha)

    def aggregate(self, server, uploads):
        """The server's dual moves by the sum over the cohort divided by the whole population."""
        delta = mean([u.delta for u in uploads], [u.weight for u in uploads])
        state = self.advance(server, delta)
        dual = server.state.dual - delta.params * (self.alpha * len(uploads) / server.population)
        shifted = state.model.replace(params=state.model.params - dual / self.alpha)
        return state.replace(model=shifted, averaged=state.model, dual=dual)
