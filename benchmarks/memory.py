"""Memory of a run over time: a thousand clients that each remember a model, most of them on disk.

    python benchmarks/memory.py OUT_FOLDER [key=value ...]

Starts `fedlens run` with SCAFFOLD and ResNet20 on CIFAR-10 (data through FEDLENS_DATA) and samples the proportional set
size of its processes; writes memory.csv, memory.png and memory.svg.
"""

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

from fedlens.plots.style import COLOURS, pyplot, save

SETTINGS = [
    "data=cifar10",
    "partition=iid",
    "clients=1000",
    "cohort=50",
    "model=resnet20",
    "algorithm=scaffold",
    "rounds=30",
    "memory=0.02",  # GiB of client memories in RAM for each process
    "evaluate.every=10",
    "evaluate.personal=none",
    "picture=false",
]


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found] + [grand for child in found for grand in children(int(child))]


def pss(pid: int) -> int:
    """Bytes of a process, pages that it shares counted in part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def rounds_done(log: Path) -> int:
    lines = log.read_text().splitlines() if log.exists() else []
    return int(lines[-1].split()[1].split("/")[0]) if lines else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two looks")
    asked = parser.parse_args()
    out, run = asked.out, asked.out / "run"
    command = [sys.executable, "-m", "fedlens", "run", *SETTINGS, *asked.words, f"out={run}"]
    process, began, rows = subprocess.Popen(command), time.perf_counter(), []
    while process.poll() is None:
        total = sum(pss(pid) for pid in [process.pid, *children(process.pid)])
        rows.append((time.perf_counter() - began, rounds_done(run / "log.txt"), total / 2**20))
        time.sleep(asked.every)
    if process.returncode:  # it has said why
        sys.exit(process.returncode)
    with open(out / "memory.csv", "w", newline="") as file:
        csv.writer(file).writerows([("seconds", "rounds", "mib"), *rows])
    draw(rows, out / "memory")
    on_disk = sum(path.stat().st_size for path in (run / "clients").iterdir()) / 2**20
    late = [mib for _, done, mib in rows if done >= 3]
    early, last = (max(part) for part in (late[: len(late) // 2], late[len(late) // 2 :]))
    print(
        f"peak {early:.0f} MiB in the first half, {last:.0f} MiB in the second; "
        f"client memories on disk {on_disk:.0f} MiB"
    )


def draw(rows: list[tuple[float, int, float]], path: Path) -> None:
    figure, axis = pyplot().subplots(figsize=(6.5, 3.2))
    axis.plot([done for _, done, _ in rows], [mib for _, _, mib in rows], color=COLOURS[0], linewidth=1.2)
    axis.set(xlabel="rounds done", ylabel="MiB (PSS) of all processes", ylim=(0, None))
    save(figure, path)


if __name__ == "__main__":
    main()
