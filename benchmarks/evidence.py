"""The queue of the four papers' evidence: cells of their tables, in order, for a GPU that is lent by the half hour.

    python benchmarks/evidence.py --list                                    # what is done, begun, waiting
    python benchmarks/evidence.py --runs DIR device=cuda precision=bf16     # run what waits, the first cell first
    python benchmarks/evidence.py --runs DIR --collect results/data/evidence.json

A cell is one run of a table that `fedlens reproduce` knows; its words are in the JSON file. Cut off at any moment, the
queue goes on where it stopped: finished cells are skipped, begun ones resume from their last checkpoint. Several
processes may share DIR, and each takes the first cell that nobody holds. `--pack FILE` saves begun runs (their newest
checkpoints and tables) for another machine, and `--unpack FILE` puts them back.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedlens import config
from fedlens.core.files import write_atomic
from fedlens.papers.registry import reproducible
from fedlens.runs.folder import RunFolder
from fedlens.runs.grid import Cell, Grid, is_done, placement
from fedlens.runs.read import evaluations, rounds_of
from fedlens.simulate.finish import GOES_WRONG, finish, reason
from fedlens.simulate.recorder import Nobody, Progress

MAIN, ALIKE = "cifar10/K10/0.1", "partition.dialect=client"
BOTH = ("evaluate.personal=both", "evaluate.personal_every=10")  # before and after training at the client
SHORT = ("rounds=40", "local.epochs=5", *BOTH)  # SPATL's later rows, instead of 100 rounds of 10 epochs
SMALL = 64  # MiB of a begun run that is worth carrying to another machine


@dataclass(frozen=True)
class Wanted:
    """One run: a cell of a grid with words over it, and a seed."""

    grid: str
    row: str
    column: str
    words: tuple[str, ...] = ()
    seed: int = 0

    @property
    def name(self) -> str:
        return " ".join((self.grid, self.row, self.column, *self.words, f"seed={self.seed}"))


def _fedxds() -> Iterator[Wanted]:
    """Section 1: FedXDS's table 1 at its own protocol, seed 0 of everything first."""
    table1 = [Wanted("fedxds/table1", row, MAIN) for row in ("fedavg", "fedx_lrp", "scaffold", "feddyn")]
    official = Wanted("fedxds/sharing", "lrp masks (released code)", MAIN)
    # FedXDS trains on two batches a step, after 11 rounds that do not count: as many images are 411 rounds of FedAvg.
    longer = replace(table1[0], words=("rounds=411",))
    alike = [replace(table1[i], words=(ALIKE,)) for i in (0, 1, 2)]
    yield from (*table1, official, longer)
    for seed in (1, 2):
        yield from (replace(one, seed=seed) for one in table1[:2])
    yield from alike
    yield Wanted("fedxds/table1", "fedfed", MAIN)
    # The released code whole, its augmentation too, and FedAvg beside it.
    released = f"{MAIN}-randaugment"
    yield from (replace(official, column=released), replace(table1[0], column=released))


def _spatl() -> Iterator[Wanted]:
    """Section 2: ResNet-20, all clients, equal sizes as the text states; then as the released code draws."""
    alike, rows = "resnet20-client", ("fedavg", "scaffold", "fedprox", "fednova")
    later = ("spatl", "fedper", "fedavg+ft", "spatl_salient")
    for seed in (0, 1):
        yield from (Wanted("spatl/accuracy", row, alike, SHORT, seed) for row in (*rows[:2], *later))
    for seed in (0, 1):
        yield from (Wanted("spatl/accuracy", row, alike, BOTH, seed) for row in rows)
    yield from (Wanted("spatl/accuracy", row, "resnet20-balanced", SHORT) for row in (*rows[:2], "spatl"))


def _pse() -> Iterator[Wanted]:
    """Section 3: eleven rows of table 2 in three settings."""
    rows = ("fedavg+ft", "pse", "fedrep", "local", "ditto", "apfl", "lgfedavg", "l2gd", "fedmtl")
    rows = (*rows, "fedprox+ft", "scaffold+ft")
    for seed in (0, 1):
        for column in ("fashion_mnist/3", "cifar10/2", "cifar10/4"):
            yield from (Wanted("pse/table2", row, column, seed=seed) for row in rows)
    for row in ("v1", "v2", "v3"):
        yield Wanted("pse/ablations", row, "fashion_mnist/3")


def _fedsls() -> Iterator[Wanted]:
    """Section 4: table 1's CIFAR-10 at 2,000 rounds."""
    for seed in (0, 1, 2):
        for alpha in ("0.05", "0.1"):
            rows = (("table1", "fedavg"), ("table1", "uniform"), ("table1", "fedsls"), ("switches", "mean"))
            yield from (Wanted(f"fedsls/{table}", row, f"cifar10/{alpha}", seed=seed) for table, row in rows)


PAPERS = {"fedxds": _fedxds, "spatl": _spatl, "pse": _pse, "fedsls": _fedsls}


def queue(papers: Sequence[str]) -> list[Wanted]:
    """Every run that is wanted, once, the most needed first."""
    return [*dict.fromkeys(one for paper in papers for one in PAPERS[paper]())]


@cache
def _grids() -> dict[str, Any]:
    return reproducible()


def cell_of(one: Wanted, words: Sequence[str]) -> Cell:
    grid = _grids()[one.grid]
    assert isinstance(grid, Grid)
    return grid.cells([one.row], [one.column], [*one.words, "compile=false", *words])[0]  # the same on every machine


class Clocked(Nobody):
    """Says how far a run is, every so many rounds, and stops it between two rounds when the time is up."""

    def __init__(self, name: str, until: float):
        self.name, self.until, self.began = name, until, time.monotonic()

    def round(self, progress: Progress) -> None:
        if progress.round % 20 == 0:
            print(f"  {self.name}: round {progress.round}, {time.monotonic() - self.began:.0f} s", flush=True)
        if time.monotonic() > self.until:
            raise TimeoutError


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Whether this process has the cell to itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def measured(one: Wanted, cell: Cell, out: Path) -> dict[str, Any]:
    """What is kept of a finished run."""
    folder = RunFolder(cell.folder(out, one.seed))
    result, card, experiment = folder.result() or {}, folder.passport(), config.read(folder.config)
    metrics = folder.metrics()
    curve = evaluations(metrics, "accuracy", rounds_of(folder))  # by rounds of training
    closing = {
        (row["model"], row["metric"]): row["value"]
        for row in metrics.to_pylist()
        if row["client"] is None and row["split"] == "client test"
    }
    return {
        "table": one.grid,
        "row": one.row,
        "column": one.column,
        "over": list(one.words),
        "seed": one.seed,
        "words": [*cell.words],
        "rounds": experiment.rounds,
        "epochs": experiment.local.epochs,
        "value": _grids()[one.grid].measure(result),
        **{key: result.get(key) for key in ("accuracy", "accuracy_last", "accuracy_best", "personal", "targets")},
        **{key: result.get(key) for key in ("bytes_up", "bytes_down", "seconds")},
        "clients": {f"{model} {metric}": value for (model, metric), value in closing.items()},
        "curve": [[at, value] for at, (_, value) in curve.items()],
        "machine": f"{card['device_name']}, {card['precision']}",
        "code": card.get("code"),
    }


def collected(file: Path, wanted: Sequence[Wanted], runs: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """What the file has and what the runs add, in the order of the queue; written back."""
    kept = json.loads(file.read_text()) if file.is_file() else []
    known = {_key(row): row for row in kept}
    for one in wanted:
        cell = cell_of(one, words)
        if is_done(cell, runs, one.seed):
            row = measured(one, cell, runs)
            known[_key(row)] = row
    rows = [*known.values()]
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)  # one line a cell: a diff shows what came
    write_atomic(file, f"[\n{lines}\n]\n".encode())
    return rows


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["table"], row["row"], row["column"], tuple(row["over"]), row["seed"]


def pack(file: Path, wanted: Sequence[Wanted], runs: Path, words: Sequence[str]) -> None:
    """Begun runs that are small enough, without what older checkpoints left."""
    with tarfile.open(file, "w:gz") as tar:
        for one in wanted:
            cell = cell_of(one, words)
            path = cell.folder(runs, one.seed)
            if not path.is_dir() or is_done(cell, runs, one.seed) or not RunFolder(path).rounds():
                continue
            size = sum(part.stat().st_size for part in path.rglob("*") if part.is_file()) / 2**20
            print(f"  {one.name}: {size:.1f} MiB{'' if size < SMALL else ', left here'}")
            if size < SMALL:
                tar.add(path, path.relative_to(runs))


def work(wanted: Sequence[Wanted], runs: Path, words: Sequence[str], until: float) -> None:
    """One cell after another, the first that is free and not done."""
    for one in wanted:
        if time.monotonic() > until:
            print("the time is up", flush=True)
            return
        cell = cell_of(one, words)
        with held(runs / ".locks" / f"{cell.home.replace('/', '-')}-{one.seed}") as mine:
            if not mine or is_done(cell, runs, one.seed):
                continue
            began = time.monotonic()
            try:
                finish(cell.at(runs, one.seed), placement(words), Clocked(one.name, until), among=runs / "-")
            except TimeoutError:
                print(f"{one.name}: cut off, goes on from its last checkpoint", flush=True)
                return
            except GOES_WRONG as error:
                print(f"{one.name}: failed: {reason(error)}", flush=True)
                continue
            row = measured(one, cell, runs)
            print(f"{one.name}: {row['value']:.2f} in {time.monotonic() - began:.0f} s", flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # recorded steps of the last run
    print("nothing is left that nobody holds", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--papers", nargs="+", choices=PAPERS, default=[*PAPERS], help="in this order")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"), help="where the runs lie")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--only", action="append", help="cells whose name has this text; may be repeated")
    parser.add_argument("--but", type=Path, metavar="FILE", help="without the cells that this JSON file has")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="add what is done to this JSON file")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="save begun runs")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="put begun runs back, then go on")
    parser.add_argument("words", nargs="*", help="over all cells, such as device=cuda")
    asked = parser.parse_intermixed_args()
    wanted = [one for one in queue(asked.papers) if any(text in one.name for text in asked.only or [""])]
    if asked.but:
        known = {_key(row) for row in json.loads(asked.but.read_text())}
        wanted = [one for one in wanted if (one.grid, one.row, one.column, one.words, one.seed) not in known]
    if asked.list:
        for one in wanted:
            cell = cell_of(one, asked.words)
            folder = RunFolder(cell.folder(asked.runs, one.seed))
            saved = max(folder.rounds(), default=0) if folder.config.exists() else 0
            state = "done" if is_done(cell, asked.runs, one.seed) else f"{saved} of {len(cell.experiment.timetable())}"
            print(f"{state:>12s}  {one.name}")
        return
    if asked.unpack:
        asked.runs.mkdir(parents=True, exist_ok=True)
        with tarfile.open(asked.unpack) as tar:
            tar.extractall(asked.runs, filter="data")
    if asked.collect:
        print(f"{len(collected(asked.collect, wanted, asked.runs, asked.words))} cells in {asked.collect}")
    if asked.pack:
        pack(asked.pack, wanted, asked.runs, asked.words)
    if not asked.collect and not asked.pack:
        work(wanted, asked.runs, asked.words, time.monotonic() + asked.seconds)


if __name__ == "__main__":
    sys.exit(main())
