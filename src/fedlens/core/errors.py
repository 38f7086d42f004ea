"""What goes wrong, in three kinds; each has its own exit code on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(Exception):
    """What was asked for cannot be done; one sentence that says why. Exit code 2."""


class RunFailed(Exception):
    """The run stopped; what was saved is intact. Exit code 1."""


class ClientFailed(RunFailed):
    """A client's hook raised, in this round, counted from 1."""

    def __init__(self, client: int, round: int, trace: str):
        super().__init__(client, round, trace)
        self.client, self.round, self.trace = client, round, trace

    def __str__(self) -> str:
        last = self.trace.strip().splitlines()[-1]
        return f"client {self.client} failed in round {self.round}: {last}"


_SHOWN = 120  # characters of what somebody typed


def brief(value: object) -> str:
    """As repr, shortened where nobody would read on."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}... ({len(text):,} characters)"


def nearest(name: str, known: Iterable[str]) -> str:
    """A closing half-sentence: the nearest known name, or all of them."""
    if not (known := sorted(known)):
        return "there is none yet"
    close = difflib.get_close_matches(name[:_SHOWN].lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
