"""What durable checkpoints cost: seconds a round of this version and of another one, and with durable=false.

    python benchmarks/checkpoint_cost.py --before CHECKOUT [--repeat 2] [--only CASE]

CHECKOUT is a folder with the source of the version before. Cases: two workers; the same on a slow disk, where each sync
takes 20 ms more; the same where syncs wait for each other, too; 1,000 clients that all write a memory in every round.
Prints the median over rounds, without the first, of the least disturbed of the repeated runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

HERE = Path(__file__).parents[1]
WORKERS = ["clients=20", "cohort=10", "model=mlp", "model.hidden=64", "engine=workers", "workers=2", "rounds=12"]
THOUSAND = [
    "clients=1000",
    "cohort=1000",
    "partition=iid",
    "model=mlp",
    "model.hidden=32",
    "engine=workers",
    "workers=2",
    "rounds=4",
]
COMMON = ["algorithm=scaffold", "local.steps=4", "evaluate.every=0", "evaluate.personal=none", "picture=false"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--only", choices=CASES, action="append")
    asked = parser.parse_args()
    print(f"{'seconds a round':32}{'before':>9}{'after':>9}{'durable=false':>15}")
    rows = {}
    for name in asked.only or CASES:
        words, how = CASES[name]
        variants = {"before": (asked.before, []), "after": (HERE, []), "durable=false": (HERE, ["durable=false"])}
        tries = {variant: [] for variant in variants}
        for _ in range(asked.repeat):  # in turn: the machine may be busy for a while
            for variant, (source, more) in variants.items():
                tries[variant].append(seconds(source, [*words, *more], how))
        rows[name] = {variant: round(min(found), 4) for variant, found in tries.items()}
        before, after, without = rows[name].values()
        print(f"{name:32}{before:9.3f}{after:9.3f}{without:15.3f}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
