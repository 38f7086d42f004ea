"""The server's door by itself: who is let in, and how much of the disk one admitted key can take."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import tomllib
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import pytest

if importlib.util.find_spec("flwr") is None:
    pytest.skip("flwr is not installed: pip install 'fedlens[flower]'", allow_module_level=True)

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import Message
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedlens.flower import door

OBJECT = 5 << 20  # bytes, as Flower cuts arrays


class Flower:
    """What is behind the door: it notes what it is told, and hands out questions."""

    def __init__(self):
        self.got: list[tuple[str, int]] = []
        self.questions = 0

    async def __call__(self, scope, receive, send):
        message = await receive()
        call = scope["path"].rpartition("/")[2]
        self.got.append((call, len(message["body"])))
        response = PullMessagesResponse()
        if call == "pull-messages" and self.questions:
            self.questions -= 1
            response.messages_list.append(Message())
        body = response.SerializeToString()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (body[:1], body[1:]):  # in pieces, as large ones come
            await send({"type": "http.response.body", "body": part, "more_body": part is not body[1:]})


class Line:
    """A node with a key, before a door that knows it."""

    def __init__(self):
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.behind = Flower()
        self.door = door.Door(self.behind, {public_key_to_bytes(self.key.public_key())})

    def call(self, name: str, body: bytes = b"", *, key=None, age: float = 0.0, more=(), claims: int | None = None):
        """The status that a call gets. `claims`: the length that it says it has."""
        key = key or self.key
        signed_at = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
        headers = {
            TIMESTAMP_HEADER: signed_at,
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, signed_at.encode())).decode(),
            "Content-Length": str(len(body) if claims is None else claims),
            **dict(more),
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": f"/v1/fleet/{name}", "headers": pairs}
        said = []

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            said.append(message)

        asyncio.run(self.door(scope, receive, send))
        return said[0]["status"]


def push(source: int, node: int = 7) -> bytes:
    request = PushMessagesRequest()
    request.node.node_id = node
    message = Message()
    message.metadata.src_node_id = source
    request.messages_list.append(message)
    return request.SerializeToString()


def test_who_is_let_in():
    line = Line()
    assert line.call("pull-messages") == 200
    assert line.call("pull-messages", key=ec.generate_private_key(ec.SECP384R1())) == 401  # nobody's
    assert line.call("pull-messages", age=120.0) == line.call("pull-messages", age=-60.0) == 401  # not of now
    assert line.call("register-node") == line.call("../control/start-run") == 404
    assert line.call("push-object", claims=17 << 20) == 413
    assert line.call("push-object", more=[("Transfer-Encoding", "chunked")]) == 413  # of no known length
    assert line.call("push-messages", push(7)) == 200 and line.call("push-messages", push(8)) == 403
    assert [name for name, _ in line.behind.got] == ["pull-messages", "push-messages"]  # Flower saw these alone


def test_one_key_has_so_many_calls(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(door.time, "monotonic", lambda: now[0])
    quota = Line().door.quota
    assert [quota.take(b"a", 0) for _ in range(2002)] == [True] * 2000 + [False] * 2
    assert quota.take(b"b", 0) and not quota.take(b"b", 129 << 20)  # others have their own
    now[0] = 1.0
    assert [quota.take(b"a", 0) for _ in range(201)] == [True] * 200 + [False]


def test_a_node_stores_no_more_than_answers_to_what_it_was_asked(monkeypatch):
    """Before: every call passed, whatever the calls before it had left on the server's disk."""
    monkeypatch.setattr(door, "_ANSWER", 4 * OBJECT)
    monkeypatch.setattr(door, "_SAVED", 8 * OBJECT)
    monkeypatch.setattr(door.Quota, "take", lambda *_: True)
    monkeypatch.setattr(door.Quota, "give_back", lambda *_: None)
    line, body = Line(), bytes(OBJECT)

    def stored() -> int:
        found = 0
        while line.call("push-object", body) == 200:
            found += 1
        assert line.call("push-object", body) == 413
        return found

    assert stored() == 8  # what a door that was started anew grants
    assert line.call("push-messages", push(7)) == 413 and line.call("pull-messages") == 200
    assert stored() == 0  # nothing was there for it
    line.behind.questions = 1
    assert line.call("pull-messages") == 200
    assert stored() == 4  # one question, one answer
    line.behind.questions = 50
    assert {line.call("pull-messages") for _ in range(50)} == {200}
    assert stored() == 8  # and no hoard
    assert sum(size for name, size in line.behind.got if name == "push-object") == 20 * OBJECT


def test_small_calls_count_too(monkeypatch):
    """Flower writes a line for each, whatever its size."""
    monkeypatch.setattr(door, "_SAVED", 10 * door._ENTRY)
    line = Line()
    assert [line.call("push-messages", push(7)) for _ in range(12)] == [200] * 10 + [413] * 2


def test_flower_still_has_the_names_that_guard_and_door_use():
    """A new version of Flower must not open what these close; none but the one that was tried is installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["flower"] == ["flwr>=1.41,<1.42"]
    assert metadata.version("flwr").startswith("1.41.")
    from flwr.supercore.retry import RetryInvoker, exponential
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    assert callable(exponential) and {"max_time", "should_giveup"} <= {*inspect.signature(RetryInvoker).parameters}
    assert RuntimeHttpClient.SendTaskHeartbeat and RuntimeHttpClient.AcquireTask
    superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    assert callable(superlink._parse_superlink_lifespan_config) and superlink.SuperLinkLifespan
    assert [*inspect.signature(pull_task_input).parameters] == ["client"]
    assert [*inspect.signature(push_message).parameters] == ["client", "message", "context"]
    assert [*inspect.signature(push_task_output).parameters] == ["client", "context", "sub_status", "details"]
