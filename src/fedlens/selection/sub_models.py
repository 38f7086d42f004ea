"""Sub-models that a method with a selection of filters left at its clients: their costs, bytes and latency."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ..core.tree import Tree
from ..core.wire import header
from .pruning import Choice, Costs, Kept, ranked, sliced, unpacked

BATCH = 32  # images of a pass whose latency is measured


@dataclass(frozen=True)
class SubModel:
    """What a client's last selection left, as shares of the whole network."""

    client: int
    flops: float
    parameters: float  # of the smaller network
    sent: float  # of the parameters of convolutions; the paper's "sparsity ratio" is of all parameters
    bytes: float  # of the client's last upload, controls and headers included
    latency: float  # measured here, one thread of a CPU or the GPU; may not have been asked for
    accuracy: float  # on the images that rewards were measured on
    dense: float  # of the whole network there
    own: float  # accuracy on the client's own test images: of its whole model; all six may not have been asked for
    smaller: float  # of its sub-model
    own_settled: float  # of its whole model with the statistics of norms taken anew over the client's training images
    settled: float  # of its sub-model with the same
    own_tuned: float  # of its whole model after it trained on these from there
    tuned: float  # of its sub-model after the same


# By the run's selector; with the smallest norms anywhere left out; with the same share of every layer.
RULES = ("selected", "norms", "alike")
Judge = Callable[[Kept], tuple[float, float, float]]  # accuracies of what is left when these filters are kept


def sub_models_by(
    run: Any,
    rules: Sequence[str] = RULES,
    batch: int = BATCH,
    repeats: int = 9,
    judge: Callable[[int], Judge] | None = None,
    progress: Callable[[Any], Iterable[Any]] = iter,
) -> dict[str, list[SubModel]]:
    """Every client's sub-model of an opened run by each rule; those that ask no client keep to the run's budget.

    Latency is that of a batch, the fastest of so many passes; without repeats it is not measured. `judge` gives for a
    client how well its model does with some filters.
    """
    algorithm, net, folder, device = run.experiment.algorithm, run.net, run.folder, run.experiment.execution.device
    checkpoint, first = run.newest(), net.initial_weights()
    layers, dtype = tuple(algorithm.layers(net)), next(iter(first.params.values())).dtype
    x = torch.zeros(batch, *run.images.x.shape[1:], dtype=dtype, device=device)
    weights = first | checkpoint.state.model.map(lambda leaf: leaf.to(device))
    costs, uploads, dense = Costs.of(net, x[:1]), _uploads(folder, checkpoint.round), _dense(checkpoint)
    limits = algorithm.constraint, algorithm.budget, algorithm.keep_floor
    choice = Choice(costs, layers, ranked(layers, weights), *limits)
    known = {"norms": lambda: choice.by_norm(weights), "alike": choice.uniform}
    for_all = {rule: cut() for rule, cut in known.items() if rule in rules}
    whole, found = sliced(net, weights, {}), {rule: [] for rule in rules}
    for client, memory in progress(folder.client_memories(checkpoint.round).items()):
        selection, judged = memory.selection, judge(client) if judge else _unknown
        of_whole = judged({})
        for rule in rules:
            selects = rule == "selected"
            kept = unpacked(selection.kept, layers) if selects else for_all[rule]
            computed = costs.computed(kept)
            with run.at_work():
                latency = _ratio(sliced(net, weights, computed), whole, x, repeats) if repeats else math.nan
            pairs = zip(of_whole, judged(computed), strict=True)
            found[rule].append(
                SubModel(
                    client,
                    costs.size("flops", kept),
                    costs.parameters(kept) / costs.parameters({}),
                    costs.size("params", kept),
                    uploads.get(client, math.nan) / dense if selects else math.nan,  # a lost one is no upload
                    latency,
                    float(selection.accuracy) if selects else math.nan,
                    float(selection.dense),
                    *(value for pair in pairs for value in pair),
                )
            )
    return found


def kept_filters(algorithm: Any, net: Any, memory: Tree) -> Kept | None:
    """The filters of a client's last selection; None where its method selects none, or it never took part."""
    if "selection" not in memory or not hasattr(algorithm, "layers"):
        return None
    layers = tuple(algorithm.layers(net))
    return unpacked(memory.selection.kept, layers) if layers else None


def _unknown(kept: Kept) -> tuple[float, float, float]:
    return math.nan, math.nan, math.nan


def _uploads(folder: Any, last: int) -> dict[int, int]:
    """Bytes of the newest upload of each client until this round."""
    rows = [row for row in folder.bytes().to_pylist() if row["kind"] == "upload" and row["round"] <= last]
    return {row["client"]: row["payload"] + row["header"] for row in sorted(rows, key=lambda row: row["round"])}


def _dense(checkpoint: Any) -> int:
    """Bytes of an upload of all filters."""
    state = checkpoint.state
    upload = Tree(delta=state.model, weight=torch.zeros((), dtype=torch.float64))
    upload = upload.replace(control=state.control) if "control" in state else upload
    return upload.nbytes + len(header(upload))


def device_name() -> str:
    """What latencies are measured on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "one thread of a CPU"


def _ratio(smaller: nn.Module, whole: nn.Module, x: torch.Tensor, repeats: int) -> float:
    """The fastest passes of both, taken in turn."""
    taken: dict[int, list[float]] = {0: [], 1: []}
    x = x.to(memory_format=torch.channels_last)
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for which, module in enumerate((smaller, whole)):
                module = cast(Any, module).to(memory_format=torch.channels_last)
                wait()
                begin = time.perf_counter()
                module(x)
                wait()
                taken[which] += [time.perf_counter() - begin] if repeat else []
    return min(taken[0]) / min(taken[1])
