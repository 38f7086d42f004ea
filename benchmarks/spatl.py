"""What SPATL costs and saves: sub-models against the whole network, the search against local training, bytes a round.

    python benchmarks/spatl.py                                   # on the GPU where there is one
    python benchmarks/spatl.py --device cpu --models resnet20 vgg11 --images 500 --epochs 1

Latency: the fastest of the repeats, all networks in turn, each the same kind of traced module, channels side by side.
Sub-models are chosen by norm (uniform ratio, global) and meet the budget; weights are those of the first moment, which
do not matter for time. Search: one client's finish with the agent's first search (30 episodes) and a later one (5)
beside its local training, with the defaults and with `spatl/smaller`, at clients of several sizes. Masks: 20 sub-models
judged one after another, and all at once under vmap. Bytes: one client's messages in one round, as the ledger counts
them (values and header).

One thread of a busy x86 CPU, torch 2.13.0, 32 images of 32 px, times the whole network; two runs differed by 0.1:
  ResNet-20 (29 ms)   0.96 with 80 % of the operations, 0.67 (by norm) and 0.77 (uniform) with 50 %
  VGG-11 (117 ms)     0.61 to 0.78 with 80 %, 0.44 to 0.47 with 50 %
  the search of a client with 500 images, ResNet-20: first 1.2 s, later 0.2 s; one epoch of its training 2.5 s
  with spatl/smaller: first 2.3 s, later 2.1 s; with 64 images 0.6 s and 0.3 s (defaults 0.5 and 0.1), an epoch 0.3 s
  20 masks on 50 images: one after another 1.0 s, all at once under vmap 3.4 s
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.func import functional_call, vmap

from fedlens.algorithms import SPATL, FedAvg, Scaffold
from fedlens.algorithms.spatl import accuracies
from fedlens.core.algorithm import Stage
from fedlens.core.batches import Dataset, Federation, Shard
from fedlens.core.cohort import Everyone
from fedlens.core.ledger import Ledger
from fedlens.core.network import Network
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import generator, seeded
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.models import model_named
from fedlens.selection.graph import layer_graph
from fedlens.selection.pruning import Choice, Costs, masked, ranked, sliced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", default=["resnet20", "resnet32", "resnet18", "vgg11", "cnn2"])
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.8, 0.5])
    parser.add_argument("--batch", type=int, default=0, help="images a pass; 512 on a GPU, 32 on a CPU")
    parser.add_argument("--repeats", type=int, default=0, help="50 on a GPU, 9 on a CPU")
    parser.add_argument("--search", nargs="*", default=["resnet20"], help="models whose search is timed")
    parser.add_argument("--images", nargs="*", type=int, default=[500], help="of the clients that search")
    parser.add_argument("--epochs", type=int, default=1, help="of its local training")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = asked.device.startswith("cuda")
    batch, repeats = asked.batch or (512 if on_gpu else 32), asked.repeats or (50 if on_gpu else 9)
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU, 1 thread"
    print(json.dumps({"machine": machine, "torch": torch.__version__, "batch": batch, "repeats": repeats}))
    for model in asked.models:
        for row in latencies(model, asked.budgets, batch, repeats, asked.device):
            print(json.dumps(row), flush=True)
    for model in asked.search:
        for images, preset in itertools.product(asked.images, PRESETS):
            print(json.dumps(search_cost(model, images, asked.epochs, asked.device, preset)), flush=True)
        print(json.dumps(mask_cost(model, max(asked.images), asked.device)), flush=True)
        for row in traffic(model, asked.device):
            print(json.dumps(row), flush=True)


def built(model: str, device: str) -> Network:
    with seeded(0):
        return Network(model_named(model).build(10, 3, 32)).to(device)


def chosen(net: Network, weights: Tree, image: torch.Tensor, budget: float) -> Choice:
    layers = layer_graph(net).layers
    return Choice(Costs.of(net, image), layers, ranked(layers, weights), "flops", budget)


def latencies(model: str, budgets: list[float], batch: int, repeats: int, device: str) -> list[dict[str, Any]]:
    net = built(model, device)
    weights = net.initial_weights()
    x = torch.randn(batch, 3, 32, 32, generator=generator(1)).to(device, memory_format=torch.channels_last)
    whole = sliced(net, weights, {})
    jobs, facts = {"dense": predicting(whole, x)}, {}
    for budget in budgets:
        choice = chosen(net, weights, x[:1], budget)
        for how, kept in (("uniform", choice.uniform()), ("l2_global", choice.by_norm(weights))):
            jobs[f"{how} {budget:g}"] = predicting(sliced(net, weights, kept), x)
            jobs[f"{how} {budget:g} align 8"] = predicting(sliced(net, weights, kept, 8), x)
            costs = choice.costs
            facts[f"{how} {budget:g} align 8"] = {}
            facts[f"{how} {budget:g}"] = {
                "flops": round(costs.size("flops", kept), 3),
                "parameters": round(costs.parameters(kept) / costs.parameters({}), 3),
                "sent": round(costs.size("params", kept), 3),
            }
    seconds = fastest(jobs, repeats, device)
    dense = seconds.pop("dense")
    rows = [{"model": model, "sub-model": "dense", "ms": round(1000 * dense, 3)}]
    for name, taken in seconds.items():
        shown = {"ms": round(1000 * taken, 3), "latency": round(taken / dense, 3)}
        rows.append({"model": model, "sub-model": name, **facts[name], **shown})
    return rows


def predicting(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    module = module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    half = x.is_cuda  # as training does there

    def job() -> object:
        with torch.inference_mode(), torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            return module(x)

    return job


def fastest(jobs: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """All jobs in turn, so that a busy machine slows all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 2):
        for name, job in jobs.items():
            seconds[name].append(timed(job, device)) if repeat > 1 else job()
    return {name: min(taken) for name, taken in seconds.items()}


def timed(job: Callable[[], object], device: str) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    begin = time.perf_counter()
    job()
    wait()
    return time.perf_counter() - begin


def federation(images: int, device: str) -> Federation:
    x = torch.randn(images + 20, 3, 32, 32, generator=generator(2))
    y = torch.arange(images + 20) % 10
    train, test = torch.arange(images), torch.arange(images, images + 20)
    return Federation(Dataset(x, y), {0: train}, {0: test}, test).to(device)


STAGE = Stage(None, 2, Everyone(), Sgd(0.005, momentum=0.9), size=64)


PRESETS = ("paper", "smaller")


def search_cost(model: str, images: int, epochs: int, device: str, preset: str) -> dict[str, Any]:
    """Seconds of two rounds of one client: local training, and all that follows it."""
    net = built(model, device)
    spent: dict[str, list[float]] = {"training": [], "search": []}

    class Watched(Sequential):
        def local_training(self, *arguments):
            kept: list[Tree] = []
            spent["training"].append(
                timed(lambda: kept.append(super(Watched, self).local_training(*arguments)), device)
            )
            return kept[0]

        def conclude(self, *arguments):
            kept: list[Any] = []
            spent["search"].append(timed(lambda: kept.append(super(Watched, self).conclude(*arguments)), device))
            return kept[0]

    engine = Watched(net, federation(images, device))
    run(SPATL(**SPATL.presets[preset]), net, engine, replace(STAGE, epochs=epochs, rounds=3))
    first, *later = spent["search"]
    return {
        "model": model,
        "preset": preset,
        "images": images,
        "epochs": epochs,
        "training s": round(min(spent["training"]), 3),
        "first search s": round(first, 3),
        "later searches s": round(min(later), 3),
    }


def mask_cost(model: str, images: int, device: str) -> dict[str, Any]:
    """20 sub-models on a tenth of the images: in a loop, and in one pass over stacked weights."""
    net = built(model, device)
    weights, data = net.initial_weights(), federation(images, device)
    part = Shard(data.data, data.train[0][: images // 10])
    graph = layer_graph(net)
    orders = ranked(graph.layers, weights)
    choice = Choice(Costs.of(net, part.x[:1]), graph.layers, orders)
    draw = generator(3)
    tried = [choice.kept((0.5 + 0.5 * torch.rand(len(orders), generator=draw)).tolist()) for _ in range(20)]

    def at_once() -> object:
        smaller = [masked(weights, kept, graph) for kept in tried]
        stacked = {n: torch.stack([w.params[n] for w in smaller]) for n in weights.params}
        net.module.eval()
        with torch.no_grad():
            passed = vmap(lambda p: functional_call(net.module, {**p, **weights.buffers}, (part.x,)))(stacked)
        return (passed.argmax(-1) == part.y).sum(1).tolist()

    jobs = {"loop": lambda: accuracies(net, weights, tried, part), "vmap": at_once}
    taken = fastest(jobs, 3, device)
    return {"model": model, "masks": 20, "images": len(part), **{f"{n} s": round(s, 4) for n, s in taken.items()}}


def traffic(model: str, device: str) -> list[dict[str, Any]]:
    """Bytes of one client in one round."""
    methods = {
        "fedavg": FedAvg(),
        "scaffold": Scaffold(),
        "spatl, uniform, dense controls": SPATL(selector="uniform"),
        "spatl, uniform, salient controls": SPATL(selector="uniform", control_upload="salient"),
        "spatl, norms, salient controls": SPATL(selector="l2_global", control_upload="salient"),
        "spatl, agent, salient controls": SPATL(control_upload="salient"),
        "spatl, agent, no controls": SPATL(control_scale=0.0),
    }
    rows = []
    for name, method in methods.items():
        net, ledger = built(model, device), Ledger()
        engine = Sequential(net, federation(200, device))

        def book(server, job, replies, ledger=ledger):
            ledger.book(job, [0], replies, round=server.round)

        run(method, net, engine, replace(STAGE, rounds=1, steps=1), observe=book)
        rows.append({"model": model, "method": name, "up": ledger.up, "down": ledger.down})
    return rows


if __name__ == "__main__":
    main()
