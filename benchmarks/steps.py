"""Kernels and milliseconds of a local step, method by method, and what FedXDS's exchange costs beside an epoch.

    python benchmarks/steps.py --json steps.json           # on a GPU: about a minute, compiled ones another
    python benchmarks/steps.py --precision tf32            # without the casts of bfloat16
    python benchmarks/steps.py --device cpu --quick

Kernels and device milliseconds are those of one client alone, counted by the profiler in recorded steps. On a CPU the
operations of a step that would launch something are counted in place of kernels. Milliseconds side by side are those of
a step of all clients in lanes, divided by their number: what a run takes. The last column is the ratio to the method
that it is compared with: PSE to FedRep's mix of steps, SPATL to FedAvg. What fails is said, and the others go on; rows
that the JSON file has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import needed
from fedlens.algorithms import PSE, SPATL, FedAvg, FedRep, FedXDS
from fedlens.cli.bench import Work, parts
from fedlens.core.algorithm import Recipe, Stage
from fedlens.core.cohort import Everyone
from fedlens.core.files import write_atomic
from fedlens.core.ledger import Ledger
from fedlens.core.network import Precision
from fedlens.core.optimizer import Sgd
from fedlens.core.run import run
from fedlens.engines.lanes import Lane, Lanes
from fedlens.engines.process import matmuls, threads
from fedlens.models import MODELS
from fedlens.runs.checkpoints import Checkpoint
from fedlens.runs.folder import RunFolder

PSE_WORK = Work("pse_net, batch 10", MODELS["pse_net"](), 20, 50, 10)
SPATL_WORK = Work("resnet20, batch 64", MODELS["resnet20"](), 10, 20, 64)
SHARED = Work("resnet8, 50,000 images", MODELS["resnet8"](), 10, 78, 64)
PRECISION: dict[str, Precision] = {"cuda": "bf16", "cpu": "fp32"}
METHODS: tuple[tuple[Work, dict[str, Recipe]], ...] = (
    (
        PSE_WORK,
        {
            "fedrep": FedRep(private="classifier", head_epochs=1),
            "pse": PSE(),
            "pse, no excitation": PSE(excite="none"),
        },
    ),
    (SPATL_WORK, {"fedavg": FedAvg(), "spatl": SPATL(selector="all"), "spatl, uniform": SPATL(selector="uniform")}),
)


def plan_of(work: Work, rounds: int) -> Stage:
    """Two epochs: FedRep needs one for the head and one for the body."""
    return Stage(None, rounds, Everyone(), Sgd(0.01, momentum=0.5), epochs=2, size=work.batch)


def engine_of(work: Work, device: str, compile: bool) -> Lanes:
    net, federation = parts(work, PRECISION[device], device)
    net.compile = compile
    return Lanes(net, federation)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Launches(TorchDispatchMode):
    """Counts operations that would launch a kernel: not views, nor what only asks for memory."""

    QUIET = frozenset(
        {"detach", "alias", "lift_fresh", "promote_types", "is_same_size", "_unsafe_view", "_reshape_alias"}
    )

    def __init__(self):
        super().__init__()
        self.count, self.began = 0, time.thread_time()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not (is_view or name in self.QUIET or "empty" in name)
        return func(*args, **(kwargs or {}))


def operations(work: Work, recipe: Recipe) -> dict[str, float]:
    """Of a step of one client on a CPU, the mean over the kinds of steps."""
    engine, found, step = engine_of(work, "cpu", False), [], Lane._step

    def watched(lane: Lane, phase: str, size: int | None = None) -> None:
        with Launches() as seen:
            step(lane, phase, size)
        found.append((seen.count, 1000 * (time.thread_time() - seen.began)))

    try:
        with mock.patch.object(Lane, "_step", watched):
            run(recipe, engine.net, engine, plan_of(work, 1))
    finally:
        engine.close()
    count, ms = (sum(column) / len(found) for column in zip(*found, strict=True))
    return {"kernels": count, "device_ms": ms}


def counted(work: Work, recipe: Recipe, device: str, compile: bool) -> dict[str, float]:
    """Kernels of a step of one client, and their milliseconds on the device; operations on a CPU."""
    alone = replace(work, clients=1)
    if device != "cuda":
        return operations(alone, recipe)
    engine = engine_of(alone, device, compile)
    seen = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def look(server: Any, *_: Any) -> None:
        wait(device)
        seen.start() if server.round == 2 else seen.stop() if server.round == 3 else None

    try:
        run(recipe, engine.net, engine, plan_of(alone, 3), observe=look)
    finally:
        engine.close()
    steps = 2 * work.steps
    kernels = [event for event in seen.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"kernels": len(kernels) / steps, "device_ms": sum(e.device_time for e in kernels) / 1000 / steps}


def timed(work: Work, recipe: Recipe, device: str, compile: bool, repeats: int) -> dict[str, float]:
    engine, laps, began = engine_of(work, device, compile), [], time.perf_counter()

    def lap(server: Any, *_: Any) -> None:
        if (server.round - 1) % repeats == 0:
            wait(device)
            laps.append(time.perf_counter())

    try:
        run(recipe, engine.net, engine, plan_of(work, 1 + 3 * repeats), observe=lap)
    finally:
        engine.close()
    best = min(after - before for before, after in pairwise(laps)) / repeats
    return {"step_ms": 1000 * best / (2 * work.steps * work.clients), "first_round_seconds": laps[0] - began}


def steps(device: str, quick: bool, compile: bool, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    there = {(row["job"], row["method"], row["compiled"]): row["step_ms"] for row in known}
    for work, methods in METHODS:
        work = replace(work, clients=2, steps=2, batch=4) if quick else work
        usual = 0.0
        for name, recipe in [*methods.items()][: 2 if quick else None]:
            if (before := there.get((work.name, name, compile))) is not None:
                usual = usual or before
                continue
            try:
                row = timed(work, recipe, device, compile, 1 if quick else 2)
                usual = usual or row["step_ms"]
                row |= {"ratio": row["step_ms"] / usual, **counted(work, recipe, device, compile)}
            except Exception as error:  # of a compiler or a device
                print(
                    f"{work.name:20} {name:28} FAILED: {type(error).__name__}: {error}".partition("\n")[0], flush=True
                )
                continue
            yield {"job": work.name, "method": name, "compiled": compile, **row}


def exchange(device: str, quick: bool) -> dict[str, Any]:
    """FedXDS: seconds of a warm-up epoch, of the exchange, and of booking and saving what is shared."""
    work = replace(SHARED, clients=2, steps=2, batch=4) if quick else SHARED
    engine, laps, kept = engine_of(work, device, False), [time.perf_counter()], []

    def lap(server: Any, job: Any, replies: Any) -> None:
        wait(device)
        laps.append(time.perf_counter())
        kept.append((server, job, replies))

    recipe = FedXDS(warmup_rounds=3, warmup_epochs=1)
    plan = Stage(None, 2, Everyone(), Sgd(0.01), epochs=1, size=work.batch)
    try:
        run(recipe, engine.net, engine, plan, observe=lap)
    finally:
        engine.close()
    spans = [after - before for before, after in pairwise(laps)]
    began, ledger = time.perf_counter(), Ledger()
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(place)
        folder.unsynced.durable = False
        folder.unsynced.mkdir(folder.checkpoints)
        server = kept[3][0]
        folder.save(Checkpoint(4, server.state, ledger, 0.0))
        saved = time.perf_counter()
        ledger.book(kept[4][1], [*range(work.clients)], kept[4][2], round=5)
    return {
        "epoch_seconds": spans[2],
        "exchange_seconds": spans[3],
        "exchange_epochs": spans[3] / spans[2],
        "shared_bytes": server.state.shared.nbytes,
        "save_seconds": saved - began,
        "book_seconds": time.perf_counter() - saved,
        "training_round_seconds": spans[5],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--compile", action="store_true", help="every method compiled, too")
    options.add_argument("--quick", action="store_true", help="seconds: a look, no measurement")
    options.add_argument("--precision", choices=["bf16", "tf32", "fp32"], default="bf16", help="on a GPU")
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    PRECISION["cuda"] = asked.precision
    needed.gpu(device := asked.device)
    found: dict[str, Any] = {"torch": torch.__version__, "steps": [], "exchange": None}
    if asked.json and asked.json.is_file():
        found |= json.loads(asked.json.read_text())

    def keep() -> None:
        if asked.json:
            write_atomic(asked.json, json.dumps(found, indent=1).encode())

    with threads(1), matmuls(PRECISION[device]):
        for compile in (False, True) if asked.compile else (False,):
            for row in steps(device, asked.quick, compile, [*found["steps"]]):
                found["steps"].append(row)
                keep()
                how = ", compiled" * compile
                numbers = f"{row['kernels']:7.0f} kernels {row['device_ms']:8.3f} ms alone {row['step_ms']:8.4f} ms"
                print(
                    f"{row['job']:20} {row['method'] + how:28} {numbers} side by side  x{row['ratio']:.2f}", flush=True
                )
            if not compile and found["exchange"] is None:
                found["exchange"] = exchange(device, asked.quick)
                keep()
                print({name: round(value, 3) for name, value in found["exchange"].items()}, flush=True)


if __name__ == "__main__":
    main()
