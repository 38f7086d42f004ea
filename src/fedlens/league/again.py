"""Two checks of a league by hand: methods again with new seeds, and a method that is entered under a second name.

Both are played into a book of their own, which lies beside the league's: its ranks stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from ..core.errors import BadInput, nearest
from .book import Book, Match
from .run import Season
from .spec import League, chosen
from .standings import MEASURES, Standings
from .statistics import Pair, Scores, differences, pair, turned, wilcoxon
from .words import interval

AGAIN, TWINS = "again", "twin"
TWIN = " again"  # what the second name of a method ends with


def check_of(book: Path, kind: str) -> Path:
    """The book of a check, beside the league's: league_again.json, league_twin.json."""
    return book.with_stem(f"{book.stem}_{kind}")


class Repeat(Season):
    """Runs that count, with other seeds, at the rates that the league found."""

    def __init__(
        self, found: Standings, seeds: Sequence[int], league: League, book: Book, runs: Path, where: Sequence[str] = ()
    ):
        super().__init__(league, book, runs, where)
        rows = [row for row in found.counted if row["method"] in league.entries]
        if old := ({row["seed"] for row in rows} | {league.search_seed}) & set(seeds):
            raise BadInput(f"seed {min(old)} is one of the league's: name new ones")
        worlds = done_by_all(found, league)
        settings = {(row["world"], row["method"]): row for row in rows if row["world"] in worlds}
        self.cells = [
            Match("final", world, method, row["rate"], row["value"], seed, row["rounds"])
            for (world, method), row in settings.items()
            for seed in seeds
        ]

    def missing(self) -> Iterator[Match]:
        return (cell for cell in self.cells if cell not in self.book.rows)

    @property
    def left(self) -> int:
        return sum(1 for _ in self.missing())


def done_by_all(found: Standings, league: League) -> list[str]:
    """Worlds of this league in which all its methods are done: in others there is nothing to compare with."""
    done = {(row["world"], row["method"]) for row in found.counted}
    worlds = [world for world in league.worlds if all((world, method) in done for method in league.entries)]
    if not worlds:
        raise BadInput(f"none of these worlds has {' and '.join(league.entries)} done: play the league first")
    return worlds


def with_twin(league: League, method: str, found: Standings) -> League:
    """The league of a method alone, under a second name, where it is done; its rates are searched anew."""
    if method not in league.entries:
        raise BadInput(f"{method!r} is not in this league; {nearest(method, league.entries)}")
    name, alone = method + TWIN, chosen(league, [], [method])
    worlds = {world: league.worlds[world] for world in done_by_all(found, alone)}
    return replace(alone, worlds=worlds, entries={name: replace(league.entries[method], name=name)})


def checks(found: Standings, again: Standings) -> Iterator[str]:
    """What a second book says: of each pair of methods before and after, and of twins beside themselves."""
    names = [*dict.fromkeys(row["method"] for row in again.counted)]
    for measure in MEASURES:
        before, after = found.scores(measure), again.scores(measure)
        for a, b in combinations((name for name in names if not name.endswith(TWIN)), 2):
            if worlds := [w for w in after if w in before and {a, b} <= after[w].keys() & before[w].keys()]:
                was, now = (_tested({w: scores[w] for w in worlds}, a, b) for scores in (before, after))
                if was.difference < 0:  # the one that was ahead comes first
                    was, now, a, b = turned(was, b), turned(now, b), b, a
                same = "the same sign" if was.difference * now.difference > 0 else "another sign"
                about = f"**{a} less {b}, {measure} model, worlds: {len(worlds)}.**"
                yield f"{about} In the league {_told(was)}. With new seeds {_told(now)}: {same}."
        for twin in (name for name in names if name.endswith(TWIN)):
            one = twin.removesuffix(TWIN)
            worlds = [w for w in after if twin in after[w] and one in before.get(w, {})]
            if worlds:
                apart = _tested({w: {one: before[w][one], twin: after[w][twin]} for w in worlds}, twin, one)
                told = "Wilcoxon's test tells them apart" if apart.differs else "They cannot be told apart"
                about = f"**{one} under two names, {measure} model, worlds: {len(worlds)}.**"
                yield f"{about} The second less the first: {_told(apart)}. {told}."


def _tested(scores: Scores, a: str, b: str) -> Pair:
    """One pair that was chosen beforehand: its p is not corrected."""
    return replace(pair(scores, a, b), p=wilcoxon(differences(scores, a, b)))


def _told(one: Pair) -> str:
    chance = "all equal" if one.p is None else f"p = {one.p:.2g}"
    return f"{interval(one)} points, {100 * one.wins:.0f} % wins, {chance}"
