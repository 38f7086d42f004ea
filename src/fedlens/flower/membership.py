"""How a federation gets its members: an invitation from the operator, keys made at the nodes, and who is admitted."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.errors import BadInput
from ..core.files import read_json, write_atomic
from .guard import LOCAL, SECRET
from .launch import Link, experiment_of

_HERE = ("localhost", "127.0.0.1")
_TRIAL = "simulation: {data}   # a trial: part {client} of data that all nodes have"
_OWNED = """\
# The owner's own images; the server never learns where they lie:
data: {is: folder, path: /path/to/images}
# What may ever leave them, over all runs. The node does not start before one of the two is chosen:
# privacy: none
# privacy: {epsilon: 8, delta: 1e-5, label: NAME}   # a budget for life; only uplink=dp is let out"""
_FOREVER = ("link", "ca", "coordinator")  # what an invitation holds; nothing of it is secret


def certify(folder: Path, *, trial: bool = False) -> list[Path]:
    """The server's certificate, the coordinator's key and an invitation; those that are there stay.

    A trial also makes every node on this machine: it joins and is admitted at once.
    """
    from .certificates import Authority, coordinator_key
    from .identity import COORDINATOR

    link, server, made = Link.of(folder / "server"), folder / "server", []
    authority = Authority(folder / "authority")
    shutil.copy(authority.certificate_file, server / "ca.crt")
    if not (server / "tls.crt").exists():
        authority.issue(server / "tls.crt", server / "tls.key", list(dict.fromkeys((link.host, *_HERE))))
        made.append(server / "tls.crt")
    if not (server / f"{COORDINATOR}.key").exists():
        coordinator_key(server / f"{COORDINATOR}.key", server / f"{COORDINATOR}.pub")
        made.append(server / f"{COORDINATOR}.key")
    (server / "keys").mkdir(exist_ok=True)
    invitation = folder / "invitation.json"
    if not invitation.exists() or made:
        said = {
            "link": read_json(server / "link.json"),
            "ca": (server / "ca.crt").read_text(),
            "coordinator": (server / f"{COORDINATOR}.pub").read_text().strip(),
        }
        write_atomic(invitation, json.dumps(said, indent=1).encode() + b"\n")
        made.append(invitation)
    for client in range(_clients(folder)) if trial else ():
        place = folder / "nodes" / str(client)
        if not place.exists():
            join(place, invitation, client, simulation=_trial_data(folder))
            admit(folder, client, place / "node.pub")
            made.append(place)
    return made


def coordinator(folder: Path) -> str:
    """The fingerprint of the key with which this federation's server signs."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from .identity import COORDINATOR, fingerprint, read_public

    public = folder / "server" / f"{COORDINATOR}.pub"
    return fingerprint(read_public(public.read_bytes(), ed25519.Ed25519PublicKey, str(public)))


def join(place: Path, invitation: Path, client: int, *, simulation: Any = None) -> tuple[str, str]:
    """A node's folder with a key that never leaves it; (its fingerprint, that of the coordinator it will obey)."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from .certificates import Authority, executor_secret, node_key
    from .identity import COORDINATOR, MINE, fingerprint, read_public

    if (place / "node.yaml").exists() or (place / MINE).exists():
        raise BadInput(f"{place} is a node already; one that joins anew, with a new key, needs another folder")
    try:
        said = read_json(invitation)
        link, ca, theirs = (said[name] for name in _FOREVER)
        Link(**link)
        coordinator = read_public(theirs, ed25519.Ed25519PublicKey, str(invitation))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{invitation} is no invitation: `fedlens deploy certs` writes invitation.json") from None
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    (place / "ca.crt").write_text(ca)
    (place / f"{COORDINATOR}.pub").write_text(theirs + "\n")
    (place / "link.json").write_text(json.dumps(link) + "\n")
    executor_secret(place / SECRET)
    own = Authority(place / LOCAL)  # the SuperNode and its guard trust it, and nobody else needs to
    own.issue(place / LOCAL / "tls.crt", place / LOCAL / "tls.key", list(reversed(_HERE)))
    mine = node_key(place / MINE, place / "node.pub")
    text = (resources.files("fedlens.flower") / "assets" / "node.yaml").read_text("utf-8")
    source = _OWNED if simulation is None else _TRIAL.format(client=client, data=json.dumps(simulation))
    text = text.format(client=client, source=source)
    (place / "node.yaml").write_text(text, "utf-8")
    return fingerprint(mine), fingerprint(coordinator)


def admit(folder: Path, client: int, public: Path) -> str:
    """Bind a node's public key to a client's number; its fingerprint. Another key of that client is forgotten."""
    from cryptography.hazmat.primitives.asymmetric import ec

    from .identity import fingerprint, public_text, read_public, roster

    link, keys = Link.of(folder / "server"), folder / "server" / "keys"
    if not keys.is_dir():
        raise BadInput(f"{folder} ({link.address}) has no keys yet: `fedlens deploy certs` comes first")
    if not 0 <= client < (population := _clients(folder)):
        raise BadInput(f"client is {client}, but this federation has clients 0 to {population - 1}")
    try:
        key = read_public(public.read_bytes(), ec.EllipticCurvePublicKey, str(public))
    except OSError:
        raise BadInput(
            f"there is no file {public}: its owner sends node.pub, which `fedlens deploy join` makes"
        ) from None
    text = public_text(key)
    if taken := [other for other, known in roster(keys).items() if public_text(known) == text and other != client]:
        raise BadInput(f"this key is that of client {taken[0]}: every node makes its own by `fedlens deploy join`")
    write_atomic(keys / f"{client}.pub", text.encode() + b"\n")
    return fingerprint(key)


def _clients(folder: Path) -> int:
    return experiment_of(folder).clients


def _trial_data(folder: Path) -> Any:
    from .. import config

    return config.to_dict(experiment_of(folder).data)
