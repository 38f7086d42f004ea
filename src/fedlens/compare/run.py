"""`fedlens compare`: methods on the same data and splits; what is missing is run, what is done is read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path

from .. import config
from ..core.errors import BadInput
from ..core.measures import numbered
from ..core.phases import counted, heard_by
from ..experiment import Execution, Experiment
from ..runs.grid import Cell, Column, Grid, Row, is_done, merged_words, placement
from ..runs.read import flat
from ..simulate.finish import GOES_WRONG, check_start, reason
from ..simulate.progress import settings_line
from ..simulate.settle import settled_alike
from .board import Board
from .crew import Crew
from .figure import draw
from .measured import Compared, check_same_split, existing, measured
from .parallel import Task, carry_out, side_by_side
from .table import Comparison, ranked_by


@dataclass(frozen=True)
class Asked:
    """What is to be compared: methods x settings, and words that say where it runs."""

    grid: Grid
    cells: Sequence[Cell]
    where: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The same for the same settings, so that the same command goes on, and another method joins those there."""
        data = config.to_dict(self.cells[0].experiment.data)["is"].rpartition(":")[2]
        fixed = sorted(merged_words(self.grid.words).values())
        several = len({column.words for column in self.grid.columns.values()}) > 1
        tag = sha256(" ".join(fixed).encode()).hexdigest()[:8] if fixed else ""
        name = "-".join(
            part for part in ("compare", "" if several and "data" in _swept(self.grid) else data, tag) if part
        )
        return Path("runs") / name

    def check_measure(self, name: str) -> None:
        """Refuses one of a class that the data do not have, before anything is trained."""
        if "/" in name:
            for one in {repr(cell.experiment.data): cell.experiment for cell in self.cells}.values():
                numbered("--by", name, one.images().classes)

    def task(self, cell: Cell, seed: int, out: Path) -> Task:
        name = " ".join(part for part in (cell.row, cell.column, f"seed {seed}") if part)
        return Task(name, cell.at(out, seed), (*cell.words, f"seed={seed}"), self.where)


def _swept(grid: Grid) -> set[str]:
    return {config.setting(word)[0] for column in grid.columns.values() for word in column.words}


# ---- from words to experiments ---------------------------------------------------------------------------------------
def asked(words: Sequence[str]) -> Asked:
    """Methods by name; key=value for all, METHOD.key=value for one; several values with commas are a sweep."""
    methods = [name for word in words if "=" not in word for name in word.split(",") if name]
    if options := [word for word in methods if word.startswith("-")]:
        raise BadInput(f"unknown option {options[0]}; settings look like key=value")
    if len(set(methods)) < len(methods):
        raise BadInput(f"{next(m for m in methods if methods.count(m) > 1)} is named twice; name each method once")
    for method in methods:
        config.read(None, [f"algorithm={method}"])
    own: dict[str, list[str]] = {method: [] for method in methods}
    common = []
    for word in (word for word in words if "=" in word):
        whose = max((m for m in methods if word.startswith(f"{m}.")), key=len, default=None)
        if whose and not config.is_section(word):  # local.epochs is everyone's, also where the method local is compared
            own[whose].append(f"algorithm.{word.removeprefix(f'{whose}.')}")
            continue
        key = config.setting(word)[0]
        if "," in key:
            method, _, own_key = key.partition(",")
            asked_for = f"{method} {method}.{own_key}{word[len(key) :]}"
            raise BadInput(f"{word} is how a table names a method with a setting; ask for it as {asked_for}")
        if key in ("out", "seed"):
            raise BadInput(f"{key}= is not for a comparison: use --{'out' if key == 'out' else 'seeds'}")
        if key == "algorithm" or key.startswith("algorithm."):
            like = f"{methods[0] if methods else 'METHOD'}.{key.partition('.')[2] or 'KEY'}=VALUE"
            raise BadInput(
                f"{key}= does not say whose it is: name methods without a key, and settings of one as {like}"
            )
        if method := _other_method(key):
            raise BadInput(f"{key} is a setting of {method}, which is not compared: name {method} as a method, too")
        common.append(word)
    if not methods:
        raise BadInput("name the methods to compare, as in `fedlens compare fedavg fedavg+ft`")
    where = tuple(placement(common))
    science = [word for word in common if word not in where]
    fixed, sweeps = _parted(science, [])
    rows: dict[str, Row] = {}
    for method in methods:
        begin = f"algorithm={method}"
        mine, varied = _parted(own[method], [begin])
        for chosen in itertools.product(*varied):
            label = ",".join([method, *(word.removeprefix("algorithm.") for word in chosen)])
            rows[label] = Row((begin, *mine, *chosen))
    columns = {",".join(map(_short, chosen)): Column(tuple(chosen)) for chosen in itertools.product(*sweeps)}
    grid = Grid(".", "", rows, columns, tuple(fixed))
    where = ("picture=false", *where)  # the comparison has its own
    return Asked(grid, grid.cells(words=where), where)


def _other_method(key: str) -> str:
    """The method whose setting a key is, where it is no setting of all; nothing otherwise."""
    name = key.partition(".")[0]
    if name == key or name in {each.name for kind in (Experiment, Execution) for each in fields(kind)}:
        return ""
    try:
        config.read(None, [f"algorithm={name}"])
    except BadInput:
        return ""
    return name


def _parted(words: Sequence[str], begin: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Words with one value, and sweeps: a comma makes one where the whole is no value, as uplink=clip,noise is."""
    fixed, sweeps = [word for word in words if "," not in word], []
    for word in words:
        if "," not in word:
            continue
        try:
            config.read(None, [*begin, *fixed, word])
        except BadInput:
            key, _, values = word.partition("=")
            found = list(dict.fromkeys(value.strip() for value in values.split(",") if value.strip()))
            sweeps.append([f"{key}={value}" for value in found])
        else:
            fixed.append(word)
    return fixed, sweeps


def _short(word: str) -> str:
    """partition.alpha=0.1 as alpha=0.1."""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


# ---- running and reading ---------------------------------------------------------------------------------------------
def compare(
    what: Asked, seeds: Sequence[int], out: Path, board: Board, processes: int = 0, measure: str = "accuracy"
) -> Comparison:
    """Run what is missing, the first seed of all first; the files of the comparison are written after each run.

    Interrupted, it goes on where it stopped when it is called again. Where none of its runs can begin, that is refused
    and nothing is written.
    """
    with board, heard_by(board.phase):
        return _compared(what, seeds, out, board, processes, measure)


def _compared(what: Asked, seeds: Sequence[int], out: Path, board: Board, processes: int, measure: str) -> Comparison:
    tasks = [(cell, seed, what.task(cell, seed, out)) for seed in seeds for cell in what.cells]
    missing = [(cell, task) for cell, seed, task in tasks if not is_done(cell, out, seed)]
    failures = _refused(missing)
    decided = settled_alike(task.experiment for _, _, task in tasks)
    able = [task.settled(decided) for _, task in missing if task.name not in failures]
    if len(failures) == len(tasks):
        raise BadInput(_whose(missing[0][0], failures[missing[0][1].name]))
    known: dict[str, Compared] = {}

    def gathered() -> Comparison:
        for cell, seed, task in tasks:
            if task.name not in known or known[task.name].state != "complete":
                why = _whose(cell, failures.get(task.name, ""))
                known[task.name] = measured(cell.column, cell.row, seed, task.out, why)
        runs = [known[task.name] for _, _, task in tasks]
        check_same_split(runs)
        return Comparison(runs, ranked_by(runs), (), measure)

    board.say(settings_line([cell.experiment for cell in what.cells]))
    for line in gathered().troubles("failed"):
        board.say(line)
    board.expect({task.name: task.rounds for task in able}, len(tasks) - len(missing))
    if able:
        crew = Crew(processes, processes) if processes else side_by_side(able)
        failures |= carry_out(able, crew, board, after=lambda: gathered().write(out))
    found = gathered()
    found.write(out)
    return found


def _refused(missing: Sequence[tuple[Cell, Task]]) -> dict[str, str]:
    """Runs that cannot even begin, and why: found out before others are trained. One seed speaks for all if it can."""
    failures: dict[str, str] = {}
    able = set()
    for cell, task in counted(missing, "checking that runs can begin"):
        if (cell.row, cell.column) not in able:
            try:
                check_start(task.experiment)
            except GOES_WRONG as error:
                failures[task.name] = reason(error)
            except Exception as error:  # a bug, most likely of the user's own method
                failures[task.name] = f"{type(error).__name__}: {reason(error)}"
            else:
                able.add((cell.row, cell.column))
    return failures


def _whose(cell: Cell, why: str) -> str:
    """Settings of a method as they are typed here: METHOD.key, not algorithm.key."""
    return re.sub(r"\balgorithm\.(?=\w)", f"{cell.row.partition(',')[0]}.", why)


def compare_existing(paths: Sequence[Path], measure: str = "accuracy") -> Comparison:
    """Runs that are there already. Those over other data or another split are never in one table."""
    runs = existing(paths)
    check_same_split(runs)
    settings = dict.fromkeys(run.setting for run in runs if run.state == "complete")
    if all(len({run.method for run in runs if run.setting == setting}) < 2 for setting in settings):
        if len(settings) > 1:
            raise BadInput(f"{_apart(runs)}: they cannot be compared")
        raise BadInput("there is nothing to compare: name complete runs of two methods or more, of the same split")
    notes = [f"{_apart(runs)}: they are in tables of their own."] if len(settings) > 1 else []
    return Comparison(runs, ranked_by(runs), (*notes, *_other_differences(runs)), measure)


def _apart(runs: Sequence[Compared]) -> str:
    first = {run.setting: run for run in reversed(runs) if run.state == "complete"}
    return (
        " and ".join(f"{run.run} ({setting})" for setting, run in first.items()) + " have other data or another split"
    )


def _other_differences(runs: Sequence[Compared]) -> Iterator[str]:
    """Settings besides the method's own in which runs of one table differ."""
    done = [run for run in runs if run.state == "complete"]
    for setting in dict.fromkeys(run.setting for run in done):
        mine = [run for run in done if run.setting == setting]
        plain = [config.science(config.read(run.run / "config.yaml")) for run in mine]
        own = ("algorithm", "data", "partition", "seed")
        for key in [key for key in plain[0] if key not in own]:
            values = dict.fromkeys(str(flat({key: one[key]})) for one in plain)
            if len(values) > 1:
                names = {
                    value: run.method
                    for run, value in zip(mine, (str(flat({key: p[key]})) for p in plain), strict=True)
                }
                yield f"Not only the methods differ: {key} of {' and '.join(names.values())} is not the same."
        seeds = {method: {run.seed for run in mine if run.method == method} for method in {run.method for run in mine}}
        if len({frozenset(found) for found in seeds.values()}) > 1:
            said = "; ".join(
                f"{method} {', '.join(map(str, sorted(found)))}" for method, found in sorted(seeds.items())
            )
            yield f"Not all methods have the same seeds ({said}): their means are over different splits."


def pictures(found: Comparison, out: Path) -> list[Path]:
    """curves.png (with SVG and PDF beside it), one for each setting."""
    drawn = []
    for setting in found.settings:
        # Without dots: what follows one would be taken for a file's ending.
        name = f"curves-{setting}".rstrip("-").replace("/", "-").replace(".", "_")
        if path := draw([run for run in found.runs if run.setting == setting], out / name):
            drawn.append(path)
    return drawn
