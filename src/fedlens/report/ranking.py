"""Ranks of groups and p against the best: those of `fedlens compare`, which reads the same runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..compare.table import Comparison, score
from ..compare.verdict import is_tested, p_words
from .groups import arenas, grouped
from .summary_text import has_measure, letter, measure_for


def ranked(runs: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Groups of runs, each with its `rank` and the letter of its `arena`; and which of them may be compared."""
    groups = grouped(runs)
    fields = arenas(groups)
    for number, arena in enumerate(fields):
        for member in arena:
            groups[member]["arena"] = letter(number)
    rank(groups, runs, fields)
    return groups, fields


def rank(groups: Sequence[dict[str, Any]], runs: Sequence[Mapping[str, Any]], arenas: Sequence[Sequence[int]]) -> None:
    """Give each group its `rank`: mean, deviation, p, and whether it can be told from the best of its arena.

    None where a group is not finished, alone, or lacks the measure of the others.
    """
    for arena in arenas:
        complete = [groups[number] for number in arena if groups[number]["complete"]]
        measure = measure_for(complete)
        rivals = {str(n): group for n, group in enumerate(complete) if measure and has_measure(group, measure)}
        for number in arena:
            groups[number]["rank"] = None
        if len(rivals) > 1:
            _compare(rivals, runs, "global" if measure == "global" else "personal")


def _compare(rivals: Mapping[str, dict[str, Any]], runs: Sequence[Mapping[str, Any]], by: Any) -> None:
    entries = [
        replace(runs[n]["compared"], setting="", method=name)
        for name, group in rivals.items()
        for n in group["runs"]
        if runs[n]["state"] == "complete"
    ]
    rows = [row for row in Comparison(entries, by).rows("") if row["mean"] is not None]
    tested = is_tested(rows)
    for row in rows:
        group = rivals[row["method"]]
        compared = {n: runs[n]["compared"] for n in group["runs"] if runs[n]["state"] == "complete"}
        group["rank"] = {
            "by": by,
            "scores": {n: score(run, by) for n, run in compared.items()},  # run -> what it is ranked by
            **{name: row[name] for name in ("rank", "mean", "std", "p_seeds", "p_clients")},
            "p_words": {over: p_words(row[f"p_{over}"]) for over in ("seeds", "clients")},
            "is_best": row is rows[0],
            "is_close": row["is_close"],
            "tested": tested,
            "last": row["last"] if by == "global" else 1,
            "last_rounds": row["last_rounds"] if by == "global" else [],
        }
