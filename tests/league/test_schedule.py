"""What is played next, what is left, and what a method or a world that fails does to the rest."""

from __future__ import annotations

import io

import numpy as np
import pytest

from fedlens import config
from fedlens.compare.board import Board
from fedlens.league.book import Book, Match
from fedlens.league.run import Season, play
from fedlens.league.schedule import all_runs, missing, still, to_come
from fedlens.league.spec import chosen, extended, listed, measure_of, parsed
from fedlens.league.standings import Standings
from fedlens.league.words import findings


# ---- the search ------------------------------------------------------------------------------------------------------
def played(league, accuracy, tmp_path, steps=50):
    """All cells that are asked for, wave by wave, with accuracies from a function instead of runs."""
    book, waves = Book(tmp_path / "book.json", league), []
    while todo := [*missing(league, book, lambda world, method, value: 9)]:
        waves.append(todo)
        for cell in todo:
            book.add(cell, {"state": "complete", "global": accuracy(cell), "personal": accuracy(cell), "seconds": 1.0})
        assert len(waves) < steps
    return book, waves


def test_rates_then_values_then_what_counts(tiny, tmp_path):
    """FedProx is best at 0.1 with mu 0.1; the grid is left where its edge is best, at most two steps."""
    league = chosen(parsed(tiny, "x"), ["even"], ["fedprox"])

    def accuracy(cell: Match) -> float:
        return 0.5 + 0.1 * (cell.value == "0.1") - abs(np.log10(cell.rate) - np.log10(0.33)) / 10

    book, waves = played(league, accuracy, tmp_path)
    assert [(len(wave), wave[0].part) for wave in waves] == [
        (2, "rate"),
        (1, "rate"),
        (1, "rate"),
        (1, "main"),
        (2, "final"),
    ]
    assert [cell.rate for cell in book.rows if cell.part == "rate"] == [0.03, 0.1, 0.33, 1.1]
    (main,) = [cell for cell in book.rows if cell.part == "main"]  # 0.01 is the default: it was tried with the rates
    assert (main.rate, main.value, main.rounds, main.seed) == (0.33, "0.1", 4, 7)
    finals = [cell for cell in book.rows if cell.part == "final"]
    assert [(c.rate, c.value, c.seed, c.rounds) for c in finals] == [(0.33, "0.1", 0, 9), (0.33, "0.1", 1, 9)]
    assert all_runs(league) == 5 and still(league, book) == 0
    again = Book(tmp_path / "book.json", league)
    assert again.rows == book.rows and not [*missing(league, again, lambda *_: 9)]


def test_a_rate_that_collapses_gives_way_to_a_smaller_one(tiny, tmp_path):
    """Longer runs of seed 1 fall to chance at 0.1: all that counts is played at 0.03, and the table has that alone."""
    league = chosen(parsed(tiny, "x"), ["even"], ["fedavg", "fedprox"])

    def accuracy(cell: Match) -> float:
        if cell.method == "fedprox" and cell.part == "final" and cell.rate == 0.1 and cell.seed == 1:
            return 0.1
        return 0.8 if cell.rate == 0.1 else 0.7 if cell.rate == 0.03 else 0.6

    book, _ = played(league, accuracy, tmp_path)
    finals = [(cell.method, cell.rate, cell.seed) for cell in book.rows if cell.part == "final"]
    assert finals == [
        *[("fedavg", 0.1, seed) for seed in (0, 1)],
        *[("fedprox", rate, seed) for rate in (0.1, 0.03) for seed in (0, 1)],
    ]
    found = Standings.read(book.path)
    assert {(row["method"], row["rate"]) for row in found.finals} == {("fedavg", 0.1), ("fedprox", 0.03)}
    assert found.collapsed == [("fedprox", "even")]
    assert found.average("fedprox", "global") == pytest.approx(0.7)
    assert "because longer runs collapsed at them: 1." in [*findings(found)][-1]


def test_a_method_that_collapses_everywhere_stays_at_its_smallest_rate(tiny, tmp_path):
    league = chosen(parsed(tiny, "x"), ["even"], ["fedavg"])
    book, _ = played(league, lambda cell: 0.1 if cell.part == "final" else 0.5, tmp_path)
    rates = sorted(cell.rate for cell in book.rows if cell.part == "rate")
    assert {row["rate"] for row in Standings.read(book.path).finals} == {rates[0]}


def test_budgets_are_kept_beside_the_runs(tiny, tmp_path, monkeypatch):
    league = parsed(tiny, "x")
    book = Book(tmp_path / "book.json", league)
    found = Season(league, book, tmp_path / "runs").budget("even", "fedprox", "0.1")
    monkeypatch.setattr("fedlens.league.run.rounds_within", lambda _: (0, 0.0, 0.0))
    again = Season(league, book, tmp_path / "runs")
    assert again.budget("even", "fedprox", "0.1") == found != (0, 0.0, 0.0)
    assert again.budget("even", "fedprox", "0.01") == (0, 0.0, 0.0)  # other settings are found out
    (tmp_path / "runs/budgets.json").write_text("[]")
    assert Season(league, book, tmp_path / "runs").budget("even", "fedprox", "0.1") == (0, 0.0, 0.0)


def test_worlds_are_played_one_after_another(tiny, tmp_path):
    """All of a world is asked for before the next one, and what stands beside the ranks at last."""
    league = parsed(tiny, "x")
    book, order = Book(tmp_path / "book.json", league), []
    while (cell := next(missing(league, book, lambda *_: 9), None)) is not None:
        order.append((cell.world, cell.method != "local"))
        book.add(cell, {"state": "complete", "global": 0.5, "personal": 0.5, "seconds": 1.0})
    assert [*dict.fromkeys(order)] == [("skewed", True), ("even", True), ("even", False)]
    assert order == sorted(order, key=[*dict.fromkeys(order)].index)


def test_what_is_under_way_is_not_begun_again(tiny, tmp_path):
    league = chosen(parsed(tiny, "x"), ["even"], ["fedavg", "twin"])
    season = Season(league, Book(tmp_path / "book.json", league), tmp_path / "runs")
    begun = [season.take() for _ in range(5)]
    assert len({task.name for task in begun[:4]}) == 4 and begun[4] is None  # two rates each; the rest waits for them
    season.until = 0.0
    assert season.over and season.take() is None


def test_edges():
    assert extended([0.03, 0.1], 0.1, [0.03, 0.1]) == 0.33
    assert extended([0.03, 0.1], 0.03, [0.03, 0.1]) == 0.009
    assert extended([0.03, 0.1, 0.33, 1.1], 1.1, [0.03, 0.1]) is None  # two steps beyond are enough
    assert extended([0.01, 0.03, 0.1], 0.03, [0.01, 0.03, 0.1]) is None
    assert [measure_of(name) for name in ("fedavg", "fedavg+ft", "fedper", "ditto", "a.b:C")] == [
        "global",
        "personal",
        "personal",
        "both",
        "both",
    ]


# ---- what fails, and what is left -----------------------------------------------------------------------------------
def test_a_rate_that_a_method_refuses_does_not_end_the_league(tiny, tmp_path):
    """pFedMe refuses a step that is too long for its pull; the other rates are played."""
    content = {**tiny, "methods": {"fedavg": None, "pfedme": None}, "others": {}, "rates": [0.01, 3.0], "seeds": [0]}
    league = chosen(parsed(content, "x"), ["even"], ["pfedme"])
    book = Book(tmp_path / "book.json", league)
    season, names = Season(league, book, tmp_path / "runs"), []
    while (task := season.take()) is not None and len(names) < 9:
        names.append(task.name)
        assert "3" not in task.name.partition("lr ")[2].partition(",")[0]
    assert names == ["rate: pfedme lr 0.01, even, seed 7"]
    (failed,) = book.rows.items()
    assert failed[0].rate == 3.0 and "lower one of them" in failed[1]["error"]


def test_a_world_that_a_method_cannot_run_in_is_left_out(tiny, tmp_path):
    """Scaffnew needs all clients in every round: it is played where all take part, and the rest goes on."""
    whole = {"words": ["partition=iid", "cohort=everyone", "local.steps=4"]}
    mine = {"scaffnew": {"words": ["local.steps=4", "weighting=uniform"]}}
    content = {**tiny, "words": [*tiny["words"], "local.momentum=0"], "rates": [0.1], "seeds": [0], "others": {}}
    content |= {"worlds": {"all": whole, "half": {"words": ["partition=iid"]}}}
    league = parsed({**content, "methods": {"fedavg": None, **mine}}, "x")
    assert league.pairs() == [("all", "fedavg"), ("all", "scaffnew"), ("half", "fedavg")]
    said, book = io.StringIO(), Book(tmp_path / "book.json", league)
    assert "scaffnew is left out in half: scaffnew needs all clients" in "\n".join(to_come(league, book))
    assert play(Season(league, book, tmp_path / "runs"), Board(said), processes=1)
    assert "scaffnew is left out in half: scaffnew needs all clients" in said.getvalue()
    finals = {(cell.world, cell.method) for cell in book.rows if cell.part == "final"}
    assert finals == {("all", "fedavg"), ("all", "scaffnew"), ("half", "fedavg")}


def test_a_rehearsal_that_fails_does_not_end_the_league(tiny, tmp_path, monkeypatch):
    league = chosen(parsed(tiny, "x"), ["even"], ["fedavg", "fedprox"])

    def fails(experiment):
        if "mu" in config.to_dict(experiment.algorithm):
            raise RuntimeError("too large\nfor this")
        return 4, 4.0, 4.0

    monkeypatch.setattr("fedlens.league.run.rounds_within", fails)
    season = Season(league, Book(tmp_path / "book.json", league), tmp_path / "runs")
    season.board = Board(said := io.StringIO())
    assert {cell.method for cell in season.missing()} == {"fedavg"}
    assert [*season.missing()] and said.getvalue().splitlines() == ["fedprox is left out in even: too large"]


def test_a_method_whose_search_fails_is_named(tiny, tmp_path):
    league = chosen(parsed(tiny, "x"), ["even"], ["fedavg"])
    book, said = Book(tmp_path / "book.json", league), io.StringIO()
    season = Season(league, book, tmp_path / "runs", ["engine=workers", "device=cuda:9"])
    assert play(season, Board(said), processes=1)
    last = said.getvalue().splitlines()[-1]
    assert last.startswith("fedavg is left out in even, where all of its search failed (") and "cuda:9" in last


def test_a_refused_rate_that_comes_first_does_not_end_the_league(tiny, tmp_path):
    content = {**tiny, "methods": {"fedavg": None, "pfedme": None}, "others": {}, "rates": [3.0, 4.0], "seeds": [0]}
    league = chosen(parsed(content, "x"), ["even"], ["pfedme"])
    book, said = Book(tmp_path / "book.json", league), io.StringIO()
    assert play(Season(league, book, tmp_path / "runs"), Board(said))
    assert [row["state"] for row in book.rows.values()] == ["failed"] * 2 and "lower one of them" in said.getvalue()


def test_budgets_of_what_is_known_are_not_asked_for(tiny, tmp_path):
    """A league that is gone on with on another machine begins at once: a budget takes a second each."""
    league = parsed(tiny, "x")
    book, _ = played(chosen(league, ["even"], []), lambda cell: 0.5, tmp_path)
    asked = []

    def rounds(*what):
        asked.append(what)
        return 9

    left = [*missing(league, book, rounds)]
    assert {cell.world for cell in left} == {"skewed"} == {world for world, *_ in asked}


def test_what_is_left_is_counted_by_world_and_method(tiny, tmp_path):
    league = parsed(tiny, "x")
    book, _ = played(chosen(league, ["even"], ["fedavg", "twin"]), lambda cell: 0.5, tmp_path)
    lines = to_come(league, book)
    assert "- skewed: 13 (fedavg 4, twin 4, fedprox 5)" in lines and "- even: 9 (fedprox 5, local 4)" in lines
    known = len(book.rows)
    assert lines[1] == f"{known} are done; about 22 are left, and some beyond the grid of rates."
    assert "one after another: 22 s." in lines[-1]


def test_worlds_are_named_by_a_part_or_whole(tiny):
    content = {**tiny, "worlds": {f"a, {n} of 100": {"words": ["partition=iid"]} for n in (1, 10)}, "others": {}}
    league = parsed(content, "x")
    for text, names in (("a, 1 of 100", [1]), ("10 of", [10]), ("a", [1, 10]), ("1 of, 10 of", [1, 10]), ("", [1, 10])):
        found = chosen(league, listed(text, league.worlds), [])
        assert [*found.worlds] == [f"a, {n} of 100" for n in names], text
