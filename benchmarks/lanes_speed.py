"""Recorded lanes on a GPU: images a second over the number of lanes, the ceiling, and a long run with evaluation.

python benchmarks/lanes_speed.py [--long]
"""

import argparse
import json
import os
import time
from functools import partial

import torch

from fedlens.algorithms import FedAvg
from fedlens.bench import JOBS, bench, parts, seconds
from fedlens.core.algorithm import Stage
from fedlens.core.cohort import Everyone
from fedlens.core.evaluate import total
from fedlens.core.optimizer import Sgd
from fedlens.core.run import run
from fedlens.engines.lanes import Lanes


def lanes_of(work, count):
    net, federation = parts(work, "bf16", "cuda")
    return net, Lanes(net, federation, lanes=count)


def long_run(rounds: int, every: int = 20) -> float:
    """Rounds of the ResNet18 job, the pooled test set of 10,000 images looked at now and then."""
    from dataclasses import replace

    work = JOBS[1]
    net, federation = parts(work, "bf16", "cuda")
    extra = torch.arange(10_000, device="cuda") % len(federation.data)
    engine = Lanes(net, replace(federation, pool=extra))
    plan = Stage(None, rounds, Everyone(), Sgd(0.01, momentum=0.9), steps=work.steps, size=work.batch)

    def look(server, job, replies):
        if server.round % every == 0:
            float(total(engine.measure(server.state.model)).correct)

    began = time.perf_counter()
    run(FedAvg(), net, engine, plan, observe=look)
    torch.cuda.synchronize()
    spent = time.perf_counter() - began
    engine.close()
    return spent


def profile() -> None:
    """Where the host spends its time."""
    import cProfile
    import pstats

    for work in JOBS[:2]:
        watch = cProfile.Profile()
        net, federation = parts(work, "bf16", "cuda")
        engine = Lanes(net, federation)
        plan = Stage(None, 6, Everyone(), Sgd(0.01, momentum=0.9), steps=work.steps, size=work.batch)

        def look(server, job, replies, watch=watch):
            torch.cuda.synchronize()
            watch.enable() if server.round == 2 else None

        run(FedAvg(), net, engine, plan, observe=look)
        watch.disable()
        engine.close()
        pstats.Stats(watch).sort_stats("tottime").print_stats(16)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--long", action="store_true")
    options.add_argument("--sweep", action="store_true")
    options.add_argument("--profile", action="store_true")
    asked = options.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    rows = []
    for row in bench(JOBS, "bf16", "cuda", 1):
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if asked.sweep:
        for work in JOBS:
            for count in (4, 8, 16, 32, 64, 100):
                if count <= max(work.clients, 16):
                    best, first = seconds(work, partial(lanes_of, work, count), "cuda", 3)
                    speed = f"{work.images / best:,.0f} images/s"
                    print(f"{work.name}: {count} lanes {speed}, first round {first:.1f} s", flush=True)
    if asked.profile:
        profile()
    if asked.long:
        print(f"2,000 rounds with evaluation every 20: {long_run(2000):.1f} s", flush=True)
    if out := os.environ.get("OUT"):
        with open(f"{out}/speed.json", "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
