"""A process that lives as long as its SuperNode: Flower starts a new Python for every task, and that one need not
import torch, decode images or build a network when it can hand the payload on to this one.

Run as `python -m fedlens.flower.resident SOCKET NODE.yaml`; the socket lies in a folder that only its owner can enter.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from .messages import Payload, from_bytes, to_bytes


def ask(path: str, payload: Payload) -> Payload | None:
    """The answer of the warm process; None: there is none, or it has died."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(path)
            _send(line, to_bytes(payload))
            return from_bytes(_receive(line))
    except OSError:
        return None


def serve(path: str, node: Path) -> None:
    """One payload after another, until the process is ended. Its node has storage: Flower's context keeps nothing."""
    from .client import Trainer
    from .node import Node

    trainer = Trainer(Node.read(node))
    with socket.socket(socket.AF_UNIX) as door:
        Path(path).unlink(missing_ok=True)
        door.bind(path)
        door.listen()
        while True:
            line, _ = door.accept()
            with line:
                try:
                    answer, _ = trainer.answer(from_bytes(_receive(line)))
                    _send(line, to_bytes(answer))
                except (OSError, EOFError):
                    continue  # whoever asked has gone


def _send(line: socket.socket, data: bytes) -> None:
    line.sendall(len(data).to_bytes(8, "little"))
    line.sendall(data)


def _receive(line: socket.socket) -> bytes:
    return bytes(_exactly(line, int.from_bytes(_exactly(line, 8), "little")))


def _exactly(line: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = line.recv_into(view)
        if not got:
            raise ConnectionResetError("the other side has gone")
        view = view[got:]
    return data


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
