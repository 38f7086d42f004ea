"""kill -9 at random moments: every run ends with the bits of one that was never disturbed.

    python benchmarks/kill.py [--kills 30] [--seed 0]

Eight configurations, tiny runs. Each is run once as it is; then it is started, killed, started again and so on, until
it ends by itself. A kill comes a random time after a random one of the checkpoints that are still to come, or of the
start: rounds differ much in length. Prints a row for each, and ends with an error where bits differ.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedlens.runs.diff import differences
from forks import Nursery

FEW = ["clients=4", "cohort=2", "model=cnn2", "local.steps=2", "picture=false", "engine=sequential"]
RUNS = {
    "scaffold, two workers": ["algorithm=scaffold", "rounds=12", "engine=workers", "workers=2"],
    "scaffold, memories on disk": ["algorithm=scaffold", "rounds=12", "memory=1e-9", "transcript=1", "checkpoint=2"],
    "fedxds": ["algorithm=fedxds", "algorithm.warmup_rounds=3", "algorithm.warmup_epochs=1", "rounds=4"],
    "fedaux+ft": ["algorithm=fedaux+ft", "auxiliary=public.npz", "algorithm.base.steps=3", "rounds=4"],
    "spatl": ["algorithm=spatl", "rounds=4"],
    "topk": ["uplink=topk", "rounds=12"],
    "faults": ["algorithm=scaffold", "rounds=12", "faults.dropout=0.2", "faults.corrupt=0.2"],
    "compare": ["fedavg", "scaffold", "--processes", "1", "rounds=5"],
}


def words(name: str, out: str, folder: Path) -> list[str]:
    """The command that begins, or goes on."""
    if name == "compare":
        return ["compare", *RUNS[name], *FEW, "--out", out]
    if (folder / out / "config.yaml").exists():
        return ["resume", out]
    return ["run", *FEW, *RUNS[name], f"out={out}"]


def random_images(path: Path) -> None:
    """Public data, for those who need some."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (60, 28, 28), dtype=np.uint8), draw.integers(0, 10, 60)
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])


def runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("config.yaml"))


def newest(out: Path) -> int:
    """The round of the newest checkpoint in the runs below."""
    return max((int(path.stem) for path in out.rglob("checkpoints/[0-9]*.json")), default=0)


def disturbed(
    nursery: Nursery, name: str, folder: Path, kills: int, draw: random.Random
) -> tuple[list[int], list[str]]:
    """How many checkpoints there were at each kill, and what differs in the end."""
    began = time.perf_counter()
    ended = nursery(*words(name, "whole", folder), cwd=folder)
    assert ended.code == 0, ended.err
    last = newest(folder / "whole")
    step, done, number = (time.perf_counter() - began) / (last + 1), [], 0
    while len(done) < kills:
        out, number = f"killed{number}", number + 1  # one that has ended leaves the rest of the kills to another
        while True:
            nursery.begin(*words(name, out, folder), cwd=folder)
            if len(done) < kills:
                after = draw.randint(newest(folder / out), last)
                while newest(folder / out) < after and not nursery.over:
                    time.sleep(0.005)
                time.sleep(draw.uniform(0, 2 * step))
            if len(done) == kills or nursery.over:
                ended = nursery.end()
                assert ended.code == 0, ended.err
                break
            nursery.kill()
            done.append(newest(folder / out))
    found = []
    for each in range(number):
        pairs = zip(runs(folder / "whole"), runs(folder / f"killed{each}"), strict=True)
        found += [line for pair in pairs for line in differences(*pair)]
    return done, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=RUNS)
    asked = parser.parse_args()
    draw, total, wrong = random.Random(asked.seed), 0, 0
    names = [asked.only] if asked.only else [*RUNS]
    with tempfile.TemporaryDirectory() as place:
        nursery = Nursery(Path(place))
        for number, name in enumerate(names):
            kills = asked.kills // len(names) + (number < asked.kills % len(names))
            folder = Path(place) / str(number)
            folder.mkdir()
            random_images(folder / "public.npz")
            try:
                done, found = disturbed(nursery, name, folder, kills, draw)
            except AssertionError as error:  # a command that failed
                done, found = [], [str(error)]
                nursery.clean()
            total, wrong = total + kills, wrong + bool(found)
            print(
                f"{name:28} {kills} kills, newest checkpoints {done}: {found[0] if found else 'same bits'}", flush=True
            )
        nursery.close()
    print(f"{total} kills over {len(names)} configurations: {wrong} with other bits")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
