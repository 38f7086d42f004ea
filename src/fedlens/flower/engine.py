"""Clients on other machines: jobs and replies over Flower's Grid."""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError

from ..core.engine import Job, Reply
from ..core.errors import BadInput, RunFailed
from ..core.files import Seal, read_bytes, remove, sealed, unsealed, write_atomic
from ..core.memories import Version
from ..core.tree import Tree
from ..core.wire import decode, encode
from ..engines.sequential import Sequential
from .messages import Forged, Payload, from_records, leaves_of, to_records, tree_digest, tree_of, with_notes

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.serverapp import Grid

    from .identity import Coordinator, Question

_PAUSE = 0.1  # seconds between two looks for replies; Flower's own send_and_receive waits for three
_REMEMBERED = 1000  # answers that are overdue
_SHOWN = 300  # characters of what a node says
_HELLO = 120.0  # seconds that a node may take to say who it is
_AGAIN = 5.0  # seconds until a node that does not take part yet is asked again
_FORGED = 3  # times that a node is asked anew, where somebody else has answered in its name


class _Pulled(NamedTuple):
    """A reply; or why there is none, or none that can be read."""

    content: RecordDict | None = None
    lost: str = ""
    damage: str = ""


class _Sent(NamedTuple):
    """A question on its way: to which node, and what its answer must be signed for."""

    node: int
    asked: Question | None


class Nodes:
    """Which of Flower's nodes is which client, and the payloads to them and back.

    With a coordinator a node is the client that its key was admitted as: others are not even greeted, and an answer
    that its key has not signed does not count. Without one, as in Flower's simulations, nodes say who they are.
    """

    def __init__(
        self,
        grid: Grid,
        contract: dict[str, Any],
        population: int,
        say: Callable[[str], None],
        largest: float = math.inf,
        coordinator: Coordinator | None = None,
    ):
        """`largest`: bytes of an answer."""
        self.grid, self.contract, self.population, self.say = grid, contract, population, say
        self.largest, self.coordinator = largest, coordinator
        self.own_data = False  # whether nodes bring their own data, or take their part of the experiment's
        self.own_noise: set[int] = set()  # clients whose noise does not come from the run's seed, as they say
        self._known: dict[int, int] = {}  # client -> node
        self._admitted: dict[int, int] = {}  # node -> client, by its key
        self._refusals: dict[int, str] = {}  # node -> why it does not take part, as it said last
        self._unapproved: set[int] = set()  # nodes whose owners have not approved the contract yet
        self._later: dict[int, float] = {}  # node that does not take part yet -> when to ask again
        self._said: set[str] = set()
        self._late: dict[str, int] = {}  # message -> node that has not answered it in time

    def gather(self, wait: float) -> None:
        """Wait until every client has a node, which must agree to the whole run."""
        end = time.monotonic() + wait
        while missing := sorted(set(range(self.population)) - self.online().keys()):
            if self._refusals:
                raise BadInput(f"a node refuses this run: {next(iter(self._refusals.values()))}")
            if time.monotonic() > end:
                raise RunFailed(self._absent(missing, wait))
            time.sleep(_PAUSE)

    def _absent(self, missing: list[int], wait: float) -> str:
        """Who is missing, and who only waits for an owner."""
        asked = sorted(client for node, client in self._admitted.items() if node in self._unapproved)
        parts = {
            "there is still no node for clients": [client for client in missing if client not in asked],
            "owners have not approved the contract at clients": asked,
        }
        said = [f"{what} {', '.join(map(str, clients))}" for what, clients in parts.items() if clients]
        return f"after {wait:g} seconds {', and '.join(said)}; the same command goes on from here"

    def online(self) -> dict[int, int]:
        """client -> node of all that can be reached now; new ones are asked who they are."""
        there = self._there()
        self._known = {client: node for client, node in self._known.items() if node in there}
        later = {node for node, when in self._later.items() if time.monotonic() < when}
        new = sorted(there - set(self._known.values()) - later)
        self._later |= dict.fromkeys(new, time.monotonic() + _AGAIN)  # whoever does not take part may try again
        hello = Payload({"ask": "hello", "contract": self.contract}, {})
        for node, answer in self.ask(dict.fromkeys(new, hello), "query", _HELLO):
            self._later[node] = time.monotonic() + _AGAIN
            self._greeted(node, answer)
        return self._known

    def _there(self) -> set[int]:
        """Nodes that Flower calls online; with a coordinator those whose keys were admitted, and no others."""
        if self.coordinator is None:
            return set(self.grid.get_node_ids())
        clients, found = self.coordinator.clients(), {}
        for node in self.grid.get_nodes():  # pyright: ignore[reportAttributeAccessIssue]  of real SuperLinks alone
            client = clients.get(node.public_key)
            if client is not None and client < self.population:
                found[node.node_id] = client
            else:
                self._once(
                    f"a node whose key nobody has admitted is there, as node {node.node_id}; nothing is sent to it"
                )
        self._admitted = found
        return set(found)

    def _greeted(self, node: int, answer: Payload) -> None:
        """One that answers as its key's client and agrees takes part; all others are told of, and asked again later."""
        self._unapproved.discard(node)
        if "waiting" in answer.notes:
            self._unapproved.add(node)
            self._once("a node waits for its owner, who reads every new contract: fedlens deploy approve", node)
            return
        said = answer.notes.get("client")
        client = said if isinstance(said, int) and 0 <= said < self.population else None
        if client is None:
            self._refusals[node] = _complaint(answer)
            self._once(f"a node does not take part: {_complaint(answer)}", node)
        elif client != self._admitted.get(node, client):
            self._once(f"a node says that it is client {client}, and its key is that of client {self._admitted[node]}")
        elif client in self._known:
            self._once(f"two nodes say that they are client {client}; the one that came first counts")
        else:
            self._known[client] = node
            self._refusals.pop(node, None)
            self.own_data |= bool(answer.notes.get("own_data"))
            (self.own_noise.add if answer.notes.get("own_noise") else self.own_noise.discard)(client)

    def _once(self, text: str, node: int | None = None) -> None:
        """Say it, but not with every try."""
        if (said := f"{node} {text}") not in self._said:
            self._said.add(said)
            self.say(text)

    def ask(self, payloads: Mapping[int, Payload], kind: str, patience: float) -> Iterator[tuple[int, Payload]]:
        """(node, answer), as they come; those who do not answer in time are left out, and said."""
        waiting, again = self._sent(payloads, kind, patience), dict.fromkeys(payloads, _FORGED)
        end = time.monotonic() + patience
        while waiting and time.monotonic() < end:
            for message, sent in list(waiting.items()):
                if (reply := self._pulled(message)) is None:
                    continue
                del waiting[message]
                if reply.lost:
                    self.say(f"node {sent.node} is lost: {_line(reply.lost)}")
                    continue
                try:
                    yield sent.node, self._opened(reply, sent)
                except Forged as error:  # somebody else's: the node itself is asked anew, under another nonce
                    self.say(f"{error}; it does not count")
                    again[sent.node] -= 1
                    if again[sent.node] >= 0 and (left := end - time.monotonic()) > 0:
                        waiting |= self._sent({sent.node: payloads[sent.node]}, kind, left)
            time.sleep(_PAUSE if waiting else 0)
        for message, sent in waiting.items():
            self.say(f"node {sent.node} has not answered within {patience:.3g} seconds")
            self._late[message] = sent.node

    def _sent(self, payloads: Mapping[int, Payload], kind: str, patience: float) -> dict[str, _Sent]:
        """message -> whom it went to. Trees are written and hashed once for all; notes are each node's own."""
        from flwr.app import Message

        content = {id(payload): to_records(payload) for payload in payloads.values()}
        digests = {id(tree): tree_digest(tree) for p in payloads.values() for tree in p.trees.values()}
        messages, sent = [], []
        for node, payload in payloads.items():
            records, asked = content[id(payload)], None
            if self.coordinator is not None:
                trees = {name: digests[id(tree)] for name, tree in payload.trees.items()}
                notes, asked = self.coordinator.signed(payload.notes, trees, self._admitted[node], patience)
                records = with_notes(records, notes)
            messages.append(Message(records, node, kind, ttl=patience))
            sent.append(_Sent(node, asked))
        return dict(zip(self.grid.push_messages(messages), sent, strict=True)) if messages else {}

    def _pulled(self, message: str) -> _Pulled | None:
        """What came of one message; None: nothing yet.

        Each is asked for by itself: what a node has sent may break Flower's own decoder, which would take the answers
        of others along, and whose answer it is must not depend on what it says of itself.
        """
        import httpx

        try:
            found = list(self.grid.pull_messages([message]))
            if not found:
                return None
            (reply,) = (each for each in found if each.metadata.reply_to_message_id == message)
            return _Pulled(lost=reply.error.reason or "no reason") if reply.has_error() else _Pulled(reply.content)
        except (httpx.HTTPError, OSError):  # the SuperLink's fault, not the node's
            raise
        except Exception as error:
            return _Pulled(damage=f"Flower cannot read it ({type(error).__name__})")

    def _opened(self, reply: _Pulled, sent: _Sent) -> Payload:
        """Whatever a broken or hostile node has sent is a payload that says so; an answer of another's is Forged."""
        try:
            if reply.content is None:
                raise RunFailed(reply.damage)
            answer = from_records(reply.content, self.largest)
            return answer if sent.asked is None else self.coordinator.opened(answer, sent.asked)  # pyright: ignore
        except Forged:
            raise
        except RunFailed as error:
            return Payload({"damaged": f"it has sent what is no answer: {error}"}, {})

    def note_late(self) -> None:
        """Say who has answered after all; nothing else is done with such answers."""
        for message, node in list(self._late.items()):
            if (reply := self._pulled(message)) is not None:
                del self._late[message]
                if not reply.lost:
                    self.say(f"node {node} has answered too late; its answer is not used")
        self._late = dict(list(self._late.items())[-_REMEMBERED:])


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
        deadline: float | None = None,
        first: Tree | None = None,
    ):
        """`local` looks at the server's test set; `holders` is the ledger's book of who has which common payload.

        `first`: weights that the network begins with and nodes cannot make themselves.
        """
        self.nodes, self.local, self.order, self.population = nodes, local, order, nodes.population
        self.journal, self.holders, self.patience, self.deadline = journal, holders, patience, deadline
        self.first, self._began = first, set[int]()  # clients that have those, as far as this process knows
        journal.mkdir(parents=True, exist_ok=True)

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        order, round = self.order(job), job.round + 1
        asked = hashlib.sha256(repr(sorted(order.items())).encode() + encode(job.download)).hexdigest()[:16]
        answered = {client: upload for client in cohort if (upload := self._read(asked, client)) is not None}
        waiting = [client for client in cohort if client not in answered]
        self.nodes.note_late()
        heard, began = bool(answered), time.monotonic()
        online = self._online(waiting, began)
        if lost := [client for client in waiting if client not in online]:
            self.nodes.say(f"round {round} goes on without clients {', '.join(map(str, lost))}: no node is there")
        work = {"ask": "work", "contract": self.nodes.contract, "order": order}
        bare = Payload(work, {"download": leaves_of(job.download)})
        common = {"shared": job.shared, "initial": self.first}
        common = {name: leaves_of(tree) for name, tree in common.items() if tree}
        whole = Payload(work, {**bare.trees, **common}) if common else bare
        knows = self.holders.get(order["shared"], set()) if job.shared else set(waiting)
        knows = knows & self._began if self.first is not None else knows
        payloads = {client: bare if client in knows else whole for client in waiting if client in online}
        damaged: dict[int, str] = {}
        while payloads and (left := self._left(began)) > 0:
            again, clients = {}, {online[client]: client for client in payloads}
            addressed = {node: payloads[client] for node, client in clients.items()}
            for node, answer in self.nodes.ask(addressed, "train", left):
                client, heard = clients[node], True
                if "missing" in answer.notes and payloads[client] is not whole:
                    again[client] = whole  # its disk has lost the common payload
                    continue
                try:
                    upload = _upload(answer)
                except RunFailed as error:
                    damaged[client] = str(error)
                    continue
                if upload is None:
                    self.nodes.say(f"round {round} goes on without client {client}: {_complaint(answer)}")
                else:
                    self._began.add(client)
                    write_atomic(self._place(asked, client), sealed(encode(upload)))
                    answered[client] = upload
            payloads = again
        if not heard and self.deadline is None:  # without a rule for silence it ends the run, which can go on later
            raise RunFailed(f"nobody answered in round {round}")
        replies = [Reply(client, self._here(upload)) for client, upload in answered.items()]
        return replies + [Reply(client, Tree(), damage=why) for client, why in damaged.items()]

    def _online(self, waiting: Sequence[int], began: float) -> dict[int, int]:
        """client -> node. A round with a deadline waits for somebody to come: else many would pass in no time."""
        online = self.nodes.online() if waiting else {}
        while waiting and self.deadline and online.keys().isdisjoint(waiting) and self._left(began) > 0:
            time.sleep(_PAUSE)
            online = self.nodes.online()
        return online

    def _left(self, began: float) -> float:
        """Seconds to wait for replies; a deadline is of the whole round."""
        return self.patience if self.deadline is None else self.deadline - (time.monotonic() - began)

    def measure(self, weights: Tree, detailed: bool = False) -> list[Tree]:
        return self.local.measure(weights, detailed)

    def save(self, round: int) -> dict[Version, Seal]:
        """Nodes save their memories themselves; what a checkpoint holds need not be in the journal any more."""
        for path in self.journal.glob("*-*"):
            remove(path)
        return {}

    def close(self) -> None:
        pass

    def _here(self, tree: Tree) -> Tree:
        return tree.map(lambda leaf: leaf.to(self.local.federation.pool.device))

    # ---- the journal of a round ----
    def _place(self, asked: str, client: int) -> Path:
        return self.journal / f"{asked}-{client:06d}.sealed"

    def _read(self, asked: str, client: int) -> Tree | None:
        try:
            return decode(unsealed(read_bytes(self._place(asked, client))))
        except (OSError, SafetensorError, ValueError, KeyError):
            return None


def _upload(answer: Payload) -> Tree | None:
    """What an answer brings; None: words alone. RunFailed where nothing can be read of it."""
    if "damaged" in answer.notes:
        raise RunFailed(_line(answer.notes["damaged"]))
    return tree_of(answer.trees["upload"]) if "upload" in answer.trees else None


def _complaint(answer: Payload) -> str:
    """What a node said in place of an answer, in a line."""
    said = answer.notes.get("refused") or answer.notes.get("failed") or "its answer is empty"
    return _line(said)


def _line(said: Any) -> str:
    """What somebody else wrote, as it may stand in a log."""
    lines = str(said).strip().splitlines() or [""]
    return "".join(each if each.isprintable() else "?" for each in lines[-1])[:_SHOWN]
