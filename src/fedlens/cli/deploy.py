"""`fedlens deploy`: from an experiment to a federation of machines."""

from __future__ import annotations

import json as json_module
import os
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..flower.node import Node

deploy = typer.Typer(no_args_is_help=True, help="The same experiment on several machines.", rich_markup_mode=None)
Folder = Annotated[Path, typer.Argument(help="The federation's folder.")]
Start = Annotated[bool, typer.Option("--start", help="Start it in the background, in place of printing how.")]
Stay = Annotated[bool, typer.Option("--stay", help="With --start: stay until it ends, as containers want it.")]
Json = Annotated[bool, typer.Option("--json", help="Answer with one line of JSON.")]


@deploy.callback()
def _check() -> None:
    from ..flower.launch import require_flower

    require_flower()


@deploy.command(context_settings={"ignore_unknown_options": True})
def init(
    folder: Folder,
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    host: Annotated[str, typer.Option(help="Name or address under which nodes reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9092,
    listen: Annotated[str, typer.Option(help="The address to listen at, where it is not --host.")] = "",
) -> None:
    """Write a Flower app and a folder for each client.

    They are of the experiment that the settings describe, as for `fedlens run`.
    """
    from ..core.errors import BadInput
    from ..flower.launch import init
    from .format import is_setting

    if is_setting(str(folder)):
        raise BadInput(f"{folder} is a setting: name a folder first, as in `fedlens deploy init FOLDER {folder}`")
    more, said = init(folder, words or (), host, port, listen)
    where = shlex.quote(str(folder))
    if more:
        print(f"added for a deployment: {' '.join(more)}   (KEY=none leaves one out)")
    print(*said, f"simulated on your own images: fedlens run {where}", f"next: fedlens deploy certs {where}", sep="\n")


@deploy.command()
def certs(
    folder: Folder,
    trial: Annotated[
        bool, typer.Option("--trial", help="Make every node here, too, for a trial on one machine.")
    ] = False,
) -> None:
    """Make the server's certificate and keys, and an invitation.

    Each owner of a node needs the invitation to join.
    """
    from ..flower.membership import certify, coordinator

    for path in certify(folder, trial=trial):
        print(path)
    if not trial:
        print(f"the federation's fingerprint, for the owners on the telephone: {coordinator(folder)}")
        print(f"send {folder}/invitation.json to the owner of each node, for `fedlens deploy join`")
    print(f"next: fedlens deploy server {shlex.quote(str(folder))} --start")


@deploy.command()
def join(
    place: Annotated[Path, typer.Argument(help="The node's new folder.")],
    invitation: Annotated[Path, typer.Argument(help="invitation.json, as the operator has sent it.")],
    client: Annotated[int, typer.Option(min=0, help="The number that the operator gives this node.")],
) -> None:
    """At a node: make its folder and key; the key never leaves it."""
    from ..flower.membership import join

    mine, theirs = join(place, invitation, client)
    print(f"{place}/node.pub is this node's public key: send it to the operator, who admits it")
    print(f"its fingerprint:              {mine}\nthe federation's fingerprint: {theirs}")
    print("Compare both by telephone: `certs` and `admit` show them to the operator.")
    print(f"next: name your images in {place}/node.yaml, then fedlens deploy node {shlex.quote(str(place))} --start")


@deploy.command()
def admit(
    folder: Folder,
    client: Annotated[int, typer.Argument(help="The client that this node is.")],
    public: Annotated[Path, typer.Argument(help="Its node.pub, as its owner has sent it.")],
) -> None:
    """At the server: bind a node's public key to a client. A new key takes the old one's place."""
    from ..flower import launch, membership

    print(f"client {client} is the node with {membership.admit(folder, client, public)}")
    told = launch.register(folder, folder / "server" / "keys" / f"{client}.pub")
    print("the SuperLink knows its key" if told else "the SuperLink learns of its key when it starts")


@deploy.command()
def server(
    folder: Folder,
    start: Start = False,
    stay: Stay = False,
    in_memory: Annotated[bool, typer.Option("--in-memory", help="Faster; nodes end when the SuperLink does.")] = False,
) -> None:
    """Start the server, or print the commands that do.

    They start Flower's SuperLink, register the nodes and submit the run.
    """
    from ..flower import launch

    if start:
        launch.start_server(folder, in_memory=in_memory)
        print(f"the SuperLink runs; next: fedlens deploy run {shlex.quote(str(folder))}", flush=True)
        if stay:
            launch.attend(folder / "server", "superlink")
        return
    for name, value in launch.server_environment(folder).items():
        print(f"export {name}={shlex.quote(value)}")
    for line in (
        launch.superlink(folder, in_memory=in_memory),
        *launch.registrations(folder),
        launch.submission(folder),
    ):
        print(shlex.join(line))


@deploy.command()
def node(
    place: Annotated[Path, typer.Argument(help="The node's folder, DIR/nodes/N or a copy of it.")],
    start: Start = False,
    stay: Stay = False,
    show: Annotated[bool, typer.Option("--show", help="Say what this node would run and let out.")] = False,
) -> None:
    """Start a node, or print the commands that do.

    They start Flower's SuperNode and the guard, the process that checks every order and does the work.
    """
    from ..flower import launch

    if show:
        from ..flower import owner

        print("\n".join([*owner.shown(_node(place)), *owner.identity(place)]))
        return
    if start:
        launch.start_node(place)
        print(f"{place} runs", flush=True)
        if stay:
            launch.attend(place, "supernode")
        return
    for name, value in {**launch.ENVIRONMENT, "FLWR_HOME": str((place / "flower").resolve())}.items():
        print(f"export {name}={shlex.quote(value)}")
    for line in (launch.supernode(place), launch.guard(place)):
        print(shlex.join(line))


@deploy.command()
def approve(
    place: Annotated[Path, typer.Argument(help="The node's folder.")],
    yes: Annotated[bool, typer.Option("--yes", help="Approve all that wait, without a question.")] = False,
) -> None:
    """Read the contracts that wait at a node, and approve them or not."""
    from ..core.files import read_json
    from ..flower import owner

    found = _node(place)
    for path in owner.waiting(found):
        print("\n".join([*owner.summary(found, read_json(path)), *owner.identity(place)]))
        if yes or typer.confirm("Carry this out?"):
            owner.approve(found, path)
            print("approved")
    print(f"{len(owner.waiting(found))} contracts wait")


@deploy.command()
def export(
    place: Annotated[Path, typer.Argument(help="The node's folder.")],
    run: Annotated[str, typer.Option(help="The run's name in the node's storage; without it the newest.")] = "",
    to: Annotated[str, typer.Option(help="torch, onnx or exported.")] = "torch",
    out: Annotated[str, typer.Option(help="The new folder; without it, `export` in the node's folder.")] = "",
    json: Json = False,
) -> None:
    """At a node: export its personal model.

    It is made at the node, never leaves it, and is used without FedLens.
    """
    from ..export.folder import check_form
    from ..export.model import trained
    from ..flower.own_model import own_model
    from .export import written

    check_form(to)
    node = _node(place)
    mine = own_model(node, run)
    model = trained(
        mine.net, mine.weights, mine.experiment.model, mine.images, node.data or node.simulation, mine.facts
    )
    written(model, Path(out) if out else place / "export", to, json=json)


@deploy.command()
def budget(place: Annotated[Path, typer.Argument(help="The node's folder.")]) -> None:
    """What has left a node's data, and what is left to spend."""
    from ..flower import owner

    print("\n".join(owner.budget(_node(place))))


def _node(place: Path) -> Node:
    from ..flower.node import Node

    return Node.read(place / "node.yaml")


@deploy.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run(context: typer.Context, folder: Folder) -> None:
    """Submit the run; after a crash, go on where it was.

    It calls `flwr run`, which gets all further words.

    With --stream it stays until the run ends, and fails where the run does.
    """
    from ..core.errors import RunFailed
    from ..flower import launch

    told, line = launch.server_environment(folder), [*launch.submission(folder), *context.args]
    environment = launch.environment_of(told)
    if "--stream" not in context.args:
        os.execvpe(line[0], line, environment)
    before = {row["run-id"] for row in launch.flower_runs(told)}
    code = subprocess.run(line, env=environment).returncode
    ended = [row for row in launch.flower_runs(told) if row["run-id"] not in before]
    if code or not ended or not str(ended[-1]["status"]).endswith("completed"):
        how = f": Flower calls it {ended[-1]['status']}" if ended else ""
        raise RunFailed(f"the run has not been completed{how}; what is above says why")


@deploy.command()
def status(folder: Folder, json: Json = False) -> None:
    """What runs, how far it is, and how many bytes were sent.

    Bytes of our messages stand beside those that Flower moved.
    """
    from ..flower.launch import status

    found = status(folder)
    if json:
        print(json_module.dumps(found))
        return
    for row in found["processes"]:
        print(f"{row['where']:>8} {row['process']:<10} {row['pid'] or 'does not run'}")
    for row in found["flower"]:
        print("flower: " + ", ".join(f"{name} {value}" for name, value in row.items() if value not in ("", None)))
    print("run: " + ", ".join(f"{name} {value}" for name, value in found["run"].items()))


@deploy.command()
def stop(folder: Folder) -> None:
    """End what `--start` started, nodes first."""
    from ..flower.launch import stop

    print("\n".join(stop(folder)) or "nothing runs")
