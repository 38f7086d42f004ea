"""The engines side by side: one process, workers, Ray on one node and on two; and two nodes that lose something.

    python benchmarks/ray_cluster.py OUT [key=value ...]

SCAFFOLD on the embedded digits. All runs must end with the bits of the first. Seconds of a round are the median after
the first; memory is the largest sum of proportional set sizes of all processes, Ray's own included. `kill -9` hits
while an actor trains. Prints the table of results/ray.md.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import needed
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from memory import children, pss, rounds_done

SETTINGS = [
    "algorithm=scaffold",
    "clients=20",
    "cohort=8",
    "model=cnn_small",
    "rounds=8",
    "evaluate.personal=none",
    "picture=false",
]
Blow = Callable[[], bool]  # strikes when the moment has come; True: it did


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A head and another node, one core each, as processes of this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    try:
        yield cluster
    finally:
        cluster.shutdown()


def training() -> list[int]:
    """Actors that train right now; they say so in their title."""
    found = []
    for pid in children(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::Owner.train"):
            found.append(pid)
    return found


def kill_actor() -> bool:
    for pid in training()[:1]:
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def kill_node(cluster: Any) -> bool:
    """Its raylet and all that it started."""
    (node,) = cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    mine = children(raylet)
    if not {*mine} & {*training()}:
        return False
    for pid in (raylet, *mine):
        os.kill(pid, signal.SIGKILL)
    return True


def measured(out: Path, more: list[str], name: str, words: list[str], blow: Blow | None = None) -> dict[str, Any]:
    place = out / name.replace(" ", "-").replace(",", "")
    shutil.rmtree(place, ignore_errors=True)
    command = [sys.executable, "-m", "fedlens", "run", *SETTINGS, *more, *words, f"out={place}"]
    began, largest = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if blow is not None and rounds_done(place / "log.txt") >= 3:
            blow = None if blow() else blow
        elif blow is None or int(time.perf_counter() * 10) % 5 == 0:
            largest = max(largest, sum(pss(pid) for pid in children(os.getpid())))
        time.sleep(0.02 if blow is not None else 0.3)
    assert process.returncode == 0 and blow is None, f"{name}: exit code {process.returncode}"
    rows = RunFolder.open(place).metrics().to_pylist()
    rounds = [row["value"] for row in rows if row["metric"] == "seconds"]
    found = {"engine": name, "whole": time.perf_counter() - began, "MiB": largest / 2**20, "place": place}
    return {**found, "round": statistics.median(rounds[1:]), "longest": max(rounds[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    asked = parser.parse_args()
    needed.package("ray", "'fedlens[ray]'")
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    out, more = asked.out.absolute(), asked.words
    rows = [
        measured(out, more, "sequential", ["engine=sequential"]),
        measured(out, more, "2 workers", ["engine=workers", "workers=2"]),
        measured(out, more, "ray, 2 actors", ["engine=ray", "workers=2"]),
    ]
    for name in ("ray, two nodes", "ray, an actor killed", "ray, a node killed"):
        with two_nodes() as cluster:
            words = ["engine=ray", "workers=2", f"ray.address={cluster.address}"]
            blow = {"ray, an actor killed": kill_actor, "ray, a node killed": lambda c=cluster: kill_node(c)}.get(name)
            rows.append(measured(out, more, name, words, blow))
    print("| engine | s a round | longest round, s | whole run, s | MiB at most | same bits |\n|" + " --- |" * 6)
    for row in rows:
        same = "yes" if not list(differences(rows[0]["place"], row["place"])) else "NO"
        numbers = " | ".join(f"{row[key]:.2f}" for key in ("round", "longest"))
        print(f"| {row['engine']} | {numbers} | {row['whole']:.0f} | {row['MiB']:.0f} | {same} |")


if __name__ == "__main__":
    main()
