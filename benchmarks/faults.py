"""What faults cost: 200 clients, 30 % dropouts, 10 % stragglers, 5 % corrupt replies, 50 rounds; and what checks cost.

python benchmarks/faults.py OUT [key=value ...]    (a new folder; about a minute on one core; 10 rounds or more)
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from fedlens import config
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Server, Stage
from fedlens.core.batches import Dataset, Federation
from fedlens.core.check import Check
from fedlens.core.cohort import Everyone
from fedlens.core.dry_run import Rehearsal
from fedlens.core.network import Network
from fedlens.core.rng import seeded
from fedlens.core.run import job_of, open_round, timetable
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.models import MODELS
from fedlens.runs.diff import differences
from fedlens.simulate import run as simulate
from fedlens.simulate.recorder import Nobody, Progress

SETTINGS = ["data=mnist5k", "clients=200", "cohort=20", "rounds=50", "model=mlp", "local.epochs=2", "local.lr=0.05"]
SETTINGS += [
    "partition=dirichlet",
    "partition.alpha=0.5",
    "evaluate.last=10",
    "evaluate.personal=none",
    "picture=false",
]
FAULTS = ["faults.dropout=0.3", "faults.straggler=0.1", "faults.corrupt=0.05", "policy.deadline=30"]
RUNS = {
    "no faults": [],
    "faults": FAULTS,
    "faults, once more": FAULTS,
    "faults, over-sampled by half": [*FAULTS, "policy.oversample=0.5", "policy.max_failures=3"],
}


class Memory(Nobody):
    """Resident MiB after every round."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def round(self, progress: Progress) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.seen.append(pages * 4096 / 2**20)


def rows(out: Path, more: list[str]) -> list[str]:
    lines = ["| run | accuracy, last 10 rounds | missing | late | refused | void | MiB at round 10, 50 | s |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, words in RUNS.items():
        folder, memory = out / name.replace(" ", "-").replace(",", ""), Memory()
        result = simulate.run(
            config.read(None, [*SETTINGS, *more, *words, "engine=sequential", f"out={folder}"]), watcher=memory
        )
        counts = " | ".join(str(result.setbacks.get(kind, 0)) for kind in ("missing", "late", "refused", "void"))
        held = f"{memory.seen[9]:.0f}, {memory.seen[-1]:.0f}"
        lines.append(f"| {name} | {100 * result.accuracy_last:.2f} % | {counts} | {held} | {result.seconds:.1f} |")
    apart = list(differences(out / "faults", out / "faults-once-more"))
    return [*lines, "", f"Differences between the two runs with the same faults: {apart or 'none'}."]


def cost() -> str:
    """Of checking a ResNet18 upload of FedAvg, beside what making its mean costs anyway."""
    with seeded(1):
        net = Network(MODELS["resnet18"]().build(10, 3, 32), "fp32")
    data = Dataset(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, dtype=torch.long), _scaled)
    one = {0: torch.tensor([0])}
    engine = Sequential(net, Federation(data, one, one, torch.tensor([0])))
    (turn,) = timetable(FedAvg(), Stage(None, 1, Everyone(), epochs=0))
    server = open_round(Server(net, Tree(), 1), turn, 0)
    job = job_of(server, turn, 0)
    upload = engine.run(job, [0])[0].upload
    upload = upload.replace(weight=torch.ones_like(upload.weight))
    check = Check(Rehearsal(Sequential, net, data), 1024)
    rehearsal = timed(lambda: check.expects(job), 3)
    check.check_structure(server, job, upload)
    form = timed(lambda: check.check_structure(server, job, upload), 20)
    values = timed(lambda: check.check_values(job, [upload]), 20)
    mean = timed(lambda: turn.stage.algorithm.aggregate(server, [upload, upload]), 20) / 2
    size = f"{upload.nbytes / 1e6:.1f} MB, {len(upload.leaves())} leaves"
    return (
        f"ResNet18 upload ({size}) on one core: names, types and shapes {1e3 * form:.2f} ms, values {1e3 * values:.2f} "
        f"ms a reply, beside {1e3 * mean:.1f} ms for its part of the mean; a rehearsal, once a stage, "
        f"{1e3 * rehearsal:.0f} ms."
    )


def _scaled(x: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
    return x.float() / 255


def timed(work, times: int) -> float:
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return median(spent)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join([*rows(asked.out, asked.words), "", cost()]))
