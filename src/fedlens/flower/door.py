"""The only way into a federation's server from outside: signed fleet calls of admitted keys, and nothing else.

Flower 1.41 serves its control, fleet and runtime interfaces on one port and asks for no login there. So the whole of it
listens on loopback, and nodes reach this second listener. What it does not know gets 404, what is not signed 401, both
before a byte of the body is read.

Run as `python -P -m fedlens.flower.door HOST PORT KEYS [what flower-superlink takes]`. It uses two private names of
Flower, whose version is pinned; a test says when they change.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_PREFIX = "/v1/fleet/"
_CALLS = {"activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run"}
_CALLS |= {"get-fab", "push-object", "pull-object", "confirm-message-received"}
_LARGEST = 16 << 20  # bytes of a body; Flower cuts arrays into objects of 5 MiB
_OLDEST, _YOUNGEST = 60.0, -5.0  # seconds since a call was signed; clocks differ
_RATE, _BURST = 200.0, 2000.0  # calls a second of one key, and how many it may save up
_STRANGERS = 1000  # that are logged
_IN_FLIGHT = 128 << 20  # bytes of one key that are on their way
_STORED = {"push-messages", "push-object"}  # calls whose bodies Flower keeps until somebody asks for them
_ANSWER = 1 << 30  # bytes that a key may send for each question that it has got; as policy.max_reply_mib
_SAVED = 2 * _ANSWER  # the most that it may have left; a door that was started anew knows of no questions
_ENTRY = 4 << 10  # bytes that the smallest of these calls counts for: Flower writes it down


class Keys:
    """The public keys in a folder, read again when it changes: a node that is admitted need not wait for a restart."""

    def __init__(self, folder: Path):
        self.folder, self._read_at, self._known = folder, -1.0, frozenset[bytes]()

    def __contains__(self, key: bytes) -> bool:
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        files = sorted(self.folder.glob("*.pub"))
        changed = max((file.stat().st_mtime for file in (self.folder, *files)), default=0.0)
        if changed != self._read_at:
            known = (load_ssh_public_key(file.read_bytes()) for file in files)
            self._known, self._read_at = frozenset(public_key_to_bytes(each) for each in known), changed  # pyright: ignore
        return key in self._known


class Quota:
    """How many calls and bytes each key may have, so that one node cannot keep the others out or fill the disk."""

    def __init__(self) -> None:
        self._left: dict[bytes, int] = {}  # bytes that may still be stored
        self._saved: dict[bytes, tuple[float, float]] = {}  # calls that are left, and when
        self._flying: dict[bytes, int] = {}

    def take(self, key: bytes, size: int) -> bool:
        now = time.monotonic()
        left, at = self._saved.get(key, (_BURST, now))
        left = min(_BURST, left + (now - at) * _RATE)
        fits = left >= 1 and self._flying.get(key, 0) + size <= _IN_FLIGHT
        self._saved[key] = left - fits, now
        if fits:
            self._flying[key] = self._flying.get(key, 0) + size
        return fits

    def give_back(self, key: bytes, size: int) -> None:
        self._flying[key] -= size

    def asked(self, key: bytes) -> None:
        """A question has gone to this key: it may send an answer."""
        self._left[key] = min(_SAVED, self._left.get(key, _SAVED) + _ANSWER)

    def store(self, key: bytes, size: int) -> bool:
        """Whether so much more may be stored for it: no node sends more than answers to what it was asked."""
        left = self._left.get(key, _SAVED) - max(size, _ENTRY)
        if left >= 0:
            self._left[key] = left
        return left >= 0


class Door:
    """An ASGI app around Flower's own."""

    def __init__(self, app: Any, keys: Any):
        self.app, self.keys, self.quota, self._told = app, keys, Quota(), set[str]()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = scope["path"].removeprefix(_PREFIX)
        if scope["method"] != "POST" or not scope["path"].startswith(_PREFIX) or call not in _CALLS:
            return await _refuse(send, 404)
        headers = {name.decode("latin1").lower(): value.decode("latin1") for name, value in scope["headers"]}
        if (key := self._signer(headers)) is None:
            self._tell(headers, scope.get("client"))
            return await _refuse(send, 401)
        length = headers.get("content-length", "")
        if not length.isdecimal() or int(length) > _LARGEST or "transfer-encoding" in headers:
            return await _refuse(send, 413)
        if not self.quota.take(key, int(length)):
            return await _refuse(send, 429)
        try:
            if call in _STORED and not self.quota.store(key, int(length)):
                return await _refuse(send, 413)
            if call == "pull-messages":
                send = _watched(send, partial(self.quota.asked, key))
            if call == "push-messages":
                body = await _body(receive, int(length))
                if body is None or not _speaks_for_itself(body):
                    return await _refuse(send, 403)
                receive = _again(body, receive)
            await self.app(scope, receive, send)
        finally:
            self.quota.give_back(key, int(length))

    def _tell(self, headers: dict[str, str], where: Any) -> None:
        """Log a stranger, each key once: who has just been admitted may try again, and is let in."""
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

        claimed = headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.lower(), "")
        name = hashlib.sha256(claimed.encode()).hexdigest()[:16] if claimed else "no key"
        if name not in self._told and len(self._told) < _STRANGERS:
            self._told.add(name)
            host = where[0] if where else "somewhere"
            print(f"the gateway refused a stranger from {host} ({name}): no admitted key", file=sys.stderr, flush=True)

    def _signer(self, headers: dict[str, str]) -> bytes | None:
        """The admitted key that has signed this call lately; None: nobody's."""
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.lower()], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.lower()], validate=True)
            signed_at = headers[TIMESTAMP_HEADER.lower()]
            age = (datetime.now(UTC) - datetime.fromisoformat(signed_at)).total_seconds()
            fine = key in self.keys and _YOUNGEST < age < _OLDEST
            return key if fine and verify_signature(bytes_to_public_key(key), signed_at.encode(), signature) else None
        except (KeyError, ValueError, TypeError):
            return None


async def _body(receive: Receive, length: int) -> bytes | None:
    """All of a body that is no longer than it says."""
    found = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        found += message.get("body", b"")
        if len(found) > length:
            return None
        if not message.get("more_body"):
            return found


def _again(body: bytes, receive: Receive) -> Receive:
    """The same body once more, then whatever comes after it."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> dict[str, Any]:
        return left.pop() if left else await receive()

    return next_message


def _watched(send: Send, asked: Callable[[], None]) -> Send:
    """The same; `asked` is called before the end of a response that brings a question."""
    found: list[bytes] = []

    async def sent(message: dict[str, Any]) -> None:
        from flwr.proto.fleet_pb2 import PullMessagesResponse
        from google.protobuf.message import DecodeError

        if message["type"] == "http.response.body":
            found.append(message.get("body", b""))
            if not message.get("more_body"):
                with suppress(DecodeError):  # as where it is a refusal
                    if PullMessagesResponse.FromString(b"".join(found)).messages_list:
                        asked()
        await send(message)

    return sent


def _speaks_for_itself(body: bytes) -> bool:
    """Whether every reply comes from the node that sends it: Flower does not compare the two."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError

    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    return all(message.metadata.src_node_id == request.node.node_id for message in request.messages_list)


async def _refuse(send: Send, status: int) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"code":0,"detail":"refused"}'})


def main() -> None:
    """The SuperLink on loopback, and the door beside it."""
    import importlib

    import uvicorn

    host, port, keys = sys.argv.pop(1), int(sys.argv.pop(1)), Path(sys.argv.pop(1))
    flower: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    from flwr.superlink.main import create_app

    config = flower._parse_superlink_lifespan_config()
    if config.host != "127.0.0.1":
        raise SystemExit(f"the whole interface of Flower stays on 127.0.0.1, not {config.host}")
    app = create_app(config, flower.SuperLinkLifespan)
    tls = {"ssl_keyfile": config.ssl_keyfile, "ssl_certfile": config.ssl_certfile}
    quiet = {"access_log": False, "server_header": False, **tls}
    limits = {"limit_concurrency": 256, "timeout_keep_alive": 15}
    outside = uvicorn.Config(Door(app, Keys(keys)), host=host, port=port, lifespan="off", **limits, **quiet)
    threading.Thread(target=uvicorn.Server(outside).run, daemon=True).start()
    uvicorn.run(app, host=config.host, port=config.port, workers=1, **quiet)


if __name__ == "__main__":
    main()
