"""Attacks on a node by the server that it works for: each must fail."""

from __future__ import annotations

import json
import sys
import threading
import typing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.core.run import run as run_rounds
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.flower import client, guard
from fedlens.flower.client import Trainer
from fedlens.flower.contract import check_order, check_size, contract, experiment_of, order_of
from fedlens.flower.ledger import ReleaseLedger, Spent
from fedlens.flower.messages import Payload, leaves_of, tree_of
from fedlens.flower.node import Budget, Node, Policy
from fedlens.flower.node import as_declared as declared
from fedlens.models import MODELS
from fedlens.privacy.accounting import Release, total_epsilon
from fedlens.simulate.run import public_images

DP = ("uplink=dp", "uplink.multiplier=4", "evaluate.personal=none", "weighting=uniform")
COINS = ("algorithm.mask_epsilon=1", "algorithm.sigma=0")  # masks alone are random


def bars(path: Path, classes: int = 3, seed: int = 0, names: tuple[str, ...] = ()) -> Path:
    """Bars, one place a class, as a file of arrays."""
    draw = np.random.default_rng(seed)
    y = np.arange(90) % classes
    x = draw.integers(0, 120, (len(y), 16, 16), dtype=np.uint8)
    for image, label in zip(x, y, strict=True):
        image[:, 2 + 4 * label : 5 + 4 * label] += 100
    parts = {"x_train": x[:60], "y_train": y[:60], "x_test": x[60:], "y_test": y[60:]}
    np.savez(path, **parts, **({"classes": np.array(names)} if names else {}))
    return path


def words(path: Path, *more: str) -> list[str]:
    usual = ["clients=2", "rounds=2", "cohort=2", "local.batch_size=8", "local.steps=2", "local.lr=0.05", "model=cnn2"]
    return [*usual, f"data={path}", "partition=iid", "picture=false", *more]


class World:
    """One experiment, its first job, and nodes that own all its data."""

    def __init__(self, folder: Path, *more: str):
        self.folder = folder
        self.experiment = config.read(None, words(bars(folder / "bars.npz"), *more)).resolved()
        self.images = self.experiment.data.load()
        net, (federation, _) = self.experiment.network(self.images), self.experiment.federation(self.images)
        jobs = []

        class Watch(Sequential):
            def run(self, job, cohort):
                jobs.append(job)
                return super().run(job, cohort)

        public = self.experiment.auxiliary and self.experiment.public(public_images(self.experiment), self.images)
        run_rounds(self.experiment.algorithm, net, Watch(net, federation), self.experiment.plan, auxiliary=public)
        self.jobs = jobs

    def node(self, name: str = "a", epsilon: float | None = None, **more) -> Trainer:
        budget = None if epsilon is None else Budget(epsilon, 1e-5, "bars", str(self.folder / "ledgers"))
        policy = Policy(raw_derived=True, contracts="any")
        node = Node(0, data=self.experiment.data, storage=str(self.folder / name), policy=policy, privacy=budget)
        return Trainer(replace(node, **more), say=lambda text: None)

    def work(self, *more: str, scale: float = 1.0, run: str = "run", seed: int | None = None, at: int = 0) -> Payload:
        """An order for the first job, under these words over the experiment."""
        experiment = self.experiment
        if more:
            experiment = config.read(None, [*words(self.folder / "bars.npz", *self.more), *more]).resolved()
        job = replace(self.jobs[at], stage=experiment.timetable()[at].stage)
        order = order_of(experiment.timetable(), job)
        order = order if seed is None else {**order, "seed": seed}
        notes = {"ask": "work", "contract": contract(experiment, self.images, run), "order": order}
        common = {"shared": leaves_of(job.shared)} if job.shared else {}
        return Payload(notes, {"download": leaves_of(job.download * scale), **common})

    more: tuple[str, ...] = ()


def world(folder: Path, *more: str) -> World:
    found = World(folder, *more)
    found.more = more
    return found


def upload(answer: tuple[Payload, object]) -> torch.Tensor:
    """All of an answer's update in one row."""
    payload = answer[0]
    assert "upload" in payload.trees, payload.notes
    return torch.cat([leaf.flatten().double() for _, leaf in sorted(tree_of(payload.trees["upload"]).delta.paths())])


# ---- contracts -------------------------------------------------------------------------------------------------------
def hostile(agreed: dict) -> list[dict]:
    """Contracts that name code, files or addresses."""
    told = agreed["experiment"]
    parts: list[tuple[str, object]] = [
        ("model", "os:system"),
        ("model", {"is": "os:system"}),
        ("model", {"is": "custom", "path": "os:system"}),
        ("model", {"is": "custom"}),
        ("model", {"is": "resnet18", "weights": "/etc/passwd"}),
        ("model", {"is": "resnet18", "weights": "somebody/repo"}),
        ("algorithm", {"is": "antigravity:fly"}),
        ("algorithm", {"is": "finetune", "base": {"is": "antigravity:fly"}}),
        ("algorithm", "fedavg+ft"),  # a shorthand
        ("algorithm", "spatl/paper"),
        ("algorithm", {"is": "spatl", "pretrained": "/etc/passwd"}),
        ("algorithm", {"is": "os\uff1asystem"}),
        ("uplink", [{"is": "antigravity:fly"}]),
        ("uplink", {"antigravity:fly": {}}),
        ("defences", ["antigravity:fly"]),
        ("cohort", {"is": "antigravity:fly"}),
        ("partition", {"is": "file", "path": "/etc/passwd"}),
        ("partition", "/etc/passwd.json"),
        ("partition", {"is": "flwr", "partitioner": "os.system"}),
        ("local", {"schedule": {"is": "antigravity:fly"}}),
        ("data", {"is": "npz", "path": "/etc/passwd"}),
        ("auxiliary", {"is": "npz", "path": "/etc/passwd"}),
        ("out", "/tmp/there"),
        ("track", ["mlflow"]),
        ("devices", {"is": "file", "path": "/etc/passwd"}),
        ("device", "cuda:7"),
        ("execution", {"out": "/tmp/there"}),
        ("rounds", {"is": "antigravity:fly"}),
    ]
    return [{**agreed, "experiment": {**told, key: value}} for key, value in parts]


def text_fields() -> list[tuple[str, str, str]]:
    """(setting of an experiment, name in its registry, field) of every field that can hold a text."""
    kinds = {kind: key for key, kind in typing.get_type_hints(config.Experiment).items() if kind in config.REGISTRIES}
    found = []
    for kind, registry in config.REGISTRIES.items():
        for name, cls in registry.items():
            hints = typing.get_type_hints(cls)
            found += [(kinds[kind], name, f.name) for f in fields(cls) if kind in kinds and hints[f.name] is str]
    return found


def test_a_version_that_no_log_can_hold_is_refused_in_words():
    with pytest.raises(BadInput, match="install the same version") as refused:
        experiment_of({"version": "\ud800"})
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["round", "at", "since", "seed", "shared", "stage", "look"])
def test_an_order_that_lacks_something_is_refused(name):
    order = {"round": 0, "at": 0, "since": 0, "seed": 0, "shared": "", "stage": 0, "look": None}
    assert check_order(order) == order
    del order[name]
    with pytest.raises(BadInput, match="the order is damaged"):
        check_order(order)


def test_contracts_import_and_open_nothing(tmp_path, monkeypatch):
    experiment = config.read(None, words(bars(tmp_path / "bars.npz")))
    agreed = contract(experiment, experiment.data.load(), "run")
    node = Trainer(Node(0, data=experiment.data, storage=str(tmp_path / "a")), say=lambda text: None)
    opened: list[str] = []
    watching = [False]

    def hook(event: str, arguments: tuple) -> None:
        if watching[0] and event in ("open", "import", "os.system", "subprocess.Popen", "socket.connect"):
            opened.append(f"{event} {arguments[0]}")

    sys.addaudithook(hook)
    before = set(sys.modules)
    for each in hostile(agreed):
        watching[0] = True
        answer, _ = node.answer(Payload({"ask": "hello", "contract": each}, {}))
        watching[0] = False
        assert set(answer.notes) == {"refused"}, (each["experiment"], answer.notes)
        assert opened == [], each["experiment"]
    assert "antigravity" not in sys.modules and set(sys.modules) == before


@pytest.mark.parametrize(("key", "name", "field"), text_fields())
def test_no_field_takes_a_text(key, name, field, tmp_path):
    experiment = config.read(None, words(bars(tmp_path / "bars.npz")))
    agreed = contract(experiment, experiment.data.load(), "run")
    asked = {**agreed["experiment"], key: {"is": name, field: "/etc/passwd"}}
    with pytest.raises(BadInput, match=r"is a text|is no part of a contract|has not allowed"):
        experiment_of({**agreed, "experiment": asked})


def test_a_file_that_is_there_and_one_that_is_not_are_refused_alike(tmp_path):
    """Else a server could ask which files a node has."""
    here = bars(tmp_path / "bars.npz")
    experiment = config.read(None, words(here))
    agreed = contract(experiment, experiment.data.load(), "run")
    said = []
    for path in (here, tmp_path / "none.npz"):
        asked = {**agreed, "experiment": {**agreed["experiment"], "data": {"is": "npz", "path": str(path)}}}
        node = Trainer(Node(0, data=experiment.data), say=lambda text: None)
        said.append(node.answer(Payload({"ask": "hello", "contract": asked}, {}))[0].notes)
    assert said[0] == said[1] and "'data' is no part of a contract" in said[0]["refused"]


def test_there_are_text_fields():
    assert ("model", "resnet18", "weights") in text_fields() and ("partition", "file", "path") in text_fields()


def test_code_that_the_owner_allows(tmp_path, monkeypatch):
    """By its whole name, and no other of the same module."""
    (tmp_path / "my_methods.py").write_text(
        "from dataclasses import dataclass\nfrom fedlens.algorithms import FedAvg\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(FedAvg):\n    pass\n\n\n@dataclass(frozen=True)\nclass Other(FedAvg):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    experiment = config.read(None, words(bars(tmp_path / "bars.npz"), "algorithm=my_methods:Mine"))
    agreed = contract(experiment, experiment.data.load(), "run")
    with pytest.raises(BadInput, match=r"'my_methods:Mine' is code that this node's owner has not allowed"):
        experiment_of(agreed)
    assert experiment_of(agreed, ["my_methods:Mine"]).algorithm == experiment.algorithm
    other = {**agreed, "experiment": {**agreed["experiment"], "algorithm": {"is": "my_methods:Other"}}}
    with pytest.raises(BadInput, match="has not allowed"):
        experiment_of(other, ["my_methods:Mine"])


BOMBS = {
    "clients": 10**9,
    "local": {"epochs": 10**9},
    "model": {"is": "mlp", "hidden": 10**9},
    "algorithm": {"is": "fedxds", "warmup_rounds": 10**9},
    "cohort": {"is": "uniform", "count": 10**12},
}


@pytest.mark.parametrize("key", BOMBS)
def test_numbers_that_would_fill_a_node_are_refused_at_once(key, tmp_path):
    """Before: the node counted to them, until its memory was full."""
    experiment = config.read(None, words(bars(tmp_path / "bars.npz")))
    agreed = contract(experiment, experiment.data.load(), "run")
    node = Trainer(Node(0, data=experiment.data, storage=str(tmp_path / "a")), say=lambda text: None)
    asked = {**agreed, "experiment": {**agreed["experiment"], key: BOMBS[key]}}
    said = node.answer(Payload({"ask": "hello", "contract": asked}, {}))[0].notes["refused"]
    assert "a contract's numbers go to" in said and key in said


def test_many_numbers_that_are_small_each_are_refused_too(tmp_path):
    """Rounds times clients, and a network of a terabyte: nothing of it is made."""
    experiment = config.read(None, words(bars(tmp_path / "bars.npz")))
    agreed = contract(experiment, experiment.data.load(), "run")
    node = Trainer(Node(0, data=experiment.data, storage=str(tmp_path / "a")), say=lambda text: None)
    for more, sentence in (
        ({"rounds": 900_000, "clients": 900_000}, "more than a node counts to"),
        ({"model": {"is": "mlp", "hidden": 10_000, "layers": 2_000}}, "weights, and a node holds"),
    ):
        asked = {**agreed, "experiment": {**agreed["experiment"], **more}}
        assert sentence in node.answer(Payload({"ask": "hello", "contract": asked}, {}))[0].notes["refused"]


def test_every_network_can_be_measured_before_it_is_made():
    for name in MODELS.keys() - {"custom"}:
        check_size(config.read(None, [f"model={name}"]), 10, 3, 32)


@pytest.mark.parametrize(
    ("more", "look", "sentence"),
    [
        (("evaluate.personal=none",), {}, "does not have"),
        (("evaluate.personal=before",), {}, ""),
        ((), {"detailed": 1}, "does not have"),
        (("evaluate.measures=all",), {"detailed": 1}, ""),
        ((), {"validation": 1}, "does not have"),
        (("evaluate.validation=0.2",), {"validation": 1}, ""),
        (("evaluate.validation=0.2",), {"validation": 1, "detailed": 1}, "does not have"),
        (("evaluate.validation=0.2", "evaluate.watch=auroc"), {"validation": 1, "detailed": 1}, ""),
        ((), {"epochs": 10**9}, "does not have"),
    ],
)
def test_only_evaluations_that_the_contract_has(more, look, sentence, tmp_path):
    """Before: an order could ask for any, such as the counts of every class, or for a billion epochs."""
    found = world(tmp_path, *more)
    good = found.work(at=1)
    order = {**good.notes["order"], "stage": 0, "at": 0, "since": 0}
    order["look"] = {"epochs": 0, "steps": None, "detailed": 0, "validation": 0, **look}
    answer, _ = found.node().answer(Payload({**good.notes, "order": order}, good.trees))
    assert sentence in answer.notes.get("refused", "") and ("upload" in answer.trees) == (not sentence)


MALFORMED = [
    {},
    {"ask": "hello"},
    {"ask": "hello", "contract": []},
    {"ask": "hello", "contract": {"version": "0.1.0", "experiment": 3}},
    {"ask": "rm", "contract": {}},
    {"ask": "work", "contract": {"version": [1] * 1000}},
]


@pytest.mark.parametrize("notes", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_messages_are_answered(notes, tmp_path):
    found = world(tmp_path)
    node = found.node()
    answer, _ = node.answer(Payload(notes, {}))
    assert "refused" in answer.notes or "failed" in answer.notes
    good = found.work()
    for broken in ({}, {"round": "one"}, {**good.notes["order"], "look": {"epochs": "many"}}, [], None):
        answer, _ = node.answer(Payload({**good.notes, "order": broken}, good.trees))
        assert "refused" in answer.notes
    for trees in ({}, {"download": {}}, {"download": leaves_of(Tree(model=Tree(a=torch.ones(2))))}):
        answer, _ = node.answer(Payload(good.notes, trees))
        assert answer.notes == {"failed": "its work failed; its own log says why"}
    assert upload(node.answer(good)).isfinite().all()  # it is alive


def test_what_failed_stays_in_the_owners_log(tmp_path):
    said: list[str] = []
    gone = config.read(None, [f"data={tmp_path}/gone.npz"]).data
    node = Trainer(Node(0, data=gone, policy=Policy(contracts="any")), say=said.append)
    experiment = config.read(None, words(bars(tmp_path / "bars.npz")))
    hello = Payload({"ask": "hello", "contract": contract(experiment, experiment.data.load(), "run")}, {})
    answer, _ = node.answer(hello)
    assert answer.notes == {"refused": "its data cannot be read"} and "gone.npz" in said[0]


# ---- noise -----------------------------------------------------------------------------------------------------------
def test_two_questions_do_not_cancel_the_noise(tmp_path):
    """Another rate, seed, run, round or download: new noise every time; the very same order: the very same bytes."""
    found = world(tmp_path, *DP, "uplink.norm=0.001", "uplink.multiplier=100")  # nearly all is noise
    node = found.node()
    orders = {
        "first": found.work(),
        "rate": found.work("local.lr=0.0500001"),
        "run": found.work(run="another"),
        "download": found.work(scale=1 + 1e-7),
        "seed": found.work(seed=12345),
        "round": found.work(at=next(n for n, job in enumerate(found.jobs) if job.round == 1)),
    }
    uploads = {name: upload(node.answer(payload)) for name, payload in orders.items()}
    again = node.answer(orders["first"])[0]
    assert again == node.answer(orders["first"])[0] and torch.equal(upload((again, {})), uploads["first"])
    rows = torch.stack([*uploads.values()])
    likeness = torch.corrcoef(rows) - torch.eye(len(rows))
    assert likeness.abs().max() < 0.03  # the noise of two answers has nothing in common
    std, expected = (rows[0] - rows[1]).std(), 2**0.5 * 100 * 0.001
    assert abs(std / expected - 1) < 0.03  # the difference has the variance of two noises
    ledger = node.node.ledger
    assert ledger is not None
    assert [line["kind"] for line in ledger.lines()] == ["booked", "sent"] * len(orders)


def test_the_same_order_may_have_its_leaves_in_another_order(tmp_path):
    """As a server's that goes on from a checkpoint. Before: it got new noise, and the owner paid twice."""
    found = world(tmp_path, *DP)
    node, payload = found.node(), found.work()
    turned = Payload(payload.notes, {name: dict(reversed(tree.items())) for name, tree in payload.trees.items()})
    assert [*turned.trees["download"]] != [*payload.trees["download"]]
    assert node.answer(turned)[0] == node.answer(payload)[0]
    ledger = node.node.ledger
    assert ledger is not None and [line["kind"] for line in ledger.lines()] == ["booked", "sent"]


def test_a_nodes_noise_has_the_mean_and_variance_of_the_simulations(tmp_path):
    """Same settings, same data: what is drawn differs, how it is distributed does not. Bounds of four deviations."""
    found = world(tmp_path, *DP, "uplink.norm=0.001", "uplink.multiplier=100")
    node = found.node()
    stage = found.experiment.timetable()[0].stage
    clean = seeded(found, node, job=replace(found.jobs[0], stage=replace(stage, uplink=())))
    mine, simulated = _leaves(node.answer(found.work())[0]), seeded(found, node)
    names = sorted(name for name in clean if name.startswith("delta/params"))
    update = torch.cat([clean[name].flatten().double() for name in names])
    update *= min(1.0, 0.001 / float(update.norm()))  # as the mechanism cuts it
    noises = [torch.cat([each[name].flatten().double() for name in names]) - update for each in (mine, simulated)]
    count, std = len(update), 0.1
    assert count > 10_000 and abs(torch.corrcoef(torch.stack(noises))[0, 1]) < 4 / count**0.5
    for noise in noises:
        assert abs(noise.mean()) < 4 * std / count**0.5 and abs(noise.var() / std**2 - 1) < 4 * (2 / count) ** 0.5


@pytest.mark.parametrize(
    "more",
    [
        DP,
        ("uplink=noise", "uplink.std=1"),
        ("algorithm=fedxds", "algorithm.warmup_rounds=1", "algorithm.warmup_epochs=1"),
        ("algorithm=fedxds", "algorithm.warmup_rounds=1", "algorithm.warmup_epochs=1", *COINS),
        (
            "algorithm=fedaux",
            "algorithm.pretrain_steps=2",
            "algorithm.pretrain_batch=8",
            "algorithm.steps=1",
            "model=cnn2",
        ),
        ("algorithm=fedfed", "algorithm.distil_rounds=1", "algorithm.latent=8", "algorithm.width=4"),
    ],
    ids=["dp", "noise", "fedxds", "mask response", "fedaux", "fedfed"],
)
def test_no_seed_takes_noise_off_again(more, tmp_path):
    """The server has the seed, the model and all settings: it cannot draw a node's noise."""
    public = [f"auxiliary={bars(tmp_path / 'public.npz', seed=1)}"] if "algorithm=fedaux" in more else []
    found = world(tmp_path, *more, *public)
    special = ("Exchange", "ScorePublicImages") if any("algorithm=" in word for word in more) else ("",)
    at = next(n for n, job in enumerate(found.jobs) if any(name in _name(job) for name in special))
    node = found.node()
    simulation = Trainer(replace(node.node, data=None, simulation=found.experiment.data, storage=""))
    mine, again = (_leaves(each.answer(found.work(at=at))[0]) for each in (node, found.node("again")))
    noisy = [key for key in mine if mine[key].is_floating_point() and mine[key].numel() > 40]
    assert noisy and all(not torch.equal(mine[key], again[key]) for key in noisy)
    drawn = seeded(found, node, at)  # by whoever has the seed, and even the data
    assert all(not torch.equal(mine[key], drawn[key]) for key in noisy)
    one, other = (_leaves(simulation.answer(found.work(at=at))[0]) for _ in range(2))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _name(job) -> str:
    return type(job.stage.algorithm).__name__


def _leaves(payload: Payload) -> dict[str, torch.Tensor]:
    assert "upload" in payload.trees, payload.notes
    return dict(tree_of(payload.trees["upload"]).paths())


def seeded(found: World, trainer: Trainer, at: int = 0, job=None) -> dict[str, torch.Tensor]:
    """What the simulator uploads for a node's own data, noise from the run's seed."""
    mine, work = trainer.node, found.work(at=at)
    images = mine.images(found.experiment, work.notes["contract"])
    engine = Sequential(found.experiment.network(images), mine.federation(found.experiment, images))
    (reply,) = engine.run(job or found.jobs[at], [mine.client])
    return dict(reply.upload.paths())


def test_without_noise_a_node_has_the_bits_of_the_simulation(tmp_path):
    found = world(tmp_path)
    node = found.node()
    mine, simulated = _leaves(node.answer(found.work())[0]), seeded(found, node)
    assert mine.keys() == simulated.keys() and all(torch.equal(mine[key], simulated[key]) for key in mine)


def test_a_budget_may_be_set_after_releases_without_one(tmp_path):
    found = world(tmp_path, *DP)
    assert upload(found.node().answer(found.work())).isfinite().all()
    assert upload(found.node(epsilon=8.0).answer(found.work(run="later"))).isfinite().all()


# ---- the ledger ------------------------------------------------------------------------------------------------------
def ledger(folder: Path, epsilon: float = 6.0) -> ReleaseLedger:
    return ReleaseLedger(folder / "ledgers" / "bars.jsonl", folder / "a" / "anchor.json", epsilon, 1e-5)


def spend(book: ReleaseLedger, count: int, start: int = 0) -> int:
    """How many of so many releases are let through."""
    done = 0
    for n in range(start, start + count):
        try:
            book.book(Spent(2.0, "delta"), f"order {n}")
        except BadInput as error:
            assert "is left after" in str(error)
            return done
        book.sent(f"order {n}")
        done += 1
    return done


def test_a_budget_is_for_life_at_the_owners_delta(tmp_path):
    """New runs, contracts and a delta of the server's choice change nothing."""
    found = world(tmp_path, *DP)
    answers = []
    for n in range(12):
        node = found.node(epsilon=6.0)  # restarted each time
        answers.append(node.answer(found.work("uplink.delta=0.5", run=f"run{n}"))[0])
    allowed = sum("upload" in answer.trees for answer in answers)
    spent = [total_epsilon({Release(2.0): count}, 1e-5) for count in (allowed, allowed + 2)]  # two a run
    assert spent[0] <= 6.0 < spent[1] and 0 < allowed < 12
    assert "is left" in answers[-1].notes["refused"]
    assert [p.stat().st_mode & 0o077 for p in (tmp_path / "ledgers").iterdir()] == [0, 0]


def test_a_node_that_is_started_anew_may_end_a_run_that_its_budget_just_covers(tmp_path):
    """Before: the rounds that were paid for were counted once more, and the node refused the rest of the run."""
    found = world(tmp_path, *DP)
    second = next(n for n, job in enumerate(found.jobs) if job.round == 1)
    enough = total_epsilon({Release(2.0): 2}, 1e-5) * 1.0001
    for at in (0, second):
        assert "upload" in found.node(epsilon=enough).answer(found.work(at=at))[0].trees
    said = found.node(epsilon=enough).answer(found.work(run="another"))[0].notes
    assert "is left, and with this run" in said["refused"]
    hello = found.node(epsilon=enough).answer(Payload({**found.work().notes, "ask": "hello"}, {}))[0].notes
    assert hello["client"] == 0  # a server that goes on may greet it


def test_a_killed_node_pays_once(tmp_path):
    """Killed before its answer was sent, an order costs nothing more; sent and lost, it costs again."""
    book = ledger(tmp_path)
    book.book(Spent(2.0, "delta"), "order")
    ledger(tmp_path).book(Spent(2.0, "delta"), "order")
    assert len(book.lines()) == 1
    book.sent("order")
    book.book(Spent(2.0, "delta"), "order")
    assert [line["kind"] for line in book.lines()] == ["booked", "sent", "booked"]


class Killed(BaseException):
    """As kill -9: nothing after it is done."""


STEPS = [
    (ReleaseLedger, "book", False),
    (ReleaseLedger, "book", True),
    (Trainer, "_work", True),
    (Trainer, "_store", False),
    (Trainer, "_store", True),
    (ReleaseLedger, "sent", True),
]


@pytest.mark.parametrize(("where", "step", "after"), STEPS, ids=[f"{s}-{a}" for _, s, a in STEPS])
def test_killed_between_any_two_steps_a_release_is_counted_once(where, step, after, tmp_path, monkeypatch):
    """Asked again it answers; one line is booked. Once sent, and its bytes lost, the same order is paid for again."""
    found = world(tmp_path, *DP)
    whole = getattr(where, step)

    def killed(self, *arguments, **more):
        if after:
            whole(self, *arguments, **more)
        raise Killed

    monkeypatch.setattr(where, step, killed)
    with pytest.raises(Killed):
        found.node(epsilon=8.0).answer(found.work())
    monkeypatch.setattr(where, step, whole)
    node = found.node(epsilon=8.0)
    first = node.answer(found.work())[0]
    book = node.node.ledger
    assert book is not None and "upload" in first.trees and found.node(epsilon=8.0).answer(found.work())[0] == first
    assert [line["kind"] for line in book.lines()] == ["booked", "sent"]
    for answer in (tmp_path / "a" / "run" / "answers").iterdir():
        answer.unlink()
    assert found.node(epsilon=8.0).answer(found.work())[0] != first
    assert [line["kind"] for line in book.lines()] == ["booked", "sent"] * 2


@pytest.mark.parametrize("torn", [1, 10, 100])
def test_a_torn_last_line_never_left(torn, tmp_path):
    book = ledger(tmp_path)
    assert spend(book, 2) == 2
    before = book.path.read_bytes()
    anchor = book.anchor.read_bytes()
    book.book(Spent(2.0, "delta"), "third")
    whole = book.path.read_bytes()
    book.path.write_bytes(whole[: len(before) + min(torn, len(whole) - len(before) - 1)])
    book.anchor.write_bytes(anchor)  # the anchor follows the line
    assert len(book.lines()) == 4 and book.path.read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "changed", "deleted", "restored", "swapped", "text"])
def test_a_damaged_ledger_lets_nothing_out(damage, tmp_path):
    book = ledger(tmp_path)
    spend(book, 1)
    old = book.path.read_bytes()
    spend(book, 1, start=1)
    lines = book.path.read_bytes().splitlines(keepends=True)
    if damage == "cut":
        book.path.write_bytes(b"".join(lines[:-1]))
    elif damage == "changed":
        book.path.write_bytes(book.path.read_bytes().replace(b"2.0", b"9.0", 1))
    elif damage == "deleted":
        book.path.unlink()
    elif damage == "restored":
        book.path.write_bytes(old)
    elif damage == "swapped":
        book.path.write_bytes(b"".join([lines[2], *lines[1:2], lines[0], *lines[3:]]))
    else:
        book.path.write_bytes(b"\xff\xfe nonsense\n")
    with pytest.raises(BadInput, match="nothing leaves") as caught:
        book.book(Spent(2.0, "delta"), "more")
    assert "bars" not in str(caught.value) and str(book.path) in caught.value.detail  # the owner's log alone


def test_two_nodes_at_once_do_not_overspend(tmp_path):
    done: list[int] = []
    threads = [
        threading.Thread(target=lambda start=start: done.append(spend(ledger(tmp_path), 10, start)))
        for start in (0, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = [total_epsilon({Release(2.0): count}, 1e-5) for count in (sum(done), sum(done) + 1)]
    assert spent[0] <= 6.0 < spent[1]


def test_two_nodes_with_one_ledger_both_pay_for_the_same_order(tmp_path, monkeypatch):
    """Two federations that work together send one order to two nodes of one data set. Before: the second was free."""
    found = world(tmp_path, *DP)
    first, second = (found.node(name, epsilon=30.0) for name in "ab")
    work, uploads = Trainer._work, []

    def meanwhile(self, *arguments):
        monkeypatch.setattr(Trainer, "_work", work)
        mine = work(self, *arguments)
        uploads.append(upload(second.answer(found.work())))  # the first is booked, and not sent yet
        return mine

    monkeypatch.setattr(Trainer, "_work", meanwhile)
    uploads.append(upload(first.answer(found.work())))
    assert not torch.equal(*uploads) and first.node.ledger is not None
    assert sum(line["kind"] == "booked" for line in first.node.ledger.lines()) == 2


def test_a_node_has_one_guard(tmp_path):
    """Else two would draw two noises for one order that was booked once."""
    held = guard.alone(tmp_path)
    with pytest.raises(SystemExit, match="a guard runs at"):
        guard.alone(tmp_path)
    held.close()
    guard.alone(tmp_path).close()
    assert (tmp_path / "guard.lock").stat().st_mode & 0o077 == 0


def test_what_a_server_writes_cannot_rewrite_the_owners_screen(capsys):
    guard.say("refused: unknown key \x1b[2Jall is well\r")
    assert capsys.readouterr().err == "refused: unknown key ?[2Jall is well?\n"


# ---- approval --------------------------------------------------------------------------------------------------------
def test_the_owner_reads_a_new_contract_first(tmp_path):
    found = world(tmp_path)
    node = found.node()
    node = Trainer(replace(node.node, policy=Policy(raw_derived=True)), say=lambda text: None)
    assert set(node.answer(found.work())[0].notes) == {"waiting"}
    (waiting,) = (tmp_path / "a" / "contracts").glob("*.json")
    assert json.loads(waiting.read_text()) == found.work().notes["contract"]
    waiting.with_suffix(".approved").touch()
    kept = [tmp_path / "a", *(path for path in (tmp_path / "a").glob("*") if path.is_dir())]
    assert len(kept) == 2 and all(place.stat().st_mode & 0o077 == 0 for place in kept)
    assert upload(node.answer(found.work())).isfinite().all()
    assert set(node.answer(found.work(run="another"))[0].notes) == {"waiting"}


# ---- the node's disk -------------------------------------------------------------------------------------------------
def test_a_server_cannot_fill_the_disk_with_contracts(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_WAITING", 3)
    found = world(tmp_path)
    node = Trainer(replace(found.node().node, policy=Policy(raw_derived=True)), say=lambda text: None)
    said = [node.answer(found.work(run=f"run{n}"))[0].notes for n in range(5)]
    assert ["waiting" in notes for notes in said] == [True] * 3 + [False] * 2
    assert said[-1] == {"refused": "3 contracts wait for its owner already, and no more are kept"}
    kept = sorted((tmp_path / "a" / "contracts").glob("*.json"))
    assert len(kept) == 3 and "waiting" in node.answer(found.work(run="run0"))[0].notes  # those that wait still do
    kept[0].with_suffix(".approved").touch()  # the owner reads one: there is room for another
    assert "waiting" in node.answer(found.work(run="run3"))[0].notes


def test_a_server_cannot_fill_the_disk_with_common_payloads(tmp_path):
    """Orders that each bring another one: the newest are kept, and an older one is asked for again."""
    found = world(tmp_path)
    node, good = found.node(), found.work()
    trees = [Tree(x=torch.full((4,), float(n))) for n in range(12)]

    def ask(tree: Tree, *, sent: bool) -> Payload:
        notes = {**good.notes, "order": {**good.notes["order"], "shared": client.version(tree), "seed": int(sent)}}
        return node.answer(Payload(notes, {**good.trees, **({"shared": leaves_of(tree)} if sent else {})}))[0]

    for tree in trees:
        assert "upload" in ask(tree, sent=True).trees
    kept = [*(tmp_path / "a" / "run").glob("shared-*.safetensors")]
    assert len(kept) == client._COMMON < len(trees)
    assert set(ask(trees[0], sent=False).notes) == {"missing"} and "upload" in ask(trees[-1], sent=False).trees


def test_a_server_learns_nothing_of_the_data_before_the_owner_agrees(tmp_path):
    """Contracts with other classes and shapes, to find out what a site has. Before: each refusal told it."""
    found = world(tmp_path)
    said: list[str] = []
    node = Trainer(replace(found.node().node, policy=Policy(raw_derived=True)), say=said.append)
    agreed = found.work().notes["contract"]
    about = agreed["data"]
    guesses = [{"classes": ["0", "1"]}, {"classes": ["0", "1", "2", "3"]}, {"shape": [1, 28, 28]}, {}]
    answers = [
        node.answer(Payload({"ask": "hello", "contract": {**agreed, "data": {**about, **guess}}}, {}))[0].notes
        for guess in guesses
    ]
    assert answers == [{"waiting": "its owner has not approved this contract yet"}] * len(guesses)
    assert len(said) == len(guesses) and all("waits for its owner" in line for line in said)


# ---- classes ---------------------------------------------------------------------------------------------------------
def test_a_site_may_lack_a_class_and_not_bring_others(tmp_path):
    images = config.read(None, [f"data={bars(tmp_path / 'bars.npz')}"]).data.load()
    some = replace(images, classes=("c", "a", "b"))
    mapped = declared(some, ("a", "b", "c", "d"))
    names = [some.classes[label] for label in some.y.tolist()]
    assert [mapped.classes[label] for label in mapped.y.tolist()] == names and mapped.classes == ("a", "b", "c", "d")
    with pytest.raises(BadInput, match="its classes differ") as caught:
        declared(some, ("a", "b"))
    assert "does not declare c;" in caught.value.detail and "declare c" not in str(caught.value)
    left = declared(some, ("a", "b"), drop=True)
    assert len(left.train) == 40 and set(left.y[left.train].tolist()) == {0, 1}
    with pytest.raises(BadInput, match="its classes differ"):
        declared(some, ("x", "y"), drop=True)
