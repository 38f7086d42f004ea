"""Bytes, derived from what crosses: jobs and replies as they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .engine import Job, Reply
from .wire import digest, header


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

    def book(
        self, job: Job, cohort: Sequence[int], replies: Sequence[Reply], *, round: int, purpose: str = ""
    ) -> list[Entry]:
        """The entries of one job, booked under `round`; those of the method itself are added up."""
        entries, prefix, top = [], f"{purpose} " if purpose else "", len(header(job.download))
        for client in cohort:
            entries.append(Entry(round, client, f"{prefix}download", job.download.nbytes, top))
            if job.shared and client not in (holders := self.holders.setdefault(digest(job.shared)[:16], set())):
                holders.add(client)
                entries.append(Entry(round, client, f"{prefix}shared", job.shared.nbytes, len(header(job.shared))))
        for reply in replies:
            size = reply.upload.nbytes, len(header(reply.upload))
            entries.append(Entry(round, reply.client, f"{prefix}upload", *size))
        if not purpose:
            self.up += sum(entry.total for entry in entries if entry.kind == "upload")
            self.down += sum(entry.total for entry in entries if entry.kind != "upload")
        return entries
