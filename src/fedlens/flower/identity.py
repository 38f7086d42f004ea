"""Who is who: messages signed both ways, each with a nonce.

The server signs with the coordinator's Ed25519 key, which nodes pin when they join. A node signs with its own key,
which the operator binds to a client's number. An answer counts where it is signed for this very question.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from ..core.errors import BadInput
from ..core.files import read_json, write_atomic
from .messages import Forged, Payload, tree_digest

_QUESTION, _ANSWER = b"fedlens question 1\0", b"fedlens answer 1\0"  # no signature of one kind passes for another
_SKEW = 60.0  # seconds by which clocks may differ; the door asks for as much
_ECDSA = ec.ECDSA(hashes.SHA256())
COORDINATOR, MINE = "coordinator", "key"  # file names: the first with .key and .pub


class Question(NamedTuple):
    """One question to one client: what its answer must be signed for."""

    client: int
    nonce: str
    said: bytes  # digest of the question


# ---- keys ------------------------------------------------------------------------------------------------------------
def public_text(key: Any) -> str:
    """A public key in one line, as OpenSSH writes it."""
    form = serialization.PublicFormat.OpenSSH
    return key.public_bytes(serialization.Encoding.OpenSSH, form).decode()


def read_public(text: str | bytes, kind: type, what: str) -> Any:
    """A public key of one line; refused where it is something else."""
    try:
        found = serialization.load_ssh_public_key(text.encode() if isinstance(text, str) else text)
    except (ValueError, TypeError):
        raise BadInput(f"{what} holds no public key") from None
    if not isinstance(found, kind):
        raise BadInput(f"{what} holds another kind of key")
    return found


def fingerprint(key: Any) -> str:
    """What people compare by telephone; the same as `ssh-keygen -lf` shows."""
    blob = b64decode(public_text(key).split()[1])
    return "SHA256:" + b64encode(sha256(blob).digest()).decode().rstrip("=")


def _private(path: Path) -> Any:
    try:
        return serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError):
        raise BadInput(f"{path} holds no private key") from None


def roster(keys: Path) -> dict[int, ec.EllipticCurvePublicKey]:
    """client -> key, as the operator has admitted them: one file N.pub for each."""
    files = {int(path.stem): path for path in keys.glob("*.pub") if path.stem.isdecimal()}
    kind = ec.EllipticCurvePublicKey
    return {client: read_public(path.read_bytes(), kind, str(path)) for client, path in sorted(files.items())}


# ---- the server ------------------------------------------------------------------------------------------------------
class Coordinator:
    """Signs what the server asks, and knows by which key each client answers."""

    def __init__(self, folder: Path):
        """The server's folder of a federation."""
        self.keys, self._key = folder / "keys", _private(folder / f"{COORDINATOR}.key")
        self._read_at, self._roster = -1, dict[int, ec.EllipticCurvePublicKey]()

    @property
    def roster(self) -> dict[int, ec.EllipticCurvePublicKey]:
        """client -> key; read again when the folder changes, as somebody may be admitted during a run."""
        if (changed := self.keys.stat().st_mtime_ns) != self._read_at:
            self._roster, self._read_at = roster(self.keys), changed
        return self._roster

    def clients(self) -> dict[bytes, int]:
        """Key, as Flower writes it -> client."""
        pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        return {key.public_bytes(*pem): client for client, key in self.roster.items()}

    def signed(
        self, notes: Mapping[str, Any], trees: Mapping[str, bytes], client: int, seconds: float
    ) -> tuple[dict[str, Any], Question]:
        """The notes of a question to one client, valid for so long. `trees`: the digest of each that goes with them."""
        about = {"client": client, "nonce": secrets.token_hex(16), "until": time.time() + seconds + _SKEW}
        said = _digest(_QUESTION, about, notes, trees)
        signed = {**notes, "signed": {**about, "by": self._key.sign(said).hex()}}
        return signed, Question(client, about["nonce"], said)

    def opened(self, answer: Payload, asked: Question) -> Payload:
        """The answer without its signature; Forged where the client's key has not signed it for this question."""
        notes = dict(answer.notes)
        by = notes.pop("signed", None)
        try:
            self.roster[asked.client].verify(bytes.fromhex(by), _answered(asked, notes, answer), _ECDSA)
        except (KeyError, TypeError, ValueError, InvalidSignature):  # nobody's, no text, no number, another's
            raise Forged(f"an answer in the name of client {asked.client} is not signed by its key") from None
        return Payload(notes, answer.trees)


# ---- a node ----------------------------------------------------------------------------------------------------------
class Member:
    """Lets questions of the pinned coordinator through, each once, and signs the answers."""

    def __init__(self, place: Path, client: int, answer: Callable[[Payload], tuple[Payload, Any]]):
        self.client, self._answer, self._seen = client, answer, place / "nonces.json"
        pinned = place / f"{COORDINATOR}.pub"
        self._theirs = read_public(pinned.read_bytes(), ed25519.Ed25519PublicKey, str(pinned))
        self._mine = _private(place / MINE)

    def answer(self, payload: Payload) -> tuple[Payload, None]:
        """A signed answer; BadInput where the question is not the coordinator's, for another, too old, or a copy."""
        asked, plain = self.opened(payload)
        answer, _ = self._answer(plain)
        by = self._mine.sign(_answered(asked, answer.notes, answer), _ECDSA).hex()
        return Payload({**answer.notes, "signed": by}, answer.trees), None

    def opened(self, payload: Payload) -> tuple[Question, Payload]:
        notes = dict(payload.notes)
        about = notes.pop("signed", None)
        about = dict(about) if isinstance(about, dict) else {}
        by = about.pop("by", None)
        said = _digest(_QUESTION, about, notes, {name: tree_digest(tree) for name, tree in payload.trees.items()})
        try:
            self._theirs.verify(bytes.fromhex(by), said)
        except (TypeError, ValueError, InvalidSignature):
            raise BadInput("a message is not signed by the coordinator that this node has joined") from None
        if about["client"] != self.client:
            raise BadInput(f"a message is for client {about['client']}, and this node is client {self.client}")
        self._once(about["nonce"], about["until"])
        return Question(self.client, about["nonce"], said), Payload(notes, payload.trees)

    def _once(self, nonce: str, until: float) -> None:
        """Written down before anything is answered: who sends a copy of an old message gets nothing."""
        now = time.time()
        if until < now:
            raise BadInput(f"a message was valid until {now - until:.0f} seconds ago: it is a copy, or clocks differ")
        try:
            seen = read_json(self._seen) if self._seen.exists() else {}
            seen = {each: end for each, end in seen.items() if end >= now}
        except (OSError, ValueError, TypeError, AttributeError):
            raise BadInput(
                f"{self._seen} cannot be read, and copies would not be noticed: nothing is answered"
            ) from None
        if nonce in seen:
            raise BadInput("a message is a copy of one that was answered before")
        write_atomic(self._seen, json.dumps({**seen, nonce: until}).encode(), durable=True)


# ---- digests ---------------------------------------------------------------------------------------------------------
def _answered(asked: Question, notes: Mapping[str, Any], answer: Payload) -> bytes:
    about = {"client": asked.client, "nonce": asked.nonce, "to": asked.said.hex()}
    return _digest(_ANSWER, about, notes, {name: tree_digest(tree) for name, tree in answer.trees.items()})


def _digest(kind: bytes, about: Mapping[str, Any], notes: Mapping[str, Any], trees: Mapping[str, bytes]) -> bytes:
    text = json.dumps([about, notes, {name: digest.hex() for name, digest in trees.items()}], sort_keys=True)
    return sha256(kind + text.encode()).digest()
