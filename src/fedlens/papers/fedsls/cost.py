"""What finding FedSLS's weights costs: operations, memory, seconds."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...attribution import layer_saliency
from ...attribution.operations import CONVOLUTIONS, Operation, Rewriting
from ...core.network import Network
from ...core.tree import Tree
from ...experiment import Experiment, build
from .weighing import engine_for, first_job


@dataclass(frozen=True)
class PassCost:
    """Of one guided pass over some images. An operation is a multiplication or an addition: two to a product."""

    images: int
    forward_operations: int
    all_operations: int  # forward and guided backward
    peak_bytes: int  # beyond the network and the images
    map_bytes: int  # of the channel means of all layers, if they were stored
    channel_bytes: int  # of all their channels
    first_map_bytes: int  # the same of the first layer
    first_channel_bytes: int
    seconds: float


@dataclass(frozen=True)
class WeighingCost:
    """Of all clients' numbers: training the copies, then the guided pass."""

    clients: int
    images: int
    epochs: int
    peak_bytes: int
    seconds: float
    device: str


def pass_cost(net: Network, weights: Tree, x: Tensor, y: Tensor) -> PassCost:
    layer_saliency(net, weights, x[:1], y[:1])  # libraries load what they need
    peak, seconds, _ = measured(lambda: layer_saliency(net, weights, x, y), x.device)
    layers = _layer_sizes(net, weights, x[:1])
    maps, channels = (sum(sizes) for sizes in zip(*layers, strict=True))
    first_maps, first_channels = layers[0]
    return PassCost(
        len(x),
        operations(lambda: net(weights, x)),
        operations(lambda: layer_saliency(net, weights, x, y)),
        peak,
        maps * 4 * len(x),
        channels * 4 * len(x),
        first_maps * 4 * len(x),
        first_channels * 4 * len(x),
        seconds,
    )


def weighing_cost(experiment: Experiment) -> WeighingCost:
    net, federation = build(experiment)
    job, engine = first_job(experiment, net, len(federation.train)), engine_for(experiment, net, federation)
    clients = range(len(federation.train))
    try:
        peak, seconds, _ = measured(lambda: engine.run(job, clients), torch.device(experiment.execution.device))
    finally:
        engine.close()
    name = "CPU" if experiment.execution.device == "cpu" else torch.cuda.get_device_name(experiment.execution.device)
    images = sum(map(len, federation.train.values()))
    return WeighingCost(len(clients), images, job.stage.epochs, peak, seconds, name)


def operations(work: Callable[[], object]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def measured(work: Callable[[], object], device: torch.device) -> tuple[int, float, object]:
    """(bytes at the peak beyond what there was before, seconds, what came of it)."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if gpu else _resident(reset=True)
    start = time.perf_counter()
    result = work()
    if gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) if gpu else _resident()
    return max(peak - before, 0), seconds, result


def _resident(reset: bool = False) -> int:
    """The largest resident size so far, in bytes; Linux can start counting anew, without what is free already."""
    if reset:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _layer_sizes(net: Network, weights: Tree, one: Tensor) -> list[tuple[int, int]]:
    """Numbers in the maps of each convolution of one image: channel means, and all channels."""
    found = []

    def count(step: Operation, out: Tensor) -> Tensor:
        found.append((out[0, 0].numel(), out[0].numel()))
        return out

    with torch.no_grad(), Rewriting(net, [(CONVOLUTIONS, count)]):
        net(weights, one)
    return found
