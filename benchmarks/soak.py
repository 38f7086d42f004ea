"""A long run of small jobs: memory, open files and threads of all processes must stay flat.

    python benchmarks/soak.py OUT [key=value ...]

Starts `fedlens run` with 2,000 rounds of SCAFFOLD and a small network in two workers, a checkpoint every 10 rounds, and
samples its processes; writes soak.csv, soak.png and soak.svg, and prints means of the second and the last fifth.
"""

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

from fedlens.report.style import COLOURS, pyplot, save
from memory import children, pss, rounds_done

SETTINGS = [
    "algorithm=scaffold",
    "clients=20",
    "cohort=2",
    "model=mlp",
    "local.steps=1",
    "rounds=2000",
    "evaluate.every=100",
    "evaluate.personal=none",
    "checkpoint=10",
    "engine=workers",
    "workers=2",
    "picture=false",
]
COLUMNS = ("MiB", "open files", "threads", "files in the run's folder")


def count(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


def sample(pid: int, run: Path) -> tuple[float, ...]:
    processes = [pid, *children(pid)]
    size = sum(map(pss, processes)) / 2**20
    files, threads = (sum(count(Path(f"/proc/{each}/{what}")) for each in processes) for what in ("fd", "task"))
    return size, files, threads, sum(path.is_file() for path in run.rglob("*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--every", type=float, default=2, help="seconds between two looks")
    asked = parser.parse_args()
    out, run = asked.out, asked.out / "run"
    command = [sys.executable, "-m", "fedlens", "run", *SETTINGS, *asked.words, f"out={run}"]
    process, rows = subprocess.Popen(command, stdout=subprocess.DEVNULL), []
    while process.poll() is None:
        if (done := rounds_done(run / "log.txt")) > 0:
            rows.append((done, *sample(process.pid, run)))
        time.sleep(asked.every)
    assert process.returncode == 0
    rows = [row for row in rows[:-1] if row[2]]  # the last may have seen processes that were ending
    with open(out / "soak.csv", "w", newline="") as file:
        csv.writer(file).writerows([("round", *COLUMNS), *rows])
    figure, axes = pyplot().subplots(1, len(COLUMNS), figsize=(12, 2.8))
    for axis, name, column, colour in zip(axes, COLUMNS, range(1, 5), COLOURS, strict=False):
        axis.plot([row[0] for row in rows], [row[column] for row in rows], color=colour, linewidth=1.4)
        axis.set(xlabel="rounds", title=name, ylim=(0, 1.3 * max(row[column] for row in rows)))
    figure.tight_layout()
    save(figure, out / "soak")
    last = rows[-1][0]
    for name, column in zip(COLUMNS, range(1, 5), strict=True):
        early, late = (
            [row[column] for row in rows if low * last <= row[0] <= high * last] for low, high in ((0.2, 0.4), (0.8, 1))
        )
        means = [sum(values) / len(values) for values in (early, late)]
        print(f"{name}: {means[0]:.1f} in rounds 20-40 %, {means[1]:.1f} in the last fifth")


if __name__ == "__main__":
    main()
