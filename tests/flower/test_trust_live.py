"""Attacks over a real SuperLink with TLS: a stranger at the port, a hostile app, another user of the node's machine."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import time
from base64 import b64encode
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

import test_flower as flower
from fedlens.flower import launch
from fedlens.flower.defaults import added
from fedlens.flower.node import Node
from fedlens.runs.folder import RunFolder
from live import own, serverapps, started, submit, wait_for
from test_flower import federation, needs_flower  # noqa: F401  the fixture

pytestmark = [needs_flower, pytest.mark.slow, pytest.mark.flower]
MALICE = """
from pathlib import Path
Path({marker!r}).write_text("ran at import")
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    Path({marker!r}).write_text("ran as a task")
    raise SystemExit

app.query()(train)
"""


def call(
    folder: Path, method: str, path: str, port: int, body: bytes = b"", headers: dict | None = None, of: str = "server"
) -> int:
    """What a stranger with the authority's certificate is answered; 0: the connection was closed on him."""
    context = ssl.create_default_context(cafile=str(folder / of / "ca.crt"))
    line = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    try:
        line.request(method, path, body, headers or {"Content-Type": "application/protobuf"})
        return line.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        line.close()


def read(folder: Path, path: str, port: int) -> bytes:
    context = ssl.create_default_context(cafile=str(folder / "server" / "ca.crt"))
    line = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    line.request("GET", path)
    return line.getresponse().read()


def memory(pid: int) -> int:
    """MiB that a process holds."""
    for row in Path(f"/proc/{pid}/status").read_text().splitlines():
        if row.startswith("VmHWM"):
            return int(row.split()[1]) >> 10
    raise AssertionError(pid)


def test_a_stranger_gets_in_nowhere(federation):  # noqa: F811
    """Control, runtime and fleet calls, Flower's own pages, and a body of 200 MiB without a signature."""
    link = launch.Link.of(federation / "server")
    for path in ("/docs", "/openapi.json", "/", "/v1/control/list-nodes", "/v1/control/register-node"):
        assert call(federation, "GET", path, link.port) == call(federation, "POST", path, link.port) == 404
    for path in (
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/../control",
    ):
        assert call(federation, "POST", path, link.port) == 404
    for path in ("/v1/fleet/activate-node", "/v1/fleet/pull-messages", "/v1/fleet/push-messages"):
        assert call(federation, "POST", path, link.port) == 401
        forged = {"flwr-public-key": "AAAA", "flwr-signature": "AAAA", "flwr-timestamp": "2026-01-01T00:00:00+00:00"}
        assert call(federation, "POST", path, link.port, headers=forged) == 401
    inner = int(link.inside.rpartition(":")[2])
    paths = [*json.loads(read(federation, "/openapi.json", inner))["paths"]]  # of Flower's whole interface
    assert len(paths) > 40 and {call(federation, "POST", path, link.port) for path in paths} == {401, 404}
    assert call(federation, "POST", "/v1/control/list-nodes", inner) == 200  # without a key: the door alone keeps it
    pid = launch.running(federation / "server", "superlink") or 0
    before = memory(pid)
    assert call(federation, "POST", "/v1/fleet/push-object", link.port, b"0" * (200 << 20)) in (0, 401)
    assert memory(pid) - before < 16


def test_flower_itself_listens_on_loopback_alone(federation):  # noqa: F811
    inner = int(launch.Link.of(federation / "server").inside.rpartition(":")[2])
    rows = subprocess.run(["ss", "-ltn"], capture_output=True, text=True).stdout.splitlines()
    heard = [row.split()[3] for row in rows if row.split()[3].endswith(f":{inner}")]
    assert heard in ([], [f"127.0.0.1:{inner}"])  # no ss: nothing to see
    assert call(federation, "GET", "/docs", inner) == 200  # the operator's own, on his machine


def test_a_hostile_app_never_runs_on_a_node(federation, tmp_path):  # noqa: F811
    """The operator himself ships foreign lines: no node imports them, and the same node then does honest work."""
    for client in range(3):
        launch.start_node(federation / "nodes" / str(client))
    marker = tmp_path / "marker"
    app = federation / "server" / "app" / "federation" / "client_app.py"
    honest = app.read_text()
    app.write_text(MALICE.format(marker=str(marker)))
    settings = [*flower.words(tmp_path, "scaffold"), "cohort=3"]
    flower.simulated(tmp_path / "simulated", settings)
    running, shown = submit(federation, settings, tmp_path / "real"), ""
    while running.poll() is None:  # what every user of this machine can see
        shown += subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True).stdout
        time.sleep(0.5)
    assert running.returncode == 0
    assert not marker.exists() and not [*federation.glob("nodes/*/flower/apps")]
    assert flower.unlike(tmp_path / "simulated", tmp_path / "real", federation / "nodes") == []
    app.write_text(honest)
    secrets = [(place / "executor.secret").read_text().strip() for place in launch.node_folders(federation)]
    lines = [line for line in shown.splitlines() if str(federation / "nodes") in line]
    assert any("fedlens.flower.guard" in line for line in lines)  # no token of a task, no app, no secret
    assert not any(word in line for line in lines for word in (*secrets, "--token", "flwr-clientapp", "superexec "))
    assert all((place / "executor.secret").stat().st_mode & 0o077 == 0 for place in launch.node_folders(federation))
    result = RunFolder.open(tmp_path / "real").result()
    assert result is not None and result["rounds"] == 3
    # Another user of the node's machine, who does not have the secret, takes no task.
    node = federation / "nodes" / "0"
    port = launch.runtime_port(node, launch.Link.of(node))
    assert call(node, "POST", "/v1/runtime/acquire-task", port, of="local") == 401


def test_a_node_cannot_answer_for_another(federation):  # noqa: F811
    """Node 0, with its own key, at the door: in the name of node 1, or as node 1, or with a stranger's key."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    places = [federation / "nodes" / str(client) for client in (0, 1)]
    for place in places:
        launch.start_node(place)
        wait_for(lambda place=place: "SuperNode ID" in (place / "supernode.log").read_text())
    found = [re.findall(r"SuperNode ID: (\d+)", (place / "supernode.log").read_text()) for place in places]
    mine, theirs = (int(each[-1]) for each in found)

    def push(node: int, source: int, key) -> int:
        request = PushMessagesRequest()
        request.node.node_id = node
        message = Message()
        message.metadata.src_node_id = source
        request.messages_list.append(message)
        signed_at = datetime.now(UTC).isoformat()
        headers = {
            "Content-Type": "application/protobuf",
            TIMESTAMP_HEADER: signed_at,
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, signed_at.encode())).decode(),
        }
        port = launch.Link.of(federation / "server").port
        return call(federation, "POST", "/v1/fleet/push-messages", port, request.SerializeToString(), headers)

    key = load_ssh_private_key((places[0] / "key").read_bytes(), None)
    assert push(mine, theirs, key) == 403  # the door: a reply in another's name
    assert push(theirs, theirs, key) == 401  # Flower: this key is another node's
    assert push(theirs, theirs, ec.generate_private_key(ec.SECP384R1())) == 401  # the door: nobody's key
    assert push(mine, mine, key) not in (401, 403)  # who speaks for itself is let through, if to no avail


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """One federation for all methods: three nodes with TLS, whose owners let more than updates out."""
    folder = tmp_path_factory.mktemp("trial") / "federation"
    words = flower.words(folder.parent, "scaffold", "cohort=3", "data.size=32")

    def owners(_: int, place: Path) -> None:
        text = (place / "node.yaml").read_text()
        (place / "node.yaml").write_text(text.replace("raw_derived: false", "raw_derived: true"))

    with started(folder, words, owners):
        yield folder


@pytest.mark.parametrize("method", flower.METHODS)
def test_methods_with_all_that_a_deployment_adds(method, trial):
    """Half a minute each: signed messages over TLS; the bits of a simulation with the settings that were printed."""
    place = trial.parent / method
    place.mkdir()
    small = [] if any(word.startswith("model=") for word in flower.METHODS[method]) else ["model=cnn2"]
    settings = flower.words(trial.parent, method, "cohort=3", "data.size=32", *small)
    settings += added(settings)[0]
    assert "policy.max_weight_share=0.6667" in settings
    flower.simulated(place / "simulated", settings)
    assert submit(trial, settings, place / "real", patience=600.0).wait(600) == 0
    assert flower.unlike(place / "simulated", place / "real", trial / "nodes") == []


def budgets(folder: Path, epsilon: float = 60.0) -> None:
    """Nodes with data of their owners' own and a budget."""
    for client, place in enumerate(launch.node_folders(folder)):
        budget = {"epsilon": epsilon, "delta": 1e-5, "label": f"own{client}", "ledger": str(folder.parent / "ledgers")}
        own(place, flower.digits(folder.parent / f"own{client}.npz", seed=client), budget)


def test_no_release_is_forgotten_and_none_counted_twice(federation, tmp_path):  # noqa: F811
    """Minutes: kill -9 of a node, of the ServerApp and of the SuperLink, with a budget ledger at every node."""
    budgets(federation)
    for place in launch.node_folders(federation):
        launch.start_node(place)
    settings = [*flower.words(tmp_path, "fedavg", *flower.DP, "uplink.multiplier=20"), "cohort=3", "rounds=8"]
    out, victim = tmp_path / "real", federation / "nodes" / "1"

    def rounds() -> int:
        return max(RunFolder(out).rounds(), default=0)

    def books() -> list[Counter]:
        ledgers = [Node.read(place / "node.yaml").ledger for place in launch.node_folders(federation)]
        return [Counter(line["round"] for line in book.lines() if line["kind"] == "booked") for book in ledgers if book]

    running = submit(federation, settings, out, patience=300.0)
    wait_for(lambda: rounds() >= 1, 600)
    for name in ("guard", "supernode"):
        os.kill(launch.running(victim, name) or 0, signal.SIGKILL)
    launch.start_node(victim)
    wait_for(lambda: rounds() >= 3, 600)
    for pid in serverapps(federation):
        os.kill(pid, signal.SIGKILL)
    running.wait(120)
    assert rounds() < 8
    running = submit(federation, settings, out, patience=300.0)
    wait_for(lambda: rounds() >= 5 or running.poll() is not None, 900)
    os.kill(launch.running(federation / "server", "superlink") or 0, signal.SIGKILL)
    running.wait(120)
    assert rounds() < 8
    launch.start_server(federation)
    for _ in range(5):  # a starved machine makes Flower give runs up: the same command goes on
        submit(federation, settings, out, patience=300.0).wait(900)
        if RunFolder(out).result() is not None:
            break
    assert RunFolder(out).result() is not None
    counted = [row for row in RunFolder(out).metrics().to_pylist() if row["metric"] == "missing"]
    missed = Counter(row["client"] for row in counted)
    for client, booked in enumerate(books()):
        assert set(booked.values()) == {1}, (client, booked)  # none twice
        assert len(booked) >= 8 - missed[client]  # none forgotten: every answer that counted is in the book
    nothing_leaks(federation, tmp_path)


def nothing_leaks(folder: Path, tmp_path: Path) -> None:
    """No key, secret, token or path of an owner's data in any log, nor in what the server keeps."""
    secrets = [path.read_bytes() for name in ("key", "*.key", "*.secret") for path in folder.rglob(name)]
    needles = [line for text in secrets for line in text.splitlines() if len(line) >= 32 and b"PRIVATE" not in line]
    logs = [*folder.rglob("*.log"), tmp_path / "real" / "log.txt"]
    kept = [path for path in (folder / "server").rglob("*") if path.is_file() and path.suffix not in (".key",)]
    assert needles and logs and all((path.stat().st_mode & 0o077) == 0 for path in folder.rglob("*.log"))
    for path in (*logs, *kept):
        text = path.read_bytes()
        assert not any(needle in text for needle in needles), path
        if path.parts[-2] == "server" or path.name == "log.txt" or path.suffix == ".db":
            assert b"own0.npz" not in text, path
