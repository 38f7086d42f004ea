"""What a comparison comes to, in a sentence a setting: who is best, and who cannot be told from the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.format import percent
from ..core.measures import LOWER_IS_BETTER

LEVEL = 0.05  # p below it is a difference
_WHOSE = {"global": "global model", "personal": "mean of personal models"}


def sentence(setting: str, rows: Sequence[Mapping[str, Any]], by: str, measure: str) -> str:
    """`rows`: a comparison's, the best first."""
    where = f"{setting}: " if setting else ""
    ranked = [row for row in rows if row["rank"]]
    if not ranked:
        return f"{where}no method has a complete run."
    best, others = ranked[0], [row for row in ranked if row["rank"] > 1]
    leaders = [row["method"] for row in ranked if row["rank"] == 1]
    who, is_one = " and ".join(leaders), len(leaders) == 1
    told = f"{_value(best['mean'], measure)} ({_WHOSE[by]}{_last(best, by, measure)})"
    if not others:
        return f"{where}{who} has {told}." if is_one else f"{where}{who} are equal: {told}."
    seeds = len(best["seeds"])
    if all(row["p_seeds"] is None for row in others):
        gap = f"{_gap(best['mean'], others[0]['mean'], measure)} from {others[0]['method']}"
        luck = f"{seeds} seed{'s' * (seeds != 1)} cannot show that this is more than luck"
        return f"{where}{who} {'is' if is_one else 'are'} ahead with {told}, {gap}; {luck}."
    unsure = [row["method"] for row in others if row["p_seeds"] is None or row["p_seeds"] >= LEVEL]
    if unsure:
        few = f"{', '.join(unsure)} cannot be told from {'it' if is_one else 'them'} over {seeds} seeds (p ≥ {LEVEL})"
        most = "lowest" if measure in LOWER_IS_BETTER else "highest"
        return f"{where}{who} {'has' if is_one else 'have'} the {most} mean, {told}; {few}."
    return (
        f"{where}{who} {'is' if is_one else 'are'} best with {told}; "
        f"all others are worse over {seeds} seeds (p < {LEVEL})."
    )


def _value(value: float, measure: str) -> str:
    if measure == "accuracy":
        return percent(value, 2)
    return f"{measure} {value:.4f}" if measure == "loss" else f"{measure} {percent(value, 2)}"


def _gap(best: float, second: float, measure: str) -> str:
    return f"{abs(best - second):.4f}" if measure == "loss" else f"{100 * abs(best - second):.2f} points"


def _last(row: Mapping[str, Any], by: str, measure: str) -> str:
    return f", mean of last {row['last']}" if by == "global" and measure == "accuracy" else ""
