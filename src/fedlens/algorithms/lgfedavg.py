from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..core.algorithm import Algorithm
from ..core.batches import Shard
from ..core.errors import BadInput
from ..core.fields import Count
from ..core.network import Network
from ..core.objective import uniformly
from ..core.tree import Tree


@dataclass(frozen=True)
class LGFedAvg(Algorithm):
    """Liang et al., 2020: every client has a representation of its own under shared top layers.

    down: model; up: delta, weight; memory: private

    Differs from the released code, which takes its layers in another order than they run and so shares convolutions,
    and which starts from a trained FedAvg model.
    """

    shared_layers: Count = 1  # the last ones to run; the paper shares 2 on CIFAR

    default_weighting = uniformly

    def setup(self, server):
        if self.shared_layers > (count := len(layers(server.net))):
            raise BadInput(f"lgfedavg: shared_layers={self.shared_layers}, but the network has {count} layers")
        return super().setup(server)

    def initial_memory(self, client):
        self._check_order(client)
        return super().initial_memory(client)

    def is_private(self, net, name):
        return name in self.low(net)

    def low(self, net: Network) -> frozenset[str]:
        """Names of all weights that stay."""
        return net.private.union(*layers(net)[: -self.shared_layers])

    def shared_part(self, net, weights):
        low = self.low(net)  # once for all names: the layers of a deep network take a while to list
        return Tree(params=weights.params, buffers=weights.buffers).select(lambda name: name not in low)

    def private_part(self, net, weights):
        low = self.low(net)
        return Tree(params=weights.params, buffers=weights.buffers).select(lambda name: name in low)

    def _check_order(self, client):
        """Layers are known in the order they were registered; one image shows whether they run in that order."""
        net, ran = client.net, []
        one, first = Shard(client.data.whole, client.data.index[:1]), net.initial_weights()
        if not len(one):
            return
        with torch.no_grad(), net.replacing_outputs(lambda name, *rest: ran.append(name), (nn.Module,)):
            net(first, one.x)
        low, high = (
            [name for name in ran if name in {weight.rpartition(".")[0] for weight in part(net, first).params}]
            for part in (self.private_part, self.shared_part)
        )
        if low and high and ran.index(high[0]) < len(ran) - ran[::-1].index(low[-1]):
            raise BadInput(
                f"lgfedavg: {high[0]} is among the last {self.shared_layers} layers but runs before {low[-1]}; "
                "register layers in the order they run, or share another number of them"
            )


def layers(net: Network) -> list[frozenset[str]]:
    """Names of the weights of each layer, in the order of registration; norms belong to the layer before them."""
    found: list[frozenset[str]] = []
    for name, part in net.module.named_modules():
        tensors = {**part._parameters, **part._buffers}
        names = frozenset(f"{name}.{key}" if name else key for key in tensors)
        if any(p is not None and p.dim() > 1 for p in part._parameters.values()) or not found:
            found.append(names)
        else:
            found[-1] |= names
    return [layer for layer in found if layer]
