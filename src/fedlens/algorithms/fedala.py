from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.algorithm import Algorithm, Client
from ..core.errors import BadInput
from ..core.fields import Count, NonNegative, Share
from ..core.network import Network
from ..core.tree import Tree
from ._own_images import gradient_on, random_part
from .lgfedavg import layers


@dataclass(frozen=True)
class FedALA(Algorithm):
    """Zhang et al., 2023: a client mixes the received top layers with its last ones, weight by weight, as it learns to.

    It trains on from the mixture, which is its personal model before training. Passes that learn the mixture read
    running statistics. Differs from the released code: the first learning has a fixed number of passes instead of a
    threshold, and images are drawn at random.

    down: model; up: delta, weight; memory: own, share, turns
    """

    share_rate: NonNegative = 1.0  # of the shares, which start at 1: all global; 0 is FedAvg
    data: Share = 0.8  # of its images that a client learns the mixture from
    batch: Count = 32  # images a step of it
    mixed_layers: Count = 1  # the last ones in the network
    first: Count = 10  # passes when a client learns its mixture for the first time; later one

    def setup(self, server):
        if self.mixed_layers > (count := len(layers(server.net))):
            raise BadInput(f"fedala: mixed_layers={self.mixed_layers}, but the network has {count} layers")
        return super().setup(server)

    def top(self, net: Network, params: Tree) -> Tree:
        """The parameters that are mixed."""
        names = frozenset().union(*layers(net)[-self.mixed_layers :])
        return params.select(lambda name: name in names)

    def initial_memory(self, client):
        top = self.top(client.net, client.received.model.params)
        begun = Tree(own=top, share=top.map(torch.ones_like), turns=torch.tensor(0))
        return super().initial_memory(client).replace(**begun)

    def mixture(self, client: Client) -> tuple[Tree, Tree]:
        """The weights that training starts from, and the shares that were learned; at first the global model."""
        model, own, share = super().start(client), client.memory.own, client.memory.share
        turns = int(client.memory.turns)
        if not turns:
            return model, share
        gap = model.params.within(own) - own
        some = random_part(client, self.data, "mixture")
        for _ in range(self.first if turns == 1 else 1):
            for piece in some.chunks(self.batch):
                mixed = own + gap * share
                slope = gradient_on(client, model | Tree(params=mixed), piece, mixed) * gap
                share = (share - slope * self.share_rate).map(lambda leaf: leaf.clamp(0, 1))
        return model | Tree(params=own + gap * share), share

    def start(self, client):
        return self.mixture(client)[0]

    def begin(self, client):
        weights, share = self.mixture(client)
        return weights.replace(optimizer=client.optimizer.init(weights.params), share=share)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        own = self.top(client.net, local.params)
        return upload, memory.replace(own=own, share=local.share, turns=client.memory.turns + 1)
