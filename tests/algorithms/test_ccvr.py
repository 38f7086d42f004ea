"""CCVR against a plain computation on all clients' features in one place, its moments by hand, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import config
from fedlens.algorithms import CCVR, FedAvg, FedExP, FedPer, FineTuned
from fedlens.algorithms import ccvr as module
from fedlens.algorithms._normal_features import moments
from fedlens.core.algorithm import Server
from fedlens.core.batches import identity
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.rng import generator, key
from fedlens.core.tree import Tree
from fedlens.simulate import run as simulate
from personal import by_package, gap, loaded, weights
from small import federation
from test_fedproto import TwoLayers
from textbook import SEED, TOLERANCE, TWO_OF_THREE, World

WORLD = World(TWO_OF_THREE, sizes=(13, 4, 9))
ROUND = len(TWO_OF_THREE)  # the calibration's


def features(world: World, model) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all clients' images, in one place."""
    data = federation(world.sizes, identity)
    mine = torch.cat([data.train[k] for k in data.train])
    model.eval()
    with torch.no_grad():
        return model.features(data.data.x[mine]), data.data.y[mine]


def symmetric_root(rows: torch.Tensor, covariance: str, pooled: torch.Tensor) -> torch.Tensor:
    """Of a covariance, from the singular values of what it is made of."""
    if covariance == "diagonal":
        return rows.std(0).diag()
    centred, n = (rows - rows.mean(0), len(rows) - 1) if covariance == "full" else (pooled, len(pooled) - 3)
    _, values, vectors = torch.linalg.svd(centred, full_matrices=False)
    return vectors.T * (values / n**0.5) @ vectors


def ccvr(world: World, base: dict, covariance: str, samples: int, epochs: int, batch: int, lr: float) -> dict:
    model = loaded(world, base)
    z, y = features(world, model)
    pooled = torch.cat([z[y == c] - z[y == c].mean(0) for c in range(3)])
    seed, xs, ys = key(key(SEED, "server", ROUND), "features"), [], []
    for c in range(3):
        noise = torch.randn(samples, 64, generator=generator(key(seed, c)), dtype=torch.float64)
        xs.append(z[y == c].mean(0) + noise @ symmetric_root(z[y == c], covariance, pooled))
        ys += [c] * samples
    x, labels, head = torch.cat(xs), torch.tensor(ys), nn.Linear(64, 3).double()
    head.load_state_dict({n: base[f"head.{n}"] for n in ("weight", "bias")})
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=generator(key(key(key(SEED, "server", ROUND), "order"), epoch)))
        for at in range(0, len(x), batch):
            rows = order[at : at + batch]
            slopes = torch.autograd.grad(F.cross_entropy(head(x[rows]), labels[rows]), list(head.parameters()))
            with torch.no_grad():
                for p, g in zip(head.parameters(), slopes, strict=True):
                    p -= lr * g
    return base | {f"head.{n}": v.detach() for n, v in head.named_parameters()}


def named(tree: Tree) -> dict:
    return {**tree.params, **tree.buffers}


@pytest.mark.parametrize("covariance", ["full", "diagonal", "pooled"])
def test_ccvr(covariance):
    recipe = CCVR(samples=7, epochs=2, batch=5, lr=0.05, covariance=covariance)
    found, base = by_package(WORLD, recipe), by_package(WORLD, FedAvg()).values
    state = found.server.state
    before = {n.removeprefix("model "): v for n, v in base.items()}
    assert all(torch.equal(v, before[n]) for n, v in named(state.model).items())  # what was trained stays beside it
    expected = ccvr(WORLD, before, covariance, 7, 2, 5, 0.05)
    assert gap(named(state.calibrated), expected) <= TOLERANCE
    assert all(torch.equal(v, before[n]) for n, v in named(state.calibrated).items() if not n.startswith("head"))
    judged = found.jobs[-1].stage.algorithm.global_model(state)
    assert judged is state.calibrated and gap(named(judged), before) > 1e-3
    shapes = {path: tuple(leaf.shape) for path, leaf in found.replies[-1][0].upload.paths()}
    size = {"full": (3, 64, 64), "diagonal": (3, 64), "pooled": (1, 64, 64)}[covariance]
    assert shapes == {"counts": (3,), "means": (3, 64), "scatter": size} and len(found.replies[-1]) == 3


def test_without_epochs_it_is_its_base():
    state = by_package(WORLD, CCVR(epochs=0)).server.state
    assert all(torch.equal(state.model.params[n], v) for n, v in state.calibrated.params.items())


def test_moments_are_those_of_all_data_in_one_place():
    found = by_package(WORLD, CCVR())
    uploads = [reply.upload for reply in found.replies[-1]]
    counts, means, covariances = moments(uploads, "full")
    z, y = features(WORLD, loaded(WORLD, named(found.server.state.model)))
    for c in range(3):
        assert counts[c] == (y == c).sum()
        assert (means[c] - z[y == c].mean(0)).abs().max() < 1e-14
        assert (covariances[c] - torch.cov(z[y == c].T)).abs().max() < 1e-13


@dataclass(frozen=True)
class Biased(module.Calibrate):
    """As two public codes do: biased covariances are merged as if they were unbiased."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        n = upload.counts.double()[:, None, None]
        return upload.replace(scatter=upload.scatter * (n - 1).clamp(min=0) / n.clamp(min=1)), memory


def test_the_moments_notice_biased_covariances(monkeypatch):
    monkeypatch.setattr(module, "Calibrate", Biased)
    found = by_package(WORLD, CCVR())
    _, _, covariances = moments([reply.upload for reply in found.replies[-1]], "full")
    z, y = features(WORLD, loaded(WORLD, named(found.server.state.model)))
    assert (covariances[0] - torch.cov(z[y == 0].T)).abs().max() > 1e-2


def test_the_judged_model_of_its_base_is_calibrated():
    """FedExP judges the mean of its last two models: the body under the new head is of that mean."""
    state = by_package(WORLD, CCVR(FedExP())).server.state
    middle = (state.previous.params["conv.weight"] + state.model.params["conv.weight"]) / 2
    assert (state.calibrated.params["conv.weight"] - middle).abs().max() < 1e-15


def test_fine_tuning_comes_after_it():
    found = by_package(WORLD, FineTuned(CCVR(), epochs=1))
    assert found.jobs[-1].download.model is found.server.state.calibrated
    first, now = weights(WORLD.model()), found.engine.memories.get(1).tuned.params
    assert (now["head.weight"] - first["head.weight"]).abs().max() > 1e-3


def test_refused(tmp_path):
    with pytest.raises(BadInput, match=r"put fine-tuning after it, algorithm=ccvr\+ft"):
        list(CCVR(FineTuned()).stages(WORLD.stage()))
    with pytest.raises(BadInput, match="fedper keeps the head at its clients"):
        by_package(WORLD, CCVR(FedPer()))
    with pytest.raises(BadInput, match="ccvr needs a model whose head is one linear layer"):
        (*_, last) = CCVR().stages(WORLD.stage())
        last.algorithm.setup(Server(Network(TwoLayers(), "fp64"), Tree(), 2))
    with pytest.raises(BadInput, match=r"use buffers=average"):
        by_package(WORLD, CCVR(), buffers="local")


FEW = ["algorithm=ccvr", "clients=4", "cohort=2", "rounds=1", "local.steps=1", "model=mlp"]
FEW += ["model.hidden=8", "picture=false", "engine=sequential", "local.batch_size=8"]


def test_refused_before_anything_is_trained(tmp_path):
    words = [*FEW, "algorithm.base=fedper", f"out={tmp_path / 'run'}"]
    with pytest.raises(BadInput, match="fedper keeps the head at its clients"):
        simulate.run(config.read(None, words))
    assert not (tmp_path / "run").exists()


def test_what_leaves_without_noise_is_said(tmp_path):
    experiment = config.read(None, [*FEW, "uplink=dp", f"out={tmp_path / 'run'}"])
    said = "once, each client's label counts"
    (note,) = experiment._start_notes([10])
    assert note.startswith(f"uplink=dp does not act on this: {said}")
    simulate.run(experiment)
    found = json.loads((tmp_path / "run/privacy.json").read_text())
    assert found["discloses"]["Calibrate"].startswith(said)
    assert found["answers_as_they_are"]["Calibrate"] == ["counts", "means", "scatter"]
    (statement,) = found["statements"]
    assert any(each.startswith(said) for each in statement["not_covered"])
    assert config.read(None, FEW)._start_notes([10]) == ()
    with pytest.raises(BadInput, match="uplink dp needs a method that uploads its update as delta"):
        simulate.run(config.read(None, ["algorithm=fedproto", *FEW[1:], "uplink=dp", f"out={tmp_path / 'other'}"]))
    assert not (tmp_path / "other").exists()
