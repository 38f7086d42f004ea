"""Attacks over a real SuperLink with TLS: a stranger at the port, a hostile app, another user of the node's machine."""

from __future__ import annotations

import http.client
import inspect
import ssl
import subprocess
from pathlib import Path

import pytest

import test_flower as flower
from fedlens.flower import launch
from fedlens.runs.folder import RunFolder
from test_flower import federation, needs_flower  # noqa: F401  the fixture

pytestmark = [needs_flower, pytest.mark.slow]
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


def call(folder: Path, method: str, path: str, port: int, body: bytes = b"", headers: dict | None = None) -> int:
    """What a stranger with the authority's certificate is answered; 0: the connection was closed on him."""
    context = ssl.create_default_context(cafile=str(folder / "server" / "ca.crt"))
    line = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    try:
        line.request(method, path, body, headers or {"Content-Type": "application/protobuf"})
        return line.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        line.close()


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
    assert flower.submit(federation, settings, tmp_path / "real").wait(300) == 0
    assert not marker.exists() and not [*federation.glob("nodes/*/flower/apps")]
    assert flower.unlike(tmp_path / "simulated", tmp_path / "real", federation / "nodes") == []
    app.write_text(honest)
    secrets = [(place / "executor.secret").read_text().strip() for place in launch.node_folders(federation)]
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert not any(secret in shown for secret in secrets)
    assert all((place / "executor.secret").stat().st_mode & 0o077 == 0 for place in launch.node_folders(federation))
    result = RunFolder.open(tmp_path / "real").result()
    assert result is not None and result["rounds"] == 3
    # Another user of the node's machine, who does not have the secret, takes no task.
    node = federation / "nodes" / "0"
    port = launch.runtime_port(node, launch.Link.of(node))
    assert call(federation, "POST", "/v1/runtime/acquire-task", port) == 401


def test_flower_still_has_the_names_that_guard_and_door_use():
    """A new version of Flower must not open what these close."""
    import importlib

    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    assert callable(superlink._parse_superlink_lifespan_config) and superlink.SuperLinkLifespan
    assert [*inspect.signature(pull_task_input).parameters] == ["client"]
    assert [*inspect.signature(push_message).parameters] == ["client", "message", "context"]
    assert [*inspect.signature(push_task_output).parameters] == ["client", "context", "sub_status", "details"]
