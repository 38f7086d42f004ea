"""Answers payloads with the sequential engine and a cohort of one; knows nothing of how payloads travel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import format_exception
from typing import Any

import torch
from safetensors import SafetensorError

from .. import config
from ..core.batches import Federation
from ..core.engine import Job
from ..core.errors import BadInput, RunFailed
from ..core.evaluate import Evaluate
from ..core.files import make_durable, write_atomic, write_json
from ..core.memories import Memories, name, prune
from ..core.network import Network
from ..core.rng import system_noise
from ..core.tree import Tree
from ..core.wire import decode, encode
from ..data import DataSource
from ..engines.process import keep_freed_memory
from ..engines.sequential import Sequential
from ..experiment import Experiment, to_device
from .contract import Timetable, check_look, check_order, check_size, digest, experiment_of, job_of, version
from .messages import DamagedMessage, Leaves, Payload, from_bytes, leaves_of, to_bytes, tree_digest, tree_of
from .node import Node, check_privacy, price
from .own_model import NEWEST, newest

_ANSWERS = 8  # that are kept: rounds, and evaluations between them
_COMMON = 8  # common payloads of a run that are kept; a server that asks for an older one sends it again
_WAITING = 100  # contracts that wait for the owner; a server cannot fill the disk with more
_MEMORY = "memory-"  # then the round that wrote it: how Flower's context names what a client knows


@dataclass(frozen=True)
class Prepared:
    """All of a run that stays the same from order to order."""

    contract: str  # its digest
    experiment: Experiment
    timetable: Timetable
    net: Network
    federation: Federation


class Trainer:
    """Keeps what the last run needed, so that a process that lives on need not build it again."""

    def __init__(self, node: Node, say: Callable[[str], None] = print):
        self.node, self.say = node, say
        self._prepared: Prepared | None = None
        torch.set_num_threads(1)  # the number of threads changes how sums round
        keep_freed_memory()

    def answer(self, payload: Payload, kept: dict[str, Leaves] | None = None) -> tuple[Payload, dict[str, Leaves]]:
        """The reply, and what Flower's context should keep where the node has no storage: `kept`, next time.

        Whatever a server sends, there is a reply. What went wrong stays in the node's own log.
        """
        try:
            return self._answer(payload, kept or {})
        except (BadInput, DamagedMessage) as error:
            self.say(f"refused: {error}{'; ' if (detail := getattr(error, 'detail', '')) else ''}{detail}")
            return Payload({"refused": str(error)}, {}), kept or {}
        except Exception as error:  # a hostile message may break anything, and the node lives on
            self.say(f"failed: {getattr(error, 'trace', '') or ''.join(format_exception(error))}")
            return Payload({"failed": "its work failed; its own log says why"}, {}), kept or {}

    def _answer(self, payload: Payload, kept: dict[str, Leaves]) -> tuple[Payload, dict[str, Leaves]]:
        notes = payload.notes if isinstance(payload.notes, dict) else {}
        contract = notes.get("contract")
        if not isinstance(contract, dict) or notes.get("ask") not in ("hello", "work"):
            raise BadInput("the message is neither a hello nor an order")
        experiment = self._allowed(contract)
        if not self.approved(contract):  # before its data are looked at: refusals would tell a server about them
            return Payload({"waiting": "its owner has not approved this contract yet"}, {}), kept
        run = self._prepare(contract, experiment)
        if notes["ask"] == "hello":
            own = {"own_data": self.node.data is not None, "own_noise": self.node.data is not None}
            return Payload({"client": self.node.client, **own}, {}), kept
        order, download = check_order(notes.get("order")), payload.trees.get("download", {})
        # By node, too: two that share a ledger must not take each other's orders for their own.
        mine = self.node.client, self.node.storage
        asked = digest(contract, order, tree_digest(download), mine)  # however its leaves are ordered
        folder = self._folder(contract["run"])
        if (stored := self._stored(folder, asked)) is not None:
            if (ledger := self.node.ledger) is not None:  # the node may have been killed before it wrote this down
                ledger.sent(asked)
            return stored, kept  # the very same bytes: nothing is computed, drawn or paid for again
        shared = self._shared(order["shared"], payload.trees.get("shared"), folder)
        first = self._shared(contract.get("initial", ""), payload.trees.get("initial"), folder)
        if folder is not None:
            self._forget(folder, order["shared"], contract.get("initial", ""))
        if shared is None or first is None:
            return Payload({"missing": "a common payload"}, {}), kept
        if first:
            run.net.start_from(first)
        device = run.experiment.execution.device
        received = tree_of(download).map(lambda leaf: leaf.to(device))
        job = job_of(run.timetable, order, received, shared.map(lambda leaf: leaf.to(device)))
        check_look(run.experiment, order)
        memories = self._memories(kept, folder, order["round"])
        upload = self._work(run, job, asked, memories)
        written = memories.save()
        if memories.folder is not None:  # before the server counts on it
            make_durable(memories.folder / name(*version) for version in written)
        reply = Payload({"client": self.node.client}, {"upload": leaves_of(upload)})
        if folder is not None:
            self._store(folder, asked, order["round"], reply)
            write_atomic(folder / NEWEST, newest(contract, order, download))  # for `fedlens deploy export`
            # A server that was killed asks for this round or the one before it again.
            prune(memories.folder or folder, before=max(0, order["round"] - 1), after=order["round"] + 1)
        if (ledger := self.node.ledger) is not None:
            ledger.sent(asked)
        return reply, self._remember(kept, memories, order)

    def _work(self, run: Prepared, job: Job, asked: str, memories: Memories) -> Tree:
        """One upload. Noise on data of the owner's own comes from the operating system, and is paid for before."""
        engine = Sequential(run.net, run.federation, memories=memories)
        is_evaluation = isinstance(job.stage.algorithm, Evaluate)
        if (ledger := self.node.ledger) is not None:
            cost = price(job.stage.uplink, type(job.stage.algorithm).__name__)
            if self.node.privacy is not None and cost.noise is None:
                raise BadInput("its owner asks for privacy, and what is asked here has no noise")
            ledger.book(cost, asked, round=job.round + 1, contract=run.contract)
        with system_noise() if self.node.data is not None else nullcontext():
            (reply,) = engine.run(job, [self.node.client])
        if not is_evaluation:
            self.node.policy.let_out(reply.upload)
        return reply.upload

    def _allowed(self, contract: dict[str, Any]) -> Experiment:
        """What a contract asks for; refused where the owner's file forbids it, whatever the data."""
        if self._prepared is not None and self._prepared.contract == digest(contract):
            return self._prepared.experiment
        node, about = self.node, contract.get("data")
        asked = experiment_of(contract, node.policy.classes)
        if node.data is None and node.simulation is None:  # nobody's node: its data are the contract's
            asked = replace(asked, data=config.resolve(DataSource, contract.get("simulation"), "data"))
        experiment = asked.with_execution(device=node.device).resolved()
        assert isinstance(about, dict)  # experiment_of has looked at it
        size = len(about["classes"]), about["shape"][0], about["shape"][2]
        check_size(experiment, *size)
        node.policy.check(experiment, *size)
        if node.privacy is not None:
            assert node.ledger is not None  # Node refuses a budget without storage
            check_privacy(experiment, node.client, node.ledger, digest(contract))
        return experiment

    def _prepare(self, contract: dict[str, Any], experiment: Experiment) -> Prepared:
        name = digest(contract)
        if self._prepared is None or self._prepared.contract != name:
            images = self.node.images(experiment, contract)
            federation = to_device(experiment, self.node.federation(experiment, images))
            net = experiment.network(images).to(experiment.execution.device)
            self._prepared = Prepared(name, experiment, experiment.timetable(), net, federation)
        return self._prepared

    # ---- the owner's approval ----
    def approved(self, contract: dict[str, Any]) -> bool:
        """Whether the owner has read this contract, or needs not; one that waits is written down for him to read."""
        if self.node.policy.contracts == "any" or self.node.data is None:
            return True
        if not self.node.storage:
            raise BadInput("its owner reads contracts first, and it has no storage to keep them")
        folder, name = Path(self.node.storage) / "contracts", digest(contract)
        if (folder / f"{name}.approved").exists():
            return True
        if not (folder / f"{name}.json").exists():
            if sum(not each.with_suffix(".approved").exists() for each in folder.glob("*.json")) >= _WAITING:
                raise BadInput(f"{_WAITING} contracts wait for its owner already, and no more are kept")
            write_json(self._private("contracts") / f"{name}.json", contract)
            self.say(f"a new contract {name[:16]} waits for its owner: fedlens deploy approve")
        return False

    # ---- what a node keeps ----
    def _folder(self, run: str) -> Path | None:
        if not self.node.storage:
            return None
        return self._private(run)

    def _private(self, name: str) -> Path:
        """A folder in the node's storage; both are its owner's alone from the first moment."""
        folder = Path(self.node.storage) / name
        for place in (folder.parent, folder):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _stored(self, folder: Path | None, asked: str) -> Payload | None:
        """The answer that this very order had, where it is still kept."""
        found = next(folder.glob(f"answers/*-{asked}"), None) if folder else None
        try:
            return from_bytes(found.read_bytes()) if found else None
        except (OSError, RunFailed):
            return None

    def _store(self, folder: Path, asked: str, round: int, reply: Payload) -> None:
        answers = folder / "answers"
        answers.mkdir(exist_ok=True, mode=0o700)
        write_atomic(answers / f"{round:06d}-{asked}", to_bytes(reply), durable=True)
        for old in sorted(answers.glob("*"))[:-_ANSWERS]:
            old.unlink()

    def _shared(self, name: str, sent: Leaves | None, folder: Path | None) -> Tree | None:
        """The common payload: none, the one that came along, or the one kept under its hash; None: it was lost."""
        if not name:
            return Tree()
        path = folder / f"shared-{name}.safetensors" if folder and name.isalnum() else None
        if sent is not None:
            tree = tree_of(sent)
            if version(tree) != name:
                raise DamagedMessage("a message is damaged: the common payload is not the one that was announced")
            if path:
                write_atomic(path, encode(tree))
            return tree
        try:
            tree = decode(path.read_bytes()) if path else Tree()
            return tree if version(tree) == name else None
        except (OSError, SafetensorError, ValueError, KeyError):
            return None

    def _forget(self, folder: Path, *needed: str) -> None:
        """Common payloads but for the newest, and those that are needed."""
        known = sorted(folder.glob("shared-*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        for old in known[:-_COMMON]:
            if old.stem.removeprefix("shared-") not in needed:
                old.unlink()

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
