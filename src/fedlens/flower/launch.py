"""A federation's folder: what `fedlens deploy` writes into it, the command lines it prints, and a trial on one machine.

DIR/authority/        ca.key, ca.crt: stays with whoever runs the federation
DIR/server/           the Flower app, certificate, the coordinator's key, the nodes' public keys, the run
DIR/invitation.json   what a node needs to join; nothing of it is secret
DIR/nodes/N/          nodes of a trial on this machine; others lie with their owners (membership.py)
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.errors import BadInput, RunFailed
from ..core.files import read_json

# Telemetry, the question for updates and installing packages at run time are off unless somebody turns them on.
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; Flower's own second would be most of a small task
    "OMP_NUM_THREADS": "1",
}
_MISSED = 90.0  # seconds; Flower takes a node that was killed for alive until two heartbeats, a minute, are missing
_INNER = 1000  # from the door's port to that of Flower on loopback; below it where ports end
SERVER = "FEDLENS_SERVER"  # the variable that tells the ServerApp where its key and the nodes' lie
_CONNECTION = "fedlens"  # what the SuperLink is called in Flower's config.toml


@dataclass(frozen=True)
class Link:
    """Where the SuperLink is reached."""

    host: str  # under which nodes reach it
    port: int
    listen: str  # the address that the door listens at
    inner: int = 0  # Flower's own port, on loopback alone

    @classmethod
    def of(cls, folder: Path) -> Link:
        try:
            return cls(**read_json(folder / "link.json"))
        except (OSError, ValueError, TypeError):
            raise BadInput(f"{folder} is no part of a federation: `fedlens deploy init` writes link.json") from None

    @property
    def address(self) -> str:
        """Where nodes reach the door."""
        return f"{self.host}:{self.port}"

    @property
    def inside(self) -> str:
        """Where the operator reaches Flower itself, on the server's own machine."""
        return f"127.0.0.1:{self.inner or self.port + _INNER}"


def require_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise BadInput("deploy needs Flower, which is not installed here: pip install 'fedlens[flower]'")


# ---- writing ---------------------------------------------------------------------------------------------------------
def init(folder: Path, words: Sequence[str], host: str, port: int, listen: str = "") -> tuple[list[str], list[str]]:
    """The folder of a new federation; (settings that were added, what was not added and why)."""
    from .. import config
    from .contract import check_deployable
    from .defaults import added

    if taken := next((name for name in ("server", "nodes") if (folder / name).exists()), ""):
        raise BadInput(f"{folder} already holds a federation ({taken}); choose another folder")
    out = [] if any(word.startswith("out=") for word in words) else [f"out={(folder / 'server' / 'run').resolve()}"]
    check_deployable(config.read(None, [*words, *out]))
    more, said = added(words)
    settings = [*words, *more, *out]
    made = next(place for place in (folder, *folder.absolute().parents) if place.exists() or place.parent.exists())
    is_new = not made.exists()
    try:
        inner = port + _INNER if port + _INNER < 1 << 16 else port - _INNER
        where = {"host": host, "port": port, "listen": listen or host, "inner": inner}
        _written(folder, settings, where)
        return more, said
    except OSError as error:
        for place in [made] if is_new else [folder / "server", folder / "nodes"]:
            shutil.rmtree(place, ignore_errors=True)
        raise BadInput(f"{folder} cannot hold a federation ({error.strerror})") from None


def _written(folder: Path, settings: Sequence[str], where: dict[str, Any]) -> None:
    app = folder / "server" / "app"
    (app / "federation").mkdir(parents=True)
    (app / "pyproject.toml").write_text(
        _template("app.toml").format(settings=json.dumps(shlex.join(settings))), "utf-8"
    )
    (app / "README.md").write_text("A FedLens federation. Made by `fedlens deploy init`.\n", "utf-8")
    (app / "federation" / "__init__.py").touch()
    for side in ("server_app", "client_app"):
        (app / "federation" / f"{side}.py").write_text(
            f"from fedlens.flower import {side}\n\napp = {side}.app\n", "utf-8"
        )
    (folder / "server" / "link.json").write_text(json.dumps(where) + "\n", "utf-8")


def experiment_of(folder: Path) -> Any:
    """What a federation runs, with all that `init` has added."""
    from .. import config

    return config.read(None, words_of(folder))


def words_of(folder: Path) -> list[str]:
    """The settings of a federation, as they would be typed."""
    import tomllib

    text = (folder / "server" / "app" / "pyproject.toml").read_text("utf-8")
    return shlex.split(tomllib.loads(text)["tool"]["flwr"]["app"]["config"]["settings"])


def _template(name: str) -> str:
    return (resources.files("fedlens.flower") / "assets" / name).read_text("utf-8")


def node_folders(folder: Path) -> list[Path]:
    return sorted((folder / "nodes").glob("*"), key=lambda path: path.name.zfill(9))


# ---- command lines ---------------------------------------------------------------------------------------------------
def server_environment(folder: Path) -> dict[str, str]:
    """Flower's own folder lies in ours, and knows the SuperLink."""
    home, link = (folder / "server" / "flower").resolve(), Link.of(folder / "server")
    _require(folder / "server", "tls.crt")
    home.mkdir(exist_ok=True, mode=0o700)
    ca = json.dumps(str((folder / "server" / "ca.crt").resolve()))
    address = json.dumps(link.inside)
    text = f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
    (home / "config.toml").write_text(f"{text}address = {address}\nroot-certificates = {ca}\n", "utf-8")
    return {**ENVIRONMENT, "FLWR_HOME": str(home), SERVER: str((folder / "server").resolve())}


def superlink(folder: Path, *, in_memory: bool = False) -> list[str]:
    """With its state on disk nodes find it again when it was killed; in memory large models move faster."""
    place, link = (folder / "server").resolve(), Link.of(folder / "server")
    _require(place, "tls.crt")
    host, port = link.inside.split(":")
    return [
        *(sys.executable, "-P", "-m", "fedlens.flower.door", link.listen, str(link.port), str(place / "keys")),
        *_tls(place),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *("--host", host, "--port", port),
        *(() if in_memory else ("--database", str(place / "flower" / "state.db"))),
    ]


def registrations(folder: Path) -> list[list[str]]:
    return [registration(key) for key in sorted((folder / "server" / "keys").glob("*.pub"))]


def registration(key: Path) -> list[str]:
    return ["flwr", "supernode", "register", str(key.resolve()), _CONNECTION]


def submission(folder: Path) -> list[str]:
    return ["flwr", "run", str((folder / "server" / "app").resolve()), _CONNECTION]


def listing() -> list[str]:
    return ["flwr", "list", _CONNECTION, "--format", "json"]


def supernode(place: Path) -> list[str]:
    """It has the network and starts nothing: the guard beside it has the data, and answers."""
    from .guard import LOCAL, SECRET

    place, link = place.resolve(), Link.of(place)
    _require(place, "coordinator.pub", "join")
    return [
        "flower-supernode",
        *("--superlink", link.address, "--root-certificates", str(place / "ca.crt")),
        *("--auth-supernode-private-key", str(place / "key")),
        *_tls(place / LOCAL),
        *("--isolation", "process", "--superexec-auth-secret-file", str(place / SECRET)),
        *("--host", "127.0.0.1", "--port", str(runtime_port(place, link))),
    ]


def guard(place: Path) -> list[str]:
    """The process that answers: the installed fedlens, and nothing that a server ships."""
    place = place.resolve()
    address = f"127.0.0.1:{runtime_port(place, Link.of(place))}"
    return [sys.executable, "-P", "-m", "fedlens.flower.guard", str(place), address]


def runtime_port(place: Path, link: Link) -> int:
    """Where a SuperNode and the processes it starts talk, on their machine; another for every node of a trial."""
    from .node import Node

    return link.port + 1 + Node.read(place / "node.yaml").client


def _tls(place: Path) -> list[str]:
    files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "tls.crt", "--ssl-keyfile": "tls.key"}
    return [word for option, name in files.items() for word in (option, str(place / name))]


def _require(place: Path, name: str, command: str = "certs") -> None:
    if not (place / name).exists():
        raise BadInput(f"{place} has no {name}: `fedlens deploy {command}` makes it")


# ---- starting and stopping -------------------------------------------------------------------------------------------
def start_server(folder: Path, *, in_memory: bool = False) -> None:
    """The SuperLink in the background, with every node's key registered."""
    environment = server_environment(folder)
    command = superlink(folder, in_memory=in_memory)
    start(folder / "server", "superlink", command, environment)
    for key in sorted((folder / "server" / "keys").glob("*.pub")):
        register(folder, key)


def register(folder: Path, key: Path) -> bool:
    """Tell the SuperLink of an admitted key; False: it does not run, and learns of it when it starts."""
    if running(folder / "server", "superlink") is None:
        return False
    alive = partial(running, folder / "server", "superlink")
    log = folder / "server" / "superlink.log"
    _insist(registration(key), server_environment(folder), lambda: alive() is not None, log)
    return True


def _insist(line: list[str], environment: dict[str, str], is_alive: Callable[[], bool], log: Path) -> None:
    """Say it to the SuperLink until it listens; to have said it before is as good."""
    said = ""
    for _ in range(120):
        done = subprocess.run(line, env=environment_of(environment), capture_output=True, text=True)
        said = " ".join((done.stdout + done.stderr).split())
        if done.returncode == 0 or "already" in said.lower():
            return
        if not is_alive():
            raise RunFailed(f"the SuperLink has ended; {log} says why")
        time.sleep(0.5)
    raise RunFailed(f"the SuperLink does not answer: {said[-300:]}")


def start_node(place: Path) -> None:
    """The SuperNode in the background, and beside it the guard that answers its tasks."""
    was_killed = (place / "supernode.pid").exists() and running(place, "supernode") is None  # `stop` leaves no number
    command = supernode(place)
    environment = {**ENVIRONMENT, "FLWR_HOME": str((place / "flower").resolve())}
    until, log = time.monotonic() + _MISSED, place / "supernode.log"
    while True:
        before = log.stat().st_size if log.exists() else 0
        start(place, "supernode", command, environment)
        if _is_taken(place, log, before):
            break
        refused = b"Failed to activate" in log.read_bytes()[before:]
        if time.monotonic() > until or not was_killed or not refused:
            stop(place)
            asked = f": has its operator admitted {place}/node.pub?" if refused else ", as its SuperNode has ended;"
            raise RunFailed(f"the server does not let this node in{asked} {log} says more")
        time.sleep(2)
    if running(place, "guard") is None:
        start(place, "guard", guard(place), environment)


def _is_taken(place: Path, log: Path, before: int) -> bool:
    """Whether the SuperLink lets the node in, or is not there and the node asks on; else it has ended."""
    for _ in range(100):
        if b"SuperNode ID" in log.read_bytes()[before:]:
            return True
        if running(place, "supernode") is None:
            return False
        time.sleep(0.2)
    return True


def start(place: Path, name: str, command: Sequence[str], environment: dict[str, str]) -> int:
    """In the background; its output goes to NAME.log, its number to NAME.pid."""
    if (pid := running(place, name)) is not None:
        raise BadInput(f"{place / name} runs already, as process {pid}; `fedlens deploy stop` ends it")
    with os.fdopen(os.open(place / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment_of(environment), cwd=place,
            start_new_session=True,
        )  # fmt: skip
    named = next((word for word in command if word.startswith("fedlens.")), Path(command[0]).name)
    (place / f"{name}.pid").write_text(json.dumps({"pid": process.pid, "command": named}), "utf-8")
    return process.pid


def attend(place: Path, name: str) -> None:
    """Stay until it ends, for containers; who is asked to end ends what was started."""

    def leave(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        while running(place, name) is not None:
            time.sleep(1)
        raise RunFailed(f"{name} has ended; {place / name}.log says why")
    finally:
        stop(place)


def environment_of(more: dict[str, str]) -> dict[str, str]:
    """Flower starts its own commands by name: those beside this Python must be found first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **more, "PATH": path}


def running(place: Path, name: str) -> int | None:
    """The process that was started here under this name, when it still runs."""
    try:
        found = read_json(place / f"{name}.pid")
    except (OSError, ValueError):
        return None
    return found["pid"] if is_running(found["pid"], found["command"]) else None


def is_running(pid: int, command: str) -> bool:
    """Numbers of processes are used again: the command must be the same, too."""
    found = subprocess.run(["ps", "-o", "stat=,command=", "-p", str(pid)], capture_output=True, text=True).stdout
    return command in found and not found.lstrip().startswith("Z")


def stop(folder: Path) -> list[str]:
    """Nodes first, then the SuperLink; what was ended."""
    ended = []
    places = [folder, *node_folders(folder), folder / "server"]  # DIR may be a node's own folder
    for place, name in ((p, n) for p in places for n in ("supernode", "guard", "superlink")):
        if (pid := running(place, name)) is None:
            continue
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            if running(place, name) is None:
                break
            time.sleep(0.1)
        else:
            os.kill(pid, signal.SIGKILL)
        (place / f"{name}.pid").unlink(missing_ok=True)
        ended.append(f"{place.name} {name}")
    return ended


def status(folder: Path) -> dict[str, Any]:
    """What runs, what Flower says about its runs, and how far ours is; the ledger's bytes beside Flower's."""
    from ..runs.folder import RunFolder
    from ..runs.read import rounds_of

    rows = [
        {"where": place.name, "process": name, "pid": running(place, name)}
        for place in (folder / "server", *node_folders(folder))
        for name in (("superlink",) if place.name == "server" else ("supernode", "guard"))
    ]
    runs = flower_runs(server_environment(folder))
    out = Path(experiment_of(folder).execution.out)
    ours: dict[str, Any] = {"run": str(out), "rounds": 0}
    if (out / "config.yaml").exists():
        run = RunFolder.open(out)
        checkpoint, _ = run.load()
        if checkpoint is not None:
            done = rounds_of(run).trained(checkpoint.round)
            ours |= {"rounds": done, "bytes_up": checkpoint.ledger.up, "bytes_down": checkpoint.ledger.down}
    return {"processes": rows, "flower": runs, "run": ours}


def flower_runs(environment: dict[str, str]) -> list[dict[str, Any]]:
    """What the SuperLink says about its runs, their bytes among it; nothing where it does not answer."""
    listed = subprocess.run(listing(), env=environment_of(environment), capture_output=True, text=True)
    try:
        return json.loads(listed.stdout)["runs"]
    except (ValueError, KeyError):
        return []
