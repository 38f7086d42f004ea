"""A league that is played: equal budgets, searched rates, going on where it stopped, and a page from the numbers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from fedlens import config
from fedlens.cli.league import BOOK, book_of
from fedlens.cli.main import app
from fedlens.compare.board import Board
from fedlens.core.errors import BadInput
from fedlens.league.book import Book, Match
from fedlens.league.budget import Passes, passes, rounds_within, trained
from fedlens.league.page import text as league_text
from fedlens.league.page import write
from fedlens.league.run import Season, play
from fedlens.league.schedule import to_come
from fedlens.league.spec import chosen, parsed
from fedlens.league.standings import REFERENCE, Standings
from fedlens.league.words import table as table_of

ROOT = Path(__file__).parents[2]


def experiment(tiny, *words):
    return config.read(None, [*tiny["words"], *words])


# ---- equal budgets ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "each"),
    [
        ("fedavg", [(2.0, 2.0, 2.0)]),
        ("fedsam", [(4.0, 4.0, 4.0)]),  # two gradients of every batch
        ("ditto", [(4.0, 4.0, 4.0)]),  # a personal model beside the shared one
        ("fedavg+ft", [(2.0, 2.0, 2.0), (5.0, 5.0, 5.0)]),  # five epochs at the end
        ("fedpac", [(3.0, 3.0, 3.0)]),  # an epoch of the head before
        ("local", [(2.0, 2.0, 2.0)]),
        ("fedala", [(2.0, 2 + 10 * 0.75, 2 + 0.75)]),  # learns its mixture when it comes back: on 6 of 8 images
    ],
)
def test_passes_are_counted(tiny, method, each):
    assert passes(experiment(tiny, f"algorithm={method}")) == each


def test_clients_that_come_back_are_expected_by_chance():
    each = Passes(1.0, 5.0, 3.0)
    assert [each.expected(rounds, 1.0) for rounds in (1, 2, 3, 10)] == pytest.approx([1, 6, 9, 30])
    # Two rounds, each with a chance of a half: a quarter of all comes twice, a half once.
    assert each.expected(2, 0.5) == pytest.approx(0.25 * (1 + 5) + 0.5 * 1)


def test_images_held_back_are_not_trained(tiny):
    (each,) = passes(experiment(tiny, "algorithm=fedfomo"))
    assert each == pytest.approx(
        (2 * 6 / 8,) * 3
    )  # of eight images two are held back; a row is filled with weights of zero


def test_rounds_within_the_budget(tiny):
    """FedAvg trains 4 rounds x 2 epochs x half of the clients: each client 4 times on each image."""
    assert trained(experiment(tiny)) == 4.0
    assert rounds_within(experiment(tiny)) == (4, 4.0, 4.0)
    assert rounds_within(experiment(tiny, "algorithm=ditto")) == (2, 4.0, 4.0)
    assert rounds_within(experiment(tiny, "algorithm=fedavg+ft", "algorithm.epochs=2")) == (2, 4.0, 4.0)
    rounds, images, budget = rounds_within(experiment(tiny, "algorithm=fedavg+ft"))  # its tuning alone is too much
    assert (rounds, images, budget) == (1, 6.0, 4.0)


def small(tiny):
    """One rate and one seed: what a search does is known from above."""
    return {
        **tiny,
        "rates": [0.1],
        "seeds": [0],
        "methods": {"fedavg": None, "twin": {"method": "fedavg"}, "fedprox": None},
    }


class Stopping(Season):
    """The time is up after three runs."""

    over = property(lambda self: len(self.book.rows) >= 3)


# ---- really ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def season(tiny, tmp_path_factory):
    """Stopped after the first batch of runs, and gone on with."""
    place = tmp_path_factory.mktemp("league")
    league, said = parsed(small(tiny), "x"), io.StringIO()
    book = Book(place / "data/league.json", league)
    assert not play(Season(league, book, place / "runs"), Board(said), processes=1, seconds=1e-9)
    half = Stopping(league, Book(book.path, league), place / "runs")
    assert not play(half, Board(said), processes=1)
    whole = Book(book.path, league)
    assert len(whole.rows) == 3
    assert play(Season(league, whole, place / "runs"), Board(said), processes=1)
    return league, whole, place, said.getvalue()


def test_it_is_played_to_its_end(season, tiny):
    league, book, place, said = season
    assert {row["state"] for row in book.rows.values()} == {"complete"}
    finals = [cell for cell in book.rows if cell.part == "final"]
    assert len(finals) == 3 * 2 + 1 and "runs are done, about 0 are left" in said
    assert [path.name for path in (place / "runs").iterdir()] == ["budgets.json"]  # what was read is gone
    assert all(row["images"] <= row["budget"] for row in book.rows.values())
    lines = book.path.read_text().splitlines()
    assert sum('"part"' in line for line in lines) == len(book.rows)  # one line a run
    before = book.path.read_bytes()
    assert play(Season(league, Book(book.path, league), place / "runs"), Board(io.StringIO()), processes=1)
    assert book.path.read_bytes() == before
    assert "are done; about 0 are left" in "\n".join(to_come(league, book))


def test_a_method_under_two_names_cannot_be_told_from_itself(season):
    book = season[1]
    found = Standings.read(book.path)
    for measure in ("global", "personal"):
        for by in found.scores(measure).values():
            assert by["fedavg"] == by["twin"]
        ranking = found.ranking(measure)
        (same,) = [one for one in ranking.pairs if {one.a, one.b} == {"fedavg", "twin"}]
        assert ranking.ranks["fedavg"] == ranking.ranks["twin"] and (same.low, same.high, same.p) == (0.0, 0.0, None)


def test_the_page_is_made_of_the_numbers(season):
    _, book, place, _ = season
    page, details, *pictures, pairs = write(Standings.read(book.path), place, book.path)
    text, second = page.read_text(), details.read_text()
    assert [path.name for path in pictures] == ["league.png", "league_rates.png"] and all(p.is_file() for p in pictures)
    for heading in (
        "# A small league",
        "## What to try first",
        "## Table",
        "## Findings",
        "## In some worlds alone",
    ):
        assert heading in text
    for heading in ("# A small league: details", "## Accuracy by world", "## Rates", "## Pairs", "## Worlds"):
        assert heading in second
    assert (page.name, details.name) == ("league.md", "league_details.md") and "](league_details.md)" in text
    scores = Standings.read(book.path).scores("global")["even"], Standings.read(book.path).scores("personal")["even"]
    assert f"{100 * scores[0]['twin']:.2f} / {100 * scores[1]['twin']:.2f}" in second
    assert f"| local | – / {100 * scores[1]['local']:.2f} at 0." in second
    assert pairs == book.path.with_name("league_pairs.csv") and "](data/league_pairs.csv)" in second
    assert "global,fedavg,twin,2,0.00,0.00,0.00,0.500,,no" in pairs.read_text().splitlines()
    table = {row["method"]: row for row in table_of(Standings.read(book.path))}
    assert set(table) == {"fedavg", "twin", "fedprox"} and table["fedavg"]["privacy"] == "updates only"
    assert f"| {table['fedprox']['method']} | {table['fedprox']['global rank']} |" in text
    assert "| local | 1 |" in text  # beside the ranking, in one world
    assert "**All 2 worlds are played by all 3 ranked methods.**" in text
    half = json.loads(book.path.read_text())
    half["cells"] = [row for row in half["cells"] if row["world"] == "even" and row["method"] != "fedprox"]
    told = league_text(Standings(half), [])
    assert "**0 of 2 worlds are played by all 3 ranked methods.** even lacks fedprox. Not played yet: skewed." in told
    before = text, *(p.with_suffix(".svg").read_bytes() for p in pictures)
    write(Standings.read(book.path), place, book.path)
    assert before == (page.read_text(), *(p.with_suffix(".svg").read_bytes() for p in pictures))


def test_ones_own_method_is_placed_among_the_others(season, tiny, tmp_path, capsys):
    book = season[1]
    (tmp_path / "league.yaml").write_text(yaml.safe_dump({**small(tiny), "others": {}}))
    (tmp_path / "book.json").write_bytes(book.path.read_bytes())
    words = ["league", "fedlens.algorithms:FedNova", "--league", str(tmp_path / "league.yaml"), "--processes", "1"]
    words += ["--book", str(tmp_path / "book.json"), "--runs", str(tmp_path / "runs"), "--json"]
    with pytest.raises(SystemExit) as code:
        app(words)
    assert code.value.code == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["method"] for row in printed["table"]} == {"fedavg", "twin", "fedprox", "FedNova"}
    rows = json.loads((tmp_path / "book.json").read_text())["cells"]
    new = [row for row in rows if row["method"] == "FedNova"]
    assert len(rows) - len(new) == len(book.rows) and {row["part"] for row in new} >= {"rate", "final"}
    assert (tmp_path / "book.md").is_file()  # a page is named after its book


def test_a_league_of_ones_own_has_a_book_and_a_page_beside_it(season, tiny, tmp_path, monkeypatch):
    """Without --book nothing goes into the project's own."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own"
    for folder in (own, tmp_path / "results/data"):
        folder.mkdir(parents=True)
    (tmp_path / "results/data/league.json").write_text("the project's")
    (own / "mine.yaml").write_text(yaml.safe_dump(small(tiny)))
    (own / "mine.json").write_bytes(season[1].path.read_bytes())
    with pytest.raises(SystemExit) as code:
        app(["league", "--page", "--league", "own/mine.yaml"])
    assert code.value.code == 0
    assert {path.name for path in own.iterdir()} >= {"mine.md", "mine_details.md", "mine_pairs.csv", "mine.png"}
    assert "](mine_details.md)" in (own / "mine.md").read_text()
    assert "](mine.md)" in (own / "mine_details.md").read_text()
    assert (tmp_path / "results/data/league.json").read_text() == "the project's"
    assert [*(tmp_path / "results").iterdir()] == [tmp_path / "results/data"]
    assert book_of(Path("benchmarks/league.yaml")) == Path(BOOK) == book_of(tmp_path / "benchmarks/league.yaml")


def test_the_table_fits_80_columns(tmp_path, monkeypatch, capsys):
    """Of the league that comes with it: three tables, in which nothing is cut or in two lines."""
    book = tmp_path / "league.json"
    book.write_bytes((ROOT / "results/data/league.json").read_bytes())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("fedlens.league.page.write", lambda *_: [])
    with pytest.raises(SystemExit) as code:
        app(["league", "--page", "--book", str(book), "--league", str(ROOT / "benchmarks/league.yaml")])
    assert code.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    found = Standings.read(book)
    for row in table_of(found):
        mine = [line for line in lines if line.startswith(f"{row['method']} ") and "  " in line]
        assert len(mine) == 2 + (row["global"] != "–"), row
        assert row["privacy"] in mine[-1] and row[f"personal, over {REFERENCE}"] in mine[-2]


def test_the_pages_fit_200_lines():
    for name in ("league.md", "league_details.md"):
        assert len((ROOT / "results" / name).read_text().splitlines()) <= 200


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rate": []}, "x has no 'rate'; did you mean 'rates'"),
        ({"rates": []}, "x: rates must be a list of numbers above 0"),
        ({"search": {"seed": 0}}, r"x: search\.seed 0 is one of seeds"),
        ({"search": {"share": 2}}, r"x: search\.share is 2"),
        ({"others": {"worlds": ["evn"]}}, r"x: others\.worlds 'evn' is unknown; did you mean 'even'"),
        ({"methods": {"fedavgg": None}}, "algorithm 'fedavgg' is unknown"),
        ({"methods": {"fedavg": {"main": {"a": [1], "b": [2]}}}}, r"methods\.fedavg\.main must be one key"),
        ({"methods": {"fedavg": {"mian": {}}}}, r"x: methods\.fedavg has no 'mian'"),
        ({"methods": {"scaffnew": None}}, "x: scaffnew in skewed: scaffnew needs all clients in every round"),
        ({"worlds": []}, "x: worlds must be names with settings"),
    ],
)
def test_refused(tiny, change, sentence):
    with pytest.raises(BadInput, match=sentence):
        parsed({**tiny, **change}, "x")


def test_refused_names_and_books(tiny, tmp_path):
    league = parsed(tiny, "x")
    with pytest.raises(BadInput, match="--methods 'fedavgg' is not in this league; did you mean 'fedavg'"):
        chosen(league, [], ["fedavgg"])
    with pytest.raises(BadInput, match="--worlds 'odd' is in no world's name"):
        chosen(league, ["odd"], [])
    with pytest.raises(BadInput, match="fedavg is in x already"):
        parsed(tiny, "x", ["a.b:fedavg"])
    for content, sentence in (("{", "is damaged"), ('{"format": 9, "cells": []}', "is of another version")):
        (tmp_path / "book.json").write_text(content)
        with pytest.raises(BadInput, match=sentence):
            Book(tmp_path / "book.json", league)
    (tmp_path / "book.json").unlink()
    empty = Book(tmp_path / "book.json", league)
    empty.write()
    other = {**tiny, "worlds": {**tiny["worlds"], "even": {"words": ["partition=iid", "rounds=9"]}}}
    assert Book(tmp_path / "book.json", parsed(other, "x")).rows == {}  # nothing was run with the settings before
    empty.add(Match("rate", "even", "fedavg", 0.1, "", 7, 2), {"state": "complete", "seconds": 1.0})
    with pytest.raises(BadInput, match=r"even has other settings in .*book\.json: give it another name"):
        Book(tmp_path / "book.json", parsed(other, "x"))
    with pytest.raises(BadInput, match="`fedlens league` writes it"):
        Standings.read(tmp_path / "none.json")


def test_a_run_that_fails_is_written_down_and_tried_again(tiny, tmp_path):
    league = chosen(parsed(tiny, "x"), ["even"], ["fedavg"])
    book = Book(tmp_path / "book.json", league)
    season = Season(league, book, tmp_path / "runs", ["engine=workers", "device=cuda:9"])
    assert play(season, Board(io.StringIO()), processes=1)
    assert {row["state"] for row in book.rows.values()} == {"failed"} and len(book.rows) == 2
    assert all("cuda:9" in row["error"] for row in book.rows.values())
    assert not Book(tmp_path / "book.json", league).rows


def test_the_league_that_comes_with_it():
    content = yaml.safe_load((ROOT / "benchmarks/league.yaml").read_text())
    league = parsed(content, "league.yaml")
    ranked = [name for name, entry in league.entries.items() if entry.everywhere]
    assert len(ranked) >= 16 and len(league.worlds) >= 12 and len(league.some) == 4 and len(league.seeds) == 2
    for world, entry in league.pairs():
        for value in league.entries[entry].values:
            league.experiment(world, entry, f"{league.entries[entry].key}={value}")


@pytest.mark.slow
def test_the_digits_league(tmp_path):
    """Really, on a CPU: FedAvg, twice, private heads and no sharing on digits; some minutes."""
    common = ["data=mnist5k", "model=cnn_small", "clients=10", "cohort=5", "rounds=12", "local.epochs=2"]
    content = {
        "title": "Digits",
        "words": [*common, "device=cpu", "durable=false", "local.momentum=0"],
        "worlds": {
            name: {"kind": "skew", "words": [f"partition.alpha={alpha}"]}
            for name, alpha in (("0.1", 0.1), ("0.5", 0.5))
        },
        "methods": {"fedavg": None, "twin": {"method": "fedavg"}, "fedper": None, "local": None, "scaffold": None},
        "rates": [0.03, 0.1],
        "seeds": [0, 1],
    }
    league = parsed(content, "x")
    book = Book(tmp_path / "data/league.json", league)
    assert play(Season(league, book, tmp_path / "runs"), Board(io.StringIO()))
    found = Standings.read(book.path)
    ranking = found.ranking("personal")
    assert ranking.ranks["fedavg"] == ranking.ranks["twin"] and len(ranking.worlds) == 2
    assert all(by["fedavg"] > 0.6 for by in found.scores("global").values())
    page, details, *_ = write(found, tmp_path)
    print(page.read_text(), details.read_text())
