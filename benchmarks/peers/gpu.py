"""Images a second of FedLens, pfl and a plain loop on one GPU, in turn: rounds of FedAvg on the three jobs of `bench`.

    python benchmarks/peers/gpu.py --pfl pfl-0.6.0-py3-none-any.whl --json gpu.json
    python benchmarks/peers/gpu.py --device cpu --quick

All have the images on the device, bfloat16 there, the same batches of the same sizes, SGD with momentum. The device is
waited for after every round; the median of the rounds after the first. `--pfl` is a folder or a wheel with pfl 0.6,
which is pure Python; without it that column is left out. Peers get images that are floats already. The ceiling is one
model, recorded, on batches of all clients' images together. `--compile`: compiled lanes as well. What fails is said,
and the others go on; rows that the JSON file has already are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import needed
from fedlens.algorithms import FedAvg
from fedlens.cli.bench import JOBS, SMALL, Work, parts
from fedlens.core.algorithm import Stage
from fedlens.core.cohort import Everyone
from fedlens.core.files import write_atomic
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import seeded
from fedlens.core.run import run
from fedlens.engines.lanes import Lanes
from fedlens.engines.process import matmuls, threads
from fedlens.engines.sequential import Sequential

RATE, MOMENTUM = 0.01, 0.9


class Laps:
    """The moment after every round, with the device idle."""

    def __init__(self, device: str):
        self.device, self.times = device, [time.perf_counter()]

    def __call__(self, *_: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def seconds(self) -> tuple[float, float]:
        """Of a round, and until the first was done."""
        spans = [after - before for before, after in zip(self.times[1:-1], self.times[2:], strict=True)]
        return statistics.median(spans), self.times[1] - self.times[0]


def fedlens(work: Work, device: str, rounds: int, compile: bool = False, kind: type = Lanes) -> Laps:
    precision, laps = "bf16" if device == "cuda" else "fp32", Laps(device)
    with threads(1), matmuls(precision):
        net, federation = parts(work, precision, device)
        net.compile = compile
        engine = kind(net, federation)
        plan = Stage(None, rounds, Everyone(), Sgd(RATE, momentum=MOMENTUM), steps=work.steps, size=work.batch)
        try:
            run(FedAvg(), net, engine, plan, observe=laps)
        finally:
            engine.close()
    return laps


def images(work: Work, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[clients, images, ...] on the device, as floats."""
    each = work.steps * work.batch
    x = torch.rand(work.clients, each, work.channels, work.size, work.size, device=device)
    return x, torch.randint(0, 10, (work.clients, each), device=device)


def module(work: Work) -> torch.nn.Module:
    with seeded(0):
        return work.model.build(10, work.channels, work.size)


def plain(work: Work, device: str, rounds: int) -> Laps:
    """What one writes without a framework: load, train, add up, client by client."""
    x, y = images(work, device)
    net = module(work).to(device).train()
    state = {name: leaf.clone() for name, leaf in net.state_dict().items()}
    laps = Laps(device)
    for _ in range(rounds):
        total = {name: torch.zeros_like(leaf, dtype=torch.float32) for name, leaf in state.items()}
        for client in range(work.clients):
            net.load_state_dict(state)
            optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=MOMENTUM)
            for rows in torch.randperm(work.steps * work.batch, device=device).split(work.batch):
                optimizer.zero_grad()
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    loss = F.cross_entropy(net(x[client][rows]), y[client][rows])
                loss.backward()
                optimizer.step()
            for name, leaf in net.state_dict().items():
                total[name] += leaf / work.clients
        state = {name: total[name].to(leaf.dtype) for name, leaf in state.items()}
        laps()
    return laps


def _stand_in() -> None:
    """Empty modules in place of those that pfl imports for what is not used here: accounting, trees, prefetching."""
    sys.modules.setdefault("multiprocess", multiprocessing)
    inside = {"dp_accounting": ("pld", "rdp"), "prv_accountant": (), "scipy": ("special", "stats")}
    for name, parts_of in inside.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:  # a second job finds them there
            sys.modules[name] = MagicMock()
            sys.modules |= {f"{name}.{part}": MagicMock() for part in parts_of}


def pfl(work: Work, device: str, rounds: int) -> Laps:
    os.environ["PFL_PYTORCH_DEVICE"] = device
    _stand_in()
    logging.disable(logging.WARNING)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module(work)

        def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
            self.train()
            return F.cross_entropy(self.net(x), y)

        @torch.no_grad()
        def metrics(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = True) -> dict[str, Any]:
            return {"examples": Weighted(len(y), 1)}

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            laps()
            return False, type(aggregate_metrics)()

    x, y = images(work, device)
    users = {i: Dataset(raw_data=[x[i], y[i]], user_id=i) for i in range(work.clients)}
    turn = (i % work.clients for i in range(10**9))
    net = Net()
    model = PyTorchModel(
        model=net,
        local_optimizer_create=lambda *a, **k: torch.optim.SGD(*a, momentum=MOMENTUM, **k),
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
        amp_dtype=torch.bfloat16 if device == "cuda" else None,
    )
    federated = FederatedDataset(users.__getitem__, lambda: next(turn))
    how = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=work.clients, val_cohort_size=0
    )
    laps = Laps(device)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # pfl prints a table every round
        FederatedAveraging().run(
            backend=SimulatedBackend(training_data=federated, val_data=None, postprocessors=[WeightByDatapoints()]),
            model=model,
            algorithm_params=how,
            model_train_params=NNTrainHyperParams(
                local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=RATE
            ),
            model_eval_params=NNEvalHyperParams(local_batch_size=work.batch),
            callbacks=[Clock()],
        )
    return laps


def rows(
    jobs: tuple[Work, ...], device: str, rounds: int, with_pfl: bool, compile: bool, known: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """One for each job and contestant, as soon as it is measured; `ratio` is FedLens's speed over its own."""
    speeds = {(row["job"], row["who"]): row["images_per_second"] for row in known}
    for work in jobs:
        contestants: dict[str, Callable[[], Laps]] = {"fedlens": lambda w=work: fedlens(w, device, 3 * rounds)}
        if compile:
            contestants["fedlens, compiled"] = lambda w=work: fedlens(w, device, 3 * rounds, compile=True)
        if with_pfl:
            contestants["pfl"] = lambda w=work: pfl(w, device, rounds)
        contestants["plain loop"] = lambda w=work: plain(w, device, rounds)
        contestants["ceiling"] = lambda w=work: fedlens(w.central, device, 3 * rounds)
        contestants["fedlens, one client after another"] = lambda w=work: fedlens(w, device, 3, kind=Sequential)
        ours = 0.0
        for name, measure in contestants.items():
            if (speed := speeds.get((work.name, name))) is not None:
                ours = max(ours, speed) if name in ("fedlens", "fedlens, compiled") else ours
                continue
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                round, first = measure().seconds()
            except Exception as error:  # of a peer, a compiler or a device: the other rows are worth having
                print(
                    f"{work.name:34} {name:34} FAILED: {type(error).__name__}: {error}".partition("\n")[0], flush=True
                )
                continue
            speed = work.images / round
            ours = max(ours, speed) if name in ("fedlens", "fedlens, compiled") else ours
            peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
            found = {"job": work.name, "who": name, "images_per_second": speed, "round_seconds": round}
            yield {**found, "first_round_seconds": first, "ratio": ours / speed, "peak_gib": peak}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--pfl", type=Path, help="a folder or a wheel with pfl 0.6")
    options.add_argument("--rounds", type=int, default=4, help="of a peer; FedLens has three times as many")
    options.add_argument("--compile", action="store_true", help="FedLens compiled, too")
    options.add_argument("--jobs", type=int, nargs="*", default=[1, 2, 3], choices=[1, 2, 3])
    options.add_argument("--quick", action="store_true", help="seconds: a look, no measurement")
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    needed.gpu(asked.device)
    if asked.pfl is not None:
        sys.path.insert(0, str(asked.pfl))
        needed.package("pfl", "pfl==0.6.0")
    jobs, rounds = (SMALL, 3) if asked.quick else (tuple(JOBS[at - 1] for at in asked.jobs), asked.rounds)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(name, torch.__version__, flush=True)
    found = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.is_file() else []
    for row in rows(jobs, asked.device, rounds, asked.pfl is not None, asked.compile, [*found]):
        found.append(row)
        speed, ratio, first = row["images_per_second"], row["ratio"], row["first_round_seconds"]
        peak = "" if row["peak_gib"] is None else f"  peak {row['peak_gib']:.1f} GiB"
        said = f"{speed:10,.0f} images/s  FedLens / it {ratio:6.2f}  first {first:.1f} s{peak}"
        print(f"{row['job']:34} {row['who']:34} {said}")
        sys.stdout.flush()
        if asked.json:
            write_atomic(
                asked.json, json.dumps({"device": name, "torch": torch.__version__, "rows": found}, indent=1).encode()
            )


if __name__ == "__main__":
    main()
