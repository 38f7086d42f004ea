"""When SCAFFOLD blows up: on quadratics a round is a linear map, whose eigenvalues say it before anything is run.

Client k's loss is H_k/2 (w - a_k)^2 for one number w. K steps of rate η go m_k = (1 - (1 - ηH_k)^K) / (KηH_k) times
as far as K times the first step, and its control becomes (1 - m_k)(c_k - c) + m_k ∇f_k(x): it feeds back on itself by
the factor 1 - m_k. That is between 0 and 1 where the loss is convex and ηH_k < 2, and can be larger than 1 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from fedlens.algorithms import FedAvg, Scaffold
from fedlens.core.algorithm import Stage
from fedlens.core.batches import Dataset, Federation
from fedlens.core.cohort import Everyone, Uniform
from fedlens.core.network import Network
from fedlens.core.optimizer import Sgd
from fedlens.core.run import run
from fedlens.engines.sequential import Sequential

RATE = 0.1
START = 0.75  # exact in single precision, which modules begin in


class Point(nn.Module):
    """One number w."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.head.weight, START)

    def features(self, x):
        return x[:, :1]


def quadratic(client, weights, batch, out):
    """An example is (H, a); the loss is that of the one number, whatever the network makes of the example."""
    curvature, optimum = batch.x[0]
    return curvature / 2 * (weights.params["head.weight"].squeeze() - optimum) ** 2


@dataclass(frozen=True)
class World:
    curvatures: tuple[float, ...]
    steps: int

    @property
    def curvature(self) -> np.ndarray:
        return np.array(self.curvatures)

    @property
    def optima(self) -> np.ndarray:
        return np.linspace(-1, 1, len(self.curvatures)) + 0.3

    @property
    def remains(self) -> np.ndarray:
        """What K steps leave of the distance to a client's optimum."""
        return (1 - RATE * self.curvature) ** self.steps

    @property
    def lengthening(self) -> np.ndarray:
        return (1 - self.remains) / (self.steps * RATE * self.curvature)

    def run(self, recipe, rounds, sizes=None, cohort=None) -> list[np.ndarray]:
        """(w, c_1, ..., c_N) after every round. Clients with more copies of their example take more steps."""
        net = Network(Point(), "fp64")
        sizes = sizes or [1] * len(self.curvatures)
        ends = np.cumsum(sizes).tolist()
        train = {k: torch.arange(end - size, end) for k, (end, size) in enumerate(zip(ends, sizes, strict=True))}
        rows = np.repeat(np.stack([self.curvature, self.optima], axis=1), sizes, axis=0)
        x = torch.from_numpy(rows)
        data = Federation(Dataset(x, torch.zeros(len(x), dtype=torch.long)), train, {k: train[k][:0] for k in train})
        engine, states = Sequential(net, data), []

        def observe(server, job, answers):
            kept = [engine.memories.get(k) for k in train]
            controls = [float(memory.control["head.weight"]) if memory else 0.0 for memory in kept]
            states.append(np.array([float(server.state.model.params["head.weight"]), *controls]))

        plan = Stage(None, rounds, cohort or Everyone(), Sgd(RATE), epochs=self.steps, size=1, objective=quadratic)
        run(recipe, net, engine, plan, observe=observe)
        return states

    def round(self) -> tuple[np.ndarray, np.ndarray]:
        """SCAFFOLD's round of everyone, z -> A z + b for z = (w, c_1, ..., c_N), from the sums of geometric series."""
        count = len(self.curvatures)
        mean = np.concatenate([[0.0], np.full(count, 1 / count)])
        own = np.eye(count + 1)[1:]
        first = np.outer(self.curvature, np.eye(count + 1)[0]) + mean - own  # of the steps: gradient + c - c_k
        offset = -self.curvature * self.optima
        paces = self.lengthening[:, None] * first, self.lengthening * offset
        matrix = np.vstack([np.eye(count + 1)[0] - RATE * self.steps * paces[0].mean(0), own - mean + paces[0]])
        return matrix, np.concatenate([[-RATE * self.steps * paces[1].mean()], paces[1]])

    @property
    def radius(self) -> float:
        """Of the eigenvalues of SCAFFOLD's round."""
        return float(np.abs(np.linalg.eigvals(self.round()[0])).max())


STEEP = World((22.0, 10.0), steps=2)  # ηH = 2.2: a step lands on the other side, further away than it began
SADDLE = World((-6.5, *[5.0] * 19), steps=5)  # one client of twenty is not convex; their mean is
MILD = World((15.0, 0.5, 3.0), steps=6)


@pytest.mark.parametrize("world", [STEEP, SADDLE, MILD], ids=["steep", "saddle", "mild"])
def test_a_round_is_the_linear_map(world):
    matrix, offset = world.round()
    expected = np.concatenate([[START], np.zeros(len(world.curvatures))])
    for found in world.run(Scaffold(), 8):
        expected = matrix @ expected + offset
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world", [STEEP, SADDLE], ids=["steep", "saddle"])
def test_it_blows_up_with_fresh_controls_and_equal_steps_where_fedavg_converges(world):
    assert world.curvature.mean() > 0  # there is one optimum to find
    assert abs(world.remains.mean()) < 0.95 and world.radius > 1.2
    averaged = [state[0] for state in world.run(FedAvg(), 30)]
    assert abs(averaged[-1] - averaged[-2]) < 1e-3 * abs(averaged[1] - averaged[0])
    controlled = np.array(world.run(Scaffold(), 40))
    grown = np.linalg.norm(controlled[-1] - controlled[-2]) / np.linalg.norm(controlled[-21] - controlled[-22])
    assert grown ** (1 / 20) == pytest.approx(world.radius, rel=0.02)


@dataclass(frozen=True)
class Frozen(Scaffold):
    """The server never moves, so that a client meets nothing but its own control."""

    def aggregate(self, server, uploads):
        return server.state


@pytest.mark.parametrize("steps", [2, 6, 7])
@pytest.mark.parametrize("curvature", [-4.0, -1.0, 0.5, 5.0, 15.0, 19.9, 22.0])
def test_a_control_alone_grows_or_fades_by_its_own_factor(curvature, steps):
    world = World((curvature, 1.0), steps)
    factor, gradient = 1 - world.lengthening[0], curvature * (START - world.optima[0])
    controls = [state[1] for state in world.run(Frozen(), 12)]
    np.testing.assert_allclose(controls, [gradient * (1 - factor**turn) for turn in range(1, 13)], rtol=1e-9)


@pytest.mark.parametrize("steps", [2, 3, 6, 7, 40])
def test_the_factor_is_less_than_one_for_convex_losses_and_stable_steps(steps):
    convex = World(tuple(np.linspace(0.01, 19.99, 500)), steps)
    assert (1 - convex.lengthening >= 0).all() and (1 - convex.lengthening < 1).all()
    assert 1 - World((22.0,), 2 * steps).lengthening[0] > 1  # too steep, an even number of steps: the same way again
    threshold = 1.2564  # where (e^s - 1) / s = 2: with a larger s = Kη|H|, H < 0, a control changes sign and grows
    below, above = (World((-share * threshold / (RATE * 4000),), 4000).lengthening[0] for share in (0.99, 1.01))
    assert 1 - below > -1 > 1 - above


def test_stale_controls_and_uneven_steps_alone_do_no_harm():
    """Half of the clients a round, one to ten steps of each, convex losses: it finds the optimum of the mean."""
    world = World(tuple(np.linspace(0.5, 5.0, 10)), steps=1)
    states = world.run(Scaffold(), 200, sizes=list(range(1, 11)), cohort=Uniform(5))
    optimum = (world.curvature * world.optima).sum() / world.curvature.sum()
    assert abs(states[-1][0] - optimum) < 1e-9
