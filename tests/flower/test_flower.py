"""A federation over Flower gives the same bits as the sequential engine, and a node is its owner's."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import ssl
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedlens import config
from fedlens.core.batches import Dataset, Federation
from fedlens.core.engine import Reply
from fedlens.core.errors import BadInput, RunFailed
from fedlens.core.memories import Memories
from fedlens.core.run import run as run_rounds
from fedlens.core.tree import Tree
from fedlens.core.wire import encode
from fedlens.data.prepare import Prepare
from fedlens.engines.sequential import Sequential
from fedlens.flower import guard, launch, membership
from fedlens.flower.client import Trainer
from fedlens.flower.contract import contract, experiment_of, job_of, order_of
from fedlens.flower.messages import Leaf, Payload, from_bytes, from_records, leaves_of, to_bytes, to_records, tree_of
from fedlens.flower.node import Budget, Node, Policy
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate
from live import free_port, started, submit, wait_for  # noqa: F401  for tests of the documents, too

has_flower = importlib.util.find_spec("flwr") is not None
needs_flower = pytest.mark.skipif(not has_flower, reason="flwr is not installed: pip install 'fedlens[flower]'")
if has_flower:
    from flwr.app import Context, Message, RecordDict
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
    from flwr.supercore.task_identity import TaskIdentity

    from fedlens.flower import client_app
    from fedlens.flower.server_app import federate

    # What Flower says about itself in the processes that it starts.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

METHODS = {
    "fedavg": (),
    "scaffold": (),
    "fedsls": ("algorithm.pretrain_epochs=1",),
    "fedxds": ("algorithm.warmup_rounds=1", "algorithm.warmup_epochs=1", "algorithm.base=scaffold", "rounds=2"),
    "pse": ("model=pse_net", "data.size=32"),
    "spatl": ("model=resnet20", "data.size=32", "rounds=2", "local.steps=1"),
    "fedper": ("uplink=topk", "uplink.share=0.1"),
}


# ---- small federations -----------------------------------------------------------------------------------------------
def digits(path: Path, seed: int = 0, size: int = 16, train: int = 60) -> Path:
    """Blurred bars in three classes, as a file of arrays."""
    draw = np.random.default_rng(seed)
    y = np.arange(train + 30) % 3
    x = draw.integers(0, 120, (len(y), size, size), dtype=np.uint8)
    for image, label in zip(x, y, strict=True):
        image[:, 2 + 4 * label : 5 + 4 * label] += 100
    parts = {"x_train": x[:train], "y_train": y[:train], "x_test": x[train:], "y_test": y[train:]}
    np.savez(path, **parts)
    return path


def words(folder: Path, method: str = "scaffold", *more: str) -> list[str]:
    extra = [*METHODS[method], *more]
    size = 32 if "data.size=32" in extra else 16
    data = digits(folder / f"data{size}.npz", size=size)
    usual = ["clients=3", "rounds=3", "cohort=2", "local.batch_size=8", "local.steps=2", "local.lr=0.05"]
    usual += ["local.momentum=0", "picture=false", f"data={data}", "partition=iid", f"algorithm={method}"]
    return [*usual, *(word for word in extra if not word.startswith("data.size"))]


def node_file(folder: Path, client: int, **settings) -> Path:
    """A node with storage, for a trial with data that all have, and an owner who does not mind."""
    plain = {"client": client, "storage": f"node-{client}", "policy": {"raw_derived": True, "contracts": "any"}}
    trial = {"is": "npz", "path": str(folder / ("data32.npz" if (folder / "data32.npz").exists() else "data16.npz"))}
    plain |= {"privacy": None} if "data" in settings else {"simulation": trial}
    plain |= settings
    path = folder / f"node-{client}.yaml"
    path.write_text(json.dumps(plain))
    return path


def nodes(folder: Path, count: int = 3, **settings) -> list[dict]:
    return [{"node": str(node_file(folder, client, **settings))} for client in range(count)]


class Grid:
    """Flower's Grid with all nodes in this process. Content crosses as protobuf, as it does over the network."""

    def __init__(self, settings, *, lost=(), dies_at: int | None = None):
        """`lost`: (node, which of its tasks) without an answer; `dies_at`: the task at which the server is killed."""
        self.contexts = {100 + i: Context(1, 100 + i, node, RecordDict(), {}) for i, node in enumerate(settings)}
        self.lost, self.dies_at = set(lost), dies_at
        self.tasks: list[tuple[int, Payload]] = []  # (node, payload) of all work that was sent
        self.replies: dict[str, Message] = {}

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        return [self.push(message) for message in messages]

    def push(self, message) -> str:
        node, name = message.metadata.dst_node_id, str(id(message))
        content = recorddict_from_proto(recorddict_to_proto(message.content))
        if message.metadata.message_type == "train":
            if len(self.tasks) == self.dies_at:
                raise KeyboardInterrupt
            self.tasks.append((node, from_records(content)))
            if (node - 100, sum(other == node for other, _ in self.tasks) - 1) in self.lost:
                return name
        arrived = Message(content, node, message.metadata.message_type)
        arrived.metadata.__dict__["_message_id"] = name
        context = self.contexts[node]
        if "node" in context.node_config:  # a node with an owner, whose guard answers
            owned = Trainer(Node.read(Path(str(context.node_config["node"]))), say=lambda text: None)
            reply = guard.replied(arrived, owned.answer)
        else:
            reply = client_app.app(arrived, context)
        reply.content = recorddict_from_proto(recorddict_to_proto(reply.content))
        self.replies[name] = reply
        return name

    def pull_messages(self, names):
        return [self.replies.pop(name) for name in names if name in self.replies]


def deployed(out: Path, settings: list[str], grid: Grid, patience: float = 0.3):
    return federate(grid, {"settings": " ".join([*settings, f"out={out}"]), "wait": 1, "patience": patience})  # pyright: ignore


def simulated(out: Path, settings: list[str]):
    return simulate.run(config.read(None, [*settings, "engine=sequential", f"out={out}"]))


def unlike(simulated: Path, real: Path, storage: Path) -> list[str]:
    """How a deployed run differs from a simulated one, with what nodes keep in the place of the run's own memories."""
    found = [each for each in differences(simulated, real) if not each.startswith("memory of client")]
    run, folder = json.loads((real / "federation.json").read_text())["run"], RunFolder.open(simulated)
    last = max(folder.rounds())
    kept = [Memories(place, round=last) for place in storage.glob(f"**/{run}/clients")]
    for client, memory in folder.client_memories(last).items():
        mine = next((store.get(client) for store in kept if client in [*store]), None)
        found += [] if mine is not None and encode(memory) == encode(mine) else [f"memory of client {client}"]
    return found


def same(tree: Tree, other: Tree) -> bool:
    return dict(tree.paths()).keys() == dict(other.paths()).keys() and all(
        torch.equal(leaf, dict(other.paths())[path]) for path, leaf in tree.paths()
    )


def state(run: Path) -> Tree:
    checkpoint, _ = RunFolder.open(run).load()
    assert checkpoint is not None
    return checkpoint.state


# ---- payloads --------------------------------------------------------------------------------------------------------
def every_kind() -> Tree:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8)
    leaves = {str(kind)[6:]: torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    odd = Tree(
        nan=torch.tensor([float("nan"), -0.0]), none=torch.empty(0, 3), one=torch.tensor(3.5), yes=torch.ones(2) > 0
    )
    return Tree(delta=Tree(params=Tree(leaves), buffers=Tree()), odd=odd)


@pytest.mark.parametrize(
    "road",
    [
        lambda payload: from_bytes(to_bytes(payload)),
        pytest.param(
            lambda payload: from_records(recorddict_from_proto(recorddict_to_proto(to_records(payload)))),
            marks=needs_flower,
        ),
    ],
    ids=["socket", "records"],
)
def test_payloads_arrive_as_they_were_sent(road):
    tree = every_kind()
    arrived = road(Payload({"ask": "work", "number": 1}, {"download": leaves_of(tree)}))
    assert arrived.notes == {"ask": "work", "number": 1}
    there = tree_of(arrived.trees["download"])
    assert "buffers" in there.delta and not there.delta.buffers  # a branch without leaves is a part of a tree, too
    for (path, leaf), (name, other) in zip(sorted(tree.paths()), sorted(there.paths()), strict=True):
        assert (path, leaf.dtype, leaf.shape) == (name, other.dtype, other.shape)
        assert leaf.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


@needs_flower
def test_records_carry_the_names_of_checkpoints_and_no_pickle():
    large = every_kind().replace(model=Tree(head=torch.ones(1 << 16)))
    record = to_records(Payload({}, {"download": leaves_of(large)}))["tree/download"]
    assert set(record) == {"model/head", "small leaves"}  # Flower asks for every Array by itself
    assert b"delta/params/float32" in record["small leaves"].data
    assert {array.stype for array in record.values()} == {"fedlens.raw", "fedlens.packed"}
    again = from_records(
        recorddict_from_proto(recorddict_to_proto(RecordDict(to_records(Payload({}, {"t": leaves_of(large)})))))
    )
    assert tree_of(again.trees["t"]).model.head.equal(torch.ones(1 << 16))


@pytest.mark.parametrize(
    "leaf", [Leaf("float32", (3,), b"1234"), Leaf("object", (1,), b"12345678"), Leaf("float32", (-1,), b"")]
)
def test_damaged_payloads_are_refused(leaf):
    with pytest.raises(RunFailed, match="damaged: x has"):
        tree_of({"x": leaf})
    with pytest.raises(RunFailed, match="do not make a tree"):
        tree_of({"x": Leaf("uint8", (1,), b"1"), "x/y": Leaf("uint8", (1,), b"1")})


# ---- orders ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_an_order_means_the_job_it_was_made_of(method, tmp_path):
    experiment = config.read(None, words(tmp_path, method))
    timetable, made = experiment.timetable(), []

    class Watch(Sequential):
        def run(self, job, cohort):
            made.append((job, order_of(timetable, job)))
            return super().run(job, cohort)

    images = experiment.data.load()
    engine = Watch(experiment.network(images), experiment.federation(images)[0])
    folder = RunFolder.create(experiment.with_execution(out=str(tmp_path / "run")))
    start = simulate.Checkpoint(0, Tree(), simulate.Ledger(), 0.0)
    observer = recorder.Recorder(folder, experiment, engine, start, recorder.Nobody())
    run_rounds(experiment.algorithm, engine.net, engine, experiment.plan, observe=observer)
    agreed = json.loads(json.dumps(contract(experiment, images, "run")))
    received = experiment_of(agreed).timetable()
    for job, order in made:
        read = job_of(received, json.loads(json.dumps(order)), job.download, job.shared)
        assert read == job
    assert any(order["look"] for _, order in made) or not any(s.algorithm.evaluated_as for s, _, _ in timetable)
    first = made[0][1]
    for wrong in ({"stage": len(timetable), "round": len(timetable)}, {"round": first["round"] + 1}):
        with pytest.raises(BadInput, match="no part of the experiment"):
            job_of(received, {**first, **wrong}, Tree(), Tree())
    with pytest.raises(BadInput, match="described in two ways"):
        job_of(received, {**first, "since": 7}, Tree(), Tree())


def test_nodes_run_no_code_of_somebody_else(tmp_path):
    experiment = config.read(None, words(tmp_path))
    images = experiment.data.load()
    agreed = contract(experiment, images, "run")
    for part, value in (("algorithm", {"is": "os:system"}), ("model", {"is": "custom", "path": "thing:Net"})):
        with pytest.raises(BadInput, match="has not allowed"):
            experiment_of({**agreed, "experiment": {**agreed["experiment"], part: value}})
    with pytest.raises(BadInput, match=r"fedlens '9\.9'.*install the same version"):
        experiment_of({**agreed, "version": "9.9"})
    with pytest.raises(BadInput, match="algorithm 'fedfoo' is unknown"):
        experiment_of({**agreed, "experiment": {**agreed["experiment"], "algorithm": {"is": "fedfoo"}}})


# ---- the same bits ---------------------------------------------------------------------------------------------------
@needs_flower
@pytest.mark.parametrize("method", METHODS)
def test_same_bits_as_sequential(method, tmp_path):
    settings = words(tmp_path, method)
    expected = simulated(tmp_path / "simulated", settings)
    result = deployed(tmp_path / "real", settings, Grid(nodes(tmp_path)))
    assert unlike(tmp_path / "simulated", tmp_path / "real", tmp_path) == []
    assert replace(result, seconds=0, run="", engine="") == replace(expected, seconds=0, run="", engine="")
    assert result.engine == RunFolder.open(tmp_path / "real").passport()["engine"] == "flower"


class Direct:
    """The engine's part without Flower: payloads go as bytes, as over a socket, to a trainer for each client."""

    def __init__(self, experiment, images, trainers):
        self.population, self.trainers, self.kept = experiment.clients, trainers, {}
        self.order = partial(order_of, experiment.timetable())
        self.contract = contract(experiment, images, "run")

    def run(self, job, cohort):
        return [Reply(client, tree_of(self.asked(job, client).trees["upload"])) for client in cohort]

    def asked(self, job, client) -> Payload:
        trees = {"download": leaves_of(job.download), "shared": leaves_of(job.shared)}
        payload = Payload({"ask": "work", "contract": self.contract, "order": self.order(job)}, trees)
        kept = self.kept.get(client)
        answer, self.kept[client] = self.trainers[client].answer(from_bytes(to_bytes(payload)), kept)
        return answer


@pytest.mark.parametrize("method", ["scaffold", "fedxds"])
def test_same_bits_without_flower_and_without_storage(method, tmp_path):
    """Memory goes out and in as it does through Flower's context."""
    experiment = config.read(None, words(tmp_path, method))
    images = experiment.data.load()
    net, (federation, _) = experiment.network(images), experiment.federation(images)
    trainers = {i: Trainer(Node.of({"partition-id": i})) for i in range(3)}
    engines = Sequential(net, federation), Direct(experiment, images, trainers)
    one, other = (run_rounds(experiment.algorithm, net, engine, experiment.plan) for engine in engines)
    assert same(one.state, other.state)
    assert all(len(kept) <= 2 for kept in engines[1].kept.values())


@pytest.mark.parametrize("method", ["feddf", "fedaux"])
def test_same_bits_where_the_server_has_public_data(method, tmp_path):
    """Nodes never see them; FedAux gives them features, and gets each client's ticket again in every round."""
    more = [f"auxiliary={digits(tmp_path / 'public.npz', seed=1, train=20)}", "model=cnn2", "algorithm.steps=3"]
    more += ["algorithm.pretrain_steps=2", "algorithm.pretrain_batch=8"] if method == "fedaux" else []
    usual = [word for word in words(tmp_path) if not word.startswith("algorithm=")]
    experiment = config.read(None, [*usual, f"algorithm={method}", *more]).resolved()
    images = experiment.data.load()
    net, (federation, _) = experiment.network(images), experiment.federation(images)
    public = experiment.public(simulate.public_images(experiment), images)
    trainers = {i: Trainer(Node.of({"partition-id": i})) for i in range(3)}
    engines = Sequential(net, federation), Direct(experiment, images, trainers)
    one, other = (
        run_rounds(experiment.algorithm, net, engine, experiment.plan, auxiliary=public) for engine in engines
    )
    assert same(one.state, other.state)


@needs_flower
def test_memory_in_flowers_context(tmp_path):
    settings = words(tmp_path, "scaffold")
    simulated(tmp_path / "simulated", settings)
    grid = Grid([{"partition-id": i} for i in range(3)])
    deployed(tmp_path / "real", settings, grid)
    assert same(state(tmp_path / "simulated"), state(tmp_path / "real"))
    last = RunFolder.open(tmp_path / "simulated").client_memories(3)
    for client, memory in last.items():
        kept = from_records(grid.contexts[100 + client].state).trees
        assert len(kept) <= 2 and same(memory, tree_of(kept[max(kept)]))


@needs_flower
def test_a_common_payload_is_sent_once_and_again_to_those_who_lost_it(tmp_path):
    settings = words(tmp_path, "fedxds", "rounds=3")
    simulated(tmp_path / "simulated", settings)

    class Forgetful(Grid):
        def push(self, message):
            for path in tmp_path.glob("node-1/*/shared-*") if len(self.tasks) == 9 else ():
                path.unlink()
            return super().push(message)

    for kind, name in ((Grid, "real"), (Forgetful, "lossy")):
        grid = kind(nodes(tmp_path))
        deployed(tmp_path / name, settings, grid)
        assert same(state(tmp_path / "simulated"), state(tmp_path / name))
        times = Counter(node - 100 for node, payload in grid.tasks if "shared" in payload.trees)
        assert times == ({0: 1, 1: 1, 2: 1} if kind is Grid else {0: 1, 1: 2, 2: 1})


@needs_flower
def test_nodes_with_data_of_their_own(tmp_path):
    """Against one federation put together by hand, prepared with the server's mean and deviation."""
    settings = words(tmp_path, "scaffold", "cohort=3")
    files = [digits(tmp_path / f"own{i}.npz", seed=i + 1, train=30 + 9 * i) for i in range(3)]
    settings_of_nodes = [
        {"node": str(node_file(tmp_path, i, data={"is": "npz", "path": str(file)}))} for i, file in enumerate(files)
    ]
    deployed(tmp_path / "real", settings, Grid(settings_of_nodes))
    experiment = config.read(None, settings)
    images, own = experiment.data.load(), [config.read(None, [f"data={file}"]).data.load() for file in files]
    starts = np.cumsum([0, *(len(each) for each in own)])
    owned = {
        name: {i: getattr(each, name) + int(starts[i]) for i, each in enumerate(own)} for name in ("train", "test")
    }
    x, y = (torch.cat([getattr(each, name) for each in own]) for name in "xy")
    data = Dataset(x, y, Prepare(images.mean, images.std, 0, False, torch.float32))
    engine = Sequential(experiment.network(images), Federation(data, **owned))
    expected = run_rounds(experiment.algorithm, engine.net, engine, experiment.plan)
    assert same(expected.state, state(tmp_path / "real"))
    card = RunFolder.open(tmp_path / "real").passport()
    assert card["nodes_own_data"] and card["split_hash"] is None
    assert not (tmp_path / "real" / "label_counts.json").exists()  # nobody has told the server


def replace_data(array, data: bytes):
    from flwr.app import Array

    return Array(array.dtype, (len(data),), array.stype, data)


# ---- what goes wrong -------------------------------------------------------------------------------------------------
@needs_flower
def test_a_round_goes_on_without_a_lost_client(tmp_path):
    settings = words(tmp_path, "scaffold", "cohort=3", "evaluate.personal=none")
    deployed(tmp_path / "real", settings, Grid(nodes(tmp_path), lost=[(1, 1)]))
    experiment = config.read(None, settings)
    images = experiment.data.load()

    class Without(Sequential):
        def run(self, job, cohort):
            return super().run(job, [i for i in cohort if (i, job.round) != (1, 1)])

    engine = Without(experiment.network(images), experiment.federation(images)[0])
    expected = run_rounds(experiment.algorithm, engine.net, engine, experiment.plan)
    assert same(expected.state, state(tmp_path / "real"))
    assert "node 101 has not answered within 0.3 seconds" in (tmp_path / "real" / "log.txt").read_text()

    class Hostile(Grid):
        """Node 2 answers with what is no tree, then with what is no payload."""

        def pull_messages(self, names):
            found = super().pull_messages(names)
            for reply in found:
                if reply.metadata.src_node_id == 102 and "tree/upload" in reply.content:
                    record = reply.content["tree/upload"]
                    junk = (
                        b"" if len(self.tasks) > 3 else to_bytes(Payload({}, {"": {"x": Leaf("float32", (9,), b"")}}))
                    )
                    record["small leaves"] = replace_data(record["small leaves"], junk)
            return found

    deployed(tmp_path / "hostile", settings, Hostile(nodes(tmp_path)))
    said = (tmp_path / "hostile" / "log.txt").read_text()
    assert "round 1 goes on without client 2: a message is damaged" in said and "what is no answer" in said
    with pytest.raises(RunFailed, match="nobody answered in round 1"):
        deployed(tmp_path / "silent", settings, Grid(nodes(tmp_path), lost=[(i, 0) for i in range(3)]))


@needs_flower
@pytest.mark.parametrize("dies_at", [1, 3, 4])
def test_a_killed_server_goes_on_in_the_middle_of_a_round(dies_at, tmp_path):
    settings = words(tmp_path, "scaffold", "cohort=3", "evaluate.personal=none")
    simulated(tmp_path / "simulated", settings)

    class OneByOne(Grid):
        """Delivers what was answered before the server died."""

        def push_messages(self, messages):
            names = []
            for message in messages:
                try:
                    names.append(self.push(message))
                except KeyboardInterrupt:
                    names.append("never")
            return names

        def pull_messages(self, names):
            found = super().pull_messages(names)
            if not found and "never" in names:
                raise KeyboardInterrupt
            return found

    first = OneByOne(nodes(tmp_path), dies_at=dies_at)
    with pytest.raises(KeyboardInterrupt):
        deployed(tmp_path / "real", settings, first)
    second = Grid(nodes(tmp_path))
    deployed(tmp_path / "real", settings, second)
    assert unlike(tmp_path / "simulated", tmp_path / "real", tmp_path) == []
    asked = {(node, payload.notes["order"]["round"]) for node, payload in first.tasks} & {
        (node, payload.notes["order"]["round"]) for node, payload in second.tasks
    }
    assert not asked  # what had been answered was in the journal
    assert not list((tmp_path / "real" / "journal").iterdir())


@needs_flower
def test_a_killed_server_that_has_lost_its_journal_gets_the_same_answers(tmp_path):
    """Nodes with noise of their own know the order again: the same bytes, and one release in the ledger."""
    settings = words(tmp_path, "fedavg", *DP, "cohort=3")
    own = [{"is": "npz", "path": str(digits(tmp_path / f"own{client}.npz", seed=client))} for client in range(3)]

    def three() -> list[dict]:
        return [{"node": str(node_file(tmp_path, client, data=data))} for client, data in enumerate(own)]

    first = Grid(three(), dies_at=5)  # in round 2, when two have answered
    with pytest.raises(KeyboardInterrupt):
        deployed(tmp_path / "real", settings, first)
    shutil.rmtree(tmp_path / "real" / "journal")
    second = Grid(three())
    deployed(tmp_path / "real", settings, second)
    again = Counter((node, payload.notes["order"]["round"]) for node, payload in (*first.tasks, *second.tasks))
    assert again[100, 1] == again[101, 1] == 2  # asked twice
    for client in range(3):
        book = Node.read(tmp_path / f"node-{client}.yaml").ledger
        assert book is not None
        assert [line["round"] for line in book.lines() if line["kind"] == "booked"] == [1, 2, 3]


@needs_flower
def test_a_repeated_round_starts_from_the_memory_before_it(tmp_path):
    """The journal is lost with the server: clients that had answered train the round again, to the same bits."""
    settings = words(tmp_path, "scaffold", "cohort=3", "evaluate.personal=none")
    simulated(tmp_path / "simulated", settings)
    for kind, storage in (("disk", True), ("context", False)):
        place = tmp_path / kind
        place.mkdir()
        digits(place / "data16.npz")
        first = Grid(nodes(place) if storage else [{"partition-id": i} for i in range(3)], dies_at=5)
        with pytest.raises(KeyboardInterrupt):
            deployed(place / "real", settings, first)
        first.dies_at = None
        deployed(place / "real", settings, first)
        assert same(state(tmp_path / "simulated"), state(place / "real"))


@needs_flower
def test_another_experiment_in_the_same_folder_is_refused(tmp_path):
    settings = words(tmp_path, "fedavg", "rounds=1")
    done = deployed(tmp_path / "real", settings, Grid(nodes(tmp_path)))
    assert deployed(tmp_path / "real", settings, Grid([])) == done  # complete: nothing is asked of anyone
    with pytest.raises(BadInput, match="holds a run with other settings"):
        deployed(tmp_path / "real", [*settings, "rounds=2"], Grid(nodes(tmp_path)))
    with pytest.raises(BadInput, match="the whole path"):
        deployed(Path("real"), settings, Grid(nodes(tmp_path)))
    with pytest.raises(RunFailed, match="no node for clients 1, 2"):
        deployed(tmp_path / "alone", settings, Grid(nodes(tmp_path, 1)))


# ---- the owner's policy ----------------------------------------------------------------------------------------------
DP = ("uplink=dp", "uplink.multiplier=4", "evaluate.personal=none", "weighting=uniform")


@pytest.mark.parametrize(
    ("policy", "epsilon", "method", "more", "sentence"),
    [
        (Policy(("fedavg",)), None, "scaffold", (), "allows fedavg, and scaffold is not among them"),
        (Policy(("fedxds",), raw_derived=True), None, "fedxds", (), "and scaffold is not among them"),
        (Policy(), None, "fedsls", (), "model updates out alone, and this method sends saliency"),
        (Policy(), None, "fedxds", (), "this method sends x, y"),
        (Policy(), 5.0, "fedavg", (), "set uplink=dp with trust=nobody"),
        (Policy(), 5.0, "fedavg", DP[:2], "set evaluate.personal=none"),
        (Policy(), 5.0, "fedavg", DP[:3], "set weighting=uniform"),
        (Policy(), 0.1, "fedavg", DP, "of which 0.1 is left, and with this run"),
        (Policy(raw_derived=True), 50.0, "fedsls", DP[:3], "has rounds whose answers have no noise"),
        (Policy(("fedavg",)), 50.0, "fedavg", DP, ""),
        (Policy(("scaffold",)), None, "scaffold", (), ""),
        (Policy(raw_derived=True), None, "fedxds", (), ""),
    ],
)
def test_policy(policy, epsilon, method, more, sentence, tmp_path):
    experiment = config.read(None, words(tmp_path, method, *more))
    images = experiment.data.load()
    budget = None if epsilon is None else Budget(epsilon, 1e-5, "bars", str(tmp_path / "ledgers"))
    own = None if epsilon is None else experiment.data
    policy = replace(policy, contracts="any")
    node = Node(0, data=own, storage=str(tmp_path / "storage"), policy=policy, privacy=budget)
    hello = Payload({"ask": "hello", "contract": contract(experiment, images, "run")}, {})
    answer, _ = Trainer(node).answer(hello)
    assert sentence in answer.notes.get("refused", "") and ("refused" in answer.notes) == bool(sentence)
    if not sentence:
        assert answer.notes == {"client": 0, "own_data": own is not None, "own_noise": own is not None}


def test_who_passes_a_strict_policy(tmp_path):
    more = {"fedsl", "fedsls", "fedxds"}  # saliency of the data, the data themselves
    updates = {"fedavg", "fedprox", "scaffold", "fednova", "feddyn", "l2gd", "moon", "fedper", "apfl", "spatl", "local"}
    refused = set()
    for name in more | updates:
        experiment = config.read(None, [*words(tmp_path, "fedavg"), f"algorithm={name}"])
        try:
            Policy().check(experiment, 3, 1, 16)
        except BadInput as error:
            assert "model updates out alone" in str(error)
            refused.add(name)
    assert refused == more


def test_the_last_look_before_anything_leaves(tmp_path, monkeypatch):
    """Whatever the check of the whole run has overlooked."""
    experiment = config.read(None, words(tmp_path, "fedsls"))
    images = experiment.data.load()
    monkeypatch.setattr(Policy, "check", lambda *_: None)
    sent = []

    class Watch(Direct):
        def run(self, job, cohort):
            sent.extend(self.asked(job, client) for client in cohort)
            raise KeyboardInterrupt

    engine = Watch(experiment, images, {i: Trainer(Node(i)) for i in range(3)})
    with pytest.raises(KeyboardInterrupt):
        run_rounds(experiment.algorithm, experiment.network(images), engine, experiment.plan)
    assert all("updates out alone, not saliency" in a.notes["refused"] and not a.trees for a in sent) and sent


@needs_flower
def test_the_server_is_told_why_a_node_refuses(tmp_path):
    grid = Grid(nodes(tmp_path, policy={"algorithms": ["fedavg"]}))
    with pytest.raises(BadInput, match="a node refuses this run: its policy allows fedavg"):
        deployed(tmp_path / "real", words(tmp_path, "scaffold"), grid)
    assert not grid.tasks


def test_node_files(tmp_path):
    assert Node.read(node_file(tmp_path, 2)).storage == str(tmp_path / "node-2")
    for text, sentence in (
        ("client: -1\nsimulation: mnist5k", "client is -1"),
        ("storage: x", "must say which client"),
        ("client: 0\npolicy: {algorithms: [fedavgg]}\nsimulation: mnist5k", "did you mean 'fedavg'"),
        ("client: 0\npolicies: {}\nsimulation: mnist5k", "unknown key policies"),
        ("client: 0", "names no data: set data"),
        ("client: 0\ndata: mnist5k", "set `privacy: none`"),
        ("client: 0\ndata: mnist5k\nsimulation: mnist5k\nprivacy: none", "remove one of the two"),
        ("client: 0\nsimulation: mnist5k\npolicy: {epsilon: 1.0}", "is now `privacy:"),
        ("client: 0\ndata: mnist5k\nprivacy: {epsilon: 1.0, delta: 1e-5, label: a}", "needs a storage folder"),
        ("client: 0\ndata: mnist5k\nprivacy: {epsilon: 1.0}", "privacy"),
        ("client: 0\ndata: mnist5k\nstorage: x\nprivacy: {epsilon: 1, delta: 1e-5, label: ../a}", "it names a file"),
        ("client: [", "cannot be read as YAML"),
    ):
        (tmp_path / "node.yaml").write_text(text)
        with pytest.raises(BadInput, match=sentence):
            Node.read(tmp_path / "node.yaml")
    with pytest.raises(BadInput, match="partition-id=N"):
        Node.of({})
    other = digits(tmp_path / "other.npz", size=24)
    experiment = config.read(None, words(tmp_path))
    agreed = contract(experiment, experiment.data.load(), "run")
    node = Node(0, data=config.read(None, [f"data={other}"]).data, policy=Policy(contracts="any"))
    answer, _ = Trainer(node).answer(Payload({"ask": "hello", "contract": agreed}, {}))
    assert answer.notes["refused"] == "its images have another shape"


@needs_flower
def test_tasks_that_are_no_orders_get_an_error_and_the_guard_lives_on(monkeypatch):
    """An agent's task, a message that never comes whole, one that breaks Flower, a SuperNode that is gone."""
    from flwr.supercore.constant import TaskType
    from flwr.supernode.runtime import run_clientapp

    pushed, ended, said = [], [], []

    class NotRunning(BaseException):
        """As Flower's own, which no `except Exception` catches."""

    def pull(line):
        if line.broken:
            raise NotRunning("no message")
        if line.stuck:
            Event().wait(60)  # the rest of its message never comes: its server was killed
        return Message(to_records(Payload({"ask": "hello"}, {})), 1, "query"), None, None, b"the server's app"

    class Line:
        broken = gone = stuck = False

        def SendTaskHeartbeat(self, request):
            return SimpleNamespace(success=False)  # the task is over, as where its run was stopped

        def close(self): ...

    def output(line, context, status, details):
        ended.append(details)
        if line.gone:
            raise ConnectionError("gone")

    monkeypatch.setattr(run_clientapp, "pull_task_input", pull)
    monkeypatch.setattr(run_clientapp, "push_message", lambda line, reply, context: pushed.append(reply))
    monkeypatch.setattr(run_clientapp, "push_task_output", output)
    monkeypatch.setattr(guard, "say", said.append)
    kinds = [kind for kind in TaskType if kind != TaskType.CLIENT_APP]
    broken, gone, stuck = Line(), Line(), Line()
    broken.broken = gone.gone = stuck.stuck = True
    tasks = [*((Line(), kind) for kind in kinds), (broken, TaskType.CLIENT_APP), (gone, TaskType.CLIENT_APP)]
    queue = iter([(stuck, TaskType.CLIENT_APP), *tasks, (Line(), TaskType.CLIENT_APP)])

    class Got:
        def __init__(self, pair):
            self.token, self.task = pair and pair[0], pair and type("Task", (), {"type": pair[1]})

        def HasField(self, name):
            return self.token is not None

    loop = guard.turns(
        lambda: Got(next(queue, None)), lambda line: line, lambda payload: (Payload({"client": 0}, {}), None)
    )
    for _ in loop:
        if len(ended) == len(tasks) + 1:
            break
    errors = [reply.error.reason for reply in pushed if reply.has_error()]
    assert kinds and errors == ["this node answers the orders of FedLens alone"] * len(kinds)
    honest = [from_records(reply.content).notes for reply in pushed if not reply.has_error()]
    assert honest == [{"client": 0}] * 2 and len(ended) == len(kinds) + 3
    assert any("a task failed: NotRunning" in line for line in said)
    assert any("was not told that a task has ended" in line for line in said)


@needs_flower
@pytest.mark.parametrize(("status", "tries"), [(401, 1), (403, 1), (503, 3)])
def test_a_task_that_is_over_does_not_end_the_guard(status, tries):
    """Flower's own retries end the process with 401, as a SuperNode answers for a task whose run was stopped."""
    import httpx

    asked = []

    def call():
        asked.append(1)
        if len(asked) < 3 or status != 503:
            request = httpx.Request("POST", "https://node")
            raise httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))
        return "done"

    invoker = guard.patience()
    invoker.wait_function = lambda seconds: None
    if status == 503:
        assert invoker.invoke(call) == "done"
    else:
        with pytest.raises(httpx.HTTPStatusError):
            invoker.invoke(call)
    assert len(asked) == tries


@needs_flower
@pytest.mark.parametrize(
    ("status", "code", "ends"),
    [("finished:completed", 0, 0), ("finished:failed", 0, 1), ("finished:stopped", 0, 1), ("", 3, 1)],
)
def test_a_streamed_run_that_fails_is_a_command_that_fails(status, code, ends, tmp_path, monkeypatch, capfd):
    """As where a node refuses: Flower's own command ends with 0 then."""
    from fedlens.cli.main import main

    runs = iter([[{"run-id": "1", "status": "finished:failed"}]])
    after = [{"run-id": "1", "status": "finished:failed"}, *([{"run-id": "2", "status": status}] if status else [])]
    monkeypatch.setattr(launch, "server_environment", lambda folder: {})
    monkeypatch.setattr(launch, "flower_runs", lambda environment: next(runs, after))
    monkeypatch.setattr(launch, "submission", lambda folder: [sys.executable, "-c", f"raise SystemExit({code})"])
    monkeypatch.setattr(sys, "argv", ["fedlens", "deploy", "run", str(tmp_path), "--stream"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == ends
    assert ("the run has not been completed" in capfd.readouterr().err) == bool(ends)


# ---- certificates and folders ---------------------------------------------------------------------------------------
def handshake(server: Path, ca: Path, name: str) -> None:
    """TLS between two ends in memory, by Python's own library; raises where the certificate is not accepted."""
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(server / "tls.crt", server / "tls.key")
    a, b, c, d = (ssl.MemoryBIO() for _ in range(4))
    here = ssl.create_default_context(cafile=str(ca))
    ends = here.wrap_bio(a, b, server_hostname=name), there.wrap_bio(c, d, server_side=True)
    done = set()
    while len(done) < 2:
        for end, (out, into) in zip(ends, ((b, c), (d, a)), strict=True):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                pass
            into.write(out.read())


@needs_flower
def test_certificates_and_keys(tmp_path):
    for name in ("ours", "theirs"):
        launch.init(tmp_path / name, words(tmp_path), "fl.example.org", 9092)
        membership.certify(tmp_path / name, trial=True)
    server, ca = tmp_path / "ours" / "server", tmp_path / "ours" / "nodes" / "0" / "ca.crt"
    for name in ("fl.example.org", "localhost", "127.0.0.1"):
        handshake(server, ca, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(server, ca, "elsewhere.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        handshake(server, tmp_path / "theirs" / "server" / "ca.crt", "localhost")
    secret = [path for name in ("*.key", "key", "*.secret") for path in (tmp_path / "ours").rglob(name)]
    assert len(secret) == 3 + 3 * 4 and all(path.stat().st_mode & 0o077 == 0 for path in secret)
    authority = (tmp_path / "ours" / "authority" / "ca.key").read_bytes()
    assert all(path.read_bytes() != authority for path in (tmp_path / "ours" / "nodes").rglob("ca.key"))
    before = (server / "tls.crt").read_bytes()
    assert membership.certify(tmp_path / "ours", trial=True) == [] and (server / "tls.crt").read_bytes() == before


@needs_flower
def test_what_init_writes(tmp_path):
    from flwr.cli.config_utils import load_and_validate

    folder = tmp_path / "federation"
    launch.init(folder, words(tmp_path), "127.0.0.1", 9092)
    app = folder / "server" / "app"
    assert load_and_validate(app / "pyproject.toml")  # by Flower itself
    with pytest.raises(BadInput, match="already holds a federation"):
        launch.init(folder, words(tmp_path), "127.0.0.1", 9092)
    with pytest.raises(BadInput, match="`fedlens deploy certs` makes it"):
        launch.superlink(folder)
    membership.certify(folder, trial=True)
    assert "--enable-supernode-auth" in launch.superlink(folder)
    assert "--disable-runtime-dependency-installation" in launch.superlink(folder)
    assert "--insecure" not in launch.superlink(folder) + launch.supernode(folder / "nodes" / "0")
    assert launch.server_environment(folder)["FLWR_TELEMETRY_ENABLED"] == "0"
    assert Node.read(folder / "nodes" / "2" / "node.yaml").policy == Policy()
    assert launch.stop(folder) == []
    with pytest.raises(BadInput, match="no part of a federation"):
        launch.supernode(tmp_path)


# ---- real processes --------------------------------------------------------------------------------------------------
@pytest.fixture
def federation(tmp_path):
    """A SuperLink, and a folder for each of three nodes, which do not run yet."""
    with started(tmp_path / "federation", [*words(tmp_path, "scaffold"), "cohort=3"], nodes=False) as folder:
        yield folder


@needs_flower
@pytest.mark.slow
def test_strangers_are_refused(federation, tmp_path):
    """Half a minute: a node whose key is not registered, and one that trusts another authority."""
    from fedlens.flower.certificates import Authority, node_key

    stranger, deceived = (tmp_path / name for name in ("stranger", "deceived"))
    for place, client in ((stranger, 0), (deceived, 1)):
        shutil.copytree(federation / "nodes" / str(client), place)
    node_key(stranger / "key", tmp_path / "key.pub")
    shutil.copy(Authority(tmp_path / "another").certificate_file, deceived / "ca.crt")
    for place in (stranger, deceived):
        with pytest.raises(RunFailed, match="does not let this node in"):
            launch.start_node(place)
        assert launch.running(place, "supernode") is launch.running(place, "guard") is None
        assert "SuperNode ID" not in (place / "supernode.log").read_text()  # never let in
    assert "the gateway refused a stranger from 127.0.0.1" in (federation / "server" / "superlink.log").read_text()
    assert "CERTIFICATE_VERIFY_FAILED" in (deceived / "supernode.log").read_text()


STUBBORN = """
import pathlib, sys, time
tries = pathlib.Path("tries")
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
if len(tries.read_text()) <= int(sys.argv[1]):
    sys.exit("[code: 2004] Failed to activate SuperNode.")
print("SuperNode ID: 1", flush=True)
time.sleep(60)
"""


def test_a_node_that_was_killed_is_started_until_flower_has_forgotten_it(tmp_path, monkeypatch):
    """Flower refuses a key whose node it believes to be alive; a node that was stopped is not believed to be."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    line = [sys.executable, "stubborn.py", "2"]
    monkeypatch.setattr(launch, "supernode", lambda place: line)
    monkeypatch.setattr(launch, "guard", lambda place: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(launch.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05)))
    with pytest.raises(RunFailed, match=r"has its operator admitted .*node\.pub"):
        launch.start_node(tmp_path)
    assert (tmp_path / "tries").read_text() == "."  # the first time nobody is believed to be alive: no second try
    (tmp_path / "supernode.pid").write_text('{"pid": 1, "command": "none"}')  # as one that was killed leaves it
    launch.start_node(tmp_path)
    assert (tmp_path / "tries").read_text() == "..." and launch.running(tmp_path, "supernode")
    assert launch.stop(tmp_path) and not (tmp_path / "supernode.pid").exists()
    line[2] = "9"
    (tmp_path / "supernode.pid").write_text('{"pid": 1, "command": "none"}')
    monkeypatch.setattr(launch, "_MISSED", 0.0)
    with pytest.raises(RunFailed, match="does not let this node in"):
        launch.start_node(tmp_path)


@needs_flower
@pytest.mark.slow
def test_real_processes_survive_kill_9(federation, tmp_path):
    """Four minutes: same bits over TLS; a node is killed in a round and comes back; then the SuperLink is killed."""
    for client in range(3):
        launch.start_node(federation / "nodes" / str(client))
    settings = [*words(tmp_path, "scaffold"), "cohort=3"]
    simulated(tmp_path / "simulated", settings)
    assert submit(federation, settings, tmp_path / "real").wait(300) == 0
    assert unlike(tmp_path / "simulated", tmp_path / "real", federation / "nodes") == []

    def rounds(run: Path) -> int:
        return len(RunFolder(run).rounds()) and RunFolder(run).rounds()[-1]

    longer = [*settings, "rounds=4", "local.steps=2"]
    victim, out = federation / "nodes" / "1", tmp_path / "killed"
    running = submit(federation, longer, out, patience=45.0)
    wait_for(lambda: rounds(out) >= 1)
    for name in ("supernode", "guard"):
        os.kill(launch.running(victim, name) or 0, signal.SIGKILL)
    wait_for(lambda: rounds(out) >= 2)
    assert "goes on without" in (out / "log.txt").read_text() or "is lost" in (out / "log.txt").read_text()
    launch.start_node(victim)
    wait_for(lambda: rounds(out) >= 3)
    os.kill(launch.running(federation / "server", "superlink") or 0, signal.SIGKILL)
    running.wait(60)
    launch.start_server(federation)
    submit(federation, longer, out).wait(300)
    assert RunFolder.open(out).result() is not None
    run = json.loads((out / "federation.json").read_text())["run"]
    assert int(Memories(victim / "storage" / run / "clients", round=4).get(1).seen) == 3  # it took part in the last
