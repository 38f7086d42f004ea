"""Recorded lanes on a GPU: images a second over the number of lanes, the ceiling, and a long run with evaluation.

python benchmarks/lanes_speed.py [--long] [--small]
"""

import argparse
import json
import os
import time
from functools import partial

import torch

import needed
from fedlens.algorithms import FedAvg
from fedlens.cli.bench import JOBS, SMALL, Work, bench, parts, seconds
from fedlens.core.algorithm import Stage
from fedlens.core.cohort import Everyone
from fedlens.core.evaluate import total
from fedlens.core.optimizer import Sgd
from fedlens.core.run import run
from fedlens.engines.lanes import Lanes

PRECISION = {"cuda": "bf16", "cpu": "fp32"}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def lanes_of(work, count, device):
    net, federation = parts(work, PRECISION[device], device)
    return net, Lanes(net, federation, lanes=count)


def long_run(work: Work, rounds: int, device: str, every: int = 20) -> float:
    """Rounds of a job, a pooled test set of 10,000 images looked at now and then."""
    from dataclasses import replace

    net, federation = parts(work, PRECISION[device], device)
    extra = torch.arange(10_000, device=device) % len(federation.data)
    engine = Lanes(net, replace(federation, pool=extra))
    plan = Stage(None, rounds, Everyone(), Sgd(0.01, momentum=0.9), steps=work.steps, size=work.batch)

    def look(server, job, replies):
        if server.round % every == 0:
            float(total(engine.measure(server.state.model)).correct)

    began = time.perf_counter()
    run(FedAvg(), net, engine, plan, observe=look)
    wait(device)
    spent = time.perf_counter() - began
    engine.close()
    return spent


def profile(jobs: tuple[Work, ...], device: str) -> None:
    """Where the host spends its time."""
    import cProfile
    import pstats

    for work in jobs[:2]:
        watch = cProfile.Profile()
        net, federation = parts(work, PRECISION[device], device)
        engine = Lanes(net, federation)
        plan = Stage(None, 6, Everyone(), Sgd(0.01, momentum=0.9), steps=work.steps, size=work.batch)

        def look(server, job, replies, watch=watch):
            wait(device)
            watch.enable() if server.round == 2 else None

        run(FedAvg(), net, engine, plan, observe=look)
        watch.disable()
        engine.close()
        pstats.Stats(watch).sort_stats("tottime").print_stats(16)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--long", action="store_true")
    options.add_argument("--sweep", action="store_true")
    options.add_argument("--profile", action="store_true")
    options.add_argument("--small", action="store_true", help="seconds: a look, no measurement")
    options.add_argument("--device", default="cuda", choices=PRECISION)
    asked = options.parse_args()
    needed.gpu(device := asked.device)
    jobs, rounds = (SMALL, 20) if asked.small else (JOBS, 2000)
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU", torch.__version__, flush=True)
    rows = []
    for row in bench(jobs, PRECISION[device], device, 1):
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if asked.sweep:
        for work in jobs:
            for count in (4, 8, 16, 32, 64, 100):
                if count <= max(work.clients, 16):
                    best, first = seconds(work, partial(lanes_of, work, count, device), device, 3)
                    speed = f"{work.images / best:,.0f} images/s"
                    print(f"{work.name}: {count} lanes {speed}, first round {first:.1f} s", flush=True)
    if asked.profile:
        profile(jobs, device)
    if asked.long:
        work = jobs[:2][-1]  # ResNet18, stock stem
        print(f"{rounds:,} rounds with evaluation every 20: {long_run(work, rounds, device):.1f} s", flush=True)
    if out := os.environ.get("OUT"):
        with open(f"{out}/speed.json", "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
