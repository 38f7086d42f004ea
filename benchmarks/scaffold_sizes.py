"""SCAFFOLD beside FedAvg where clients' sizes differ: which factor it is, and what mends it.

    python benchmarks/scaffold_sizes.py --runs DIR --json FILE                     # CIFAR-10, for a GPU
    python benchmarks/scaffold_sizes.py --runs DIR --json FILE --on digits --seeds 0 1   # for a CPU

Ten clients, five a round, Dirichlet 0.1. A cell is one run; cells go in the order of PLANS.
A cell that is in FILE is not run again, and none is begun that would end after --seconds. Lines and FILE have the mean
accuracy of the last ten rounds, the last accuracy and the seconds of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedlens import config
from fedlens.core.errors import BadInput, RunFailed
from fedlens.core.files import write_json
from fedlens.runs.folder import RunFolder
from fedlens.simulate.run import run

COMMON = (
    "partition=dirichlet",
    "partition.alpha=0.1",
    "clients=10",
    "cohort=5",
    "local.epochs=1",
    "local.momentum=0.9",
    "evaluate.personal=none",
    "evaluate.closing=10",
    "evaluate.last=10",
    "evaluate.every=5",
    "checkpoint=0",
    "picture=false",
)
SETS = {
    # The settings of the tables of FedXDS with one epoch a round and 100 rounds: 3 to 170 steps a round at seed 0.
    "cifar10": (
        "data=cifar10",
        "model=resnet8",
        "rounds=100",
        "local.batch_size=64",
        "local.lr=0.01",
        "local.weight_decay=0.0001",
        "augment=crop_flip",
    ),
    "digits": ("data=mnist5k", "model=cnn2", "rounds=40", "local.batch_size=8", "local.lr=0.01", "engine=sequential"),
}
STEPS = {"cifar10": "80", "digits": "50"}  # for everyone: about the mean of one epoch each
FEDAVG, SCAFFOLD = "algorithm=fedavg", "algorithm=scaffold"
CELLS: dict[str, tuple[str, ...]] = {
    "fedavg": (FEDAVG,),
    "scaffold": (SCAFFOLD,),
    # what mends it
    "scaffold, by samples": (SCAFFOLD, "algorithm.by=samples"),
    "scaffold, steps": (SCAFFOLD, "local.steps=STEPS"),
    "scaffold, clip": (SCAFFOLD, "algorithm.clip=10"),
    # one factor at a time
    "fedavg, uniform": (FEDAVG, "weighting=uniform"),
    "fednova": ("algorithm=fednova",),
    "fedavg, steps": (FEDAVG, "local.steps=STEPS"),
    "scaffold, models weighed": (SCAFFOLD, "weighting=samples"),
    "fedavg, no momentum": (FEDAVG, "local.momentum=0", "local.lr=0.1"),
    "scaffold, no momentum": (SCAFFOLD, "local.momentum=0", "local.lr=0.1"),
    "fedavg, everyone": (FEDAVG, "cohort=10"),
    "scaffold, everyone": (SCAFFOLD, "cohort=10"),
}
FACTORS = tuple(CELLS)
MAIN = FACTORS[:4]
# In this order: dialect, cells, how many of the seeds.
PLANS: dict[str, tuple[tuple[str, tuple[str, ...], int], ...]] = {
    "cifar10": (("class", MAIN, 3), ("class", FACTORS, 1), ("client", MAIN[:3], 3), ("balanced", MAIN, 3)),
    "digits": (("class", FACTORS, 2), ("client", MAIN, 2), ("balanced", MAIN, 2)),
}


def cells(on: str, seeds: list[int]) -> Iterator[tuple[str, str, int]]:
    """(dialect, cell, seed) in order, each once."""
    wanted = ((d, name, seed) for d, names, most in PLANS[on] for seed in seeds[:most] for name in names)
    yield from dict.fromkeys(wanted)


def measured(folder: Path, words: list[str]) -> dict[str, Any]:
    """One run, and what is kept of it."""
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut off
    result = run(config.read(None, [*words, f"out={folder}"]))
    opened = RunFolder.open(folder)
    rows = opened.metrics().to_pylist()
    evaluations = [
        (row["round"], row["value"]) for row in rows if row["metric"] == "accuracy" and row["client"] is None
    ]
    sizes = [sum(counts) for counts in json.loads((folder / "label_counts.json").read_text())]
    for large in ("memories", "checkpoints"):
        shutil.rmtree(folder / large, ignore_errors=True)
    kept = {"last_ten": result.accuracy_last, "accuracy": result.accuracy, "best": result.accuracy_best}
    return kept | {"seconds": result.seconds, "sizes": sizes, "accuracies": evaluations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a folder for runs, made where it is missing")
    parser.add_argument("--json", type=Path, required=True, help="all results; read first")
    parser.add_argument("--copy", type=Path, help="written like --json, never read")
    parser.add_argument("--on", choices=list(SETS), default="cifar10")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing that would end later")
    parser.add_argument("--guess", type=float, default=60.0, help="seconds of a cell before one has been run")
    parser.add_argument("--only", nargs="*", default=[], help="cells by name")
    parser.add_argument("--dialects", nargs="*", default=[])
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("words", nargs="*", help="laid over all cells, such as rounds=2 device=cuda")
    asked = parser.parse_args()
    began, walls = time.monotonic(), []
    done = json.loads(asked.json.read_text()) if asked.json.is_file() else []
    if asked.copy and done:
        write_json(asked.copy, done)
    have = {(row["dialect"], row["cell"], row["seed"]) for row in done}
    for dialect, cell, seed in cells(asked.on, asked.seeds):
        unwanted = (asked.only and cell not in asked.only) or (asked.dialects and dialect not in asked.dialects)
        if unwanted or (dialect, cell, seed) in have:
            continue
        chosen = [word.replace("STEPS", STEPS[asked.on]) for word in CELLS[cell]]
        words = [*COMMON, *SETS[asked.on], f"partition.dialect={dialect}", *chosen, f"seed={seed}", *asked.words]
        if asked.list:
            print(dialect, cell, seed, " ".join(words), sep=" | ")
            continue
        spent = time.monotonic() - began
        if spent + max(walls[-3:], default=asked.guess) * 1.1 > asked.seconds:
            print(f"stopped before {dialect}, {cell}, seed {seed}: {spent:.0f} s are gone", flush=True)
            return
        folder = asked.runs / f"{dialect}-{cell.replace(', ', '-').replace(' ', '_')}-{seed}"
        asked.runs.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        try:
            found = measured(folder, words)
        except (BadInput, RunFailed, RuntimeError) as error:
            print(f"{dialect:9s} {cell:30s} seed {seed}  failed: {error}", flush=True)
            continue
        wall = time.monotonic() - start
        walls.append(wall)
        done.append(
            {"on": asked.on, "dialect": dialect, "cell": cell, "seed": seed, "words": words, "wall": wall, **found}
        )
        for file in filter(None, (asked.json, asked.copy)):
            write_json(file, done)
        numbers = f"{100 * found['last_ten']:6.2f}  last {100 * found['accuracy']:6.2f}  {wall:6.1f} s"
        print(f"{dialect:9s} {cell:30s} seed {seed}  {numbers}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()  # recorded steps of the last run
    print("complete", flush=True)


if __name__ == "__main__":
    main()
