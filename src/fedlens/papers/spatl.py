"""SPATL (Yu et al., 2022): accuracies, bytes of a client's round, ablations; and what a finished run holds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from .. import config
from ..algorithms.spatl import SPATL
from ..core.errors import BadInput
from ..runs import RunFolder
from ..selection.pruning import Costs, sliced, unpacked
from .grid import Column, Grid, Reported, Row, percent

# Section 4.1 and, where that is silent, the released code: batch 64, momentum 0.9, decay 1e-5, crop and flip.
WORDS = (
    "data=cifar10",
    "partition=dirichlet",
    "partition.alpha=0.1",
    "partition.test=pooled",
    "partition.holdout=0.1667",
    "clients=10",
    "cohort=everyone",
    "rounds=100",
    "local.epochs=10",
    "local.batch_size=64",
    "local.momentum=0.9",
    "local.weight_decay=1e-5",
    "augment=crop_flip",
    "evaluate.personal=before",
    "evaluate.personal_every=1",
    "checkpoint=10",
)
METHODS = {
    "fedavg": ("algorithm=fedavg",),
    "fednova": ("algorithm=fednova",),
    "fedprox": ("algorithm=fedprox",),
    "scaffold": ("algorithm=scaffold",),
    "spatl": ("algorithm=spatl",),
    "spatl_salient": ("algorithm=spatl", "algorithm.control_upload=salient"),
    "spatl_official": ("algorithm=spatl_official",),
}
ABLATIONS = {
    "no_selection": ("algorithm=spatl", "algorithm.selector=all"),
    "no_transfer": ("algorithm=spatl", "algorithm.private=none"),
    "no_control": ("algorithm=spatl", "algorithm.control_scale=0"),
    **{name: ("algorithm=spatl", f"algorithm.selector={name}") for name in ("uniform", "l2_global", "random")},
    "per_index": ("algorithm=spatl", "algorithm.normalise=per_index"),
    "fresh_agent": ("algorithm=spatl", "algorithm.agent=fresh"),
}
RATES = {"resnet20": "0.005", "resnet32": "0.005", "vgg11": "0.01"}
COLUMNS = {model: Column((f"model={model}", f"local.lr={rate}")) for model, rate in RATES.items()}

_ACCURACY = {"resnet20": 84.27, "resnet32": 83.67, "vgg11": 84.07}  # section 4.2, of SPATL
_MEGABYTES = {  # table 1, of one client in one round
    "fedavg": (2.1, 3.2, 42.0),
    "fednova": (4.2, 6.4, 84.0),
    "fedprox": (2.1, 3.2, 42.0),
    "scaffold": (4.3, 6.5, 84.0),
    "spatl": (2.1, 3.6, 61.3),
}


def tables() -> list[Grid]:
    rows, home = {name: Row(words) for name, words in METHODS.items()}, "spatl/accuracy"
    accuracy = Grid(
        home,
        "clients' own models on their own test images (figures 4 and 5)",
        rows,
        COLUMNS,
        WORDS,
        {("spatl", model): Reported(value) for model, value in _ACCURACY.items()},
        measure=accuracy_of,
        measured="mean over clients of the accuracy on their own test images, before local training, %",
        notes=(
            "The paper's numbers are the text's; its figure 4 has the other methods as curves only.",
            "10 clients of 6,000 images each cannot come of Dirichlet 0.1; here clients differ in size.",
        ),
    )
    traffic = Grid(
        "spatl/table1",
        "what one client sends and receives in one round",
        {name: Row(words, home=home) for name, words in METHODS.items()},
        COLUMNS,
        WORDS,
        {
            (method, model): Reported(value)
            for method, values in _MEGABYTES.items()
            for model, value in zip(COLUMNS, values, strict=True)
        },
        measure=megabytes_of,
        measured="megabytes up and down, headers included, mean over rounds and clients",
        notes=(
            "The paper counts one way for VGG-11 and both ways for ResNet, and charges FedNova twice although it sends "
            "one number more than FedAvg.",
        ),
    )
    ablations = Grid(
        "spatl/ablations",
        "SPATL without its parts, and with other selectors",
        {"spatl": Row(METHODS["spatl"], home=home), **{name: Row(words) for name, words in ABLATIONS.items()}},
        COLUMNS,
        WORDS,
        measure=accuracy_of,
        measured=accuracy.measured,
    )
    return [accuracy, traffic, ablations]


def accuracy_of(result: Any) -> float | None:
    return percent(result["personal"].get("before", {}).get("mean"))


def megabytes_of(result: Any) -> float | None:
    """All ten clients take part in every round."""
    return (result["bytes_up"] + result["bytes_down"]) / (10 * result["rounds"]) / 1e6


# ---- what a finished run holds ---------------------------------------------------------------------------------------
def bytes_to(folder: RunFolder, target: float) -> dict[str, int] | None:
    """The first round whose mean accuracy of clients' own models is at least this, and the bytes up to it."""
    looks = [
        (row["round"], row["value"])
        for row in folder.metrics().to_pylist()
        if row["client"] is None and row["model"] == "personal before" and row["metric"] == "accuracy_mean"
    ]
    first = next((round for round, value in sorted(looks) if value >= target), None)
    if first is None:
        return None
    spent = [
        row for row in folder.bytes().to_pylist() if row["round"] <= first and not row["kind"].startswith("evaluation")
    ]
    return {"round": first, "bytes": sum(row["payload"] + row["header"] for row in spent)}


@dataclass(frozen=True)
class SubModel:
    """What a client's last selection left, as shares of the whole network."""

    client: int
    flops: float
    parameters: float  # of the smaller network
    sent: float  # of the parameters of convolutions: the paper's "sparsity ratio"
    latency: float  # measured here, one thread of a CPU or the GPU
    accuracy: float  # on the images that rewards were measured on
    dense: float  # of the whole network there


def sub_models(path: str | Path, batch: int = 32, repeats: int = 9) -> list[SubModel]:
    """Table 2 for a finished run: every client's sub-model of the last global encoder."""
    folder = RunFolder.open(path)
    experiment = config.read(folder.config).placed()
    algorithm = experiment.algorithm
    if not isinstance(algorithm, SPATL) or algorithm.selector == "all":
        raise BadInput(f"{path} is not a run of spatl that selects filters")
    checkpoint, _ = folder.load()
    if checkpoint is None:
        raise BadInput(f"{path} has no checkpoint yet")
    images = experiment.data.load()
    net = experiment.network(images).to(experiment.device)
    layers, x = algorithm.layers(net), torch.zeros(batch, *images.x.shape[1:], device=experiment.device)
    weights = net.initial_weights() | checkpoint.state.model.map(lambda leaf: leaf.to(experiment.device))
    costs, found = Costs.of(net, x[:1]), []
    whole = sliced(net, weights, {})
    for client, memory in folder.client_memories(checkpoint.round).items():
        kept = unpacked(memory.selection.kept, layers)
        smaller = sliced(net, weights, kept)
        found.append(
            SubModel(
                client,
                costs.size("flops", kept),
                costs.parameters(kept) / costs.parameters({}),
                costs.size("params", kept),
                _ratio(smaller, whole, x, repeats),
                float(memory.selection.accuracy),
                float(memory.selection.dense),
            )
        )
    return found


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
