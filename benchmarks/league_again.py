"""Two checks of the league by hand; `fedlens league --page` then shows what they say.

python benchmarks/league_again.py feddyn fedavg --seeds 2,3 device=cuda
    plays these methods again with new seeds, at the rates of the book, in all worlds that they are done in
python benchmarks/league_again.py fedavg --twin --worlds "fashion 0.1,cifar10 0.5" device=cuda
    enters a method under a second name: rates are searched anew, and what counts is played with the league's seeds

Both write a book beside the league's (league_again.json, league_twin.json), and go on where they stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedlens.compare.board import board
from fedlens.core.errors import BadInput
from fedlens.league.again import AGAIN, TWINS, Repeat, check_of, checks, with_twin
from fedlens.league.book import Book
from fedlens.league.run import Season, play
from fedlens.league.spec import chosen, listed, read
from fedlens.league.standings import Standings


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="methods, and settings of where it runs, such as device=cuda")
    parser.add_argument("--seeds", default="2,3", help="new ones, with commas between")
    parser.add_argument("--twin", action="store_true", help="enter one method under a second name")
    parser.add_argument("--worlds", default="", help="only these, by a part of their names, with commas between")
    parser.add_argument("--league", type=Path, default=Path("benchmarks/league.yaml"))
    parser.add_argument("--book", type=Path, default=Path("results/data/league.json"))
    parser.add_argument("--runs", type=Path, default=Path("runs/league_again"))
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0)
    asked = parser.parse_intermixed_args(words)
    methods, where = [w for w in asked.words if "=" not in w], [w for w in asked.words if "=" in w]
    found, place = Standings.read(asked.book), check_of(asked.book, TWINS if asked.twin else AGAIN)
    whole = read(asked.league)
    league = chosen(whole, listed(asked.worlds, whole.worlds), methods)
    if asked.twin:
        league = with_twin(league, methods[0], found)
        season = Season(league, Book(place, league), asked.runs, where)
    else:
        seeds = [int(seed) for seed in asked.seeds.split(",")]
        season = Repeat(found, seeds, league, Book(place, league), asked.runs, where)
    done = play(season, board(False), processes=asked.processes, seconds=60 * asked.minutes)
    if place.is_file():
        print(*checks(found, Standings.read(place)), sep="\n")
    return 0 if done else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
