"""Numbers as people read them: one format everywhere."""

from __future__ import annotations

from collections.abc import Sequence


def percent(share: float | None, digits: int = 1) -> str:
    """0.4312 as 43.1 %."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def size(count: float) -> str:
    """Bytes in the largest unit that leaves a number above one: 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """In hours or minutes from two of them on: 12.3 s, 2.5 min, 4.0 h."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def joined(names: Sequence[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
