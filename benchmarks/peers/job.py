"""The job that FedLens, a tight loop and pfl are timed on: FedAvg on Fashion-MNIST, 100 clients, ten a round.

`python job.py FOLDER` writes it once as arrays; split and cohorts are FedLens's own, so that all do the same work.
"""

import json
import os
import sys
import time
from pathlib import Path

ROUNDS, LAST_TIMED, BATCH, RATE, MOMENTUM, LOOK_EVERY = 7, 6, 32, 0.01, 0.9, 5
WORDS = (
    "data=fashion_mnist partition=dirichlet partition.alpha=0.1 partition.min_size=40 clients=100 cohort=10 "
    f"model=cnn_small rounds={ROUNDS} local.batch_size={BATCH} local.lr={RATE} local.momentum={MOMENTUM} "
    f"evaluate.every={LOOK_EVERY} evaluate.personal=none checkpoint=0 picture=false engine=workers workers=2"
).split()
SMALL = ["data=mnist5k", "clients=20", "cohort=2", "partition.min_size=10"]  # a look, no measurement


def arrays(folder):
    """What `write` left: images, labels, who owns what, who takes part."""
    import numpy as np

    with np.load(Path(folder) / "j1.npz") as stored:
        found = dict(stored)
    ends = found["sizes"].cumsum()
    found["owned"] = [found["index"][end - size : end] for end, size in zip(ends, found["sizes"], strict=True)]
    return found


def scaled(x):
    return (x.astype("float32") / 255 - 0.286) / 0.353


def network():
    import torch
    from torch import nn

    torch.manual_seed(0)
    features = nn.Sequential(
        *(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU()),
    )
    return nn.Sequential(features, nn.Linear(512, 10))


def say(event, **more):
    """A line with the time, for `compare.py`."""
    with open(os.environ["J1_LOG"], "a") as log:
        log.write(json.dumps({"event": event, "time": time.time(), **more}) + "\n")


def write(folder, more=()):
    import numpy as np

    from fedlens import config
    from fedlens.core.rng import key

    experiment = config.read(words=[*WORDS, *more])
    images = experiment.data.load()
    federation, _ = experiment.federation(images)
    owned = [federation.train[client].numpy() for client in range(experiment.clients)]
    cohorts = [experiment.cohort(experiment.clients, key(experiment.seed, "cohort", r)) for r in range(ROUNDS)]
    sizes = np.array([len(index) for index in owned])
    x, y = images.x.numpy(), images.y.numpy()
    Path(folder).mkdir(parents=True, exist_ok=True)
    test = images.test.numpy()
    np.savez(
        Path(folder) / "j1.npz",
        **dict(x=x, y=y, test_x=x[test], test_y=y[test]),
        **dict(index=np.concatenate(owned), sizes=sizes, cohorts=np.array(cohorts)),
    )
    print(f"clients of {sizes.min()} to {sizes.max()} images; {sizes[np.array(cohorts)].sum(1).tolist()} a round")


if __name__ == "__main__":
    write(sys.argv[1])
