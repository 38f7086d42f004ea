"""Clients on other machines: jobs and replies over Flower's Grid."""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from ..core.errors import BadInput, RunFailed
from ..core.memories import write_whole
from ..core.run import Job, Reply
from ..core.tree import Tree
from ..core.wire import decode, encode
from ..flower.letters import Letter, from_records, leaves_of, to_records, tree_of
from .sequential import Sequential

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_PAUSE = 0.1  # seconds between two looks for replies; Flower's own send_and_receive waits for three
_HELLO = 120.0  # seconds that a node may take to say who it is


class Nodes:
    """Which of Flower's nodes is which client, and the letters to them and back."""

    def __init__(self, grid: Grid, contract: dict[str, Any], population: int, say: Callable[[str], None]):
        self.grid, self.contract, self.population, self.say = grid, contract, population, say
        self.own_data = False  # whether nodes bring their own data, or take their part of the experiment's
        self._known: dict[int, int] = {}  # client -> node
        self._strangers: set[int] = set()  # nodes that do not take part
        self._refusals: list[str] = []

    def gather(self, wait: float) -> None:
        """Wait until every client has a node, which must agree to the whole run."""
        end = time.monotonic() + wait
        while missing := sorted(set(range(self.population)) - self.online().keys()):
            if self._refusals:
                raise BadInput(f"a node refuses this run: {self._refusals[0]}")
            if time.monotonic() > end:
                listed = ", ".join(map(str, missing))
                raise RunFailed(f"after {wait:g} seconds there is still no node for clients {listed}")
            time.sleep(_PAUSE)

    def online(self) -> dict[int, int]:
        """client -> node of all that can be reached now; new ones are asked who they are."""
        there = set(self.grid.get_node_ids())
        self._known = {client: node for client, node in self._known.items() if node in there}
        new = sorted(there - set(self._known.values()) - self._strangers)
        hello = Letter({"ask": "hello", "contract": self.contract}, {})
        for node, answer in self.ask(dict.fromkeys(new, hello), "query", _HELLO):
            client = answer.notes.get("client")
            if client is not None and client not in self._known:
                self._known[client], self.own_data = node, bool(answer.notes["own_data"])
                continue
            self._strangers.add(node)
            if client is not None:
                self.say(f"two nodes say that they are client {client}; the one that came first counts")
            else:
                self._refusals.append(_complaint(answer))
                self.say(f"a node does not take part: {_complaint(answer)}")
        return self._known

    def ask(self, letters: Mapping[int, Letter], kind: str, patience: float) -> Iterator[tuple[int, Letter]]:
        """(node, answer), as they come; those who do not answer in time are left out, and said."""
        from flwr.app import Message

        content = {id(letter): to_records(letter) for letter in letters.values()}  # written once for all nodes
        messages = [Message(content[id(letter)], node, kind, ttl=patience) for node, letter in letters.items()]
        ids = self.grid.push_messages(messages) if messages else []
        waiting, end = dict(zip(ids, letters, strict=True)), time.monotonic() + patience
        while waiting and time.monotonic() < end:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is None:
                    continue
                if reply.has_error():
                    self.say(f"node {node} is lost: {reply.error.reason}")
                    continue
                try:
                    answer = from_records(reply.content)
                except (ValueError, KeyError, TypeError):  # whatever a broken or hostile node may have sent
                    self.say(f"node {node} has sent what is no answer")
                    continue
                yield node, answer
            time.sleep(_PAUSE if waiting else 0)
        for node in waiting.values():
            self.say(f"node {node} has not answered within {patience:g} seconds")


class Flower:
    """Sends each round's job to the nodes of its cohort. A node that is lost or fails is a missing reply.

    Memories stay at the nodes. Replies are written down as they come, so that a server which is killed in the middle
    of a round asks only those who had not answered.
    """

    def __init__(
        self,
        nodes: Nodes,
        local: Sequential,
        order: Callable[[Job], dict[str, Any]],
        *,
        journal: Path,
        holders: Mapping[str, set[int]],
        patience: float,
    ):
        """`local` looks at the server's test set; `holders` is the ledger's book of who has which common payload."""
        self.nodes, self.local, self.order, self.population = nodes, local, order, nodes.population
        self.journal, self.holders, self.patience = journal, holders, patience
        journal.mkdir(parents=True, exist_ok=True)

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        order, round = self.order(job), job.round + 1
        asked = hashlib.sha256(repr(sorted(order.items())).encode() + encode(job.download)).hexdigest()[:16]
        answered = {client: upload for client in cohort if (upload := self._read(asked, client)) is not None}
        waiting = [client for client in cohort if client not in answered]
        online = self.nodes.online() if waiting else {}
        if lost := [client for client in waiting if client not in online]:
            self.nodes.say(f"round {round} goes on without clients {', '.join(map(str, lost))}: no node is there")
        work = {"ask": "work", "contract": self.nodes.contract, "order": order}
        bare = Letter(work, {"download": leaves_of(job.download)})
        whole = Letter(work, {**bare.trees, "shared": leaves_of(job.shared)}) if job.shared else bare
        knows = self.holders.get(order["shared"], set())
        letters = {client: bare if client in knows else whole for client in waiting if client in online}
        while letters:
            again, clients = {}, {online[client]: client for client in letters}
            addressed = {node: letters[client] for node, client in clients.items()}
            for node, answer in self.nodes.ask(addressed, "train", self.patience):
                client = clients[node]
                if "missing" in answer.notes and letters[client] is not whole:
                    again[client] = whole  # its disk has lost the common payload
                elif (upload := self._upload(round, client, answer)) is not None:
                    write_whole(self._place(asked, client), encode(upload))
                    answered[client] = upload
            letters = again
        if not answered:
            raise RunFailed(f"nobody answered in round {round}")
        return [Reply(client, self._here(answered[client])) for client in sorted(answered)]

    def _upload(self, round: int, client: int, answer: Letter) -> Tree | None:
        try:
            if "upload" in answer.trees:
                return tree_of(answer.trees["upload"])
            said = _complaint(answer)
        except RunFailed as error:
            said = str(error)
        self.nodes.say(f"round {round} goes on without client {client}: {said}")
        return None

    def measure(self, weights: Tree) -> list[Tree]:
        return self.local.measure(weights)

    def save(self, round: int) -> None:
        """Nodes save their memories themselves; what a checkpoint holds need not be in the journal any more."""
        for path in self.journal.glob("*.safetensors"):
            path.unlink()

    def close(self) -> None:
        pass

    def _here(self, tree: Tree) -> Tree:
        return tree.map(lambda leaf: leaf.to(self.local.federation.pool.device))

    # ---- the journal of a round ----
    def _place(self, asked: str, client: int) -> Path:
        return self.journal / f"{asked}-{client:06d}.safetensors"

    def _read(self, asked: str, client: int) -> Tree | None:
        try:
            return decode(self._place(asked, client).read_bytes())
        except (OSError, SafetensorError, ValueError, KeyError):
            return None


def _complaint(answer: Letter) -> str:
    """What a node said in place of an answer, in a line."""
    said = answer.notes.get("refused") or answer.notes.get("failed") or "its answer is empty"
    return str(said).strip().splitlines()[-1]
