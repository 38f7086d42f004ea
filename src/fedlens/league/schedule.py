"""What is left to play: rates, then values of the main parameter, then the seeds that count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..core.format import duration
from .book import Book, Match, Part, score_of
from .spec import League, extended

Rounds = Callable[[str, str, str], int | None]  # world, method, value -> rounds within the budget; None: it cannot run


def missing(league: League, book: Book, rounds: Rounds, done: set[tuple[str, str]] | None = None) -> Iterator[Match]:
    """What can be run now, a world after the other; asked again when some of it is done, until nothing is left.

    Rates first, a step beyond the grid where the best lies at its edge; then values of the main parameter at the best
    rate; then the seeds that count, under the best of both. Where one of these collapses, all of them are played at a
    smaller rate: the search is shorter, and cannot know. `done` keeps the pairs that need not be looked at again.
    """
    done = set() if done is None else done
    for world, method in league.pairs():
        if (world, method) in done:
            continue
        searched = _searched(league, book, world, method, rounds)
        todo = searched if isinstance(searched, list) else []
        if isinstance(searched, Match):
            searched = book.steady(searched)
            whole = book.rounds(world, method, searched.value, True) or rounds(world, method, searched.value)
            finals = [replace(searched, part="final", seed=seed, rounds=whole or 0) for seed in league.seeds]
            todo = [cell for cell in finals if cell.rounds and cell not in book.rows]
        if not todo:
            done.add((world, method))
        yield from todo


def _searched(league: League, book: Book, world: str, method: str, rounds: Rounds) -> list[Match] | Match | None:
    """Cells of the search that are missing, or its best; nothing where it cannot be run, or all of it failed."""
    entry = league.entries[method]

    def cells(part: Part, rate: float, value: str = "") -> list[Match]:
        """One that is not in the book; none where the budget of this value cannot be found out."""
        short = book.rounds(world, method, value, False)
        if short is None:
            whole = rounds(world, method, value)
            if whole is None:
                return []
            short = max(1, round(whole * league.search_share))
        one = Match(part, world, method, rate, value, league.search_seed, short)
        return [] if one in book.rows else [one]

    if todo := [one for rate in league.rates for one in cells("rate", rate)]:
        return todo
    best = book.best(world, method, "rate")
    if best is None:
        return None
    tried = [known.rate for known in book.of(world, method) if known.part == "rate"]
    if (further := extended(tried, best.rate, league.rates)) is not None:
        return cells("rate", further)
    if todo := [one for value in values_of(league, world, method) for one in cells("main", best.rate, value)]:
        return todo
    other = book.best(world, method, "main")
    scores = {one: score_of(book.rows[one], entry.measure) or 0.0 for one in (best, other) if one is not None}
    return max(scores, key=lambda one: scores[one])


def _default(league: League, world: str, method: str) -> str:
    """What the main parameter is without a word; asked for often, and reading settings takes a while."""
    if (world, method) not in league.defaults:
        league.defaults[world, method] = _read_default(league, world, method)
    return league.defaults[world, method]


def _read_default(league: League, world: str, method: str) -> str:
    entry = league.entries[method]
    if not entry.key.startswith("algorithm."):
        return ""
    part: Any = league.experiment(world, method).algorithm
    for name in entry.key.split(".")[1:]:
        part = getattr(part, name, None)
    return f"{part:g}" if isinstance(part, float) else str(part)


def values_of(league: League, world: str, method: str) -> list[str]:
    """Of the main parameter, but its default, which the search of rates has."""
    usual = _default(league, world, method)
    return [value for value in league.entries[method].values if value != usual]


# ---- how many --------------------------------------------------------------------------------------------------------
def all_runs(league: League) -> int:
    """Of a whole league, without steps beyond the grid."""
    each = len(league.rates) + len(league.seeds)
    return sum(each + len(values_of(league, world, method)) for world, method in league.pairs())


def left_of(league: League, book: Book, world: str, method: str) -> tuple[int, int]:
    """(runs of the search, runs that count) that a method lacks in a world; steps beyond the grid are not known yet."""
    known = book.of(world, method)
    rates = sum(not any((one.part, one.rate) == ("rate", rate) for one in known) for rate in league.rates)
    if not rates and book.best(world, method, "rate") is None:
        return 0, 0  # all of the search failed: there is nothing to go on with
    values = {one.value for one in known if one.part == "main"}
    finals = [one for one in known if one.part == "final"]
    least = min((one.rate for one in finals), default=0.0)  # larger ones collapsed
    seeds = {one.seed for one in finals if one.rate == least}
    return rates + len({*values_of(league, world, method)} - values), len({*league.seeds} - seeds)


def still(league: League, book: Book) -> int:
    """About how many runs are left."""
    return sum(sum(left_of(league, book, *pair)) for pair in league.pairs())


def to_come(league: League, book: Book) -> list[str]:
    """How many runs there are, which are left by world and method, and how long they take one after another."""
    pairs, total = league.pairs(), all_runs(league)
    counts = len(pairs) * len(league.seeds)
    mine = sum(len(book.of(*pair)) for pair in pairs)
    left = {pair: lacks for pair in pairs if sum(lacks := left_of(league, book, *pair))}
    runs = sum(map(sum, left.values()))
    lines = [
        f"Worlds: {len(league.worlds)}, methods: {len({method for _, method in pairs})}. Runs of the search: "
        f"{total - counts}, runs that count: {counts}.",
        f"{mine} are done; about {runs} are left, and some beyond the grid of rates.",
    ]
    for world in league.worlds:
        if by := {method: sum(lacks) for (one, method), lacks in left.items() if one == world}:
            named = ", ".join(f"{method} {count}" for method, count in by.items())
            lines.append(f"- {world}: {sum(by.values())} ({named})")
    if runs and book.rows:
        lines.append(f"At the seconds of runs so far, one after another: {duration(_seconds(book, left))}.")
    return [*lines, *left_out(league)]


def _seconds(book: Book, left: dict[tuple[str, str], tuple[int, int]]) -> float:
    """By the mean of the runs that are known of a world; of all where it has none."""

    def mean(world: str | None, counts: bool) -> float | None:
        known = [
            row["seconds"]
            for cell, row in book.rows.items()
            if row["state"] == "complete" and world in (None, cell.world) and (cell.part == "final") is counts
        ]
        return math.fsum(known) / len(known) if known else None

    means = {
        (world, counts): mean(world, counts) or mean(None, counts) or mean(None, not counts) or 0.0
        for world in {world for world, _ in left}
        for counts in (False, True)
    }
    return math.fsum(
        count * means[world, counts]
        for (world, _), lacks in left.items()
        for counts, count in zip((False, True), lacks, strict=True)
    )


def left_out(league: League) -> list[str]:
    """A sentence for each method that a world is not made for."""
    mine = [pair for pair in league.barred if pair[0] in league.worlds and pair[1] in league.entries]
    return [f"{method} is left out in {world}: {league.barred[world, method]}" for world, method in mine]
