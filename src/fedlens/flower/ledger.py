"""What has left a data set, for life: one line for each release, chained by hashes, written before anything leaves."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..core.errors import BadInput
from ..core.files import write_atomic
from ..privacy.accounting import Release, total_epsilon

_FIRST = "0" * 64


@dataclass(frozen=True)
class Spent:
    """What one release costs: Gaussian noise in units of the most that it can hide, or nothing that is counted."""

    noise: float | None  # standard deviation / sensitivity; None: not counted, and said so
    what: str


class DamagedLedger(BadInput):
    """What the server is told, and what the owner's log has besides: where the ledger lies is the owner's matter."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"the ledger of its data {what}; nothing leaves")
        self.detail = f"it is {path}"


class ReleaseLedger:
    """The account of one data set. Whoever cannot read it whole refuses: a lost line would be spent twice.

    `anchor` lies in another folder and holds how many lines there were, and the last one's hash: a ledger that was cut
    or put back from an older copy is noticed, unless both were.
    """

    def __init__(self, path: Path, anchor: Path, epsilon: float | None, delta: float):
        self.path, self.anchor, self.epsilon, self.delta = path, anchor, epsilon, delta

    def spent(self, noise: float | None = None, times: int = 0) -> float:
        """Epsilon of all releases together, at the owner's delta; and of so many more under this noise."""
        with self._locked() as lines:
            return self._epsilon([*lines, *[{"noise": noise}] * times])

    def book(self, release: Spent, order: str, **about: Any) -> None:
        """Write a release down before it is made; one too many is refused.

        An order that was booked and never sent, as where the node was killed between the two, costs nothing more.
        """
        with self._locked() as lines:
            before = next((line for line in reversed(lines) if line["order"] == order), None)
            if before is not None and before["kind"] == "booked":
                return
            line = {"kind": "booked", "order": order, "noise": release.noise, "what": release.what, **about}
            after = self._epsilon([*lines, line])
            if self.epsilon is not None and after > self.epsilon:
                left = max(0.0, self.epsilon - self._epsilon(lines))
                releases = sum(line["kind"] == "booked" for line in lines)
                raise BadInput(
                    f"the budget of its data is epsilon {self.epsilon:g} at delta {self.delta:g}: {left:.4g} is left "
                    f"after {releases} releases, and with this one {after:.4g} would be spent"
                )
            self._append(line, lines)

    def sent(self, order: str) -> None:
        """An answer is about to leave: whoever asks again and does not get these very bytes pays again."""
        with self._locked() as lines:
            last = next((line["kind"] for line in reversed(lines) if line["order"] == order), "")
            if last != "sent":  # as where the same bytes leave again
                self._append({"kind": "sent", "order": order, "noise": None, "what": ""}, lines)

    def rounds(self, contract: str) -> int:
        """How many rounds of a contract have been paid for."""
        booked = (line for line in self.lines() if line["kind"] == "booked")
        return len({line.get("round") for line in booked if line.get("contract") == contract})

    def lines(self) -> list[dict[str, Any]]:
        with self._locked() as found:
            return found

    # ---- the file ----
    @contextmanager
    def _locked(self) -> Iterator[list[dict[str, Any]]]:
        for folder in (self.path.parent, self.anchor.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _private(self.path.with_suffix(".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._read()

    def _read(self) -> list[dict[str, Any]]:
        text = self.path.read_bytes() if self.path.exists() else b""
        if text and not text.endswith(b"\n"):  # the line that a power cut broke off: nothing left under it
            text = text[: text.rfind(b"\n") + 1]
            write_atomic(self.path, text, durable=True)
        try:
            lines = [json.loads(line) for line in text.splitlines()]
            before = _FIRST
            for line in lines:
                if line["previous"] != before or line["hash"] != _hash(line):
                    raise ValueError
                before = line["hash"]
            count, last = json.loads(self.anchor.read_text()) if self.anchor.exists() else (0, _FIRST)
            whole = len(lines) >= count and (lines[count - 1]["hash"] if count else _FIRST) == last
        except (ValueError, KeyError, TypeError, OSError):
            raise DamagedLedger(self.path, "cannot be read") from None
        if not whole:
            raise DamagedLedger(self.path, "is shorter than it was")
        return lines

    def _append(self, line: dict[str, Any], before: list[dict[str, Any]]) -> None:
        line = {**line, "at": datetime.now(UTC).isoformat(), "previous": before[-1]["hash"] if before else _FIRST}
        line["hash"] = _hash(line)
        new = not self.path.exists()
        with _private(self.path) as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            _sync(self.path.parent)
        write_atomic(self.anchor, json.dumps([len(before) + 1, line["hash"]]).encode(), durable=True)

    def _epsilon(self, lines: list[dict[str, Any]]) -> float:
        noises = Counter(line["noise"] for line in lines if line["noise"] is not None)
        return total_epsilon({Release(noise): times for noise, times in noises.items()}, self.delta) if noises else 0.0


def _private(path: Path) -> Any:
    """Open for appending, readable by its owner alone from the first moment."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(line: Mapping[str, Any]) -> str:
    said = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
