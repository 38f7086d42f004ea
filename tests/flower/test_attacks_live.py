"""Attacks on owners and by nodes over a real SuperLink with TLS; one federation of three for all. Minutes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import test_flower as flower
from fedlens import config
from fedlens.flower import launch
from fedlens.flower.contract import contract
from fedlens.flower.node import Node
from fedlens.runs.folder import RunFolder
from live import again, own, started, submit, wait_for
from test_flower import needs_flower
from test_trust import bars

pytestmark = [needs_flower, pytest.mark.slow, pytest.mark.flower]
COMMON = ["clients=3", "cohort=3", "rounds=1", "local.batch_size=8", "local.steps=2", "local.lr=0.05", "model=cnn2"]
COMMON += ["evaluate.personal=none", "picture=false"]
NOISY = ["uplink=dp", "uplink.norm=0.001", "uplink.multiplier=100", "weighting=uniform"]  # nearly all is noise

# The operator's own ServerApp: sends what it likes to real nodes, and writes down what they answer.
HOSTILE = """
import json, os, time
from pathlib import Path
from flwr.app import Message
from flwr.serverapp import ServerApp
from fedlens.flower.identity import Coordinator
from fedlens.flower.messages import Leaf, Payload, from_records, to_records, tree_digest

app = ServerApp()

@app.main()
def main(grid, context):
    coordinator, place = Coordinator(Path(os.environ["FEDLENS_SERVER"])), Path({place!r})
    nodes = {{}}
    while len(nodes) < 3:
        nodes = {{coordinator.clients()[each.public_key]: each.node_id for each in grid.get_nodes()}}
        time.sleep(0.5)
    sent = []
    for order in json.loads((place / "orders.json").read_text()):
        notes, size = order["notes"], order["junk"]
        trees = {{"download": {{"x": Leaf("uint8", (size,), bytes(size))}}}} if size else {{}}
        if order["signed"]:
            digests = {{name: tree_digest(tree) for name, tree in trees.items()}}
            notes, _ = coordinator.signed(notes, digests, order["for"], 300.0)
        for _ in range(order["copies"]):
            message = Message(to_records(Payload(notes, trees)), nodes[0], "query")
            sent += grid.push_messages([message])
    answers = {{}}
    while len(answers) < len(sent):
        for reply in grid.pull_messages([name for name in sent if name not in answers]):
            said = {{"error": reply.error.reason}} if reply.has_error() else from_records(reply.content).notes
            answers[reply.metadata.reply_to_message_id] = said
        time.sleep(0.2)
    (place / "answers.json").write_text(json.dumps([answers[name] for name in sent]))
"""

# A node's owner may run what they like, such as a guard that lies.
LIAR = """
import sys
from pathlib import Path
import torch
from fedlens.flower import client, guard

honest = client.Trainer._work

def lying(self, *arguments):
    upload = honest(self, *arguments)
    return upload.replace(delta=upload.delta * 1e6, weight=torch.tensor(1e12, dtype=torch.float64))

client.Trainer._work = lying
guard.serve(Path(sys.argv[1]), sys.argv[2])
"""


LACKS = {0: {"classes": 2, "names": ("a", "b")}}


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A SuperLink and three nodes with data of their owners' own, one of which lacks a class."""
    place = tmp_path_factory.mktemp("attacks")
    data = bars(place / "server.npz", names=("a", "b", "c"))

    def owners(client: int, node: Path) -> None:
        named = LACKS.get(client, {"names": ("a", "b", "c")})
        own(node, bars(place / f"own{client}.npz", seed=client + 1, **named))

    with started(place / "federation", [*COMMON, f"data={data}"], owners) as folder:
        yield folder


def settings(folder: Path, *more: str) -> list[str]:
    return [*COMMON, f"data={folder.parent / 'server.npz'}", *more]


def deployed(folder: Path, name: str, *more: str) -> Path:
    out = folder.parent / name
    assert submit(folder, settings(folder, *more), out).wait(300) == 0
    assert RunFolder(out).result() is not None
    return out


def moved(folder: Path, out: Path) -> torch.Tensor:
    """From the first weights to the last."""
    experiment = config.read(None, settings(folder)).resolved()
    first, last = experiment.network(experiment.images()).initial_weights().params, flower.state(out).model.params
    return torch.cat([(leaf - first[path]).flatten().double() for path, leaf in sorted(last.paths())])


def test_noise_is_new_for_every_question_and_every_run(there):
    """The same run again, with the same seed; the same with another rate. The operator has all that a seed makes."""
    rows = [
        moved(there, deployed(there, name, *NOISY, *more))
        for name, more in (("one", ()), ("two", ()), ("rate", ("local.lr=0.0500001",)))
    ]
    likeness = torch.corrcoef(torch.stack(rows)) - torch.eye(3)
    assert likeness.abs().max() < 0.03  # of cancelling noise it would be one
    for other in rows[1:]:
        assert abs((rows[0] - other).std() / (0.1 * (2 / 3) ** 0.5) - 1) < 0.03  # two means of three noises
    for node in launch.node_folders(there):
        book = Node.read(node / "node.yaml").ledger
        assert book is not None and [line["kind"] for line in book.lines()] == ["booked", "sent"] * 3


def test_a_server_that_sends_what_it_likes(there, tmp_path):
    """Contracts that import, name files, or fill a node; copies, messages for others, junk: all refused, all alive."""
    experiment = config.read(None, settings(there)).resolved()
    agreed = contract(experiment, experiment.images(), "run")
    marker = tmp_path / "marker"

    def order(notes, *, signed: bool = True, client: int = 0, copies: int = 1, junk: int = 0) -> dict:
        return {"notes": notes, "signed": signed, "for": client, "copies": copies, "junk": junk}

    def hello(**parts) -> dict:
        return {"ask": "hello", "contract": {**agreed, "experiment": {**agreed["experiment"], **parts}}}

    orders = [
        order(hello(model={"is": "custom", "path": "os:system"})),
        order(hello(algorithm={"is": "antigravity:fly"})),
        order(hello(data={"is": "npz", "path": str(marker)})),
        order(hello(partition={"is": "file", "path": "/etc/passwd"})),
        order(hello(clients=10**9)),
        order({"ask": "work", "contract": []}),
        order(hello(), junk=64 << 20),  # 64 MiB that nobody asked for
        order(hello(), signed=False),
        order(hello(), client=1),
        order(hello(), copies=2),
    ]
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    app = there / "server" / "app" / "federation" / "server_app.py"
    honest, node = app.read_text(), there / "nodes" / "0"
    before = {name: launch.running(node, name) for name in ("guard", "supernode")}
    app.write_text(HOSTILE.format(place=str(tmp_path)))
    try:
        assert submit(there, settings(there), tmp_path / "none").wait(300) == 0
    finally:
        app.write_text(honest)
    said = json.loads((tmp_path / "answers.json").read_text())
    sentences = [answer.get("refused") or answer.get("error") or "answered" for answer in said]
    for found, expected in zip(
        sentences,
        (
            "'os:system' is code that this node's owner has not allowed",
            "'antigravity:fly' is code that this node's owner has not allowed",
            "'data' is no part of a contract",
            "partition.path",
            "clients is 1e+09, and a contract's numbers go to 1,000,000",
            "neither a hello nor an order",
            "answered",
            "not one for this node",
            "not one for this node",
        ),
        strict=False,
    ):
        assert expected in found, sentences
    assert sorted(sentences[-2:]) == ["answered", "the message is not one for this node"]  # of two copies one
    log = (node / "guard.log").read_text()
    assert "is not signed by the coordinator" in log and "is for client 1" in log and "a copy of one" in log
    assert before == {name: launch.running(node, name) for name in before} and None not in before.values()
    assert not marker.exists()


def test_a_run_that_is_stopped_ends_no_guard(there):
    """In the middle of nodes' work. Before: the answer to their next sign of life ended the guards."""
    environment, nodes = launch.server_environment(there), launch.node_folders(there)
    before = [orders(node) for node in nodes]
    running = submit(there, settings(there, "local.steps=8000"), there.parent / "stopped")

    def state() -> dict[str, str]:
        return {row["run-id"]: row["status"] for row in launch.flower_runs(environment)}

    wait_for(lambda: [orders(node) for node in nodes] > before)
    (run,) = (name for name, status in state().items() if status == "running")
    line = ["flwr", "stop", str(run), "fedlens"]
    subprocess.run(line, env=launch.environment_of(environment), check=True, capture_output=True)
    running.wait(120)
    end = time.monotonic() + 25  # two signs of life
    while time.monotonic() < end:
        assert all(launch.running(node, "guard") for node in nodes)
        time.sleep(1)
    deployed(there, "after")


def orders(node: Path) -> int:
    """How many a SuperNode has got."""
    return (node / "supernode.log").read_text().count("Receiving: train")


def test_one_lying_node_of_three_is_bounded_by_what_a_deployment_adds(there, tmp_path):
    """It claims 1e12 images and sends a million times its update. Before: the model is where it says."""
    node = there / "nodes" / "2"
    honest = moved(there, deployed(there, "honest")).norm()
    os.kill(launch.running(node, "guard") or 0, signal.SIGTERM)
    wait_for(lambda: launch.running(node, "guard") is None)
    (tmp_path / "liar.py").write_text(LIAR)
    launch.start(
        node, "guard", [sys.executable, str(tmp_path / "liar.py"), *launch.guard(node)[-2:]], launch.ENVIRONMENT
    )
    try:
        bare = deployed(there, "bare", "policy.max_weight_share=none", "defences=none")
        assert moved(there, bare).norm() > 1e4 * honest
        kept = [word for word in launch.words_of(there) if word.startswith(("policy.max", "defences"))]
        assert kept == ["policy.max_weight_share=0.6667", "defences=clip"]
        assert moved(there, deployed(there, "bounded", *kept)).norm() < 3 * honest
    finally:
        again(node, lambda: None)


def test_a_node_that_calls_itself_another_gets_no_work(there):
    """Node 0 says after a restart that it is client 1: its key is that of client 0."""
    node = there / "nodes" / "0"
    text = (node / "node.yaml").read_text()
    other = re.sub(r"^client: 0", "client: 1", text, flags=re.M)
    port = launch.runtime_port(node, launch.Link.of(node))
    launch.stop(node)
    (node / "node.yaml").write_text(other)
    moved_port = [str(port) if word == str(port + 1) else word for word in launch.supernode(node)]
    environment = {**launch.ENVIRONMENT, "FLWR_HOME": str((node / "flower").resolve())}
    launch.start(node, "supernode", moved_port, environment)
    launch.start(node, "guard", [*launch.guard(node)[:-1], f"127.0.0.1:{port}"], environment)
    try:
        ended = streamed(there, "taken", "wait=40.0")
        assert ended.returncode == 1 and "no node for clients 0" in ended.stdout + ended.stderr
        assert "a message is for client 0, and this node is client 1" in (node / "guard.log").read_text()
        assert launch.running(node, "guard") and launch.running(node, "supernode")
    finally:
        again(node, lambda: (node / "node.yaml").write_text(text))
    deployed(there, "returned")  # it may try again


def streamed(folder: Path, name: str, *waits: str) -> subprocess.CompletedProcess:
    """`fedlens deploy run --stream`, as an operator types it."""
    text = " ".join([*settings(folder), f"out={folder.parent / name}"])
    line = [sys.executable, "-m", "fedlens", "deploy", "run", str(folder), "--stream", "--run-config"]
    return subprocess.run(
        [*line, " ".join([f'settings="{text}"', *waits])], capture_output=True, text=True, timeout=300
    )


def test_a_site_with_an_undeclared_class_refuses_and_keeps_its_name(there):
    """The server hears that classes differ; the owner's log says which; the command fails. Site 0 lacks c, and may."""
    node, before = there / "nodes" / "1", (there / "nodes" / "1" / "node.yaml").read_text()
    again(node, lambda: own(node, bars(there.parent / "other.npz", seed=7, names=("a", "b", "syphilis"))))
    try:
        ended = streamed(there, "differs")
        told = ended.stdout + ended.stderr + (there / "server" / "superlink.log").read_text()
        assert ended.returncode == 1 and "a node refuses this run: its classes differ" in told
        kept = [path for path in (there.parent / "differs").rglob("*") if path.is_file()]
        assert kept and not any(b"syphilis" in path.read_bytes() for path in kept) and "syphilis" not in told
        assert "the run does not declare syphilis" in (node / "guard.log").read_text()
    finally:
        again(node, lambda: (node / "node.yaml").write_text(before))
    ended = streamed(there, "agrees")
    assert ended.returncode == 0, ended.stderr
