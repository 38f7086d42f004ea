"""The jobs that FedLens, a tight loop and pfl are timed on: FedAvg with a small CNN (J1), and with ResNet-20.

`python job.py FOLDER [JOB]` writes one as arrays and its network as a file; split, cohorts and network are FedLens's
own, so that all do the same work. Nothing of FedLens is needed to read it.
"""

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    words: str  # what is trained, as FedLens is told
    last: int  # the last round that is timed; the first is not
    batch: int
    steps: int | None = None  # of a client in a round; None: one epoch
    look_every: int = 10**6  # rounds
    mean: tuple[float, ...] = (0.286,)  # by which the others scale pixels
    std: tuple[float, ...] = (0.353,)
    rate: float = 0.01
    momentum: float = 0.9

    @property
    def settings(self):
        """One round more than is timed: FedLens evaluates after the last."""
        local = f"local.batch_size={self.batch} local.lr={self.rate} local.momentum={self.momentum} "
        local += f"local.steps={self.steps} " if self.steps else ""
        watching = f"evaluate.every={self.look_every} evaluate.personal=none checkpoint=0 picture=false "
        rounds = f"rounds={self.last + 1} engine=workers workers=2"
        return f"{self.words} {local}{watching}{rounds}".split()


JOBS = {
    "cnn": Job(
        "data=fashion_mnist partition=dirichlet partition.alpha=0.1 partition.min_size=40 clients=100 cohort=10 "
        "model=cnn_small",
        last=6,
        batch=32,
        look_every=5,
    ),
    "resnet20": Job(
        "data=cifar10 partition=iid clients=100 cohort=4 model=resnet20",
        last=4,
        batch=32,
        steps=5,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
    ),
}
SMALL = [
    "data=mnist5k",
    "clients=20",
    "cohort=2",
    "partition=dirichlet",
    "partition.min_size=10",
]  # a look, no measurement


def read(folder):
    """(the job, what `write` left: images, labels, who owns what, who takes part)"""
    import numpy as np

    with np.load(Path(folder) / "job.npz") as stored:
        found = dict(stored)
    ends, taking_part = found["sizes"].cumsum(), {*found["cohorts"].flatten().tolist()}
    found["owned"] = {i: found["index"][ends[i] - found["sizes"][i] : ends[i]] for i in sorted(taking_part)}
    return JOBS[Path(folder).name], found


def scaled(job, x):
    """Images as numbers; grey ones where the job's are in colour, as in a look at the small data."""
    import numpy as np

    mean, std = (np.array(values[: x.shape[1]], "float32").reshape(1, -1, 1, 1) for values in (job.mean, job.std))
    return (x.astype("float32") / 255 - mean) / std


def network(folder):
    """The job's network, of torch alone."""
    import torch

    torch.manual_seed(0)
    found = {}
    exec((Path(folder) / "network.py").read_text(), found)
    return found["build"]()


def say(event, **more):
    """A line with the time, and the processor's seconds so far, for `compare.py`."""
    times = {"time": time.time(), "cpu": cpu_seconds(int(os.environ["PEERS_ROOT"]))}
    with open(os.environ["PEERS_LOG"], "a") as log:
        log.write(json.dumps({"event": event, **times, **more}) + "\n")


def cpu_seconds(root):
    """What all processes under this one have used; None where there is no /proc to read it from."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = int(words[1]), int(words[11]) + int(words[12])
    below = {root}
    while more := {pid for pid, (parent, _) in found.items() if parent in below} - below:
        below |= more
    ticks = sum(found[pid][1] for pid in below - {root} if pid in found)
    return ticks / os.sysconf("SC_CLK_TCK") if found else None


def linger():
    """Long enough after the last timed round for `compare.py` to look at the memory."""
    time.sleep(0.6)


def write(folder, more=()):
    import numpy as np

    from fedlens import config
    from fedlens.core.rng import key

    job = JOBS[Path(folder).name]
    experiment = config.read(words=[*job.settings, *more])
    images = experiment.data.load()
    federation, _ = experiment.federation(images)
    owned = [federation.train[client].numpy() for client in range(experiment.clients)]
    cohorts = [experiment.cohort(experiment.clients, key(experiment.seed, "cohort", r)) for r in range(job.last)]
    sizes = np.array([len(index) for index in owned])
    x, y = images.x.numpy(), images.y.numpy()
    Path(folder).mkdir(parents=True, exist_ok=True)
    test = images.test.numpy()
    (Path(folder) / "network.py").write_text(experiment.model.source(len(images.classes), *x.shape[1:3]))
    np.savez(
        Path(folder) / "job.npz",
        **dict(x=x, y=y, test_x=x[test], test_y=y[test]),
        **dict(index=np.concatenate(owned), sizes=sizes, cohorts=np.array(cohorts)),
    )
    print(f"clients of {sizes.min()} to {sizes.max()} images; {sizes[np.array(cohorts)].sum(1).tolist()} a round")


if __name__ == "__main__":
    write(Path(sys.argv[1]) / (sys.argv[2] if len(sys.argv) > 2 else "cnn"))
