"""What papers add to `fedlens explain`: figures of their own about a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .fedsls.weights import explain_weights, legends


def own_figures(run: str, out: Path | None, clients: Sequence[int], count: int) -> list[tuple[Path, str]]:
    """Each with how to read it; none for a run of a method that has none."""
    drawn = explain_weights(run, out, clients=clients, count=count)
    return [*zip(drawn, legends(maps=len(drawn) > 1), strict=False)]
