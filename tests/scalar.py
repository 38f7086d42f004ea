"""A world of one number: two clients with f_i(w) = a_i/2 (w - c_i)^2, for values that can be worked out by hand.

a = (1, 3), c = (0, 4), w = 1 at first, a rate of 0.1, two full-batch steps a round, clients count alike, no momentum.
FedAvg: the clients move by -0.19 and 1.53, and the mean by 0.67.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.core.algorithm import Server, Stage
from fedlens.core.batches import Dataset, Federation, identity
from fedlens.core.cohort import Everyone
from fedlens.core.network import Network
from fedlens.core.objective import uniformly, weighted
from fedlens.core.optimizer import Sgd
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential

CURVATURES, CENTRES, STEPS, RATE = (1.0, 3.0), (0.0, 4.0), 2, 0.1


class Distance(nn.Module):
    """Half the square of what it returns is f_i."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x[:, 1:]) * x[:, :1].sqrt()


class Number(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Distance()

    def features(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def half_square(client, weights, batch, out):
    return weighted(out.logits.square().sum(1) / 2, batch)


def scalar_run(
    recipe: Any,
    rounds: int = 1,
    steps: int = STEPS,
    rate: float = RATE,
    module: Callable[[], nn.Module] = Number,
    curvatures: tuple[float, float] = CURVATURES,
) -> Server:
    """The server after so many rounds."""
    x = torch.tensor([curvatures, CENTRES], dtype=torch.float64).T.contiguous()
    one = {i: torch.tensor([i]) for i in range(2)}
    data = Federation(Dataset(x, torch.zeros(2, dtype=torch.long), identity), one, one, torch.arange(2))
    plan = Stage(None, rounds, Everyone(), Sgd(rate), steps=steps, size=1, objective=half_square, weighting=uniformly)
    net = Network(module(), "fp64")
    return run(recipe, net, Sequential(net, data, checked=True), plan)


def number(server: Server, algorithm: Any | None = None) -> float:
    """The weight itself; with an algorithm, of the model that it judges."""
    model = server.state.model if algorithm is None else algorithm.global_model(server.state)
    return float(model.params["head.w"])
