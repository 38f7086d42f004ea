"""A long run of small jobs: memory, open files and threads of all processes must stay flat.

    python benchmarks/soak.py OUT [key=value ...]

Runs 2,000 rounds of SCAFFOLD with a small network in two workers, a checkpoint every 10 rounds, and looks at all
processes after every 10th round; writes soak.csv, soak.png and soak.svg, and prints means of the second and the last
fifth.
"""

import argparse
import csv
import os
from pathlib import Path

from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.plots.style import COLOURS, pyplot, save
from fedlens.simulate import run as simulate
from fedlens.simulate.recorder import Nobody, Progress
from memory import children, pss

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
LOOKS = 200  # over the whole run
COLUMNS = ("MiB", "open files", "threads", "files in the run's folder")


def count(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


class Looking(Nobody):
    """Looks at this process and those it started while they wait for the next round: no pace of theirs outruns it."""

    def __init__(self, run: Path):
        self.run, self.rows = run, []

    def round(self, progress: Progress) -> None:
        if progress.round % max(progress.rounds // LOOKS, 1) == 0:
            processes = [os.getpid(), *children(os.getpid())]
            size = sum(map(pss, processes)) / 2**20
            files, threads = (sum(count(Path(f"/proc/{each}/{what}")) for each in processes) for what in ("fd", "task"))
            in_folder = sum(path.is_file() for path in self.run.rglob("*"))
            self.rows.append((progress.round, size, files, threads, in_folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", metavar="key=value")
    asked = parser.parse_args()
    out, looking = asked.out, Looking(asked.out / "run")
    try:
        experiment = config.read(None, [*SETTINGS, *asked.words, f"out={looking.run}"])
        if experiment.rounds < 5:
            raise BadInput(f"rounds is {experiment.rounds}, but two fifths of them are compared: 5 or more")
        simulate.run(experiment, watcher=looking)
    except BadInput as error:
        parser.error(str(error))
    rows = looking.rows
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
