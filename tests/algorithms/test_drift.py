"""Methods that correct client drift reach the optimum that FedAvg misses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.algorithms import FedAvg, FedDyn, Scaffold
from fedlens.core.algorithm import Stage
from fedlens.core.batches import Dataset, Federation
from fedlens.core.cohort import Everyone
from fedlens.core.network import Network
from fedlens.core.objective import weighted
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import generator, seeded
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential
from textbook import SEED, total


# ---- a problem with a known answer -----------------------------------------------------------------------------------
class Line(nn.Module):
    """Linear regression."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Identity(), nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.head(self.features(x))


def half_square(client, weights, batch, out):
    return weighted((out.logits[:, 0] - batch.y) ** 2 / 2, batch)


@dataclass(frozen=True)
class Regression:
    """f_k(w) = |X_k w - y_k|^2 / 2 n_k on clients that disagree; quadratic, so that every optimum is a linear solve."""

    sizes: tuple[int, ...] = (5, 8, 12)
    rate: float = 0.4
    steps: int = 10
    rounds: int = 60

    def data(self) -> Federation:
        draw, n = generator(11), sum(self.sizes)
        x = torch.randn(n, 3, generator=draw, dtype=torch.float64)
        owner = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))
        y = (x * torch.randn(len(self.sizes), 3, generator=draw, dtype=torch.float64)[owner]).sum(1)
        train = {k: (owner == k).nonzero()[:, 0] for k in range(len(self.sizes))}
        return Federation(Dataset(x, y), train, train)

    def quadratics(self) -> list[tuple[Tensor, Tensor]]:
        """(A_k, b_k) of the gradients A_k w - b_k."""
        data = self.data()
        pairs = [(data.data.x[index], data.data.y[index]) for index in data.train.values()]
        return [(x.T @ x / len(x), x.T @ y / len(x)) for x, y in pairs]

    def optimum(self, shares: list[float]) -> Tensor:
        A = total(share * A for share, (A, _) in zip(shares, self.quadratics(), strict=True))
        b = total(share * b for share, (_, b) in zip(shares, self.quadratics(), strict=True))
        return torch.linalg.solve(A, b)

    def by_package(self, recipe: Any) -> Tensor:
        """Every batch is the whole client: shorter ones wrap round with weight zero."""
        with seeded(7):
            net = Network(Line(), "fp64")
        stage = Stage(None, self.rounds, Everyone(), Sgd(self.rate), steps=self.steps, size=12, objective=half_square)
        server = run(recipe, net, Sequential(net, self.data()), stage, seed=SEED)
        return recipe.global_model(server.state).params["head.weight"][0]

    def by_displacement(self, alpha: float) -> Tensor:
        """FedDyn's q-form with exact local minima."""
        theta = averaged = torch.zeros(3).double()
        q = [torch.zeros(3).double() for _ in self.sizes]
        for _ in range(self.rounds):
            local = [
                torch.linalg.solve(A + alpha * torch.eye(3), b - alpha * (q_k - theta))
                for (A, b), q_k in zip(self.quadratics(), q, strict=True)
            ]
            q = [q_k + w - theta for q_k, w in zip(q, local, strict=True)]
            averaged = torch.stack(local).mean(0)
            theta = averaged + torch.stack(q).mean(0)
        return averaged


def test_methods_without_drift_reach_the_uniform_optimum():
    problem, alpha = Regression(), 1.0
    uniform, by_size = problem.optimum([1 / 3] * 3), problem.optimum([n / 25 for n in problem.sizes])
    assert (uniform - by_size).norm() > 0.1  # else the test could not tell them apart
    assert (problem.by_displacement(alpha) - uniform).norm() < 1e-12
    assert (problem.by_package(FedDyn(alpha=alpha, clip=None)) - uniform).norm() < 1e-12
    assert (problem.by_package(Scaffold()) - uniform).norm() < 1e-6
    drifted = replace(problem, rounds=15).by_package(FedAvg())
    assert (drifted - uniform).norm() > 0.1
    assert (drifted - by_size).norm() > 0.1
