"""What a part of a league ranks, what it proposes, and two checks of it by hand."""

from __future__ import annotations

import io
import json

import pytest

from fedlens.compare.board import Board
from fedlens.core.errors import BadInput
from fedlens.league.again import Repeat, checks, with_twin
from fedlens.league.book import Book
from fedlens.league.page import text
from fedlens.league.run import Season, play
from fedlens.league.spec import chosen, parsed
from fedlens.league.standings import Standings
from fedlens.league.words import findings, first, table

METHODS = {"fedavg": 0.6, "feddyn": 0.65, "fedprox": 0.61, "fedxds": 0.7, "scaffold": 0.66, "spatl": 0.62}


def row(world, method, accuracy, seed):
    """One that counts."""
    where = {"part": "final", "world": world, "method": method, "rate": 0.1, "value": "", "seed": seed, "rounds": 5}
    cost = {"bytes_up": 10, "bytes_down": 10, "target": None, "seconds": 2.0, "budget": 1.0}
    return {**where, "state": "complete", "global": accuracy, "personal": None, **cost}


def book(methods=METHODS, worlds=8, lacking=(), change=None, keep=()) -> Standings:
    """Every method in every world with two seeds, but (world, method) that are lacking; rows may be changed."""
    about = {"main": "", "everywhere": True, "measure": "global", "discloses": []}
    cells = [
        row(f"w{w}", name, accuracy + 0.01 * w + 0.001 * seed, seed)
        for w in range(worlds)
        for name, accuracy in methods.items()
        for seed in (0, 1)
        if (f"w{w}", name) not in lacking
    ]
    content = {
        "title": "x",
        "worlds": {f"w{w}": {"kind": "all", "words": []} for w in range(worlds)},
        "methods": {name: {**about, "words": [f"algorithm={name}"], "algorithm": name} for name in methods},
        "cells": [{**cell, **(change or {}).get((cell["world"], cell["method"], cell["seed"]), {})} for cell in cells],
    }
    return Standings(content, keep)


def names(found: Standings) -> set[str]:
    return {name for by in found.ranked("global").values() for name in by}


def test_a_method_that_lacks_worlds_goes_before_they_do():
    lacking = [("w0", "spatl"), ("w1", "spatl"), ("w2", "spatl")]
    found = book(lacking=lacking)
    assert names(found) == set(METHODS) - {"spatl"} and len(found.ranked("global")) == 8
    assert found.unranked("global") == {"spatl": 5}
    assert "Not ranked, for lack of worlds: spatl (5)." in next(iter(findings(found)))
    rows = {row["method"]: row for row in table(found)}
    assert rows["spatl"]["global rank"] == rows["spatl"]["global"] == "–"
    assert rows["spatl"]["global, over fedavg"].startswith("+2.0 [")  # it is compared where it can be
    kept = book(lacking=lacking, keep=("spatl",))  # one of the user's own is ranked, in the worlds that it has
    assert names(kept) == set(METHODS) and len(kept.ranked("global")) == 5


def test_a_world_that_lacks_most_methods_goes():
    found = book(lacking=[("w7", name) for name in METHODS if name != "fedavg"])
    assert names(found) == set(METHODS) and [*found.ranked("global")] == [f"w{w}" for w in range(7)]
    lacks = ", ".join(name for name in METHODS if name != "fedavg")
    assert f"**7 of 8 worlds are played by all 6 ranked methods.** w7 lacks {lacks}.\n" in text(found, [])
    assert "**All 8 worlds are played by all 6 ranked methods.**\n" in text(book(), [])


def test_a_method_with_fewer_seeds_does_not_count():
    """Another seed is another split: one seed beside the mean of two would compare unlike with unlike."""
    half = book(change={("w3", "feddyn", 1): {"state": "failed"}})
    assert "feddyn" not in half.scores("global")["w3"] and "feddyn" in half.scores("global")["w2"]
    assert names(half) == set(METHODS) and len(half.ranked("global")) == 7  # of 48 numbers this keeps 42, not 40


def test_what_to_try_first_is_sure_private_and_never_fell():
    """fedxds shares data and scaffold failed once: feddyn is proposed, and both are named."""
    fell = book(change={("w5", "scaffold", 0): {"global": 0.1}})
    told = next(iter(first(fell)))
    assert told.startswith("**One model for all: try feddyn first.** It is +5.0 [+5.0, +5.0] points over fedavg")
    assert "ahead in 100 % of 8 worlds, beyond chance (p = 0.039)" in told  # 2 / 2^8, times five methods
    assert "scaffold ranks higher, but fell below half of fedavg in 1 world." in told
    assert "fedxds ranks higher than fedavg, but: shares data." in told
    assert "Its learning rate was 0.1 in 8 of the 8 worlds that it ran in: search yours." in told
    assert any("A run ended below half of fedavg: scaffold (1 world)." in line for line in findings(fell))
    few = [*first(book(worlds=3))]
    assert few[0].startswith("**One model for all: begin with fedavg.** No method is ahead of it beyond chance in 3")
    assert "Then try scaffold: +6.0" in few[0] and few[1].startswith("**A model for each client: nothing can be said")
    assert "p is 1 at best" in next(iter(findings(book(worlds=3))))


def test_a_main_parameter_is_named_where_it_is_not_the_default():
    change = {(f"w{w}", "scaffold", seed): {"value": "samples"} for w in range(6) for seed in (0, 1)}
    found = book(change=change)
    found.methods["scaffold"]["main"] = "algorithm.by"
    told = next(iter(first(found)))
    assert "Its `algorithm.by` was samples in 6 of 8 worlds, which is not the default: search it, too." in told
    assert "default" not in next(iter(first(book())))


def test_by_what_rates_are_chosen():
    found = book()
    assert not any("rates are chosen" in line for line in findings(found))  # all by the same
    found.methods["spatl"]["measure"] = "personal"
    *_, told = findings(found)
    assert "By personal models: spatl. So global numbers of these may be too low" in told


def test_where_fedavg_is_best_nothing_else_is_proposed():
    told = next(iter(first(book({"fedavg": 0.7, "feddyn": 0.6, "moon": 0.5}))))
    assert "begin with fedavg" in told and "Then try" not in told


# ---- by hand ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def played(tiny, tmp_path_factory):
    """FedAvg and FedProx in two worlds, at one rate."""
    place = tmp_path_factory.mktemp("again")
    league = parsed({**tiny, "methods": {"fedavg": None, "fedprox": None}, "others": {}, "rates": [0.1]}, "x")
    whole = Book(place / "league.json", chosen(league, [], ["fedavg", "fedprox"]))
    assert play(Season(league, whole, place / "runs"), Board(io.StringIO()), processes=1)
    return league, Standings.read(whole.path), place


def test_a_pair_is_repeated_with_new_seeds(played):
    league, found, place = played
    book = Book(place / "league_again.json", league)
    assert play(Repeat(found, [2, 3], league, book, place / "runs"), Board(io.StringIO()), processes=1)
    assert {(cell.part, cell.seed) for cell in book.rows} == {("final", 2), ("final", 3)} and len(book.rows) == 8
    rates = {(row["world"], row["method"]): row["rate"] for row in found.finals}
    assert all(cell.rate == rates[cell.world, cell.method] for cell in book.rows)
    again = Standings.read(book.path)
    told = [*checks(found, again)]
    assert len(told) == 2 and told[0].startswith("**fedavg less fedprox, global model, worlds: 2.** In the league ")
    for scores in (found.scores("global"), again.scores("global")):
        mean = sum(by["fedavg"] - by["fedprox"] for by in scores.values()) / 2
        assert f"{100 * mean:+.1f} [" in told[0]
    assert "## Checks by hand" in text(found, [], [again]) and told[1] in text(found, [], [again])
    less = {
        **found.content,
        "cells": [c for c in found.content["cells"] if (c["world"], c["method"]) != ("even", "fedprox")],
    }
    assert {cell.world for cell in Repeat(Standings(less), [2, 3], league, book, place / "runs").cells} == {"skewed"}
    none = {**found.content, "cells": [c for c in found.content["cells"] if c["method"] != "fedprox"]}
    with pytest.raises(BadInput, match="none of these worlds has fedavg and fedprox done"):
        Repeat(Standings(none), [2, 3], league, book, place / "runs")
    with pytest.raises(BadInput, match="seed 0 is one of the league's"):
        Repeat(found, [0], league, book, place / "runs")


def test_a_method_under_a_second_name(played):
    league, found, place = played
    twin = with_twin(league, "fedavg", found)
    book = Book(place / "league_twin.json", twin)
    assert play(Season(twin, book, place / "runs"), Board(io.StringIO()), processes=1)
    told = [*checks(found, Standings.read(book.path))]
    said = "The second less the first: +0.0 [+0.0, +0.0] points, 50 % wins, all equal. They cannot be told apart."
    assert told[0] == f"**fedavg under two names, global model, worlds: 2.** {said}"
    with pytest.raises(BadInput, match="'fedavgg' is not in this league"):
        with_twin(league, "fedavgg", found)
    content = json.loads(book.path.read_text())
    for cell in content["cells"]:
        cell["global"] -= 0.1
    assert "-10.0 [-10.0, -10.0] points, 0 % wins" in next(iter(checks(found, Standings(content))))
