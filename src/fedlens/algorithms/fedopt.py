from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from ..core.algorithm import Algorithm
from ..core.fields import Momentum, Positive
from ..core.tree import Tree


@dataclass(frozen=True)
class FedOpt(Algorithm):
    """Reddi et al., 2021: what FedAdam, FedYogi and FedAdagrad have in common. Nothing corrects the bias.

    down: model; up: delta, weight; memory: nothing
    """

    beta1: Momentum = 0.9  # how much of the mean direction stays
    tau: Positive = 1e-3  # added to the root: larger is nearer to momentum alone
    initial: Literal["tau", "zero"] = (
        "tau"  # of the mean square: tau squared as printed, or zero as in much public code
    )
    # The first step moves nearly every weight by this much: more than a layer's weights undoes what they begin with.
    server_lr: Positive = field(default=0.01, kw_only=True)  # of the scaled direction: tune it with local.lr

    def setup(self, server):
        state = super().setup(server)
        zeros = state.model.params.zeros()
        second = zeros.map(lambda v: v + self.tau**2) if self.initial == "tau" else zeros
        return state.replace(first=zeros, second=second)

    def advance(self, server, delta):
        first = server.state.first * self.beta1 + delta.params * (1 - self.beta1)
        second = self.mean_square(server.state.second, delta.params * delta.params)
        scaled = first / second.map(lambda v: v.sqrt() + self.tau)
        return super().advance(server, delta.replace(params=scaled)).replace(first=first, second=second)

    def mean_square(self, second: Tree, square: Tree) -> Tree:
        """The next one, from the last and the square of the mean update."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it averages squares")


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """Reddi et al., 2021: the server steps by Adam, with a rate for each weight.

    down: model; up: delta, weight; memory: nothing
    """

    beta2: Momentum = 0.99  # how much of the mean square stays

    def mean_square(self, second, square):
        return second * self.beta2 + square * (1 - self.beta2)


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """Reddi et al., 2021: the server steps by Yogi: after a large update its rates recover slowly.

    down: model; up: delta, weight; memory: nothing
    """

    beta2: Momentum = 0.99  # how much of the mean square stays

    def mean_square(self, second, square):
        side = (second - square).map(torch.sign)
        return second - square * side * (1 - self.beta2)


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """Reddi et al., 2021: the server steps by Adagrad, whose rates only fall.

    down: model; up: delta, weight; memory: nothing
    """

    beta1: Momentum = 0.0  # how much of the mean direction stays; none in the paper

    def mean_square(self, second, square):
        return second + square
