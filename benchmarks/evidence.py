"""The queue of the four papers' evidence: cells of their tables, in order, for a GPU that is lent by the half hour.

    python benchmarks/evidence.py --list --estimate --but results/data/evidence.json     # what waits, and how long
    python benchmarks/evidence.py --minutes 9 --processes 3 --runs DIR --json FILE --state DIR/state device=cuda
    python benchmarks/evidence.py --papers spatl pse --processes 6 6 --whole --minutes 25 --runs DIR device=cuda
    python benchmarks/evidence.py --only "pse cifar10/" --only pse/ablations --processes 8 --runs DIR device=cuda
    python benchmarks/evidence.py --runs DIR --collect results/data/evidence.json
    python benchmarks/evidence.py --merge FILE --collect results/data/evidence.json     # of another machine

A cell is one run of a table that `fedlens reproduce` knows; its words are in the JSON file. The same command goes on
where it stopped, however it ended: finished cells are skipped, begun ones resume. `--minutes` ends every cell with a
checkpoint after the round it is in. `--processes` share DIR, each at the first cell that nobody holds; so many for each
paper where several numbers are given, and who finds nothing left in its own goes on with the next paper. With `--whole`
no cell begins that would be cut: what cells here took, beside what was estimated, says how long the next will take.

FILE has what is done, and is written every few seconds. Beside it, FILE_begun.json has the curves of cells that are
under way or were cut, with the round that they reached. `--state PREFIX` keeps begun cells for another machine: the
newest checkpoint of each, in files of 15 MiB; the same option puts them back. Cells whose clients remember much are too
large for that: they should end where they began. Required cells come first; `--required` leaves the others out. With
`--only` cells come in the order of these texts: name the longest first, or one of them runs alone in the end.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedlens import config
from fedlens.core.files import write_atomic
from fedlens.engines.mps import shared_gpu
from fedlens.league.budget import trained
from fedlens.papers.registry import reproducible
from fedlens.runs.folder import RunFolder
from fedlens.runs.grid import Cell, Grid, is_done, placement
from fedlens.runs.opened import OpenedRun
from fedlens.runs.read import evaluations, rounds_of
from fedlens.simulate.finish import GOES_WRONG, finish, reason
from fedlens.simulate.recorder import STOP, Nobody, Progress

MAIN, ALIKE = "cifar10/K10/0.1", "partition.dialect=client"
BOTH = ("evaluate.personal=both", "evaluate.personal_every=10")  # before and after training at the client
SHORT = ("rounds=40", "local.epochs=5", *BOTH)  # SPATL's later rows, instead of 100 rounds of 10 epochs
MOST, PART = 45, 15  # MiB of all begun runs that are carried to another machine, and of a file of them
EVERY = 15.0  # seconds between two times that results are collected
GRACE = 40.0  # seconds that a round may take when the time is up
# Milliseconds of a client's step on one H200, bf16, not compiled, beside other lanes: estimates for --list.
STEP_MS = {"resnet8": 1.3, "resnet20": 0.7, "resnet18": 0.55, "pse_net": 0.13}


@dataclass(frozen=True)
class Wanted:
    """One run: a cell of a grid with words over it, and a seed."""

    grid: str
    row: str
    column: str
    words: tuple[str, ...] = ()
    seed: int = 0
    required: bool = True

    @property
    def key(self) -> tuple[Any, ...]:
        return self.grid, self.row, self.column, self.words, self.seed

    @property
    def name(self) -> str:
        return " ".join((self.grid, self.row, self.column, *self.words, f"seed={self.seed}"))


def _optional(cells: Iterable[Wanted]) -> Iterator[Wanted]:
    return (replace(one, required=False) for one in cells)


def _fedxds() -> Iterator[Wanted]:
    """Section 1: FedXDS's table 1 at its own protocol, seed 0 of everything first."""
    table1 = [Wanted("fedxds/table1", row, MAIN) for row in ("fedavg", "fedx_lrp", "scaffold", "feddyn")]
    official = Wanted("fedxds/sharing", "lrp masks (released code)", MAIN)
    # Equation 6 keeps the pixels of input x gradient, so that fedx_lrp tests LRP as printed alone.
    coded = replace(table1[1], row="fedx_lrp_code")
    # FedXDS trains on two batches a step, after ten rounds of ten epochs of everybody: as many images as in these.
    longer = replace(table1[0], words=("rounds=440",))
    alike = [replace(table1[i], words=(ALIKE,)) for i in (0, 1, 2)]
    yield from (*table1, coded)
    # The longest first, so that cells side by side end together; three seeds of the main claim before its variants.
    yield from (replace(row, seed=seed) for row in (table1[1], table1[0]) for seed in (1, 2))
    yield from (longer, official)
    # FedAvg as the paper prints it: a uniform mean, as its other rows have.
    yield replace(table1[0], row="fedavg_uniform")
    yield from _optional(alike)
    # The released code whole, its augmentation too, and FedAvg beside it.
    released = f"{MAIN}-randaugment"
    some = Wanted("fedxds/table1", "fedfed", MAIN), replace(official, column=released)
    yield from _optional((*some, replace(table1[0], column=released)))
    # What each part is worth: noise, sparsity, the attribution, other base methods, more skew.
    parts = [("table6", "10", "lrp"), ("table6", "5", "lrp"), ("table5", "60", "lrp"), ("table5", "85", "lrp")]
    parts += [("table1", f"fedx_{name}", MAIN) for name in ("ig", "smoothgrad")]  # input x gradient: as fedx_lrp
    parts += [("sharing", "random masks", MAIN), ("sharing", "raw images", MAIN)]
    parts += [("table4", row, MAIN) for name in ("fedprox", "feddyn", "scaffold") for row in (f"{name}+fedxds", name)]
    parts += [("table1", row, "cifar10/K10/0.05") for row in ("fedavg", "fedx_lrp")]
    done = {("feddyn", MAIN), ("scaffold", MAIN)}  # of table 1: the same runs
    yield from _optional(Wanted(f"fedxds/{table}", *cell) for table, *cell in parts if tuple(cell) not in done)


def _spatl() -> Iterator[Wanted]:
    """Section 2: ResNet-20, all clients, equal sizes as the text states; then as the released code draws."""
    alike, rows = "resnet20-client", ("fedavg", "scaffold", "fedprox", "fednova")
    later = ("spatl", "fedper", "fedavg+ft", "spatl_salient")
    for seed in (0, 1):
        yield from (Wanted("spatl/accuracy", row, alike, SHORT, seed) for row in (*rows[:2], *later))
    for seed in (0, 1):
        yield from (Wanted("spatl/accuracy", row, alike, BOTH, seed) for row in rows)
    yield from _optional(Wanted("spatl/accuracy", row, "resnet20-balanced", SHORT) for row in (*rows[:2], "spatl"))


def _pse() -> Iterator[Wanted]:
    """Section 3: eleven rows of table 2 in three settings, a setting with both seeds before the next."""
    rows = ("fedavg+ft", "pse", "fedrep", "local", "ditto", "apfl", "lgfedavg", "l2gd", "fedmtl")
    rows = (*rows, "fedprox+ft", "scaffold+ft")
    for column in ("fashion_mnist/3", "cifar10/2", "cifar10/4"):
        for seed in (0, 1):
            yield from (Wanted("pse/table2", row, column, seed=seed) for row in rows)
    for seed in (0, 1):  # figure 2a, and two other excitations; v1 has none
        yield from _optional(Wanted("pse/ablations", row, "fashion_mnist/3", seed=seed) for row in ("v1", "v2", "v3"))
        excited = ("algorithm.reduce=mean",), ("algorithm.xi=0.1",)
        yield from _optional(Wanted("pse/table2", "pse", "fashion_mnist/3", words, seed) for words in excited)
    some = ("pse", "fedavg+ft", "fedrep")
    for seed in (0, 1):  # figure 3a
        yield from _optional(Wanted("pse/table2", row, "fashion_mnist/4", seed=seed) for row in some)
    for seed in (0, 1):  # the other reading of equation 6: places attend to each other
        both = (Wanted("pse/table2", row, "fashion_mnist/3", ("model.tokens=spatial",), seed) for row in some[:2])
        yield from _optional(both)
    whole = ("model.ceil=true",)  # a network that sees all of 28 pixels
    yield from _optional(Wanted("pse/table2", row, "fashion_mnist/3", whole) for row in some)
    for seed in (0, 1):  # tables 1 and 3, the column that both have
        joint = "fashion_gray_colour/3"
        yield from _optional(Wanted("pse/table1", row, joint, seed=seed) for row in some)
        yield from _optional(Wanted("pse/table3", row, joint, seed=seed) for row in ("gradcam++", "scorecam"))


def _fedsls() -> Iterator[Wanted]:
    """Section 4: table 1's CIFAR-10 at 2,000 rounds."""
    rows = (("table1", "fedavg"), ("table1", "uniform"), ("table1", "fedsls"), ("switches", "mean"))
    for alpha in ("0.05", "0.1"):
        for seed in (0, 1, 2):
            cells = [Wanted(f"fedsls/{table}", row, f"cifar10/{alpha}", seed=seed) for table, row in rows]
            readings = ("algorithm=fedsls/even",), ("algorithm=fedsls/literal",)
            yield from (*cells, *(replace(cells[2], words=words) for words in readings))
    epochs = ("local.steps=null", "local.epochs=10")  # the paper's interval of 10, read as epochs instead of steps
    yield from _optional(Wanted("fedsls/table1", row, "cifar10/0.05", epochs) for row in ("fedavg", "fedsls"))


def _compose() -> Iterator[Wanted]:
    """Section 5: FedXDS over others, their parts, personal models: as many images each. Bytes come from the curves."""
    for seed in (0, 1, 2):
        for row in ("fedavg", "feddyn", "scaffold"):
            both = (row, "rounds=140"), (f"{row}+fedxds", "rounds=50")
            yield from _optional(Wanted("fedxds/table4", name, MAIN, (word,), seed) for name, word in both)
        # Personal models on the same split; fine-tuning everybody takes as much as two rounds of half of them.
        for row, word in (("fedavg+ft", "rounds=138"), ("spatl", "rounds=140")):
            words = ("partition.dialect=balanced", word, *BOTH)
            yield from _optional([Wanted("compose/cifar10", row, MAIN, words, seed)])


PAPERS = {"fedxds": _fedxds, "spatl": _spatl, "pse": _pse, "fedsls": _fedsls, "compose": _compose}


def queue(papers: Sequence[str]) -> list[Wanted]:
    """Every run that is wanted, once, the most needed first."""
    found = dict.fromkeys(one for paper in papers for one in PAPERS[paper]())
    return sorted(found, key=lambda one: not one.required)


def chosen(wanted: Sequence[Wanted], texts: Sequence[str]) -> list[Wanted]:
    """Those whose names have one of these texts, in the order of the texts."""
    places = {one: next((at for at, text in enumerate(texts) if text in one.name), -1) for one in wanted}
    return sorted((one for one in wanted if places[one] >= 0), key=places.__getitem__)


@cache
def _grids() -> dict[str, Any]:
    return reproducible()


def cell_of(one: Wanted, words: Sequence[str]) -> Cell:
    return _cell_of(one, tuple(words))


@cache
def _cell_of(one: Wanted, words: tuple[str, ...]) -> Cell:
    grid = _grids()[one.grid]
    assert isinstance(grid, Grid)
    return grid.cells([one.row], [one.column], [*one.words, "compile=false", *words])[0]  # the same on every machine


def estimated(cell: Cell) -> float:
    """Seconds on one H200, alone: the steps of all clients, as rehearsed, times what one took there."""
    experiment = cell.experiment
    name = config.to_dict(experiment.model)["is"]
    if experiment.local.steps is None:
        steps = trained(experiment) * len(experiment.images().train) / experiment.local.batch_size
    else:  # a stage in epochs beside these is one round
        turns = [turn.stage for turn in experiment.timetable() if turn.stage.steps is not None]
        steps = sum((stage.steps or 0) * stage.cohort.size(experiment.clients) for stage in turns)
    return steps * STEP_MS.get(name, math.nan) / 1000


def pace(one: Wanted, runs: Path) -> float:
    """Seconds that cells of this kind took here, as a multiple of what was estimated.

    Of its own row where one has run; else of its row in other tables, of its table, of its paper.
    """
    file = runs / ".pace"
    lines = file.read_text().splitlines() if file.is_file() else []
    known = [line for text in lines if (line := _line(text)) and _paper(line[0]) == _paper(one.grid)]
    own = [ratio for grid, row, ratio in known if (grid, row) == (one.grid, one.row)]
    like = [ratio for _, row, ratio in known if row == one.row]
    table = [ratio for grid, _, ratio in known if grid == one.grid]
    return max(own or like or table or [ratio for *_, ratio in known], default=1.0)


def _paper(grid: str) -> str:
    return grid.partition("/")[0]


def note_pace(one: Wanted, cell: Cell, runs: Path, seconds: float) -> None:
    with (runs / ".pace").open("a") as file:
        file.write(json.dumps([one.grid, one.row, seconds / estimated(cell)]) + "\n")


class Clocked(Nobody):
    """Keeps a run's curve, says how far it is, and has it end between two rounds when the time is up."""

    def __init__(self, name: str, file: Path, until: float):
        self.name, self.file, self.until, self.began = name, file, until, time.monotonic()
        self.said, self.stop = self.began, Path()

    def begin(self, experiment: Any, folder: Path, notes: list[str], round: int, rounds: int) -> None:
        self.stop = Path(folder) / STOP
        print(f"  {self.name}: {'begins' if not round else f'goes on after round {round}'} of {rounds}", flush=True)

    def round(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.accuracy is not None and progress.trained:
            line = [progress.trained, progress.training, progress.accuracy, round(progress.seconds, 1)]
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if now - self.said > 60:
            self.said = now
            print(f"  {self.name}: round {progress.round} of {progress.rounds}, {now - self.began:.0f} s", flush=True)
        if now > self.until:
            self.stop.touch()  # the run saves after the next round, and ends


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
    """What is kept of a finished run; found out once, as some of it takes seconds."""
    file = place_of(out, "rows", one, cell)
    if not file.is_file():
        write_atomic(file, json.dumps(_measured(one, cell, out)).encode())
    return json.loads(file.read_text())


def _measured(one: Wanted, cell: Cell, out: Path) -> dict[str, Any]:
    folder = RunFolder(cell.folder(out, one.seed))
    result, card, experiment = folder.result() or {}, folder.passport(), config.read(folder.config)
    metrics = folder.metrics()
    curve = evaluations(metrics, "accuracy", rounds_of(folder))  # by rounds of training
    rows = [row for row in metrics.to_pylist() if row["split"] == "client test"]
    closing = {(row["model"], row["metric"]): row["value"] for row in rows if row["client"] is None}
    last = {row["model"]: row["round"] for row in rows}
    each: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["client"] is not None and row["metric"] == "accuracy" and row["round"] == last[row["model"]]:
            each.setdefault(row["model"], {})[row["client"]] = round(row["value"], 4)
    means: dict[str, list[list[float]]] = {}
    for row in rows:
        if row["metric"] == "accuracy_mean":
            means.setdefault(row["model"], []).append([row["round"], round(row["value"], 4)])
    return {
        **_called(one, cell),
        "rounds": experiment.rounds,
        "epochs": experiment.local.epochs if experiment.local.steps is None else None,
        "steps": experiment.local.steps,
        "value": _grids()[one.grid].measure(result),
        **{key: result.get(key) for key in ("accuracy", "accuracy_last", "accuracy_best", "personal", "targets")},
        **{key: result.get(key) for key in ("bytes_up", "bytes_down", "seconds")},
        "clients": {f"{model} {metric}": value for (model, metric), value in closing.items()},
        "each_client": each,  # in the last round
        "curve": [[at, value] for at, (_, value) in curve.items()],
        "client_curves": means,  # by rounds of the run, as the table of metrics has them
        "losses": losses(folder) if experiment.execution.keep else {},
        "machine": f"{card['device_name']}, {card['precision']}",
        "code": card.get("code"),
    }


def losses(folder: RunFolder) -> dict[int, float]:
    """On training images, by rounds of training whose checkpoints were kept."""
    return {at: round(loss, 5) for at, loss in OpenedRun.open(folder.path).training_losses().items()}


def place_of(runs: Path, kind: str, one: Wanted, cell: Cell) -> Path:
    """Of a lock, a curve or a failure of this cell."""
    path = runs / f".{kind}" / f"{cell.home.replace('/', '-')}-{one.seed}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _called(one: Wanted, cell: Cell) -> dict[str, Any]:
    """What a row of results begins with, whether its run is done or not."""
    head = {"table": one.grid, "row": one.row, "column": one.column, "over": list(one.words), "seed": one.seed}
    return {**head, "words": [*cell.words]}


def begun(one: Wanted, cell: Cell, runs: Path) -> dict[str, Any] | None:
    """The curve so far of a cell that is not done, and the round that it reached; a resumed run writes rounds again."""
    file = place_of(runs, "curves", one, cell)
    lines = file.read_text().splitlines() if file.is_file() else []
    found = {row[0]: row for line in lines if (row := _line(line))}
    if not found:
        return None
    last, folder = found[max(found)], RunFolder(cell.folder(runs, one.seed))
    card = folder.passport() if folder.config.exists() else {}
    return {
        **_called(one, cell),
        "reached": last[0],
        "rounds": last[1],
        "seconds": last[3],
        "curve": [[at, found[at][2]] for at in sorted(found)],
        "machine": f"{card.get('device_name')}, {card.get('precision')}",
    }


def _line(text: str) -> Any:
    """None where a process was killed while it wrote."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def collected(
    file: Path, wanted: Sequence[Wanted], runs: Path, words: Sequence[str], *, ready: bool = False
) -> list[dict[str, Any]]:
    """What the file has and what the runs add, in the order of the queue; written back.

    `ready`: a cell whose process has not measured it yet is left to that process.
    """
    part = file.with_name(f"{file.stem}_begun.json")
    known, cut = ({_key(row): row for row in _rows(each)} for each in (file, part))
    before = set(known), {key: row["reached"] for key, row in cut.items()}
    for one in wanted:
        cell = cell_of(one, words)
        if one.key not in known and is_done(cell, runs, one.seed):
            if not ready or place_of(runs, "rows", one, cell).is_file():
                known[one.key] = measured(one, cell, runs)
            continue
        row = begun(one, cell, runs) if one.key not in known else None
        if row is not None and row["reached"] >= cut.get(one.key, row)["reached"]:
            cut[one.key] = row
    cut = {key: row for key, row in cut.items() if key not in known}
    if (set(known), {key: row["reached"] for key, row in cut.items()}) != before or not file.is_file():
        _write(file, [*known.values()])
        if cut or part.is_file():
            _write(part, [*cut.values()])
    return [*known.values()]


def merge(file: Path, others: Sequence[Path]) -> None:
    """Add the cells that these files have and this one has not."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for each in (file, *others) for row in _rows(each)):
        known.setdefault(_key(row), row)
    _write(file, [*known.values()])


def _rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text()) if file.is_file() else []


def _write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)  # one line a cell: a diff shows what came
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, f"[\n{lines}\n]\n".encode())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["table"], row["row"], row["column"], tuple(row["over"]), row["seed"]


def pack(prefix: Path, wanted: Sequence[Wanted], runs: Path, words: Sequence[str]) -> None:
    """Begun runs with their newest checkpoints and curves, the smallest first, while there is room."""
    waiting = []
    for one in wanted:
        cell = cell_of(one, words)
        path = cell.folder(runs, one.seed)
        if path.is_dir() and not is_done(cell, runs, one.seed) and RunFolder(path).rounds():
            files = [*_needed(path), place_of(runs, "curves", one, cell)]
            waiting.append((sum(file.stat().st_size for file in files if file.is_file()) / 2**20, one.name, files))
    room, data = float(MOST), io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=1) as tar:
        for size, name, files in sorted(waiting, key=lambda each: each[:2]):
            room -= size
            print(f"  {name}: {size:.1f} MiB{'' if room > 0 else ', left here'}", flush=True)
            for file in files if room > 0 else ():
                if file.is_file():
                    tar.add(file, file.relative_to(runs))
    for old in parts_of(prefix):
        old.unlink()
    whole, step = data.getvalue(), PART * 2**20
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for number, at in enumerate(range(0, len(whole), step) if waiting else ()):
        prefix.with_name(f"{prefix.name}.{number:03d}").write_bytes(whole[at : at + step])


def _needed(path: Path) -> list[Path]:
    """What a run goes on from: all but what older checkpoints stand on."""
    newest = max(RunFolder(path).rounds())
    manifest = path / "checkpoints" / f"{newest:06d}.json"
    stands_on = {manifest, *(path / name for name in json.loads(manifest.read_text())["files"])}
    versions = {path / "checkpoints", path / "clients", path / "transcript"}
    files = [file for file in path.rglob("*") if file.is_file()]
    return [file for file in files if file in stands_on or file.parent not in versions or file.suffix == ".copy"]


def parts_of(prefix: Path) -> list[Path]:
    return sorted(prefix.parent.glob(f"{prefix.name}.[0-9][0-9][0-9]"))


def unpack(prefix: Path, runs: Path) -> None:
    """Put begun runs back; what is there already is further."""
    if not (parts := parts_of(prefix)):
        return
    runs.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
        new = [member for member in tar if not (runs / member.name).exists()]
        tar.extractall(runs, new, filter="data")


def work(wanted: Sequence[Wanted], runs: Path, words: Sequence[str], until: float, whole: bool = False) -> int:
    """One cell after another, the first that is free, not done and has not failed; an exit code."""
    for one in wanted:
        if time.monotonic() > until:
            return 0
        cell = cell_of(one, words)
        failed = place_of(runs, "failed", one, cell)
        with held(place_of(runs, "locks", one, cell)) as mine:
            if not mine or failed.exists() or is_done(cell, runs, one.seed):
                continue
            began, watcher = time.monotonic(), Clocked(one.name, place_of(runs, "curves", one, cell), until)
            if whole and began + estimated(cell) * pace(one, runs) > until:
                print(f"  {one.name}: would take too long", flush=True)
                continue
            try:
                finish(cell.at(runs, one.seed), placement(words), watcher, among=runs / "-")
            except GOES_WRONG as error:
                if time.monotonic() > until:
                    print(f"{one.name}: {reason(error)}", flush=True)
                    return 0
                failed.write_text(reason(error))
                print(f"{one.name}: failed: {reason(error)}", flush=True)
                return 3  # a GPU may be lost to this process: another one goes on
            row = measured(one, cell, runs)
            if whole:
                note_pace(one, cell, runs, time.monotonic() - began)
            value = "no value" if row["value"] is None else f"{row['value']:.2f}"
            print(f"{one.name}: {value} in {time.monotonic() - began:.0f} s", flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # recorded steps of the last run
    return 0


def side_by_side(
    commands: Sequence[Sequence[str]], until: float, often: Callable[[], Any], ways: Mapping[str, str]
) -> None:
    """A process for each command, a new one in the place of each that failed; results are collected in between."""
    running: list[subprocess.Popen[bytes] | None] = [None] * len(commands)
    chances, looked = [4] * len(commands), time.monotonic()
    try:
        while (now := time.monotonic()) < until + GRACE:
            for place, process in enumerate(running):
                if process is not None and (code := process.poll()) is not None:
                    running[place] = None
                    chances[place] = chances[place] - 1 if code else 0
                    print(f"a process ended with code {code}", flush=True) if code else None
                if running[place] is None and chances[place] and now < until:
                    left = ["--minutes", f"{(until - now) / 60:.3f}"] if until < math.inf else []
                    environment = {**os.environ, **ways}
                    running[place] = subprocess.Popen([*commands[place], *left], stdin=subprocess.PIPE, env=environment)
            if not any(running):
                break
            if now - looked > EVERY:
                looked = now
                often()
            time.sleep(0.5)
    finally:
        for process in filter(None, running):
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--papers", nargs="+", choices=PAPERS, default=[*PAPERS], help="in this order")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"), help="where the runs lie")
    parser.add_argument("--minutes", type=float, default=math.inf, help="save and stop after these")
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="cells side by side; or of each paper")
    parser.add_argument("--whole", action="store_true", help="begin only what should end in time")
    parser.add_argument("--required", action="store_true", help="without the cells that are optional")
    parser.add_argument("--only", action="append", help="cells whose name has this text; repeated: in this order")
    parser.add_argument("--but", type=Path, metavar="FILE", help="without the cells that this JSON file has")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--estimate", action="store_true", help="and about how many seconds it takes on one H200")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, while cells are run")
    parser.add_argument("--state", type=Path, metavar="PREFIX", help="begun cells from here and to here")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="add what is done to this JSON file, and stop")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE", help="collect from these as well")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="over all cells, such as device=cuda")
    asked = parser.parse_intermixed_args()
    if len(asked.processes) not in (1, len(asked.papers)):
        parser.error(f"--processes: one number, or one for each of {len(asked.papers)} papers")
    until = time.monotonic() + 60 * asked.minutes
    wanted = chosen(queue(asked.papers), asked.only or [""])
    wanted = [one for one in wanted if one.required or not asked.required]
    if asked.but:
        known = {_key(row) for row in _rows(asked.but)}
        wanted = [one for one in wanted if one.key not in known]
    if asked.worker:
        threading.Thread(target=_end_with_the_lead, daemon=True).start()
        sys.exit(work(wanted, asked.runs, asked.words, until, asked.whole))
    if asked.list:
        listed(wanted, asked.runs, asked.words, asked.estimate)
    elif asked.collect:
        merge(asked.collect, asked.merge)
        print(f"{len(collected(asked.collect, wanted, asked.runs, asked.words))} cells in {asked.collect}")
    else:
        lead(asked, wanted, until)


def _end_with_the_lead() -> None:
    """Nothing is ever written to a worker: when its input ends, the process that leads is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


def lead(asked: argparse.Namespace, wanted: Sequence[Wanted], until: float) -> None:
    """Run what waits, in processes of their own, and keep results and begun cells."""
    if asked.state:
        unpack(asked.state, asked.runs)
    for failed in (asked.runs / ".failed").glob("*"):
        failed.unlink()  # another try

    def often(ready: bool = True) -> None:
        if asked.json:
            collected(asked.json, wanted, asked.runs, asked.words, ready=ready)

    command = [sys.executable, __file__, "--worker", "--runs", str(asked.runs)]
    command += [word for text in asked.only or () for word in ("--only", text)] + ["--required"] * asked.required
    command += ["--but", str(asked.but)] * bool(asked.but) + ["--whole"] * asked.whole + asked.words
    commands = [[*command, "--papers", *papers] for papers in turns(asked.papers, asked.processes)]
    try:
        with shared_gpu(len(commands) > 1 and torch.cuda.is_available()) as ways:
            side_by_side(commands, until, often, ways)
    finally:
        often(ready=False)
        if asked.state:
            pack(asked.state, wanted, asked.runs, asked.words)
    done = sum(is_done(cell_of(one, asked.words), asked.runs, one.seed) for one in wanted)
    print(f"{done} of {len(wanted)} cells are done", flush=True)


def turns(papers: Sequence[str], processes: Sequence[int]) -> list[list[str]]:
    """For each process the papers in its order: one number shares them all, several are those that begin with each."""
    if len(processes) == 1:
        return [[*papers]] * processes[0]
    return [[*papers[at:], *papers[:at]] for at, count in enumerate(processes) for _ in range(count)]


def listed(wanted: Sequence[Wanted], runs: Path, words: Sequence[str], estimate: bool) -> None:
    total, places = 0.0, {True: "required", False: "optional"}
    for one in wanted:
        cell = cell_of(one, words)
        folder = RunFolder(cell.folder(runs, one.seed))
        saved = max(folder.rounds(), default=0) if folder.config.exists() else 0
        done, seconds = is_done(cell, runs, one.seed), estimated(cell) if estimate else 0.0
        state = "done" if done else f"{saved} of {len(cell.experiment.timetable())}"
        total += 0.0 if done else seconds
        takes = f"{seconds:6.0f} s  " if estimate else ""
        print(f"{state:>12s}  {takes}{places[one.required]}  {one.name}", flush=True)
    if estimate:
        print(f"about {total / 60:.0f} minutes alone on one H200")


if __name__ == "__main__":
    main()
