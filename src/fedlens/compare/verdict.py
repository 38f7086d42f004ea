"""What a comparison comes to, in a sentence a setting: who is best, and who cannot be told from the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.format import percent
from ..core.measures import LOWER_IS_BETTER
from ..runs.measures import window

LEVEL = 0.05  # p below it is a difference
_WHOSE = {"global": "global model", "personal": "mean of personal models"}


def mark_close(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row `is_close`: whether it cannot be told from the best, which is first. All that show it use this.

    By the paired test over seeds; where there is none, by a lead that is not above the deviations over seeds. Where
    that makes some close, so are those that the test over clients, the only one then, does not tell from the best.
    """
    tested = is_tested(rows)
    for row in rows:
        is_ranked = row is not rows[0] and row["rank"] is not None
        row["is_close"] = is_ranked and not _is_worse(row, rows[0], tested)
    if not tested and any(row["is_close"] for row in rows):
        for row in rows[1:]:
            alike = row["p_clients"] is not None and bool(row["p_clients"] >= LEVEL)
            row["is_close"] = row["is_close"] or alike


def p_words(p: float | None) -> str:
    """p with as many digits as show on which side of LEVEL it is: 0.0504, not 0.050."""
    if p is None:
        return "–"
    if p < 0.001:
        return "<0.001"
    digits = next((count for count in (3, 4, 5) if round(p, count) != LEVEL), 3)
    return f"{p:.{digits}f}"


def is_tested(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["p_seeds"] is not None for row in rows)


def close_because(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rule by which these rows cannot be told from the best."""
    return f"p ≥ {LEVEL}" if is_tested(rows) else f"a lead within the deviation over seeds, or p ≥ {LEVEL} over clients"


def _is_worse(row: Mapping[str, Any], best: Mapping[str, Any], tested: bool) -> bool:
    if tested and row["rank"] > 1:
        return row["p_seeds"] is not None and row["p_seeds"] < LEVEL
    return abs(best["mean"] - row["mean"]) > max(row["std"] or 0.0, best["std"] or 0.0)


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
    unsure = [row["method"] for row in others if row["is_close"]]
    if not unsure and not is_tested(others):
        gap = f"{_gap(best['mean'], others[0]['mean'], measure)} from {others[0]['method']}"
        luck = f"{seeds} seed{'s' * (seeds != 1)} cannot show that this is more than luck"
        return f"{where}{who} {'is' if is_one else 'are'} ahead with {told}, {gap}; {luck}."
    if unsure:
        names, them = ", ".join(unsure), "it" if is_one else "them"
        few = f"{names} cannot be told from {them} over {seeds} seeds ({close_because(others)})"
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
    return f", {window(row['last'], row['last_rounds'])}" if by == "global" and measure == "accuracy" else ""
