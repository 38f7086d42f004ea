"""Seconds of a grid of runs as `fedlens compare` carries it out: one after another, and so many side by side.

    python benchmarks/grid.py --json grid.json                    # six runs of 100 rounds; `scaled` is for thirty
    python benchmarks/grid.py --processes 1 0 --device cpu --quick

0 processes: as many as pay, as `compare` decides. Every way has the same results, which is checked: to the bit on a
CPU, by the last accuracy on a GPU. Seconds are those of the whole command, its start included. Ways that the JSON file
has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import needed
from fedlens.core.files import write_atomic

WORDS = ("data=mnist5k", "model=cnn", "rounds=100", "cohort=10", "evaluate.personal=none")
QUICK = ("data=mnist5k", "model=cnn_small", "rounds=2", "cohort=2", "local.steps=2", "evaluate.personal=none")
METHODS, WANTED = ("fedavg", "fedprox", "fedavgm"), 30


def carried_out(methods: tuple[str, ...], seeds: int, words: tuple[str, ...], processes: int, out: Path) -> float:
    command = [sys.executable, "-m", "fedlens", "compare", *methods, "--seeds", str(seeds), *words]
    command += ["--processes", str(processes), "--out", str(out), "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return time.perf_counter() - began


def accuracies(out: Path) -> dict[str, Any]:
    """The last accuracy and loss of every run."""
    found = {}
    for path in sorted(out.rglob("result.json")):
        result = json.loads(path.read_text())
        found[str(path.parent.relative_to(out))] = result["accuracy"], result["loss"], result["seconds"]
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--processes", type=int, nargs="+", default=[1, 0])
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--quick", action="store_true", help="seconds: a look, no measurement")
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    needed.gpu(asked.device)
    methods, words = (METHODS[:1], QUICK) if asked.quick else (METHODS, WORDS)
    words = (*words, f"device={asked.device}")
    before = json.loads(asked.json.read_text()) if asked.json and asked.json.is_file() else {}
    rows: list[dict[str, Any]] = before.get("rows", [])
    runs, known = len(methods) * asked.seeds, before.get("results")
    with tempfile.TemporaryDirectory() as folder:
        for processes in asked.processes:
            if any((row["processes"], row["runs"]) == (processes, runs) for row in rows):
                continue
            out = Path(folder) / f"{processes}"
            seconds = carried_out(methods, asked.seeds, words, processes, out)
            found = accuracies(out)
            training = sum(result[2] for result in found.values())
            told = {name: result[:2] for name, result in found.items()}
            known = known or told
            apart = max(abs(a - b) for name in known for a, b in zip(known[name], told[name], strict=True))
            row = {"processes": processes, "runs": runs, "seconds": seconds, "training_seconds": training}
            rows.append(
                {**row, "scaled": seconds / runs * WANTED, "ratio": seconds / rows[0]["seconds"] if rows else 1.0}
            )
            rows[-1]["largest_difference"] = apart
            said = f"{seconds:6.1f} s, in rounds {training:.1f} s, {WANTED} runs {rows[-1]['scaled']:.0f} s"
            print(f"{processes} processes: {said}, x{rows[-1]['ratio']:.2f}; accuracy or loss differ by {apart:.1e}")
            sys.stdout.flush()
            if asked.json:
                found = {"torch": torch.__version__, "rows": rows, "results": known}
                write_atomic(asked.json, json.dumps(found, indent=1).encode())
            if asked.device == "cpu" and apart:
                sys.exit("results differ")


if __name__ == "__main__":
    main()
