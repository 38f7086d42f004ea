"""Answers payloads with the sequential engine and a cohort of one; knows nothing of how payloads travel."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..core.algorithm import Client
from ..core.batches import Federation, Plan
from ..core.engine import Job
from ..core.errors import BadInput, ClientFailed, RunFailed
from ..core.evaluate import Evaluate
from ..core.files import write_atomic
from ..core.memories import Memories, prune
from ..core.network import Network
from ..core.rng import key
from ..core.tree import Tree
from ..core.wire import decode, encode
from ..engines.process import keep_freed_memory
from ..engines.sequential import Sequential
from ..experiment import Experiment, to_device
from .contract import Timetable, digest, experiment_of, job_of, version
from .messages import Leaves, Payload, leaves_of, tree_of
from .node import Node, epsilon, private

_MEMORY = "memory-"  # then the round that wrote it: how Flower's context names what a client knows


class NodeEngine(Sequential):
    """The sequential engine; where `secret` is given, what a client draws cannot be drawn again by the server."""

    secret: str = ""

    def _view(
        self, job: Job, i: int, net: Network | None = None, federation: Federation | None = None
    ) -> tuple[Client, Plan]:
        client, batches = super()._view(job, i, net, federation)
        if self.secret:
            asked = hashlib.sha256(encode(job.download)).hexdigest()
            client = replace(client, key=key(self.secret, job.round, i, asked))
        return client, batches


@dataclass(frozen=True)
class Prepared:
    """All of a run that stays the same from order to order."""

    experiment: Experiment
    timetable: Timetable
    net: Network
    federation: Federation


class Trainer:
    """Keeps what the last run needed, so that a process that lives on need not build it again."""

    def __init__(self, node: Node):
        self.node = node
        self._prepared: tuple[str, Prepared] | None = None
        torch.set_num_threads(1)  # the number of threads changes how sums round
        keep_freed_memory()

    def answer(self, payload: Payload, kept: dict[str, Leaves] | None = None) -> tuple[Payload, dict[str, Leaves]]:
        """The reply, and what Flower's context should keep where the node has no storage: `kept`, next time."""
        try:
            return self._answer(payload, kept or {})
        except BadInput as error:
            return Payload({"refused": str(error)}, {}), kept or {}
        except (ClientFailed, RunFailed) as error:
            return Payload({"failed": getattr(error, "trace", str(error))}, {}), kept or {}

    def _answer(self, payload: Payload, kept: dict[str, Leaves]) -> tuple[Payload, dict[str, Leaves]]:
        notes = payload.notes
        run = self._prepare(notes["contract"])
        if notes["ask"] == "hello":
            own = {"own_data": self.node.data is not None, "own_noise": self.node.policy.epsilon is not None}
            return Payload({"client": self.node.client, **own}, {}), kept
        order = notes["order"]
        folder = self._folder(notes["contract"]["run"])
        shared = self._shared(order["shared"], payload.trees.get("shared"), folder)
        if shared is None:
            return Payload({"missing": order["shared"]}, {}), kept
        device = run.experiment.execution.device
        received = tree_of(payload.trees["download"]).map(lambda leaf: leaf.to(device))
        job = job_of(run.timetable, order, received, shared.map(lambda leaf: leaf.to(device)))
        memories = self._memories(kept, folder, order["round"])
        engine = NodeEngine(run.net, run.federation, memories=memories)
        if self.node.policy.epsilon is not None:
            assert folder is not None  # Node refuses a limit without storage
            engine.secret = _secret(Path(self.node.storage))
            _account(folder, job, self.node.policy.epsilon)
        (reply,) = engine.run(job, [self.node.client])
        if not isinstance(job.stage.algorithm, Evaluate):
            self.node.policy.let_out(reply.upload)
        memories.save()
        if folder is not None:
            # A server that was killed asks for this round or the one before it again.
            prune(memories.folder or folder, before=max(0, order["round"] - 1), after=order["round"] + 1)
        return Payload({"client": self.node.client}, {"upload": leaves_of(reply.upload)}), self._remember(
            kept, memories, order
        )

    def _prepare(self, contract: dict[str, Any]) -> Prepared:
        name = digest(contract)
        if self._prepared is None or self._prepared[0] != name:
            experiment = experiment_of(contract).with_execution(device=self.node.device).resolved()
            images = self.node.images(experiment, contract)
            self.node.policy.check(experiment, images, self.node.client)
            federation = to_device(experiment, self.node.federation(experiment, images))
            net = experiment.network(images).to(experiment.execution.device)
            self._prepared = name, Prepared(experiment, experiment.timetable(), net, federation)
        return self._prepared[1]

    # ---- what a node keeps ----
    def _folder(self, run: str) -> Path | None:
        if not self.node.storage:
            return None
        if not run.isalnum():
            raise BadInput(f"the run calls itself {run!r}, which is no name for a folder")
        folder = Path(self.node.storage) / run
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _shared(self, name: str, sent: Leaves | None, folder: Path | None) -> Tree | None:
        """The common payload: none, the one that came along, or the one kept under its hash; None: it was lost."""
        if not name:
            return Tree()
        path = folder / f"shared-{name}.safetensors" if folder and name.isalnum() else None
        if sent is not None:
            tree = tree_of(sent)
            if version(tree) != name:
                raise RunFailed("a message is damaged: the common payload is not the one that was announced")
            if path:
                write_atomic(path, encode(tree))
            return tree
        try:
            return decode(path.read_bytes()) if path else None
        except (OSError, SafetensorError, ValueError, KeyError):
            return None

    def _memories(self, kept: dict[str, Leaves], folder: Path | None, round: int) -> Memories:
        """As they were before this round, whatever a round that was broken off has left."""
        if folder is not None:
            return Memories(folder / "clients", round=round)
        memories = Memories()
        earlier = [name for name in kept if int(name.removeprefix(_MEMORY)) < round]
        if earlier:
            newest = max(earlier)
            memories.put(self.node.client, tree_of(kept[newest]), int(newest.removeprefix(_MEMORY)))
        return memories

    def _remember(self, kept: dict[str, Leaves], memories: Memories, order: dict[str, Any]) -> dict[str, Leaves]:
        """The newest memory, and the one before it, which a repeated round starts from."""
        if memories.folder is not None:
            return {}
        memory = memories.get(self.node.client)
        if not memory:
            return kept
        written = f"{_MEMORY}{int(memory.seen):06d}"
        before = sorted(name for name in kept if name < written)[-1:]
        return {name: kept[name] for name in before} | {written: leaves_of(memory)}


def _secret(storage: Path) -> str:
    """This node's own randomness, from the operating system, once."""
    path = storage / "secret"
    if not path.exists():
        storage.mkdir(parents=True, exist_ok=True)
        write_atomic(path, secrets.token_hex(32).encode(), durable=True)
        path.chmod(0o600)
    return path.read_text("utf-8")


def _account(folder: Path, job: Job, limit: float) -> None:
    """Writes an upload down before it is made; refuses one too many. The same question again is the same upload."""
    dp = private(job.stage.uplink)
    if dp is None:
        raise BadInput("its policy asks for privacy, and what is asked here has no noise")
    path = folder / "releases"
    asked = f"{job.round} {hashlib.sha256(encode(job.download)).hexdigest()}"
    before = path.read_text("utf-8").splitlines() if path.exists() else []
    if asked in before:
        return
    if epsilon(dp, len(before) + 1) > limit:
        raise BadInput(f"its policy allows epsilon {limit:g} at most, which {len(before)} uploads have spent")
    write_atomic(path, ("\n".join([*before, asked]) + "\n").encode(), durable=True)
