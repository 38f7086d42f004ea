from __future__ import annotations

from dataclasses import dataclass

from torch.nn.modules.batchnorm import _BatchNorm

from ..core.algorithm import Algorithm


@dataclass(frozen=True)
class FedBN(Algorithm):
    """Li et al., 2021: batch norms, with their statistics, stay at their client.

    down: model; up: delta, weight; memory: nothing

    In a network with batch norms, memory: private. Without them it is FedAvg.
    """

    def is_private(self, net, name):
        owner = net.module.get_submodule(name.rpartition(".")[0])
        return isinstance(owner, _BatchNorm) or super().is_private(net, name)
