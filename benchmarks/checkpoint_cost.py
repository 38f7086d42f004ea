"""What durable checkpoints cost: seconds a round of this version and of another one, and with durable=false.

    python benchmarks/checkpoint_cost.py --before COMMIT [--repeat 2] [--only CASE] [--page results/durability.md]

COMMIT is the version before, or a folder with its source. With --page, the table goes into that page. Cases: two
workers; the same on a slow disk, where each sync takes 20 ms more; the same where syncs wait for each other, too; 1,000
clients that all write a memory in every round. Prints the median over rounds, without the first, of the least disturbed
of the repeated runs.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

HERE = Path(__file__).parents[1]
LOAD = os.getloadavg()[0]  # of the machine before anything was measured here
MARKS = "<!-- cost -->", "<!-- /cost -->"
TWO = ["model=mlp", "engine=workers", "workers=2"]
WORKERS = [*TWO, "clients=20", "cohort=10", "model.hidden=64", "local.steps=4", "rounds=40"]
# One step a client: the less they compute, the more a round is made of files.
THOUSAND = [*TWO, "clients=1000", "cohort=1000", "partition=iid", "model.hidden=32", "local.steps=1", "rounds=8"]
COMMON = ["algorithm=scaffold", "evaluate.every=0", "evaluate.personal=none", "picture=false"]
CASES = {
    "two workers": (WORKERS, ""),
    "slow disk": (WORKERS, "time.sleep(0.02)"),
    "slow disk, one sync at a time": (WORKERS, "with lock: time.sleep(0.02)"),
    "1,000 clients with memories": (THOUSAND, ""),
}
SLOW = """import os, threading, time
lock, sync = threading.Lock(), os.fsync
def slow(file):
    sync(file)
    {how}
os.fsync = slow
"""


def seconds(source: Path, words: list[str], how: str) -> float:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as place:
        path = [str(source / "src")]
        if how:  # Python imports a module of this name when it starts
            (Path(place) / "sitecustomize.py").write_text(SLOW.format(how=how))
            path.insert(0, place)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-m", "fedlens", "run", *COMMON, *words, "out=run"]
        subprocess.run(command, cwd=place, env=environment, check=True, stdout=subprocess.DEVNULL)
        table = pq.read_table(Path(place) / "run" / "metrics.parquet").to_pylist()
    found = {row["round"]: row["value"] for row in table if row["metric"] == "seconds"}
    return statistics.median(found[round] for round in found if round > 1)


@contextlib.contextmanager
def source_of(version: str) -> Iterator[Path]:
    """The folder itself, or one with what a commit held."""
    if Path(version).is_dir():
        yield Path(version)
        return
    with tempfile.TemporaryDirectory() as place:
        packed = subprocess.run(["git", "archive", version, "src"], cwd=HERE, check=True, stdout=subprocess.PIPE)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(place, filter="data")
        yield Path(place)


def fill(page: Path, rows: dict[str, dict[str, float]], repeat: int) -> None:
    """The table between the marks of a page."""
    head, _, rest = page.read_text("utf-8").partition(f"{MARKS[0]}\n")
    _, found, tail = rest.partition(MARKS[1])
    if not found:
        sys.exit(f"{page} has no {MARKS[0]} and {MARKS[1]}, between which the table goes")
    about = (
        f"Seconds a round: median over rounds, least of {repeat} runs in turn; {os.cpu_count()} cores, load before: "
    )
    lines = [f"{about}{LOAD:.1f}.\n", "| case | before | after | `durable=false` |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {' | '.join(f'{value:.3f}' for value in row.values())} |" for name, row in rows.items()]
    page.write_text(f"{head}{MARKS[0]}\n" + "\n".join(lines) + f"\n{MARKS[1]}{tail}", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    with source_of(asked.before) as before:
        rows = measured(asked.only or [*CASES], before, asked.repeat)
    print(json.dumps(rows))
    if asked.page:
        fill(asked.page, rows, asked.repeat)


def measured(names: list[str], source_before: Path, repeat: int) -> dict[str, dict[str, float]]:
    print(f"{'seconds a round':32}{'before':>9}{'after':>9}{'durable=false':>15}")
    rows = {}
    for name in names:
        words, how = CASES[name]
        variants = {"before": (source_before, []), "after": (HERE, []), "durable=false": (HERE, ["durable=false"])}
        tries = {variant: [] for variant in variants}
        for _ in range(repeat):  # in turn: the machine may be busy for a while
            for variant, (source, more) in variants.items():
                tries[variant].append(seconds(source, [*words, *more], how))
        rows[name] = {variant: round(min(found), 4) for variant, found in tries.items()}
        before, after, without = rows[name].values()
        print(f"{name:32}{before:9.3f}{after:9.3f}{without:15.3f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
