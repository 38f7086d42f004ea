from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.errors import BadInput


@dataclass(frozen=True)
class FedBABU(Algorithm):
    """Oh et al., 2022: clients train the body under one random head that never moves, and adapt both at the end.

    The end is fine-tuning: `algorithm=fedbabu+ft`, five epochs of the whole model.

    down: model; up: delta, weight; memory: private
    """

    def setup(self, server):
        """The head is there so that the global model can be judged; it is nobody's message."""
        if not server.net.head:
            raise BadInput("fedbabu fixes the head, and this model has no part of that name: name another model")
        if server.net.head.issuperset(server.net.initial_weights().params):
            raise BadInput("fedbabu trains all but the head, and this model has nothing else: name another model")
        whole = server.net.initial_weights()
        return super().setup(server).replace(head=whole.select(lambda name: name in server.net.head))

    def global_model(self, state):
        return state.model | state.head

    def is_private(self, net, name):
        return name in net.head or super().is_private(net, name)

    def trains(self, client, name):
        return name not in client.net.head
