"""Fed-MTL and L2GD: the penalty of the public code, and strengths that do tie clients together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedlens.algorithms import L2GD, FedMTL, Local
from fedlens.core.algorithm import Client
from fedlens.core.rng import generator
from fedlens.core.tree import Tree
from personal import by_package, flat
from small import PLAN, network
from textbook import World


@pytest.mark.parametrize("m", [2, 3, 10])
def test_the_public_code_squares_a_matrix_of_ones(m):
    """The gradient of |W|^2 + tr(W Omega W') in the own column, by autograd; Omega = (11' - 11'/m) squared by entry."""
    draw = torch.randn(7, m, generator=generator(m), dtype=torch.float64)
    ones = torch.ones(m, m, dtype=torch.float64)
    own = (draw[:, 0] + 0.3).requires_grad_()
    W = torch.cat([own[:, None], draw[:, 1:]], 1)
    (slope,) = torch.autograd.grad(W.norm() ** 2 + (W @ (ones - ones / m) ** 2 @ W.T).trace(), own)
    tree = lambda column: Tree(params=Tree(w=column))  # noqa: E731
    received = Tree(model=tree(draw.mean(1)), clients=torch.tensor(m, dtype=torch.float64))
    client = Client(network(), received, Tree(own=tree(draw[:, 0])), Tree(), None, None)  # pyright: ignore
    pull = FedMTL(omega="code").pull(client, Tree(w=own.detach()))
    assert (2 * pull["w"] - slope).abs().max() <= 1e-12


def spread(world: World, recipe) -> tuple[float, float]:
    """(how far clients' models are from those of training alone, how far from each other), by norm."""
    alone = by_package(world, Local()).values
    ours = by_package(world, recipe)
    own = [flat(ours.personal(k, recipe)) for k in range(3)]
    local = [flat({n: v for n, v in alone.items() if n.startswith(f"private of {k}")}) for k in range(3)]
    own, local = torch.stack(own), torch.stack(local)
    return float((own - local).norm()), float((own - own.mean(0)).norm())


@pytest.mark.parametrize("recipe", [FedMTL(), L2GD()], ids=["fedmtl", "l2gd"])
def test_by_default_clients_are_tied(recipe):
    """Not training alone in all but name: the distance to it is a good part of the distance between clients."""
    world = World(((0, 1, 2),) * 8, norm=False)
    far, apart = spread(world, recipe)
    weak = replace(recipe, **type(recipe).presets["weak"])
    assert far > 0.05 * apart
    assert far > 5 * spread(world, weak)[0]


def test_an_aggregation_of_l2gd_goes_half_way():
    """With the paper's p and step: eta lambda / (n p), where p = lambda / (L + lambda), eta = n / (2 (L + lambda))."""
    for smooth, pull, n in ((50.0, 450.0, 3), (10.0, 2.5, 100), (1.0, 1.0, 7)):
        p, eta = pull / (smooth + pull), n / (2 * (smooth + pull))
        lr = eta / (n * (1 - p))
        assert abs(lr - 1 / (2 * smooth)) <= 1e-12
        assert abs(eta * pull / (n * p) - 0.5) <= 1e-12
        assert abs(L2GD(p=p, pull=pull).share(lr) - 0.5) <= 1e-12
        assert L2GD(p=p).share(lr) == 0.5


def test_what_the_published_runs_had_can_be_asked_for():
    assert FedMTL(**FedMTL.presets["weak"]).weight(network()) == 1e-4  # 234 weights
    assert abs(L2GD(**L2GD.presets["weak"]).share(0.01) - 0.01 * 0.5 * 0.1 / 0.9) <= 1e-18
    assert next(iter(L2GD().stages(PLAN))).algorithm.share(0.1) == 0.5
