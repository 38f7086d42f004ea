"""IFCA against a plain loop over several models, and on a world of one number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedlens.algorithms import IFCA, FedAvg
from fedlens.algorithms.ifca import shuffled
from fedlens.core.algorithm import Server
from fedlens.core.batches import identity
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.rng import key
from fedlens.core.tree import Tree
from personal import Values, assert_same, by_package, descend, gap, label, loaded, loss, named
from scalar import scalar_run
from small import federation, network
from textbook import SEED, TWO_OF_THREE, World

WORLD = World(TWO_OF_THREE)


def starts(world, recipe) -> list[Values]:
    """The first models are the package's; that they differ as promised has a test of its own."""
    net = network(world.norm)
    state = recipe.setup(Server(net, Tree(), 3, key=key(SEED, "server", 0)))
    return [named("", recipe.model(state, j)) for j in range(recipe.clusters)]


def choice(world, models: list[Values], client: int) -> int:
    data = federation(world.sizes, identity)
    mine = data.train[client]
    batch = data.data.x[mine], data.data.y[mine], torch.ones(len(mine)).double()
    with torch.no_grad():
        losses = [float(loss(loaded(world, model).eval(), *batch)) for model in models]
    return losses.index(min(losses))


def by_size(world, models: list[Values], client: int) -> int:
    return world.sizes[client] % len(models)


@dataclass(frozen=True)
class BySize(IFCA):
    """Clients of 13, 4 and 9 images choose 1, 1 and 0 of three models, whatever these say; nobody chooses 2."""

    def chosen(self, client):
        return len(client.data) % self.clusters


def ifca(world, recipe, choose=choice) -> tuple[Values, list[tuple[int, ...]]]:
    """(models, who chose what in each round)."""
    models, told, chosen = starts(world, recipe), [], {}
    for round, cohort in enumerate(world.cohorts):
        chosen = {k: choose(world, models, k) for k in cohort}
        told.append(tuple(chosen.values()))
        local = {k: descend(world, loaded(world, models[chosen[k]]), round, k) for k in cohort}
        new = []
        for j, model in enumerate(models):
            moved = dict(model)
            for name in model:
                members = tuple(k for k in cohort if chosen[k] == j)
                rate = 1.0 if "running" in name else recipe.server_lr
                p = world.shares(members, uniformly)
                moved[name] = model[name] + sum(
                    rate * p[k] * (local[k][name] - models[chosen[k]][name]) for k in members
                )
            new.append(moved)
        models = new
    found = label("model", models[0])
    for j, model in enumerate(models[1:], 1):
        found |= label(f"others {j}", model)
    members = [sum(c == j for c in chosen.values()) for j in range(recipe.clusters)]
    return found | {"members": torch.tensor(members)}, told


def values(found, recipe) -> Values:
    """Of the server, cluster by cluster."""
    state = found.server.state
    known = label("model", named("", state.model)) | {"members": state.members}
    for j in range(1, recipe.clusters):
        known |= label(f"others {j}", named("", state.others[f"cluster {j}"]))
    return known


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize(("kind", "choose"), [(IFCA, choice), (BySize, by_size)], ids=["by loss", "by size"])
@pytest.mark.parametrize("world", [WORLD, replace(WORLD, weighting=by_examples)], ids=["uniform", "by examples"])
def test_ifca(world, kind, choose, server_lr):
    recipe = kind(clusters=3, server_lr=server_lr)
    expected, told = ifca(world, recipe, choose)
    found = by_package(world, recipe)
    assert told == [tuple(int(r.upload.cluster) for r in replies) for replies in found.replies]
    assert_same(values(found, recipe), expected)
    mine, models = found.personal(0, recipe), [named("", recipe.model(found.server.state, j)) for j in range(3)]
    assert gap(mine, models[choose(world, models, 0)]) == 0


def test_one_cluster_is_fedavg():
    found = by_package(replace(WORLD, weighting=uniformly), IFCA(clusters=1)).values
    usual = by_package(replace(WORLD, weighting=uniformly), FedAvg()).values
    assert all(torch.equal(found[name], usual[name]) for name in usual)


@dataclass(frozen=True)
class At(IFCA):
    """Models of one number."""

    places: tuple[float, float] = (0.0, 4.0)

    def setup(self, server):
        state = super().setup(server)
        one, two = (state.model.map(lambda leaf, at=at: torch.full_like(leaf, at)) for at in self.places)
        return state.replace(model=one, others=Tree({"cluster 1": two}))


def ends(places: tuple[float, float], **more) -> tuple[float, float, list[int]]:
    state = scalar_run(At(places=places), **more).state
    one, two = state.model, state.others["cluster 1"]
    return float(one.params["head.w"]), float(two.params["head.w"]), state.members.tolist()


def test_by_hand():
    """Client 1 is best at 0 and client 2 at 4; from 1 and 2 they go to 0.81 and 3.02. Equal models: the first."""
    assert ends((0.0, 4.0)) == (0.0, 4.0, [1, 1])
    assert ends((1.0, 2.0)) == (pytest.approx(0.81, abs=1e-15), pytest.approx(3.02, abs=1e-15), [1, 1])
    assert ends((1.0, 1.0)) == (pytest.approx(1.67, abs=1e-15), 1.0, [2, 0])
    assert ends((9.0, 4.0))[2] == [0, 2] and ends((9.0, 4.0))[0] == 9.0


def test_the_global_model_is_the_largest_clusters():
    state = scalar_run(At(places=(9.0, 4.0))).state
    assert float(At().global_model(state).params["head.w"]) == float(state.others["cluster 1"].params["head.w"])


def test_starts_have_the_same_numbers_in_another_order():
    first = network().initial_weights()
    a, b = shuffled(first, 1, 1), shuffled(first, 1, 2)
    for name, leaf in first.params.items():
        assert torch.equal(a.params[name].flatten().sort().values, leaf.flatten().sort().values)
    assert not torch.equal(a.params["conv.weight"], b.params["conv.weight"])
    assert torch.equal(a.params["conv.weight"], shuffled(first, 1, 1).params["conv.weight"])


@dataclass(frozen=True)
class FromTheFirst(BySize):
    """Sends its way from the first model, whichever it trained."""

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload.replace(delta=self.shared_part(client.net, local) - client.received.model), memory


@dataclass(frozen=True)
class Another(BySize):
    """Trains a model that is not the best."""

    def chosen(self, client):
        return self.clusters - 1 - super().chosen(client)


def test_the_textbook_notices():
    right, _ = ifca(WORLD, BySize(clusters=3), by_size)
    for wrong in (FromTheFirst(clusters=3), Another(clusters=3)):
        assert gap(values(by_package(WORLD, wrong), wrong), right) > 1e-4


def test_refused():
    upload = by_package(WORLD, IFCA()).replies[0][0].upload
    server = Server(network(), Tree(), 3)
    assert IFCA().validate_upload(server, upload, upload) == ""
    wrong = upload.replace(cluster=torch.tensor(2))
    assert IFCA().validate_upload(server, wrong, upload) == "there is no cluster of its number"
