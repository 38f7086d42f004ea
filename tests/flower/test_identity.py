"""Who is who: keys made at nodes, messages signed both ways. Attacks that succeed without fail with them."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlens.core.errors import BadInput

if importlib.util.find_spec("flwr") is None:
    pytest.skip("flwr is not installed: pip install 'fedlens[flower]'", allow_module_level=True)

from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Message
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

import test_flower as flower
from fedlens.cli.format import split_words
from fedlens.cli.main import app
from fedlens.flower import guard, launch, membership
from fedlens.flower.client import Trainer
from fedlens.flower.identity import Coordinator, Member, roster
from fedlens.flower.messages import Forged, Payload, from_records, to_records, tree_digest
from fedlens.flower.node import Node
from fedlens.flower.server_app import federate

HELLO = Payload({"ask": "hello"}, {})


def made(folder: Path, method: str) -> Path:
    """A federation of three, whose nodes have joined and are admitted, with all that a deployment adds."""
    more, _ = launch.init(folder, flower.words(folder.parent, method, "cohort=3"), "127.0.0.1", 9092)
    assert more and set(more) <= set(launch.words_of(folder))
    membership.certify(folder, trial=True)
    for node in launch.node_folders(folder):
        text = (node / "node.yaml").read_text()
        (node / "node.yaml").write_text(text.replace("raw_derived: false", "raw_derived: true"))
    return folder


@pytest.fixture
def place(tmp_path):
    return made(tmp_path / "federation", "scaffold")


class SignedGrid(flower.Grid):
    """Nodes with keys and guards. What somebody else does to messages on their way is `meddle`'s."""

    def __init__(self, federation: Path, extra: dict[int, Path] | None = None, meddle: Callable | None = None):
        places = {100 + int(place.name): place for place in launch.node_folders(federation)} | (extra or {})
        super().__init__([])
        self.places, self.meddle, self.said = places, meddle, {node: list[str]() for node in places}
        self.contexts = dict.fromkeys(places)
        self.asked: list[int] = []

    def get_nodes(self):
        keys = {node: load_ssh_public_key((place / "node.pub").read_bytes()) for node, place in self.places.items()}
        return [SimpleNamespace(node_id=node, public_key=public_key_to_bytes(key)) for node, key in keys.items()]  # pyright: ignore

    def push(self, message) -> str:
        name, node = str(id(message)), message.metadata.dst_node_id
        self.asked.append(node)
        arrived = Message(message.content, node, message.metadata.message_type)
        arrived.metadata.__dict__["_message_id"] = name
        reply = self.meddle(self, node, arrived) if self.meddle else None
        self.replies[name] = reply or self.answered(node, arrived)
        return name

    def answered(self, node: int, message) -> Message:
        place = self.places[node]
        found = Node.read(place / "node.yaml")
        member = Member(place, found.client, Trainer(found, say=self.said[node].append).answer)
        original, guard.say = guard.say, self.said[node].append
        try:
            return guard.replied(message, member.answer)
        finally:
            guard.say = original


def deploy(federation: Path, grid: flower.Grid, out: Path, *, signed: bool = True, **waits: float):
    settings = " ".join([*launch.words_of(federation), f"out={out}"])
    coordinator = Coordinator(federation / "server") if signed else None
    return federate(grid, {"settings": settings, "wait": 2, "patience": 5, **waits}, coordinator=coordinator)  # pyright: ignore


def log(run: Path) -> str:
    return (run / "log.txt").read_text()


# ---- joining ---------------------------------------------------------------------------------------------------------
def test_keys_are_made_at_the_node_and_bound_by_the_operator(tmp_path, place):
    """The invitation has no secret in it; a key is one client's, and another takes the place of the one before."""
    said = json.loads((place / "invitation.json").read_text())
    assert said.keys() == {"link", "ca", "coordinator"} and "PRIVATE" not in json.dumps(said)
    node = tmp_path / "hospital"
    mine, theirs = membership.join(node, place / "invitation.json", 1)
    assert (node.stat().st_mode & 0o777) == 0o700
    assert [(node / name).stat().st_mode & 0o077 for name in ("key", "executor.secret", "local/tls.key")] == [0, 0, 0]
    with pytest.raises(BadInput, match="privacy: none"):
        Node.read(node / "node.yaml")  # until its owner has decided
    before = roster(place / "server" / "keys")
    assert membership.admit(place, 1, node / "node.pub") == mine and mine.startswith("SHA256:") and mine != theirs
    after = roster(place / "server" / "keys")
    assert before.keys() == after.keys() == {0, 1, 2} and [i for i in after if after[i] != before[i]] == [1]


def test_both_sides_read_the_same_fingerprints(tmp_path, place, capsys):
    """What a node prints when it joins, the operator's commands have printed."""
    node = tmp_path / "hospital"
    shown = {}
    for words in (
        ["certs", str(place)],
        ["join", str(node), str(place / "invitation.json"), "--client", "1"],
        ["admit", str(place), "1", str(node / "node.pub")],
    ):
        app(["deploy", *words], standalone_mode=False)
        shown[words[0]] = {word for word in capsys.readouterr().out.split() if word.startswith("SHA256:")}
    assert len(shown["certs"]) == len(shown["admit"]) == 1 and shown["join"] == shown["certs"] | shown["admit"]


def test_secrets_are_private_from_the_first_moment(tmp_path):
    """Where files are usually everybody's to read and write: made so, and never changed to it."""
    watching, changed = [True], []
    sys.addaudithook(lambda event, about: changed.append(about) if watching[0] and event == "os.chmod" else None)
    before = os.umask(0)
    try:
        made(tmp_path / "federation", "scaffold")
    finally:
        os.umask(before)
        watching[0] = False
    secret = [path for name in ("*.key", "key", "*.secret") for path in (tmp_path / "federation").rglob(name)]
    assert len(secret) == 15 and {path.stat().st_mode & 0o777 for path in secret} == {0o600}
    assert not {str(about[0]) for about in changed} & {str(path) for path in secret}
    assert {place.stat().st_mode & 0o777 for place in launch.node_folders(tmp_path / "federation")} == {0o700}


def test_init_prints_what_it_adds(tmp_path, capsys):
    """And `fedlens run` of the folder has it: what was typed, what was printed, and nothing else."""
    typed = flower.words(tmp_path, "fedavg", "cohort=3")
    app(["deploy", "init", str(tmp_path / "federation"), *typed], standalone_mode=False)
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("added for a deployment: "))
    printed = line.removeprefix("added for a deployment: ").partition("   ")[0].split()
    assert printed == ["policy.max_weight_share=0.6667", "defences=clip"]
    assert split_words([str(tmp_path / "federation")])[1] == [*typed, *printed]


def test_who_is_not_admitted(tmp_path, place):
    node = tmp_path / "hospital"
    membership.join(node, place / "invitation.json", 1)
    (tmp_path / "junk.pub").write_text("ssh-ed25519 nonsense")
    for client, public, sentence in (
        (0, place / "nodes" / "2" / "node.pub", "this key is that of client 2"),
        (3, node / "node.pub", "has clients 0 to 2"),
        (0, tmp_path / "junk.pub", "holds no public key"),
        (0, place / "server" / "coordinator.pub", "another kind of key"),
        (0, tmp_path / "none.pub", "there is no file"),
    ):
        with pytest.raises(BadInput, match=sentence):
            membership.admit(place, client, public)
    with pytest.raises(BadInput, match="is a node already"):
        membership.join(node, place / "invitation.json", 1)
    (tmp_path / "half.json").write_text("{}")
    with pytest.raises(BadInput, match="is no invitation"):
        membership.join(tmp_path / "other", tmp_path / "half.json", 1)
    assert not (tmp_path / "other").exists()


# ---- signed messages -------------------------------------------------------------------------------------------------
def ends(federation: Path, client: int = 0, say: Callable[[Payload], Payload] | None = None):
    """The two ends of a line, and a question that was signed for this client."""
    coordinator = Coordinator(federation / "server")
    member = Member(
        federation / "nodes" / str(client), client, lambda p: ((say or (lambda p: Payload({}, {})))(p), None)
    )
    return coordinator, member


def question(coordinator: Coordinator, client: int = 0, seconds: float = 5.0, payload: Payload = HELLO):
    digests = {name: tree_digest(tree) for name, tree in payload.trees.items()}
    notes, asked = coordinator.signed(payload.notes, digests, client, seconds)
    return Payload(notes, payload.trees), asked


def test_a_question_is_answered_once_and_only_as_it_was_signed(place):
    """Another node's, changed, copied, overdue, of another coordinator, or of nobody."""
    coordinator, member = ends(place)
    sent, asked = question(coordinator)
    answer, _ = member.answer(sent)
    assert coordinator.opened(answer, asked) == Payload({}, {})
    stranger = place.parent / "stranger"
    launch.init(stranger, flower.words(place.parent), "127.0.0.1", 9092)
    membership.certify(stranger)
    changed = Payload({**sent.notes, "ask": "work"}, {})
    moved = Payload({**sent.notes, "signed": {**sent.notes["signed"], "client": 1}}, {})
    for payload, sentence in (
        (sent, "a copy of one that was answered before"),
        (HELLO, "is not signed by the coordinator"),
        (changed, "is not signed by the coordinator"),
        (moved, "is not signed by the coordinator"),
        (Payload({**sent.notes, "signed": 3}, {}), "is not signed by the coordinator"),
        (question(Coordinator(stranger / "server"))[0], "is not signed by the coordinator"),
        (question(coordinator, client=1)[0], "is for client 1, and this node is client 0"),
        (question(coordinator, seconds=-100.0)[0], "valid until"),
    ):
        with pytest.raises(BadInput, match=sentence):
            member.answer(payload)
    _, again = ends(place)  # a node that was started anew has not forgotten
    with pytest.raises(BadInput, match="a copy"):
        again.answer(sent)
    (place / "nodes" / "0" / "nonces.json").write_text("[")
    with pytest.raises(BadInput, match="nothing is answered"):
        again.answer(question(coordinator)[0])


def test_an_answer_counts_for_its_question_and_from_its_key_alone(place):
    coordinator, member = ends(place, say=lambda payload: Payload({"client": 0}, {}))
    _, other = ends(place, client=1)
    (first, asked), (second, later) = question(coordinator), question(coordinator)
    honest, old = member.answer(second)[0], member.answer(first)[0]
    assert coordinator.opened(honest, later).notes == {"client": 0}
    forged = other.answer(question(coordinator, client=1)[0])[0]
    changed = Payload({**honest.notes, "client": 1}, {})
    for answer in (old, forged, changed, Payload({"client": 0}, {}), Payload({"client": 0, "signed": "zz"}, {})):
        with pytest.raises(Forged, match="in the name of client 0 is not signed by its key"):
            coordinator.opened(answer, later)
    assert coordinator.opened(old, asked)


# ---- a whole federation ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsls", "fedxds", "pse", "spatl"])
def test_the_bits_of_the_simulation_with_all_protections(method, tmp_path):
    """`fedlens run federation`: the settings that `deploy init` has printed. test_trust_live.py has real processes."""
    place = made(tmp_path / "federation", method)
    flower.simulated(tmp_path / "simulated", split_words([str(place)])[1])
    deploy(place, SignedGrid(place), tmp_path / "real")
    assert flower.unlike(tmp_path / "simulated", tmp_path / "real", place / "nodes") == []


def unsigned(reply: Message) -> Message:
    """A reply without its node's signature, as a server without keys would get it."""
    payload = from_records(reply.content)
    reply.content = to_records(Payload({k: v for k, v in payload.notes.items() if k != "signed"}, payload.trees))
    return reply


class OpenGrid(SignedGrid):
    """The same nodes as they were before they had keys: they answer whoever asks, and nobody signs."""

    def answered(self, node, message):
        found = Node.read(self.places[node] / "node.yaml")
        return guard.replied(message, Trainer(found, say=self.said[node].append).answer)


def impostor(times: int):
    """Node 102 answers work for node 101, first: with a refusal in its name."""
    done = [times]

    def meddle(grid, node, message):
        if node == 101 and message.metadata.message_type == "train" and done[0]:
            done[0] -= 1
            forged = Payload({"client": 1, "refused": "its owner has left"}, {})
            return Message(to_records(forged), reply_to=message)
        return None

    return meddle


def test_nobody_answers_for_another(tmp_path, place):
    """Before: a forged refusal counts as client 1's, and the round goes on without it. Now: it is asked anew."""
    deploy(place, OpenGrid(place, meddle=impostor(1)), tmp_path / "open", signed=False)
    assert "round 1 goes on without client 1: its owner has left" in log(tmp_path / "open")
    for node in launch.node_folders(place):
        for run in (node / "storage").glob("*"):
            assert run.is_dir()
    grid = SignedGrid(place, meddle=impostor(1))
    result = deploy(place, grid, tmp_path / "real")
    assert "an answer in the name of client 1 is not signed by its key; it does not count" in log(tmp_path / "real")
    assert not result.setbacks and "goes on without" not in log(tmp_path / "real")
    flower.simulated(tmp_path / "simulated", launch.words_of(place))
    assert flower.same(flower.state(tmp_path / "simulated"), flower.state(tmp_path / "real"))


def test_a_node_is_the_client_of_its_key(tmp_path, place):
    """Node 0 calls itself client 1. Before: the first who says so is client 1. Now it gets no work, and says why."""
    (path,) = (place / "nodes" / "0").glob("node.yaml")
    path.write_text(path.read_text().replace("client: 0 ", "client: 1 "))
    with pytest.raises(BaseException, match="no node for clients 0"):
        deploy(place, OpenGrid(place), tmp_path / "open", signed=False, wait=0.1)
    assert "two nodes say that they are client 1" in log(tmp_path / "open")  # 100 came first: client 1's place is taken
    grid = SignedGrid(place)
    with pytest.raises(BaseException, match="no node for clients 0"):
        deploy(place, grid, tmp_path / "real", wait=0.1)
    assert any("a message is for client 0, and this node is client 1" in line for line in grid.said[100])
    path.write_text(path.read_text().replace("client: 1 ", "client: 0 "))
    deploy(place, SignedGrid(place), tmp_path / "real")  # it may try again


def test_a_run_says_which_owners_have_not_approved_and_goes_on_once_they_have(tmp_path, place, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "approved", lambda self, contract: self.node.client == 0)
        with pytest.raises(BaseException, match=r"after 0\.1 seconds owners have not approved .* at clients 1, 2; the"):
            deploy(place, SignedGrid(place), tmp_path / "real", wait=0.1)
        (place / "server" / "keys" / "2.pub").rename(tmp_path / "2.pub")
        with pytest.raises(BaseException, match=r"no node for clients 2, and owners have not .* at clients 1; the"):
            deploy(place, SignedGrid(place), tmp_path / "real", wait=0.1)
    membership.admit(place, 2, tmp_path / "2.pub")
    deploy(place, SignedGrid(place), tmp_path / "real")


def test_a_stranger_is_not_greeted_is_told_of_and_may_come_again(tmp_path, place, monkeypatch):
    """Its key was registered with Flower behind the door; once the operator admits it, it takes part in the run."""
    monkeypatch.setattr("fedlens.flower.engine._AGAIN", 0.0)
    stranger = tmp_path / "stranger"
    membership.join(stranger, place / "invitation.json", 2)
    text = (place / "nodes" / "2" / "node.yaml").read_text()
    (stranger / "node.yaml").write_text(text)
    keys = place / "server" / "keys"
    (keys / "2.pub").unlink()
    grid = SignedGrid(place, extra={200: stranger})
    with pytest.raises(BaseException, match="no node for clients 2"):
        deploy(place, grid, tmp_path / "real", wait=0.3)
    assert 200 not in grid.asked and 102 not in grid.asked
    assert "a node whose key nobody has admitted is there, as node 200; nothing is sent to it" in log(tmp_path / "real")

    class Admitted(SignedGrid):
        """The operator admits the stranger while the server waits."""

        def get_nodes(self):
            if not (keys / "2.pub").exists() and len(self.asked) >= 2:
                membership.admit(place, 2, stranger / "node.pub")
                time.sleep(0.01)
            return super().get_nodes()

    grid = Admitted(place, extra={200: stranger})
    deploy(place, grid, tmp_path / "real")
    assert 200 in grid.asked and 102 not in grid.asked  # the key that was admitted before is not client 2's any more


def test_copies_of_a_message_get_nothing(tmp_path, place):
    """Somebody sends every question twice. Before: the second is answered as the first. Now it is refused."""
    copies: list[Message] = []

    def twice(grid, node, message):
        first = grid.answered(node, message)
        copies.append(grid.answered(node, message))
        return first

    deploy(place, OpenGrid(place, meddle=twice), tmp_path / "open", signed=False)
    assert copies and not any(reply.has_error() for reply in copies)
    copies.clear()
    grid = SignedGrid(place, meddle=twice)
    deploy(place, grid, tmp_path / "real")
    assert copies and all(reply.has_error() for reply in copies)
    said = [line for lines in grid.said.values() for line in lines]
    assert said and all("a message is a copy of one that was answered before" in line for line in said)
    assert {reply.error.reason for reply in copies} == {"the message is not one for this node"}
