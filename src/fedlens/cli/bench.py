"""Images per second of every engine on this machine, beside the ceiling: one model trained centrally on as many images.

Each job is one round of FedAvg, loading and aggregation included; engines are timed in turn, several rounds each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..algorithms import FedAvg
from ..core.algorithm import Stage
from ..core.batches import Dataset, Federation
from ..core.cohort import Everyone
from ..core.engine import Engine
from ..core.network import Network, Precision
from ..core.optimizer import Sgd
from ..core.rng import generator, key, seeded
from ..core.run import run
from ..data import Prepare
from ..engines.lanes import MOST, Lanes
from ..engines.sequential import Sequential
from ..engines.workers import Workers
from ..models import MODELS
from ..models.resnet import ResNet18

Make = Callable[[], tuple[Network, Engine]]


@dataclass(frozen=True)
class Work:
    """So many clients, each with so many steps of so many images."""

    name: str
    model: Any
    clients: int
    steps: int
    batch: int
    channels: int = 3
    size: int = 32

    @property
    def images(self) -> int:
        return self.clients * self.steps * self.batch

    @property
    def central(self) -> Work:
        return replace(self, clients=1, batch=self.clients * self.batch)


JOBS = (
    Work("small CNN, 100 clients", MODELS["cnn"](), 100, 20, 32),
    Work("ResNet18, stock stem, 10 clients", ResNet18(), 10, 10, 64),
    Work("ResNet18, 3x3 stem, 10 clients", ResNet18(stem="cifar"), 10, 10, 64),
)


ON_CPU = (  # in a minute or two instead of hours
    replace(JOBS[0], name="small CNN, 20 clients", clients=20, steps=4),
    replace(JOBS[1], name="ResNet18, stock stem, 4 clients", clients=4, steps=2, batch=32),
    replace(JOBS[2], name="ResNet18, 3x3 stem, 4 clients", clients=4, steps=1, batch=16),
)
SMALL = (replace(JOBS[0], name="small CNN, 4 clients", clients=4, steps=3, batch=8),)


def parts(work: Work, precision: Precision, device: str) -> tuple[Network, Federation]:
    """Random images: speed does not depend on what they show."""
    with seeded(key("bench")):
        net = Network(work.model.build(10, work.channels, work.size), precision)
    each = work.steps * work.batch
    draw, shape = generator(1), (work.clients * each, work.channels, work.size, work.size)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 10, (len(x),), generator=draw)
    half = (0.5,) * work.channels
    owned = {i: torch.arange(i * each, (i + 1) * each) for i in range(work.clients)}
    none = dict.fromkeys(owned, torch.empty(0, dtype=torch.long))
    federation = Federation(Dataset(x, y, Prepare(half, half, 0, False, torch.float32)), owned, none)
    return net.to(device), federation.to(device)


def seconds(work: Work, make: Make, device: str, repeats: int) -> tuple[float, float]:
    """(seconds of a round, seconds until the first was done). Rounds follow each other as in a run: the host may
    prepare the next while the device is still busy; the device is waited for after each of three series."""
    laps, began = [], time.perf_counter()

    def lap(server: Any, *_: Any) -> None:
        if server.round == 1 or (server.round - 1) % repeats == 0:
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            laps.append(time.perf_counter())

    net, engine = make()
    rounds = 1 + 3 * repeats
    plan = Stage(None, rounds, Everyone(), Sgd(0.01, momentum=0.9), steps=work.steps, size=work.batch)
    try:
        run(FedAvg(), net, engine, plan, observe=lap)
    finally:
        engine.close()
    series = [(after - before) / repeats for before, after in pairwise(laps)]
    return min(series), laps[0] - began


def engines(work: Work, precision: Precision, device: str, cores: int) -> dict[str, tuple[Work, Make]]:
    """Name -> what it is given to do, and how it is made."""

    def made(kind: type, work: Work, compile: bool = False) -> tuple[Network, Engine]:
        net, federation = parts(work, precision, device)
        net.compile = compile
        return net, kind(net, federation)

    def workers() -> tuple[Network, Engine]:
        net, _ = parts(work, precision, device)
        return net, Workers(partial(parts, work, precision, device), [work.steps * work.batch] * work.clients, cores)

    found: dict[str, tuple[Work, Make]] = {"sequential": (work, partial(made, Sequential, work))}
    if device == "cpu":
        found["workers"] = work, workers
        found["central"] = work.central, partial(made, Sequential, work.central)
    else:
        found["lanes"] = work, partial(made, Lanes, work)
        found["lanes, compiled"] = work, partial(made, Lanes, work, compile=True)
        found["central, eager"] = work.central, partial(made, Sequential, work.central)
        found["central"] = work.central, partial(made, Lanes, work.central)
    return found


def bench(
    jobs: tuple[Work, ...], precision: Precision, device: str, cores: int, repeats: int = 3
) -> Iterator[dict[str, Any]]:
    """One row for each job and engine, as soon as a job is done."""
    for work in jobs:
        rows = []
        for name, (given, make) in engines(work, precision, device, cores).items():
            if device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            best, first = seconds(given, make, device, repeats)
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else None
            side_by_side = min(given.clients, MOST) if name.startswith("lanes") else 1
            rows.append(
                {
                    "job": work.name,
                    "engine": name,
                    "images_per_second": work.images / best,
                    "round_seconds": best,
                    "first_round_seconds": first,
                    "peak_gib": peak,
                    "lane_mib": peak and 1024 * peak / side_by_side,  # images and all that lanes share counted in
                }
            )
        base = {row["engine"]: row["images_per_second"] for row in rows}
        for row in rows:
            speed = row["images_per_second"]
            yield {**row, "over_sequential": speed / base["sequential"], "over_central": speed / base["central"]}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of images per second, a panel for each job."""
    from ..plots.style import COLOURS, pyplot, save

    jobs = list(dict.fromkeys(row["job"] for row in rows))
    figure, axes = pyplot().subplots(1, len(jobs), figsize=(4.2 * len(jobs), 2.6), squeeze=False)
    for job, axis in zip(jobs, axes[0], strict=True):
        some = [row for row in rows if row["job"] == job]
        colours = [COLOURS[6] if row["engine"].startswith("central") else COLOURS[0] for row in some]
        names = [row["engine"] for row in some]
        axis.barh(names, [row["images_per_second"] for row in some], color=colours, height=0.6)
        for place, row in enumerate(some):
            axis.text(row["images_per_second"], place, f" {row['images_per_second']:,.0f}", va="center", fontsize=8)
        axis.set_title(job, fontsize=9)
        axis.set_xlabel("images per second")
        axis.margins(x=0.25)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
    figure.tight_layout()
    save(figure, path)
