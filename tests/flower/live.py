"""A federation of real processes on this machine, for tests: SuperLink, nodes and guards with TLS; and runs over it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedlens.flower import launch, membership


def free_port(count: int) -> int:
    """The first of so many neighbouring ports that nobody uses."""
    for port in range(20_000 + os.getpid() * 16 % 20_000, 60_000, 16):  # neighbours may look at the same moment
        try:
            for each in range(port, port + count):
                with socket.socket() as line:
                    line.bind(("127.0.0.1", each))
            return port
        except OSError:
            continue
    raise RuntimeError("no free ports")


@contextmanager
def started(
    folder: Path, words: Sequence[str], owners: Callable[[int, Path], None] | None = None, *, nodes: bool = True
) -> Iterator[Path]:
    """A SuperLink with TLS and node authentication, and its nodes; `owners` decide on their files before that."""
    launch.init(folder, words, "127.0.0.1", free_port(4))
    membership.certify(folder, trial=True)
    for client, place in enumerate(launch.node_folders(folder)):
        if owners is not None:
            owners(client, place)
    try:
        launch.start_server(folder)
        for place in launch.node_folders(folder) if nodes else ():
            launch.start_node(place)
        yield folder
    finally:
        launch.stop(folder)


def own(node: Path, data: Path, privacy: dict | None = None) -> None:
    """Data of the owner's, who approves all contracts; with a budget, or none."""
    text = (node / "node.yaml").read_text().replace("contracts: ask", "contracts: any")
    text = re.sub(r"^(simulation|data|privacy): .*\n", "", text, flags=re.M)
    said = {"data": {"is": "npz", "path": str(data)}, "privacy": privacy or "none"}
    (node / "node.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in said.items()) + text)


def again(node: Path, change: Callable[[], object]) -> None:
    """Start a node anew, after its owner has changed its file."""
    launch.stop(node)
    change()
    launch.start_node(node)


def submit(folder: Path, settings: list[str], out: Path, patience: float = 90.0) -> subprocess.Popen:
    text = " ".join([*settings, f"out={out}"])
    line = [*launch.submission(folder), "--stream", "--run-config", f'settings="{text}" patience={patience}']
    return subprocess.Popen(line, env=launch.environment_of(launch.server_environment(folder)))


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def serverapps(folder: Path) -> list[int]:
    """Processes that run the ServerApp under this federation's SuperLink."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    family = {launch.running(folder / "server", "superlink")}
    for _ in range(5):
        family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
    return [int(pid) for pid, _, line in rows if int(pid) in family and "flwr-serverapp" in line]
