"""Images on the GPU against images on the host, in one run: the same bits, and at what speed.

    python benchmarks/residency.py [--device cuda] [--images 20000] [--side 64] [--rounds 5]

Synthetic photographs lie in a mapped file, as a decoded data set does. `lanes` records steps and fetches the next ones
while it computes; `sequential` fetches batch by batch. Seconds are of the rounds after the first.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import needed
from fedlens.algorithms import FedAvg
from fedlens.core.algorithm import Stage
from fedlens.core.batches import Dataset, Federation
from fedlens.core.cohort import Everyone
from fedlens.core.evaluate import total
from fedlens.core.network import Network
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import numpy_generator, seeded
from fedlens.core.run import run
from fedlens.data.prepare import Prepare
from fedlens.engines.lanes import Lanes
from fedlens.engines.sequential import Sequential
from fedlens.models import MODELS

CLIENTS, CLASSES = 16, 10


def photographs(folder: Path, count: int, side: int) -> Federation:
    draw = numpy_generator(0)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, 3, side, side))
    for start in range(0, count, 1000):
        x[start : start + 1000] = draw.integers(0, 256, x[start : start + 1000].shape, np.uint8)
    y = torch.from_numpy(draw.integers(0, CLASSES, count))
    order = torch.from_numpy(draw.permutation(count))
    test, train = order[: count // 5], order[count // 5 :]
    shards = dict(enumerate(train.chunk(CLIENTS)))
    data = Dataset(torch.from_numpy(x), y, Prepare((0.5,) * 3, (0.25,) * 3, flip=True))
    return Federation(data, shards, dict(enumerate(test.chunk(CLIENTS))), test)


def timed(engine, net: Network, plan: Stage, device: str) -> dict:
    """Seconds of a round and of an evaluation, with what came out."""
    moments = []

    def look(server, job, replies) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        moments.append(time.perf_counter())

    state = run(FedAvg(), net, engine, plan, observe=look).state
    began = time.perf_counter()
    score = total(engine.measure(state.model))
    loss = float(score.loss)
    evaluated = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**20 if device != "cpu" else float("nan")
    engine.close()
    return {"round": (moments[-1] - moments[0]) / (len(moments) - 1), "evaluation": evaluated, "peak": peak} | {
        "state": state.map(lambda leaf: leaf.cpu()),
        "loss": loss,
    }


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--device", default="cuda")
    words.add_argument("--model", default="resnet18", choices=sorted(MODELS))
    for name, default in (("images", 20_000), ("side", 64), ("rounds", 5), ("lanes", 4), ("size", 64)):
        words.add_argument(f"--{name}", type=int, default=default)
    asked = words.parse_args()
    needed.gpu(asked.device)
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True  # so that two runs of the same kernels can be compared bit by bit
    plan = Stage(None, asked.rounds, Everyone(), Sgd(0.01, momentum=0.9), size=asked.size)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        federation = photographs(Path(folder), asked.images, asked.side)
        name = torch.cuda.get_device_name() if asked.device != "cpu" else "CPU"
        print(f"{name}, torch {torch.__version__}, {asked.model}, {federation.data.x.nbytes / 2**20:.0f} MiB of images")
        print(f"{'engine':12s}{'images':10s}{'s/round':>10s}{'images/s':>10s}{'eval s':>9s}{'peak MiB':>10s}  bits")
        for kind in ("sequential", "lanes"):
            before = None
            for place in ("device", "host"):
                with seeded(0):
                    module = MODELS[asked.model]().build(CLASSES, 3, asked.side)
                net = Network(module, "bf16" if asked.device != "cpu" else "fp32").to(asked.device)
                data = (federation.on_host() if place == "host" else federation).to(asked.device)
                if asked.device != "cpu":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                engine = Sequential(net, data) if kind == "sequential" else Lanes(net, data, lanes=asked.lanes)
                found = timed(engine, net, plan, asked.device)
                alike = before is None or (
                    found["loss"] == before["loss"]
                    and all(map(torch.equal, found["state"].leaves(), before["state"].leaves(found["state"])))
                )
                wrong += not alike
                verdict = "" if before is None else "the same" if alike else "DIFFER"
                speed = sum(map(len, federation.train.values())) / found["round"]
                numbers = f"{found['round']:10.3f}{speed:10.0f}{found['evaluation']:9.3f}{found['peak']:10.0f}"
                print(f"{kind:12s}{place:10s}{numbers}  {verdict}", flush=True)
                before = found
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
