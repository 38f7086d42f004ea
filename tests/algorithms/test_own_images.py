"""Passes over a client's own images: sums of features by class, gradients, random parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens.algorithms import FedAvg
from fedlens.algorithms import _own_images as own
from fedlens.core.algorithm import Server
from fedlens.core.errors import BadInput
from fedlens.core.network import Network
from fedlens.core.run import Turn, job_of
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.models.generators import linear_head
from small import PLAN, Net, federation, network


@pytest.fixture
def client(monkeypatch):
    """The one with 22 images, looked at in pieces of at most five."""
    monkeypatch.setattr(own, "pieces", lambda shard: shard.chunks(5))
    net = network()
    (stage,) = FedAvg().stages(PLAN)
    server = Server(net, FedAvg().setup(Server(net, Tree(), 6)), 6)
    return Sequential(net, federation((13, 4, 9, 1, 22, 3))).open(job_of(server, Turn(stage), 0), 4)[0]


def test_sums_by_class(client):
    weights = client.received.model
    found = own.class_sums(client.net, weights, client.data, outer=True)
    z, y = client.net.forward(weights, client.data.x).features, client.data.y
    for c in range(3):
        mine = z[y == c]
        assert found.counts[c] == len(mine)
        assert (found.sums[c] - mine.sum(0)).abs().max() < 1e-12
        assert (found.products[c] - mine.T @ mine).abs().max() < 1e-11
    assert own.class_sums(client.net, weights, replace(client.data, index=client.data.index[:0])).counts.sum() == 0


def test_a_gradient_over_all_images_is_that_of_one_batch(client):
    weights = client.received.model
    found = own.gradient_on(client, weights, client.data, weights.params)
    model = Net().double().eval()
    model.load_state_dict({**weights.params, **weights.buffers}, strict=False)
    F.cross_entropy(model(client.data.x), client.data.y).backward()
    for name, p in model.named_parameters():
        assert (found[name] - p.grad).abs().max() < 1e-14
    some = own.gradient_on(client, weights, client.data, weights.params.select(lambda name: name == "head.bias"))
    assert some.keys() == {"head.bias"} and (some["head.bias"] - found["head.bias"]).abs().max() < 1e-15


def test_a_random_part(client):
    parts = [own.random_part(replace(client, key=key), 0.8, "mix").index for key in (1, 1, 2)]
    assert all(len(part) == 18 and len(part.unique()) == 18 for part in parts)
    assert torch.equal(parts[0], parts[1]) and not torch.equal(parts[0], parts[2])
    one = replace(client, data=replace(client.data, index=client.data.index[:1]))
    assert len(own.random_part(one, 0.1, "mix")) == 1


def test_the_names_of_a_linear_head():
    assert linear_head(network(), "it") == ("head.weight", "head.bias")
    model = Net()
    model.head = nn.Linear(64, 3, bias=False)
    with pytest.raises(BadInput, match="it needs a model whose head is one linear layer with a bias"):
        linear_head(Network(model), "it")
