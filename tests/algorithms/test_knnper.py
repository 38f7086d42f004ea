"""kNN-Per against a plain search of neighbours, its limits, and by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from fedlens.algorithms import CCVR, FedAvg, FedPer, FineTuned, KNNPer
from fedlens.algorithms import knnper as module
from fedlens.algorithms.knnper import AskNeighbours, nearest
from fedlens.core.batches import identity
from fedlens.core.errors import BadInput
from fedlens.core.evaluate import Evaluate
from fedlens.core.tree import Tree
from personal import by_package, loaded
from small import federation
from textbook import TOLERANCE, TWO_OF_THREE, World

WORLD = World(TWO_OF_THREE, sizes=(13, 2, 9))
CLASSES = 3


def neighbours(world: World, values: dict, k: int, by: KNNPer) -> torch.Tensor:
    """Probabilities of a client's test images, one at a time: (1 - lambda) softmax + lambda votes of the k nearest."""
    data, model = federation(world.sizes, identity), loaded(world, values).eval()
    mine, test = data.train[k], data.test[k]
    with torch.no_grad():
        known, asked = model.features(data.data.x[mine]), model.features(data.data.x[test])
        shares = model.head(asked).softmax(1)
    found = []
    for z, share in zip(asked, shares, strict=True):
        order = sorted(range(len(mine)), key=lambda i: float(((z - known[i]) ** 2).sum()))[: by.neighbours]
        votes = torch.zeros(CLASSES).double()
        for i in order:
            votes[data.data.y[mine[i]]] += math.exp(-float(((z - known[i]) ** 2).sum()) / (len(z) * by.scale))
        found.append(by.share * votes / votes.sum() + (1 - by.share) * share)
    return torch.stack(found)


def predicted(found, k: int, recipe) -> tuple[torch.Tensor, Tree]:
    """(logits on the client's test images, what its evaluation says)."""
    job = found.jobs[-1]
    stage = job.stage.errand(Evaluate(base=recipe))
    client, _ = found.engine.open(replace(job, stage=stage, download=recipe.broadcast(found.server)), k)
    weights = recipe.personal(client)
    said, _ = stage.algorithm.finish(client, weights)
    return recipe.predictions(client, weights, client.test.x), said


def named(state: Tree) -> dict:
    return {**state.model.params, **state.model.buffers}


BY = KNNPer(neighbours=3, share=0.6, scale=0.5)


def test_knnper():
    found, base = by_package(WORLD, BY), by_package(WORLD, FedAvg())
    model = named(found.server.state)
    assert all(torch.equal(v, named(base.server.state)[n]) for n, v in model.items())  # nothing was trained
    assert all(not reply.upload for reply in found.replies[-1]) and len(found.replies[-1]) == 3
    recipe = found.jobs[-1].stage.algorithm
    assert recipe.evaluated_as == ("personal before",)
    data = federation(WORLD.sizes, identity)
    for k in range(3):
        logits, said = predicted(found, k, recipe)
        expected, y = neighbours(WORLD, model, k, BY), data.data.y[data.test[k]]
        assert float((logits.exp() - expected).abs().max()) <= TOLERANCE
        assert int(said.correct) == int((expected.argmax(1) == y).sum())
        nll = -expected[torch.arange(len(y)), y].log().sum()
        assert float(said.loss) == pytest.approx(float(nll), abs=1e-12)


def test_without_a_share_it_is_its_base():
    found = by_package(WORLD, KNNPer(share=0.0))
    recipe = found.jobs[-1].stage.algorithm
    for k in range(3):
        (logits, said), (usual, expected) = predicted(found, k, recipe), predicted(found, k, FedAvg())
        assert float((logits - usual.log_softmax(1)).abs().max()) <= TOLERANCE and said.correct == expected.correct


def test_images_that_were_trained_on_are_known_by_heart():
    found = by_package(WORLD, KNNPer(share=1.0, neighbours=1))
    recipe, job = found.jobs[-1].stage.algorithm, found.jobs[-1]
    client, _ = found.engine.open(job, 0)
    weights = recipe.personal(client)
    assert torch.equal(recipe.predictions(client, weights, client.data.x).argmax(1), client.data.y)


def store(values: list[float], labels: list[int]) -> Tree:
    return Tree(features=torch.tensor(values).double()[:, None], labels=torch.tensor(labels))


def test_by_hand():
    """0 is an a, 1 a b; 0.25 is nearer to a: 1 / (1 + e^-0.5)."""
    x = torch.tensor([[0.25]]).double()
    a, b = nearest(x, store([0, 1], [0, 1]), 2, 1.0, 2)[0].tolist()
    assert (a, b) == (pytest.approx(0.622459331201855, abs=1e-15), pytest.approx(0.377540668798145, abs=1e-15))
    # From afar all count alike: the shares of classes. Of equally near ones the first is taken.
    assert nearest(x, store([0, 1, 5], [0, 1, 1]), 3, 1e15, 2)[0].tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-12)
    assert nearest(x, store([0.5, 0.0], [1, 0]), 1, 1.0, 2)[0].tolist() == [0.0, 1.0]
    # So far away that every nearness is zero: the nearest decides all the same.
    assert nearest(x, store([900, 1000], [1, 0]), 2, 1.0, 2)[0].tolist() == [0.0, 1.0]


@dataclass(frozen=True)
class OnLogits(AskNeighbours):
    """As one public code: probabilities of neighbours are added to logits."""

    def predictions(self, client, weights, x):
        model = Tree(params=weights.params, buffers=weights.buffers)
        z = module.features(client.net, model, x)
        near = nearest(z, weights.store, self.by.neighbours, self.by.scale, CLASSES)
        return self.by.share * near + (1 - self.by.share) * client.net(model, x)


def test_the_search_notices_logits(monkeypatch):
    monkeypatch.setattr(module, "AskNeighbours", OnLogits)
    found = by_package(WORLD, BY)
    logits, _ = predicted(found, 0, found.jobs[-1].stage.algorithm)
    assert float((logits.softmax(1) - neighbours(WORLD, named(found.server.state), 0, BY)).abs().max()) > 1e-3


def test_with_others():
    """Over private heads; over fine-tuning; and fine-tuning after it, which starts from weights alone."""
    for recipe in (KNNPer(FedPer()), KNNPer(FineTuned(epochs=1)), FineTuned(KNNPer(), epochs=1)):
        found = by_package(WORLD, recipe)
        logits, said = predicted(found, 2, found.jobs[-1].stage.algorithm)
        assert bool(logits.isfinite().all()) and int(said.examples) == 2
    with pytest.raises(BadInput, match="ccvr comes after the last round of training"):
        list(CCVR(KNNPer()).stages(WORLD.stage()))


def test_a_client_without_images_predicts_as_the_base():
    found = by_package(replace(WORLD, sizes=(13, 0, 9)), BY)
    logits, _ = predicted(found, 1, found.jobs[-1].stage.algorithm)
    usual, _ = predicted(found, 1, FedAvg())
    assert torch.equal(logits, usual)
