"""The model of a node's own client, made at the node from what it keeps: it never leaves it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from .. import config
from ..core.batches import Shard
from ..core.errors import BadInput, RunFailed
from ..core.evaluate import pieces, score, total
from ..core.memories import Memories
from ..core.network import Network
from ..core.tree import Tree
from ..core.wire import decode
from ..data import DataSource, Images
from ..engines.process import matmuls, threads
from ..engines.sequential import Sequential
from ..experiment import Experiment
from .contract import experiment_of, job_of
from .messages import Leaves, Payload, from_bytes, to_bytes, tree_of
from .node import Node, named

NEWEST = "newest"  # what the server asked last, in the folder that a node has for a run


class OwnModel(NamedTuple):
    """What a client predicts with after the last thing that it was asked."""

    experiment: Experiment
    images: Images
    net: Network
    weights: Tree
    facts: dict[str, Any]  # for its model card


def newest(contract: dict[str, Any], order: dict[str, Any], download: Leaves) -> bytes:
    """What a node keeps of an order, so that its model can be made again."""
    return to_bytes(Payload({"contract": contract, "order": order}, {"download": download}))


def own_model(node: Node, run: str = "") -> OwnModel:
    """The newest model of this node's client, of the newest run or the one named; refused where it has none."""
    folder, kept = _newest(node, run)
    contract, order = kept.notes["contract"], kept.notes["order"]
    experiment = experiment_of(contract, node.policy.classes)
    if node.data is None and node.simulation is None:
        experiment = replace(experiment, data=config.resolve(DataSource, contract.get("simulation"), "data"))
    experiment = experiment.with_execution(device="cpu").resolved()
    images = node.images(experiment, contract)
    federation = node.federation(experiment, images)
    with threads(1):
        net = experiment.network(images)
    if contract.get("initial"):
        net.start_from(_common(folder, contract["initial"]))
    common = _common(folder, order["shared"]) if order["shared"] else Tree()
    turns = experiment.timetable()
    job = job_of(turns, order, tree_of(kept.trees.get("download", {})), common)
    engine = Sequential(net, federation, memories=Memories(folder / "clients", round=order["round"]))
    with threads(1), matmuls(experiment.execution.precision):
        client, batches = engine.open(job, node.client)
        after = engine.local_training(job, node.client, client, batches) if client.steps else None
        found = job.stage.algorithm.personal(client, after)
        weights = Tree(params=found.params, buffers=found.buffers)
        scores = [score(net, weights, piece) for piece in pieces(Shard(federation.data, federation.test[node.client]))]
    facts = {
        "whose": f"the personal model of client {node.client}",
        "run": contract["run"],
        "round": order["stage"] + 1,
        "method": "+".join(named(experiment.algorithm)),
        "accuracy": int(total(scores).correct) / int(total(scores).examples) if scores else None,
        "on": "this client's test images",
        "precision": experiment.execution.precision,
        "settings": {},
    }
    return OwnModel(experiment, images, net, weights, facts)


def _common(folder: Path, name: str) -> Tree:
    """A payload that all clients had, as the node keeps it."""
    try:
        return decode((folder / f"shared-{name}.safetensors").read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError):
        raise BadInput(f"{folder} has lost what all clients were sent: the newest model cannot be made") from None


def _newest(node: Node, run: str) -> tuple[Path, Payload]:
    if not node.storage:
        raise BadInput("this node has no storage, so that it keeps no model: set `storage` in node.yaml")
    there = sorted(Path(node.storage).glob(f"*/{NEWEST}"), key=lambda path: path.stat().st_mtime)
    names = ", ".join(path.parent.name for path in there)
    if run:
        there = [path for path in there if path.parent.name == run]
    if not there:
        known = f"no run {run!r} has trained here; there are {names}"
        raise BadInput(known if run and names else "no run has trained here")
    path = there[-1]
    try:
        return path.parent, from_bytes(path.read_bytes())
    except (OSError, RunFailed):
        raise BadInput(f"{path} is damaged: the newest model cannot be made") from None
