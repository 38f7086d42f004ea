"""FedProto against a plain loop, its means by hand, and the nearest mean as a head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedlens import config
from fedlens.algorithms import FedProto, Local
from fedlens.core.algorithm import Server
from fedlens.core.batches import identity
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.tree import Tree
from personal import Values, assert_same, by_package, gap, label, loaded, sgd, weights
from small import Net, federation
from textbook import TWO_OF_THREE, World

CLASSES = 3
WORLD = World(TWO_OF_THREE, sizes=(13, 2, 9))  # whoever has two images lacks a class


def own_means(world: World, model, k: int) -> dict[int, tuple[torch.Tensor, int]]:
    """Of the classes that a client has: (mean features, images), as the model would predict."""
    data, mine = federation(world.sizes, identity).data, federation(world.sizes, identity).train[k]
    model.eval()
    with torch.no_grad():
        z, y = model.features(data.x[mine]), data.y[mine]
    return {c: (z[y == c].mean(0), int((y == c).sum())) for c in range(CLASSES) if (y == c).any()}


def fedproto(world: World, pull: float, by_examples: bool = False) -> Values:
    models, shared = {}, {}
    for round, cohort in enumerate(world.cohorts):
        found = {}
        for k in cohort:
            model = loaded(world, models.get(k, weights(world.model()))).train()
            descent = sgd(world, world.rate(round), model.parameters())
            for x, y, weight in world.batches(round, k):
                descent.zero_grad()
                z = model.features(x)
                pairs = zip(z, y.tolist(), strict=True)
                apart = [((v - shared[c]) ** 2).mean() if c in shared else 0 * v.sum() for v, c in pairs]
                value = nn.functional.cross_entropy(model.head(z), y, reduction="none") + pull * torch.stack(apart)
                ((value * weight).sum() / weight.sum()).backward()
                descent.step()
            models[k], found[k] = weights(model), own_means(world, model, k)
        for c in range(CLASSES):
            having = [found[k][c] for k in cohort if c in found[k]]
            counts = [n if by_examples else 1 for _, n in having]
            if having:
                shared[c] = sum(n * z for n, (z, _) in zip(counts, having, strict=True)) / sum(counts)
    nothing = torch.zeros(64, dtype=torch.float64)
    values = {
        "prototypes": torch.stack([shared.get(c, nothing) for c in range(CLASSES)]),
        "known": torch.tensor([float(c in shared) for c in range(CLASSES)], dtype=torch.float64),
    }
    for k, own in models.items():
        values |= label(f"private of {k}", own)
    return values


@pytest.mark.parametrize("mean", ["clients", "examples"])
@pytest.mark.parametrize("world", [WORLD, replace(WORLD, norm=False, momentum=0.0)], ids=["norms", "plain"])
def test_fedproto(world, mean):
    found = by_package(world, FedProto(pull=0.7, mean=mean))
    assert_same(found.values, fedproto(world, 0.7, mean == "examples"))
    sent = {path: tuple(leaf.shape) for path, leaf in found.replies[0][0].upload.paths()}
    assert sent == {"prototypes": (3, 64), "counts": (3,)}


def test_without_pull_models_are_those_of_local_training():
    found, alone = by_package(WORLD, FedProto(pull=0.0)).values, by_package(WORLD, Local()).values
    assert all(torch.equal(found[name], alone[name]) for name in alone)
    assert max((by_package(WORLD, FedProto()).values[n] - alone[n]).abs().max() for n in alone) > 1e-4


def test_the_nearest_mean_as_a_head():
    """A class that nobody had is never predicted; before there are means the own head is asked."""
    found = by_package(WORLD, FedProto())
    client = found.engine.open(replace(found.jobs[-1], download=FedProto().broadcast(found.server)), 0)[0]
    received = client.received.replace(known=torch.tensor([1.0, 0.0, 1.0]).double())
    client = replace(client, received=received)
    x = federation().data.x[-40:]
    features = client.net.forward(client.memory.private, x).features
    apart = torch.cdist(features, received.prototypes)
    apart[:, 1] = torch.inf
    assert torch.equal(client.net(FedProto().personal(client), x).argmax(1), apart.argmin(1))
    none = replace(client, received=received.replace(known=received.known * 0))
    for other in (FedProto().personal(none), FedProto(predict="head").personal(client)):
        assert torch.equal(other.params["head.weight"], client.memory.private.params["head.weight"])


def upload(mean: list[float], count: int) -> Tree:
    return Tree(
        prototypes=torch.tensor([mean, [9.0, 9.0]]).double(), counts=torch.tensor([count, 0], dtype=torch.int32)
    )


@pytest.mark.parametrize(("mean", "expected"), [("clients", 2.0), ("examples", 2.5)])
def test_by_hand(mean, expected):
    """Means (1, 0) of one image and (3, 0) of three; nobody has the other class, which keeps what it had."""
    before = Tree(prototypes=torch.tensor([[0.0, 0.0], [5.0, 6.0]]).double(), known=torch.tensor([0.0, 1.0]).double())
    state = FedProto(mean=mean).aggregate(Server(None, before, 2), [upload([1, 0], 1), upload([3, 0], 3)])  # pyright: ignore
    assert state.prototypes.tolist() == [[expected, 0.0], [5.0, 6.0]] and state.known.tolist() == [1.0, 1.0]


@dataclass(frozen=True)
class PullsToZero(FedProto):
    """As one public code does: classes without a mean are pulled to zero."""

    def loss(self, client, weights, batch, out):
        known = torch.ones_like(client.received.known)
        return super().loss(replace(client, received=client.received.replace(known=known)), weights, batch, out)


def test_the_textbook_notices_a_pull_to_zero():
    assert gap(by_package(WORLD, PullsToZero(pull=0.7)).values, fedproto(WORLD, 0.7)) > 1e-4


class TwoLayers(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))


def test_refused():
    with pytest.raises(BadInput, match=r"leave algorithm\.server_lr at 1"):
        config.read(None, ["algorithm=fedproto", "algorithm.server_lr=0.5"])
    with pytest.raises(BadInput, match="fedproto needs a model whose head is one linear layer"):
        FedProto().setup(Server(Network(TwoLayers(), "fp64"), Tree(), 2))
