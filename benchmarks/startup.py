"""Where the seconds of `fedlens run` go beside its rounds: until the first is done, and after the last.

    python benchmarks/startup.py --repeats 5 --json startup.json     # on a quiet machine
    python benchmarks/startup.py --repeats 1 rounds=2 model=mlp

Each start is the command itself in a process of its own. Training is what a run says its rounds took, evaluations and
checkpoints in; overhead is all else, from the command to the prompt. The disk's cache is warm, and modules are compiled
(PYTHONDONTWRITEBYTECODE would compile them at each start): one start goes before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def started(words: list[str]) -> dict[str, float]:
    """Seconds from the command to the first round's line, to the last one's, and to the prompt."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-u", "-m", "fedlens", "run", *words, f"out={out}"]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        began, rounds = time.perf_counter(), []
        with subprocess.Popen(command, env=environment, **pipes) as process:
            assert process.stdout
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("round ") and "accuracy" in line:
                    rounds.append(time.perf_counter() - began)
        total = time.perf_counter() - began
        if process.returncode or not rounds:
            sys.exit(f"{' '.join(command)} failed:\n{''.join(said)[-2000:]}")
        training = json.loads((out / "result.json").read_text())["seconds"]
    found = {"first round": rounds[0], "after the last": total - rounds[-1], "total": total, "training": training}
    return {**found, "overhead": 1 - training / total}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--json", type=Path)
    options.add_argument("words", nargs="*", help="of the run; none: the default run")
    asked = options.parse_intermixed_args()
    started(["rounds=1", *[word for word in asked.words if not word.startswith("rounds=")]])
    rows = [started(asked.words) for _ in range(asked.repeats)]
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    for row in [*rows, middle]:
        print("  ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"words": asked.words, "rows": rows, "median": middle}, indent=1))


if __name__ == "__main__":
    main()
