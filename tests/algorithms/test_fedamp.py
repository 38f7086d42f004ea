"""FedAMP against a plain loop over all clients' models, and by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from fedlens import config
from fedlens.algorithms import FedAMP, Local
from fedlens.core.algorithm import Client
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.optimizer import Sgd
from fedlens.core.tree import Tree
from personal import Values, by_package, gap, label, loaded, loss, weights
from scalar import Number, half_square
from textbook import TOLERANCE, TWO_OF_THREE, World, sgd, star

WORLDS = {"everyone": World(), "two of three": World(TWO_OF_THREE, momentum=0.0), "no norms": World(norm=False)}


def trained(world, own: Values, centre: Values, round: int, k: int, strength: float) -> Values:
    model = loaded(world, own).train()
    descent = sgd(world, world.rate(round), model.parameters())
    for batch in world.batches(round, k):
        descent.zero_grad()
        near = sum(((p - centre[n]) ** 2).sum() for n, p in model.named_parameters())
        (loss(model, *batch) + strength / 2 * near).backward()
        descent.step()
    return weights(model)


def distance(a: Values, b: Values) -> float:
    return sum(float(((a[n] - b[n]) ** 2).sum()) for n in a if "running" not in n)


def fedamp(world, pull: float, alpha: float | None, sigma: float | None) -> Values:
    """u_i = w_i + sum over j of xi_ij (w_j - w_i), j the others of the last cohort."""
    own, last = {}, {}
    for round, cohort in enumerate(world.cohorts):
        new = {}
        for k in cohort:
            mine = own.get(k, weights(world.model()))
            pairs = [distance(last[i], last[j]) for i in last for j in last if i < j]
            width = sigma or (sum(pairs) / len(pairs) if pairs else 1.0)
            others = {j: model for j, model in last.items() if j != k}
            reach = alpha or width / (len(others) + 1)
            xi = {j: reach / width * math.exp(-distance(mine, others[j]) / width) for j in others}
            centre = {n: mine[n] + sum(xi[j] * (others[j][n] - mine[n]) for j in others) for n in mine}
            new[k] = trained(world, mine, centre, round, k, pull / (alpha or 1.0))
        own, last = own | new, new
    found = {}
    for k, model in own.items():
        found |= label(f"private of {k}", model)
    return found | {f"stacked {n}": torch.stack([m[n] for m in last.values()]) for n in weights(world.model())}


def known(found) -> Values:
    """Clients' models, and what the server hands on."""
    models = found.server.state.models
    mine = {n: v for n, v in found.values.items() if n.startswith("private")}
    return mine | {f"stacked {n}": v for n, v in models.items()}


def differ(found, expected: Values) -> float:
    mine = known(found)
    return gap(mine, {n: v for n, v in expected.items() if n in mine})


@star(WORLDS, "alpha sigma", [(None, None), (None, 2.0), (0.8, 2.0)])
def test_fedamp(world, alpha, sigma):
    found = by_package(world, FedAMP(pull=0.7, alpha=alpha, sigma=sigma))
    assert len(known(found)) > 8 and differ(found, fedamp(world, 0.7, alpha, sigma)) <= TOLERANCE


def test_without_pull_it_is_local():
    world = WORLDS["two of three"]
    found, usual = by_package(world, FedAMP(pull=0.0)).values, by_package(world, Local()).values
    assert len(usual) > 8 and all(torch.equal(found[name], usual[name]) for name in usual)


def centre_of(own: float, others: list[float], **settings) -> float:
    """Of a client that has one number, among others' numbers."""
    recipe, net = FedAMP(**settings), Network(Number(), "fp64")
    row = {"head.w": torch.tensor(others).double()}
    received = Tree(models=Tree(row), spread=torch.tensor(1.0), tickets=torch.arange(len(others)) + 1)
    private = net.initial_weights().map(lambda leaf: torch.full_like(leaf, own))
    memory = Tree(private=private, ticket=torch.tensor(0))
    client = Client(net, received, memory, Tree(), half_square, Sgd())
    return float(recipe.centre(client)["head.w"])


def test_by_hand():
    """w = (0, 1), sigma 1, alpha 0.5: xi = e^-1 / 2, and the sum of centres is that of the models."""
    settings = {"alpha": 0.5, "sigma": 1.0}
    one, two = centre_of(0.0, [1.0], **settings), centre_of(1.0, [0.0], **settings)
    assert (one, two) == (pytest.approx(0.183939720585721, abs=1e-15), pytest.approx(0.816060279414279, abs=1e-15))
    # All are alike from afar: with alpha = sigma / m every centre is the mean.
    assert centre_of(0.0, [1.0, 5.0], sigma=1e12) == pytest.approx(2.0, abs=1e-9)
    assert centre_of(3.0, []) == 3.0


@dataclass(frozen=True)
class OwnTwice(FedAMP):
    """Does not know its own model, from which it counts one more."""

    def centre(self, client):
        return super().centre(replace(client, memory=client.memory.replace(ticket=torch.tensor(-1))))


@dataclass(frozen=True)
class NoGradient(FedAMP):
    """As one public code: the pull moves nothing."""

    def gradient(self, client, local, batch):
        return super().gradient(client, local.replace(centre=local.params), batch)


def test_the_textbook_notices():
    world = WORLDS["everyone"]
    right = fedamp(world, 0.7, None, None)
    for wrong in (OwnTwice(pull=0.7), NoGradient(pull=0.7)):
        assert differ(by_package(world, wrong), right) > 1e-4


def test_refused_and_told():
    with pytest.raises(BadInput, match="fedamp: alpha means nothing without sigma"):
        FedAMP(alpha=1.0)
    with pytest.raises(BadInput, match="fedamp has no server_lr"):
        FedAMP(server_lr=0.5)
    with pytest.raises(BadInput, match=r"with 3 clients a round alpha is at most 0\.5"):
        by_package(WORLDS["everyone"], FedAMP(alpha=0.6, sigma=1.0))
    told = config.read(None, ["algorithm=fedamp"]).discloses
    assert told == {"FedAMP": "every client's model reaches all clients of the next round, unprotected"}


def test_models_that_are_too_far_apart_are_spoken_of():
    """The mean over pairs, and what it means for a sigma that is given."""
    found = by_package(WORLDS["everyone"], FedAMP())
    replies = found.replies[-1]
    models = [dict(reply.upload.model.params) for reply in replies]
    apart = sum(distance(models[i], models[j]) for i, j in ((0, 1), (0, 2), (1, 2))) / 3
    assert float(found.server.state.spread) == pytest.approx(apart, rel=1e-13) and apart > 1e-3
    (said,) = FedAMP(sigma=apart / 20).notes(replies)
    assert said == "fedamp: models are far apart for such a small sigma, so that all train alone: raise it"
    assert FedAMP(sigma=apart).notes(replies) == FedAMP().notes(replies) == []
