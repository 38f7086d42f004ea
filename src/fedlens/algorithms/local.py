from __future__ import annotations

from dataclasses import dataclass

from ..core.algorithm import Algorithm
from ..core.tree import Tree


@dataclass(frozen=True)
class Local(Algorithm):
    """Every client trains alone, in the rounds it would have taken part in: the same compute, nothing shared.

    down: nothing; up: nothing; memory: private
    """

    def is_private(self, net, name):
        return True

    def broadcast(self, server):
        return Tree()

    def start(self, client):
        return client.memory.private

    def finish(self, client, local):
        return Tree(), Tree(private=self.private_part(client.net, local))

    def aggregate(self, server, uploads):
        return server.state
