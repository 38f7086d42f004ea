"""SPATL against what it is made of, and against plain loops over filters, gradients and predictors."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlens import config
from fedlens.algorithms import SPATL, FedAvg, FedPer, Scaffold, spatl
from fedlens.core.batches import Federation, Shard, identity, plan, split_holdout
from fedlens.core.engine import Job, Reply
from fedlens.core.errors import BadInput
from fedlens.core.memories import Memories
from fedlens.core.network import Network
from fedlens.core.objective import by_examples, uniformly
from fedlens.core.optimizer import Adam, Sgd
from fedlens.core.rng import key, seeded
from fedlens.core.run import run, timetable
from fedlens.core.transform import Clip, TopK
from fedlens.core.tree import Tree
from fedlens.core.wire import decode, encode
from fedlens.engines.sequential import Sequential
from fedlens.experiment import Experiment
from fedlens.papers.spatl import tables as papers
from fedlens.runs.folder import RunFolder
from fedlens.selection.graph import layer_graph
from fedlens.selection.pruning import listed, unpacked
from fedlens.selection.search import SearchResult
from fedlens.simulate import run as simulate
from small import Net, federation, same
from textbook import EVERYONE, NEVER_THE_LAST, SEED, TWO_OF_THREE, World

OFFICIAL = SPATL(**SPATL.presets["official"])
LARGE = (80, 45, 66)  # enough images that a twentieth of them are of several classes
TOLERANCE = 1e-12


class Residual(nn.Module):
    """Two convolutions whose outputs are added, norms behind both, a bias in one, and a layer that is none."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.conv2, self.norm2 = nn.Conv2d(5, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.hidden = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def features(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(x + self.norm2(self.conv2(x)))
        return F.relu(self.hidden(x.mean((2, 3))))

    def forward(self, x):
        return self.head(self.features(x))


FILTERS = {  # weight -> the convolution whose filters its rows belong to
    **{name: "conv1" for name in ("conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias")},
    **{name: "conv1" for name in ("norm1.running_mean", "norm1.running_var")},
    **{name: "conv2" for name in ("conv2.weight", "norm2.weight", "norm2.bias")},
    **{name: "conv2" for name in ("norm2.running_mean", "norm2.running_var")},
}


def network(kind: type = Residual) -> Network:
    with seeded(7):
        return Network(kind(), "fp64")


LAYERS = layer_graph(network()).layers


class Outcome(NamedTuple):
    state: Tree
    engine: Sequential
    replies: list[list[Reply]]
    jobs: list[Job]

    def memory(self, client: int) -> Tree:
        return self.engine.memories.get(client)

    def uploads(self, round: int = 0) -> dict[int, Tree]:
        return {reply.client: reply.upload for reply in self.replies[round]}


def play(
    recipe: Any,
    world: World | None = None,
    kind: type = Residual,
    data: Federation | None = None,
    **changes: Any,
) -> Outcome:
    world = world or World(sizes=LARGE)
    net, replies, jobs = network(kind), [], []
    engine = Sequential(net, data or federation(world.sizes, identity), checked=True)

    def observe(server, job, answers):
        replies.append(answers)
        jobs.append(job)

    server = run(recipe, net, engine, replace(world.stage(), **changes), seed=SEED, observe=observe)
    return Outcome(server.state, engine, replies, jobs)


def far(a: Tree, b: Tree) -> float:
    theirs = b.leaves(a)
    return max((float((x - y).abs().max()) for x, y in zip(a.leaves(), theirs, strict=True)), default=0.0)


def chosen(upload: Tree) -> dict[str, list[int]]:
    kept = unpacked(upload.kept, LAYERS)
    return {name: listed(filters) for name, filters in kept.items()}


# ---- what it is when parts are left out ------------------------------------------------------------------------------
worlds = pytest.mark.parametrize("world", [World(EVERYONE), World(TWO_OF_THREE), World(NEVER_THE_LAST, momentum=0.0)])


@worlds
def test_without_anything_of_its_own_it_is_fedavg(world):
    bare = SPATL(selector="all", control_scale=0.0, private="none")
    found, expected = play(bare, world), play(FedAvg(), world, weighting=uniformly)
    assert same(found.state, expected.state)
    assert [list(reply.upload) for reply in found.replies[0]] == [["delta", "weight"]] * len(found.replies[0])


@worlds
def test_with_transfer_alone_it_is_fedper(world):
    found = play(SPATL(selector="all", control_scale=0.0), world)
    expected = play(FedPer(), world, weighting=uniformly)
    assert same(found.state, expected.state)
    for client in expected.engine.memories:
        assert same(found.memory(client).private, expected.memory(client).private)


@worlds
@pytest.mark.parametrize("control_upload", ["dense", "salient"])
def test_without_selection_and_transfer_it_is_scaffold(world, control_upload):
    found = play(SPATL(selector="all", private="none", control_upload=control_upload), world)
    expected = play(Scaffold(), world)
    assert same(found.state, expected.state)
    for client in expected.engine.memories:
        assert same(found.memory(client).control, expected.memory(client).control)


@dataclass(frozen=True)
class PersonalScaffold(FedPer, Scaffold):
    """SCAFFOLD with a private head."""


@worlds
@pytest.mark.parametrize("selector", ["all", "uniform", "l2_global", "random"])
def test_with_everything_selected_it_is_scaffold_with_a_private_head(world, selector):
    found, expected = play(SPATL(selector=selector, budget=1.0), world), play(PersonalScaffold(), world)
    assert same(found.state, expected.state)
    for client in expected.engine.memories:
        for name in ("private", "control"):
            assert same(found.memory(client)[name], expected.memory(client)[name])


# ---- what is sent ----------------------------------------------------------------------------------------------------
SELECTORS = ["rl", "uniform", "l2_global", "random"]


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("control_upload", ["dense", "salient"])
def test_only_kept_filters_are_sent(selector, control_upload):
    """In the first round clients train as they would without selection: the rows are those of what they learned."""
    recipe = SPATL(selector=selector, budget=0.6, control_upload=control_upload, episodes=3)
    found, whole = play(recipe), play(trains_like(selector))
    for client, upload in found.uploads().items():
        kept, dense = chosen(upload), whole.uploads()[client]
        assert 0 < len(kept["conv1"]) + len(kept["conv2"]) < 10
        for part in ("params", "buffers"):
            assert upload.delta[part].keys() == dense.delta[part].keys()
            for name, rows in upload.delta[part].items():
                all_rows = dense.delta[part][name]
                wanted = [all_rows[at] for at in kept[FILTERS[name]]] if name in FILTERS else list(all_rows)
                assert torch.equal(rows, torch.stack(wanted))
        for name, rows in upload.control.items():
            cut = control_upload == "salient" and name in FILTERS
            wanted = dense.control[name][kept[FILTERS[name]]] if cut else dense.control[name]
            assert torch.equal(rows, wanted)
        assert upload.kept.dtype == torch.uint8 and upload.kept.numel() == 2  # ten filters, one bit each
        assert same(decode(encode(upload)), upload)


@pytest.mark.parametrize("selector", ["rl", "uniform", "l2_global"])
def test_filters_that_stay_have_the_largest_norms(selector):
    found, whole = play(SPATL(selector=selector, budget=0.6, episodes=3)), play(trains_like(selector))
    for client, upload in found.uploads().items():
        for layer, kept in chosen(upload).items():
            name = f"{layer}.weight"
            trained = whole.jobs[0].download.model.params[name] + whole.uploads()[client].delta.params[name]
            norms = [float(filter.pow(2).sum()) for filter in trained]
            gone = [norms[at] for at in range(5) if at not in kept]
            assert min(norms[at] for at in kept) > max(gone, default=-1.0)


def test_random_filters_are_others_for_every_client_and_round():
    found = play(SPATL(selector="random", budget=0.6))
    seen = [
        tuple(map(tuple, chosen(upload).values())) for round in range(3) for upload in found.uploads(round).values()
    ]
    assert len(set(seen)) > 4


@pytest.mark.parametrize("selector", SELECTORS)
def test_what_is_private_never_travels(selector):
    found = play(SPATL(selector=selector, episodes=3))
    sent = [job.download for job in found.jobs] + [reply.upload for round in found.replies for reply in round]
    paths = {path for message in sent for path, _ in message.paths()}
    assert any(path.endswith("hidden.weight") for path in paths)
    assert not [path for path in paths if "head" in path or "agent" in path or "selection" in path]


def test_the_stem_may_stay_as_well():
    found = play(SPATL(selector="uniform", private="predictor_and_stem", constraint="params", budget=0.9))
    paths = {path for round in found.replies for reply in round for path, _ in reply.upload.paths()}
    assert not [path for path in paths if path.rpartition("/")[2].startswith(("conv1", "norm1", "head"))]
    assert "delta/buffers/norm2.running_var" in paths
    assert set(found.memory(0).private.params) == {
        "conv1.weight",
        "conv1.bias",
        "norm1.weight",
        "norm1.bias",
        "head.weight",
        "head.bias",
    }


@pytest.mark.parametrize("selector", SELECTORS)
def test_bytes_of_an_upload(selector):
    """Eight bytes a number: rows of kept filters, what is no filter's, one bit a filter, the weight."""
    found = play(SPATL(selector=selector, budget=0.6, control_upload="salient", episodes=3))
    scaffold = play(PersonalScaffold())
    for client, upload in found.uploads().items():
        kept = {name: len(filters) for name, filters in chosen(upload).items()}
        params = kept["conv1"] * (9 + 1 + 2) + kept["conv2"] * (45 + 2) + (5 * 6 + 6)
        statistics = 2 * (kept["conv1"] + kept["conv2"])
        assert upload.nbytes == 8 * (2 * params + statistics + 1) + 2
        assert upload.nbytes < scaffold.uploads()[client].nbytes


# ---- what the server makes of it -------------------------------------------------------------------------------------
def aggregated(name: str, old: torch.Tensor, uploads: dict[int, Tree], part: str, weights: dict[int, float], how: str):
    """Filter by filter, client by client."""
    new = old.clone()
    for row in range(len(old)):
        moved, senders = torch.zeros_like(old[row]), 0.0
        for client, upload in uploads.items():
            kept = chosen(upload)[FILTERS[name]] if name in FILTERS else list(range(len(old)))
            if row in kept:
                moved = moved + weights[client] * upload.delta[part][name][kept.index(row)]
                senders += weights[client]
        among = sum(weights.values()) if how == "all_selected" else senders
        if senders:
            new[row] = old[row] + moved / among
    return new


@pytest.mark.parametrize("how", ["all_selected", "per_index"])
@pytest.mark.parametrize("weighting", [uniformly, by_examples])
def test_aggregation_filter_by_filter(how, weighting):
    recipe = SPATL(selector="random", budget=0.4, normalise=how)
    found = play(recipe, World(((0, 1, 2),), sizes=LARGE), weighting=weighting)
    old, uploads = found.jobs[0].download.model, found.uploads()
    weights = {client: float(LARGE[client]) if weighting is by_examples else 1.0 for client in uploads}
    never = 0
    for part, tree in old.items():
        for name, leaf in tree.items():
            expected = aggregated(name, leaf, uploads, part, weights, how)
            new = found.state.model[part][name]
            assert float((new - expected).abs().max()) <= TOLERANCE
            for row in range(len(leaf)) if name in FILTERS else ():
                if not any(row in chosen(upload)[FILTERS[name]] for upload in uploads.values()):
                    never += 1
                    assert torch.equal(new[row], leaf[row])
    assert never  # some filter was sent by nobody


def test_running_variances_stay_positive():
    found = play(SPATL(selector="random", budget=0.4, normalise="all_selected"))
    assert all(float(leaf.min()) > 0 for name, leaf in found.state.model.buffers.items() if name.endswith("var"))


@pytest.mark.parametrize("among", ["population", "cohort"])
@pytest.mark.parametrize("control_upload", ["dense", "salient"])
def test_controls_of_server_and_clients(control_upload, among):
    """Round by round: the server's moves by the sum of what was sent, a client's by what it sent itself."""
    recipe = SPATL(selector="random", budget=0.4, control_upload=control_upload, control_norm=among)
    found = play(recipe, World(TWO_OF_THREE, sizes=LARGE))
    ours = {client: found.state.control.zeros() for client in range(3)}
    server = found.state.control.zeros()
    for round, replies in enumerate(found.replies):
        for name, before in found.jobs[round].download.control.items():
            assert float((before - server[name]).abs().max()) <= TOLERANCE
        for reply in replies:
            for name, rows in reply.upload.control.items():
                cut = control_upload == "salient" and name in FILTERS
                where = chosen(reply.upload)[FILTERS[name]] if cut else list(range(len(rows)))
                for at, row in enumerate(where):
                    ours[reply.client][name][row] += rows[at]
                    server[name][row] += rows[at] / (3 if among == "population" else len(replies))
    assert far(server, found.state.control) <= TOLERANCE
    assert all(far(ours[client], found.memory(client).control) <= TOLERANCE for client in ours)
    assert far(server, server.zeros()) > 1e-3


# ---- gradient control ------------------------------------------------------------------------------------------------
def raw_path(outcome: Outcome, world: World, round: int, client: int, recipe: SPATL, at_end: bool):
    """The client's local training in plain torch, and the mean of its gradients as momentum weighs them.

    Only the encoder is controlled. `at_end`: the control is put on after each step instead of into the gradient.
    """
    download = outcome.jobs[round].download
    model = copy.deepcopy(network().module)
    values = {**download.model.params, **download.model.buffers, **outcome.private[client]}  # pyright: ignore
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name in values:
            value.data.copy_(values[name])
    pull = {
        name: recipe.control_scale * (download.control[name] - outcome.controls[client][name])  # pyright: ignore
        for name in download.control
    }
    rate, model = world.rate(round), model.train()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=world.momentum)
    batches, mean = world.batches(round, client), {name: torch.zeros_like(pull[name]) for name in pull}
    reach = [(1 - world.momentum ** (len(batches) - t)) / (1 - world.momentum) for t in range(len(batches))]
    for t, (x, y, weight) in enumerate(batches):
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        ((losses * weight).sum() / weight.sum()).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            p.grad += 1e-3 * p.detach()
            if name in pull:
                mean[name] += reach[t] / sum(reach) * p.grad
                if not at_end:
                    p.grad += pull[name]
        optimizer.step()
        for name, p in model.named_parameters():
            if name in pull and at_end:
                p.data -= rate * pull[name]
    return mean, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("at", ["grad", "post_step"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_control_is_the_mean_gradient(momentum, at, scale):
    """Whatever the controls themselves added to the path, in every round."""
    world = World(TWO_OF_THREE, momentum=momentum, sizes=LARGE)
    recipe = SPATL(selector="all", control_scale=scale, control_at=at)
    found = play(recipe, world)
    first = network().initial_weights()
    private = {client: {n: v for n, v in first.params.items() if n.startswith("head")} for client in range(3)}
    controls = {client: {n: torch.zeros_like(v) for n, v in found.state.control.items()} for client in range(3)}
    known = type("Known", (), {"jobs": found.jobs, "private": private, "controls": controls})
    for round, cohort in enumerate(TWO_OF_THREE):
        for client in cohort:
            mean, end = raw_path(known, world, round, client, recipe, at == "post_step")  # pyright: ignore
            upload = found.uploads(round)[client]
            for name, delta in upload.delta.params.items():
                trained = found.jobs[round].download.model.params[name] + delta
                assert float((trained - end[name]).abs().max()) <= TOLERANCE
                now = controls[client][name] + upload.control[name]
                assert float((now - mean[name]).abs().max()) <= 1e-11  # divided by the rate and the reach
            controls[client] = mean
            private[client] = {n: v for n, v in end.items() if n.startswith("head")}


def test_after_one_step_the_control_is_the_gradient():
    world = World(((0,),), momentum=0.0, epochs=1, sizes=(8, 8, 8), batch=8)
    found = play(SPATL(selector="all"), world)
    model = copy.deepcopy(network().module).train()
    ((x, y, _),) = world.batches(0, 0)
    F.cross_entropy(model(x), y).backward()
    for name, p in model.named_parameters():
        if not name.startswith("head"):
            expected = p.grad + 1e-3 * p.detach()  # pyright: ignore
            assert float((found.memory(0).control[name] - expected).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("selector", ["rl", "all"])
def test_without_steps_nothing_moves(selector):
    found = play(SPATL(selector=selector, episodes=2), World(sizes=(25, 0, 33), epochs=0))
    first = network().initial_weights()
    for part, tree in found.state.model.items():
        assert all(torch.equal(leaf, first[part][name]) for name, leaf in tree.items())
    assert far(found.state.control, found.state.control.zeros()) == 0
    assert far(found.memory(0).control, found.state.control) == 0


def test_what_the_released_code_does():
    """One round: all but stem and head is sent, weighed by examples; the control is the path over rate and steps."""
    world = World(EVERYONE, sizes=LARGE)
    found = play(OFFICIAL, world)
    uploads = found.uploads()
    assert [float(upload.weight) for upload in uploads.values()] == list(LARGE)
    assert "kept" not in uploads[0] and "conv1.weight" not in uploads[0].delta.params
    for round in range(3):
        for client, upload in found.uploads(round).items():
            steps = len(world.batches(round, client))
            for name, delta in upload.delta.params.items():
                expected = -delta / (world.rate(round) * steps) - found.jobs[round].download.control[name]
                assert float((upload.control[name] - expected).abs().max()) <= TOLERANCE
    total = {n: sum(u.control[n] for u in uploads.values()) / 3 for n in found.state.control}
    assert all(float((found.jobs[1].download.control[n] - total[n]).abs().max()) <= TOLERANCE for n in total)
    alike = play(OFFICIAL, world, weighting=uniformly)
    assert [float(upload.weight) for upload in alike.uploads().values()] == [1, 1, 1]


@pytest.mark.parametrize(("kind", "stays"), [(Residual, {"conv1", "norm1", "head"}), (Net, {"head"})])
def test_released_code_keeps_the_stem_of_residual_networks_alone(kind, stays):
    """Its VGG-11 and two-layer CNN share their first convolution."""
    net = network(kind)
    private = [name for name in net.initial_weights().params if OFFICIAL.is_private(net, name)]
    assert {name.partition(".")[0] for name in private} == stays


# ---- the agent at the client -----------------------------------------------------------------------------------------
def searches(monkeypatch) -> list[tuple[int, Tree]]:
    """How many episodes each search was asked for, and with which agent."""
    asked: list[tuple[int, Tree]] = []

    def watched(seen, agent, choice, judge, episodes, seed, learns):
        asked.append((episodes, agent))
        after = agent.replace(weights=agent.weights * 1.5)
        return SearchResult(choice.uniform(), after, 0.5, 40.0)

    monkeypatch.setattr(spatl, "search", watched)
    return asked


def test_agents_persist(monkeypatch):
    asked = searches(monkeypatch)
    found = play(SPATL(), World(((0, 2), (0,), (0,)), sizes=LARGE))
    assert [episodes for episodes, _ in asked] == [30, 30, 5, 5]
    ours = [asked[at][1] for at in (0, 2, 3)]
    assert same(ours[1].weights, ours[0].weights * 1.5) and same(ours[2].weights, ours[1].weights * 1.5)
    assert same(found.memory(0).agent.weights, ours[2].weights * 1.5)
    chosen = found.memory(0).selection
    assert (float(chosen.accuracy), float(chosen.reward)) == (0.5, 40.0) and 0 <= float(chosen.dense) <= 1


def test_fresh_agents_do_not(monkeypatch):
    asked = searches(monkeypatch)
    play(SPATL(agent="fresh"), World(((0,), (0,)), sizes=LARGE))
    assert [episodes for episodes, _ in asked] == [30, 30]
    assert (
        not same(asked[0][1].weights, asked[1][1].weights) and float(asked[1][1].optimizer.steps["actor.far.bias"]) == 0
    )


def test_agents_from_a_file(monkeypatch, tmp_path):
    first = play(SPATL(episodes=2), World(((0,),), sizes=LARGE))
    from fedlens.selection import save_agent

    save_agent(first.memory(0).agent, tmp_path / "agent")
    asked = searches(monkeypatch)
    play(SPATL(pretrained=str(tmp_path / "agent")), World(((0, 1),), sizes=LARGE))
    assert all(same(agent.weights, first.memory(0).agent.weights) for _, agent in asked) and len(asked) == 2


def test_of_a_pretrained_agent_the_head_alone_may_learn(tmp_path):
    first = play(SPATL(episodes=2), World(((0,),), sizes=LARGE)).memory(0).agent
    from fedlens.selection import save_agent

    save_agent(first, tmp_path / "agent")
    recipe = SPATL(episodes=2, pretrained=str(tmp_path / "agent"), agent_learns="head")
    after = play(recipe, World(((0,),), sizes=LARGE)).memory(0).agent
    stays = {name for name, leaf in after.weights.items() if torch.equal(leaf, first.weights[name])}
    encoders = [f"{who}.{part}" for who in ("actor", "critic") for part in ("near", "far")]
    assert stays == {f"{part}.{what}" for part in encoders for what in ("weight", "bias")}


@dataclass(frozen=True)
class HoldsOut(SPATL):
    """Trains on the images that a client trains on whose agent is rewarded on the others."""

    def holdout_size(self, examples):
        return SPATL().holdout_size(examples)


def trains_like(selector: str) -> SPATL:
    return HoldsOut(selector="all") if selector == "rl" else SPATL(selector="all")


def test_rewards_are_measured_on_images_that_are_never_trained_on():
    """A twentieth of them, the same ones in every round; what they show does not reach the weights."""
    assert [SPATL().holdout_size(n) for n in (0, 1, 2, 40, 41, 10**6)] == [0, 0, 1, 2, 3, 1000]
    assert SPATL(validation=1).holdout_size(40) == 1 and SPATL(selector="uniform").holdout_size(40) == 0
    index = torch.arange(100, 140)
    mine, held = split_holdout(index, 2, 5)
    assert sorted([*mine.tolist(), *held.tolist()]) == index.tolist() and len(held) == 2
    assert torch.equal(held, split_holdout(index, 2, 5)[1]) and not torch.equal(held, split_holdout(index, 2, 6)[1])
    data = federation(LARGE, identity)
    others = torch.cat([split_holdout(data.train[i], SPATL().holdout_size(n), i)[1] for i, n in enumerate(LARGE)])
    spoilt = data.data.x.clone()
    spoilt[others] = torch.nan
    world = World(((0, 1),), sizes=LARGE)
    clean, dirty = (
        play(HoldsOut(selector="all"), world, data=replace(data, data=replace(data.data, x=x)))
        for x in (data.data.x, spoilt)
    )
    assert same(clean.uploads()[0], dirty.uploads()[0])


def test_rewards_are_accuracies_of_sub_models():
    net, data = network(Net), federation((40, 300), identity)
    weights, (layer,) = net.initial_weights(), layer_graph(net).layers
    tried = [{"conv": 0b0101}, {"conv": 0b1000}, {}]
    whole = Shard(data.data, data.train[1])
    expected = []
    for kept in tried:
        model = copy.deepcopy(net.module).eval()
        for at in range(4):
            if not kept.get("conv", 15) >> at & 1:
                for leaf in (*model.conv.parameters(), *model.norm.parameters()):  # pyright: ignore
                    leaf.data[at] = 0
        right = sum(int(model(whole.x[at : at + 1]).argmax()) == int(whole.y[at]) for at in range(300))
        expected.append(right / 300)
    assert layer.norms == ("norm",)
    assert spatl.accuracies(net, weights, tried, whole) == expected and len(set(expected)) > 1


def test_sub_models_with_norms_of_their_own():
    """By a plain module whose norm is told the mean and variance of what reaches it."""
    net, data = network(Net), federation((40, 300), identity)
    weights, whole = net.initial_weights(), Shard(data.data, data.train[1])
    some = spatl.spaced(whole, 100)
    assert some.index.tolist() == whole.index[::3].tolist() and len(spatl.spaced(whole, 1000)) == 300
    tried, expected = [{"conv": 0b0101}, {"conv": 0b1000}, {}], []
    for kept in tried:
        model: Any = copy.deepcopy(net.module).eval()
        for at in range(4):
            if not kept.get("conv", 15) >> at & 1:
                for leaf in (*model.conv.parameters(), *model.norm.parameters()):
                    leaf.data[at] = 0
        seen = model.conv(some.x).detach()
        model.norm.running_mean, model.norm.running_var = seen.mean((0, 2, 3)), seen.var((0, 2, 3))
        expected.append(int((model(whole.x).argmax(1) == whole.y).sum()) / 300)
    before = weights.clone()
    assert spatl.accuracies(net, weights, tried, whole, some.x) == expected
    assert expected != spatl.accuracies(net, weights, tried, whole)
    assert same(weights, before) and {part.momentum for _, part in net.norms} == {0.1}


def test_a_search_may_judge_sub_models_with_norms_of_their_own(monkeypatch):
    plain, settled_on = spatl.accuracies, []

    def watched(net, weights, tried, part, settling=None):
        settled_on.append(settling)
        return plain(net, weights, tried, part, settling)

    monkeypatch.setattr(spatl, "accuracies", watched)
    data, world = federation(LARGE, identity), World(((0,),), sizes=LARGE)
    play(SPATL(), world, data=data)
    assert settled_on and all(each is None for each in settled_on)
    settled_on.clear()
    play(SPATL(settle=True), world, data=data)
    mine = split_holdout(data.train[0], SPATL().holdout_size(LARGE[0]), 0)[0]
    assert settled_on and all(torch.equal(each, data.data.x[mine[::38]]) for each in settled_on)


class Counted(Residual):
    """Counts the images that pass it: with gradients, and without."""

    passed: ClassVar[Counter[bool]] = Counter()

    def __init__(self):
        super().__init__()
        self.conv1.register_forward_pre_hook(
            lambda module, given: self.passed.update({torch.is_grad_enabled(): len(given[0])})
        )


@pytest.mark.parametrize("images", [64, 400, 6500])
@pytest.mark.parametrize("preset", ["", "smaller"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_search_costs_no_more_than_an_epoch(images, preset, rounds):
    """A training step on an image is a forward pass and a backward one, which costs twice as much."""
    recipe, world = SPATL(**SPATL.presets.get(preset, {})), World(((0,),) * rounds, sizes=(images,), epochs=1, batch=50)
    Counted.passed.clear()
    found = play(recipe, world, kind=Counted)
    trained = images - recipe.holdout_size(images)
    assert Counted.passed[True] >= rounds * trained and not found.memory(0).selection.reward.isnan()
    assert recipe.holdout_size(images) * 20 < Counted.passed[False] <= 3 * rounds * trained


def test_settling_stops_where_it_costs_too_much():
    def settled_on(images: int, episodes: int) -> int:
        mine = Shard(federation((images,), identity).data, torch.arange(images))
        some = SPATL(settle=True).settling(mine, -(-images // 20), episodes)
        return 0 if some is None else len(some)

    assert [settled_on(images, 30) for images in (1, 20, 60, 95, 950)] == [0, 0, 0, 2, 28]
    assert [settled_on(images, 5) for images in (1, 20, 60, 95, 950)] == [0, 7, 20, 32, 238]
    assert settled_on(10_000, 30) == 250 == len(range(0, 10_000, 40))  # as without any such limit


def test_a_client_that_shows_one_class_takes_the_same_ratio_everywhere(monkeypatch):
    monkeypatch.setattr(spatl, "search", lambda *_: pytest.fail("there is nothing to learn"))
    data = federation(LARGE, identity)
    one = replace(data, data=replace(data.data, y=torch.zeros_like(data.data.y)))
    world = World(((0, 1),), sizes=LARGE)
    found = play(SPATL(), world, data=one)
    expected = play(HoldsOut(selector="uniform"), world, data=one)
    assert same(found.uploads()[0], expected.uploads()[0])
    assert bool(found.memory(0).selection.reward.isnan())
    assert float(found.memory(0).agent.optimizer.steps["actor.far.bias"]) == 0


def test_a_run_resumes_from_bytes_after_every_round(tmp_path):
    recipe, world = SPATL(episodes=4, later_episodes=2), World(TWO_OF_THREE, sizes=LARGE)
    expected = play(recipe, world)

    class Stopped(Exception):
        pass

    for stop in range(1, len(timetable(recipe, world.stage()))):
        folder = tmp_path / str(stop)
        first = Sequential(network(), federation(LARGE, identity), memories=Memories(folder))

        def halt(server, job, replies, stop=stop, first=first):
            if server.round == stop:
                first.save(stop)
                raise Stopped(encode(server.state))

        with pytest.raises(Stopped) as caught:
            run(recipe, network(), first, world.stage(), seed=SEED, observe=halt)
        second = Sequential(network(), federation(LARGE, identity), memories=Memories(folder, round=stop))
        state = decode(caught.value.args[0])
        found = run(recipe, network(), second, world.stage(), seed=SEED, state=state, round=stop)
        assert same(expected.state, found.state)
        assert all(same(expected.memory(client), second.memories.get(client)) for client in range(3))


# ---- clients that never took part ------------------------------------------------------------------------------------
def personal(recipe: SPATL, outcome: Outcome, client: int) -> tuple[Tree, Any]:
    job = replace(outcome.jobs[-1], round=7, download=outcome.jobs[-1].download)
    view, _ = outcome.engine.open(job, client)
    return recipe.personal(view), view


def test_a_predictor_is_adapted_on_the_frozen_encoder():
    """In plain torch: features once in evaluation mode, then a linear layer on them."""
    recipe = SPATL(selector="all", adapt_epochs=3)
    found = play(recipe, World(((0, 1),), sizes=(40, 25, 130)))
    weights, view = personal(recipe, found, 2)
    first, sent = network().initial_weights(), view.received.model
    for part, tree in sent.items():
        assert all(torch.equal(weights[part][name], leaf) for name, leaf in tree.items())
    model = copy.deepcopy(network().module).eval()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        value.data.copy_({**first.params, **first.buffers, **sent.params, **sent.buffers}[name])
    head, features = model.head, model.features(view.data.x).detach()  # pyright: ignore
    descent = torch.optim.SGD(head.parameters(), view.optimizer.lr, momentum=0.9, weight_decay=1e-3)  # pyright: ignore
    rows = plan(130, 64, key(view.key, "adapted"), epochs=3)
    for row, weight in zip(rows.rows, rows.weights, strict=True):
        descent.zero_grad()
        losses = F.cross_entropy(head(features[row]), view.data.y[row], reduction="none")  # pyright: ignore
        ((losses * weight).sum() / weight.sum()).backward()
        descent.step()
    for name, parameter in head.named_parameters():  # pyright: ignore
        value = parameter.detach()
        assert float((weights.params[f"head.{name}"] - value).abs().max()) <= TOLERANCE
        assert float((value - first.params[f"head.{name}"]).abs().max()) > 1e-3
    assert len(rows.rows) == 9


def test_those_who_took_part_keep_the_predictor_they_have():
    recipe = SPATL(selector="all")
    found = play(recipe, World(((0, 1),), sizes=LARGE))
    weights, view = personal(recipe, found, 0)
    assert same(weights.params.within(view.memory.private.params), view.memory.private.params)
    same_for_all = SPATL(selector="all", private="none")
    found = play(same_for_all, World(((0, 1),), sizes=LARGE))
    weights, view = personal(same_for_all, found, 2)
    assert same(Tree(params=weights.params, buffers=weights.buffers), view.received.model)


# ---- bad input -------------------------------------------------------------------------------------------------------
class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.hidden, self.head = nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, 3)

    def features(self, x):
        return self.hidden(self.flat(x))


class OneFilter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 1, 3), nn.Linear(1, 3)

    def features(self, x):
        return self.conv(x).mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


class Headless(Residual):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 3), nn.Identity()


@pytest.mark.parametrize(
    ("kind", "recipe", "sentence"),
    [
        (Flat, SPATL(), "selects filters of convolutions, and the shared part of this network has none"),
        (Net, SPATL(private="predictor_and_stem"), "selects filters of convolutions, and the shared part"),
        (
            Net,
            SPATL(selector="all", private="predictor_and_stem"),
            "algorithm.private=predictor_and_stem leaves nothing of this network to share",
        ),
        (Headless, SPATL(), "its own predictor, and this network's head has no weights"),
        (Residual, SPATL(budget=0.5, keep_floor=0.9), "algorithm.budget=0.5 cannot be met: keep_floor=0.9"),
        (OneFilter, SPATL(), "nothing of this network can be cut out; take algorithm.selector=all"),
        (Residual, SPATL(pretrained="nowhere"), "algorithm.pretrained=nowhere: there is no such file"),
    ],
)
def test_networks_and_settings_that_do_not_go_together(kind, recipe, sentence):
    with pytest.raises(BadInput, match=sentence):
        play(recipe, kind=kind)


def test_a_network_without_convolutions_can_be_shared_whole():
    assert "control" in play(SPATL(selector="all"), kind=Flat).state


@pytest.mark.parametrize("name", ["budget", "keep_floor"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_ratios_out_of_range(name, value):
    with pytest.raises(BadInput, match=rf"algorithm.{name} is {value}, but it should be"):
        config.read(words=["algorithm=spatl", f"algorithm.{name}={value}"])
    with pytest.raises(BadInput, match=rf"algorithm.{name} is {value}, but it should be above 0 and at most 1"):
        SPATL(**{name: value})


def test_configuration():
    with pytest.raises(BadInput, match=r"algorithm.selector is 'unifrom', but it should be 'rl', 'uniform'"):
        config.read(words=["algorithm=spatl", "algorithm.selector=unifrom"])
    experiment = config.read(words=["algorithm=spatl", "algorithm.selector=l2_global", "algorithm.budget=0.5"])
    assert experiment.algorithm == SPATL(selector="l2_global", budget=0.5)
    assert config.resolve(Experiment, config.to_dict(experiment)) == experiment
    assert config.read(words=["algorithm=spatl_official"]).algorithm == OFFICIAL  # as it was once called
    assert config.read(words=["algorithm=spatl/paper"]).algorithm == SPATL(**SPATL.presets["paper"])
    assert config.read(words=["algorithm=spatl/official"]).algorithm == OFFICIAL


def test_optimizers_and_uplinks_that_do_not_fit():
    stage = World().stage()
    with pytest.raises(BadInput, match=r"needs local.optimizer=sgd"):
        list(SPATL().stages(replace(stage, optimizer=Adam())))
    assert list(SPATL(control_scale=0.0).stages(replace(stage, optimizer=Adam())))
    with pytest.raises(BadInput, match=r"uplink topk packs what spatl sends in parts already"):
        list(SPATL().stages(replace(stage, uplink=(TopK(),))))
    assert list(SPATL(selector="all").stages(replace(stage, uplink=(TopK(),))))


def test_kept_filters_can_be_clipped():
    found = play(SPATL(selector="uniform", budget=0.6), uplink=(Clip(0.01),), optimizer=Sgd(0.1))
    for upload in found.uploads().values():
        total = sum(float(rows.pow(2).sum()) for rows in upload.delta.params.values())
        assert total == pytest.approx(1e-4)


# ---- the paper's tables ----------------------------------------------------------------------------------------------
def test_tables_are_experiments():
    for grid in papers.tables():
        cells = grid.cells()
        assert {(cell.row, cell.column) for cell in cells} >= set(grid.paper)
    assert papers.megabytes_of({"bytes_up": 30e6, "bytes_down": 50e6, "rounds": 4}) == 2.0
    assert papers.accuracy_of({"personal": {"before": {"mean": 0.5}}}) == 50


def test_what_a_finished_run_holds(tmp_path):
    words = ["data=mnist5k", "model=cnn2", "clients=3", "cohort=2", "rounds=2", "local.steps=2", "engine=sequential"]
    words += ["picture=false", "evaluate.personal=before", "evaluate.personal_every=1", "algorithm=spatl"]
    experiment = config.read(words=[*words, "algorithm.episodes=2", f"out={tmp_path / 'run'}"])
    result, folder = simulate.run(experiment), RunFolder.open(tmp_path / "run")
    assert papers.bytes_to(folder, 0.0)["round"] == 1  # pyright: ignore
    looks = [row for row in folder.metrics().to_pylist() if row["metric"] == "accuracy_mean"]
    first, last = (row["value"] for row in sorted(looks, key=lambda row: row["round"]))
    reached = papers.bytes_to(folder, max(first, last))
    assert reached is not None
    if last > first:
        assert reached == {"round": 2, "bytes": result.bytes_up + result.bytes_down}
    assert papers.bytes_to(folder, 1.1) is None
    found = papers.sub_models(tmp_path / "run", batch=2, repeats=1)
    assert {each.client for each in found} == set(folder.client_memories(2)) and len(found) >= 2
    assert all(0 < each.flops <= 0.8 and each.latency > 0 and each.sent < 1 for each in found)
    plain = config.read(words=[*words[:-1], "algorithm=fedavg", f"out={tmp_path / 'plain'}"])
    simulate.run(plain)
    with pytest.raises(BadInput, match="is not a run of spatl that selects filters"):
        papers.sub_models(tmp_path / "plain")
