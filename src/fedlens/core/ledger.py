"""Bytes, derived from what crosses: jobs and replies as they are sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .engine import Job, Reply
from .tree import Tree
from .wire import encode, header


class Entry(NamedTuple):
    round: int  # rounds done when it was over
    client: int
    kind: str  # download, shared, upload; "evaluation ..." for measurements that are no part of the method
    payload: int  # values
    header: int  # names, shapes, types

    @property
    def total(self) -> int:
        return self.payload + self.header


@dataclass
class Ledger:
    """A common payload is booked once for each client and version; who has which is part of a checkpoint."""

    holders: dict[str, set[int]] = field(default_factory=dict)
    up: int = 0
    down: int = 0
    _last: tuple[Tree, str] | None = None

    def book(
        self, job: Job, cohort: Sequence[int], replies: Sequence[Reply], *, round: int, purpose: str = ""
    ) -> list[Entry]:
        """The entries of one job, booked under `round`; those of the method itself are added up."""
        entries, prefix, top = [], f"{purpose} " if purpose else "", len(header(job.download))
        for client in cohort:
            entries.append(Entry(round, client, f"{prefix}download", job.download.nbytes, top))
            if job.shared and client not in (holders := self.holders.setdefault(self._version(job.shared), set())):
                holders.add(client)
                entries.append(Entry(round, client, f"{prefix}shared", job.shared.nbytes, len(header(job.shared))))
        for reply in replies:
            size = reply.upload.nbytes, len(header(reply.upload))
            entries.append(Entry(round, reply.client, f"{prefix}upload", *size))
        if not purpose:
            self.up += sum(entry.total for entry in entries if entry.kind == "upload")
            self.down += sum(entry.total for entry in entries if entry.kind != "upload")
        return entries

    def _version(self, shared: Tree) -> str:
        if self._last is None or self._last[0] is not shared:
            self._last = shared, hashlib.sha256(encode(shared)).hexdigest()[:16]
        return self._last[1]
