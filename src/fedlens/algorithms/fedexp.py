from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import NonNegative
from ..core.tree import dot, mean


@dataclass(frozen=True)
class FedExP(Algorithm):
    """Jhunjhunwala et al., 2023: the server steps further than the mean update the more clients' updates disagree.

    Running statistics are averages and are not extrapolated. Noise of an uplink looks like disagreement, and makes
    the step longer. The released code lets epsilon grow with the cohort and fall from round to round; here it stays.

    down: model; up: delta, weight; memory: nothing
    """

    epsilon: NonNegative = 1e-3  # added to the square of the mean update's length; large: FedAvg
    judge: Literal["pair", "last"] = "pair"  # the mean of the last two models, as published, or the last one

    presets: ClassVar[dict[str, dict[str, Any]]] = {"emnist": {"epsilon": 0.1}}

    def __post_init__(self):
        if self.server_lr != 1:
            raise BadInput("fedexp finds the server's rate itself: leave algorithm.server_lr at 1")

    def setup(self, server):
        state = super().setup(server).replace(rate=torch.ones((), dtype=torch.float64))
        return state.replace(previous=state.model) if self.judge == "pair" else state

    def aggregate(self, server, uploads):
        weights = [float(u.weight) for u in uploads]
        delta = mean([u.delta for u in uploads], weights)
        lengths = [w * float(dot(u.delta.params, u.delta.params)) for w, u in zip(weights, uploads, strict=True)]
        least = 2 * (float(dot(delta.params, delta.params)) + self.epsilon)
        rate = max(1.0, sum(lengths) / sum(weights) / least) if least else 1.0
        state = self.advance(server, delta.replace(params=delta.params * rate))
        state = state.replace(rate=torch.full_like(server.state.rate, rate))
        return state.replace(previous=server.state.model) if self.judge == "pair" else state

    def global_model(self, state):
        return mean([state.previous, state.model], [1.0, 1.0]) if self.judge == "pair" else state.model
