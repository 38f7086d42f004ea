"""SPATL (Yu et al., 2022): accuracies, bytes of a client's round, ablations; and what a finished run holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...algorithms.fedavg import FedAvg
from ...algorithms.finetune import FineTune
from ...algorithms.spatl import SPATL
from ...core.algorithm import Server
from ...core.batches import Federation, Shard
from ...core.errors import BadInput
from ...core.evaluate import total
from ...core.network import Network
from ...core.rng import generator, key
from ...core.run import Turn, job_of
from ...core.tree import Tree
from ...engines.sequential import Sequential, tuned
from ...runs.folder import RunFolder
from ...runs.grid import Column, Grid, Reported, Row, in_percent, merged_words
from ...runs.opened import OpenedRun
from ...runs.read import bytes_until, points, rounds_of
from ...selection import sub_models as selection
from ...selection.pruning import Kept, settled, sliced
from ...selection.sub_models import BATCH, RULES, Judge, SubModel
from ...simulate.progress import counted

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
    "evaluate.last=10",
    "checkpoint=10",
)
PAPER = "algorithm=spatl/paper"
METHODS = {
    "fedavg": ("algorithm=fedavg",),
    "fednova": ("algorithm=fednova",),
    "fedprox": ("algorithm=fedprox",),
    "scaffold": ("algorithm=scaffold",),
    "spatl": (PAPER,),
    "spatl_salient": (PAPER, "algorithm.control_upload=salient"),
    "spatl_default": ("algorithm=spatl",),
    "spatl_official": ("algorithm=spatl/official",),
    # not in the paper: what a private predictor is worth by itself, and what training once more does
    "fedper": ("algorithm=fedper",),
    "fedavg+ft": ("algorithm=fedavg+ft",),
}
ABLATIONS = {
    "no_selection": (PAPER, "algorithm.selector=all"),
    "no_transfer": (PAPER, "algorithm.private=none"),
    "no_control": (PAPER, "algorithm.control_scale=0"),
    **{name: (PAPER, f"algorithm.selector={name}") for name in ("uniform", "l2_global", "random")},
    "per_index": (PAPER, "algorithm.normalise=per_index"),
    "fresh_agent": (PAPER, "algorithm.agent=fresh"),
}
RATES = {"resnet20": "0.005", "resnet32": "0.005", "vgg11": "0.01"}
COLUMNS = {model: Column((f"model={model}", f"local.lr={rate}")) for model, rate in RATES.items()}
# By its formula a client has a share of each label's images (dialect class, above), by its numbers all have 6,000, and
# the released code balances sizes as it draws.
READINGS = {
    f"{model}-{dialect}": Column((*one.words, f"partition.dialect={dialect}"))
    for dialect in ("client", "balanced")
    for model, one in COLUMNS.items()
}
# Figure 4's fourth panel: LEAF's split by writers, characters that are not flipped. The paper gives no rate: VGG-11's.
CNN = {"cnn2-femnist": Column(("model=cnn2", "local.lr=0.01", "data=femnist", "partition=by_user", "augment=none"))}
# Figure 7's networks; of their training the text says no more than that there was some.
SEARCHED = {model: Column((f"model={model}", "local.lr=0.005")) for model in ("resnet18", "resnet56")}

_ACCURACY = {"resnet20": 84.27, "resnet32": 83.67, "vgg11": 84.07}  # section 4.2, of SPATL
_MEGABYTES = {  # table 1, of one client in one round
    "fedavg": (2.1, 3.2, 42.0),
    "fednova": (4.2, 6.4, 84.0),
    "fedprox": (2.1, 3.2, 42.0),
    "scaffold": (4.3, 6.5, 84.0),
    "spatl": (2.1, 3.6, 61.3),
}
# Table 1, to 80 %: rounds (None: more than 200) and gigabytes of all clients.
_TO_80: dict[str, tuple[tuple[int | None, float], ...]] = {
    "fedavg": ((None, 4.2), (None, 6.4), (181, 76)),
    "fednova": ((198, 8.32), (197, 12.6), (159, 136)),
    "fedprox": ((None, 4.2), (None, 6.4), (None, 84)),
    "scaffold": ((49, 2.1), (55, 3.6), (54, 45)),
    "spatl": ((52, 1.1), (50, 1.8), (46, 28)),
}
TO_80 = {
    (method, name): dict(zip(COLUMNS, by, strict=True))[name.partition("-")[0]]
    for method, by in _TO_80.items()
    for name in (*COLUMNS, *READINGS)
}
# Table 2, in %: salient parameters, operations removed on average and at most.
_INFERENCE = {"resnet20": (84, 25.8, 31.9), "resnet32": (82, 29.6, 38.4), "vgg11": (70, 29.9, 39.7)}
INFERENCE = {name: _INFERENCE[name.partition("-")[0]] for name in (*COLUMNS, *READINGS)}
# Section 4.5: 50,000 images for ten clients, a fifth of each client's kept back; the other 10,000 are no client's.
APART = ("partition.test=holdout", "partition.holdout=0.2")
TRANSFER = (83.92, 87.06)  # of clients on what they keep back, then of a new predictor on the other images


SAYS = (
    "VGG-11 (rate 0.01) and ResNet-20 and -32 (0.005); 10 clients, all in every round, 10 local rounds, 100 rounds. "
    "The mean over clients of their models' accuracy on images of their own.",
    "Dirichlet 0.1, and the text contradicts itself. By its formula a client gets a share of every label's images, so "
    "that sizes differ (columns without an ending). By its numbers each has 6,000, 5,000 to train and 1,000 to test "
    "(-client). The released code balances sizes as it draws (-balanced), where it is asked for a skewed split.",
    "The agent is updated every 20 search steps, 20 epochs at a time; gamma 0.99, clip 0.2, deviation of actions 0.5, "
    "Adam 3e-4. It goes on learning over rounds, and begins to converge at about 40 updates.",
    "Controls begin at zero. Table 1 is of runs to 80 %, 200 rounds at most: so is `spatl/bytes`.",
)
LEAVES_OPEN = (
    "Local 'rounds': read as epochs. Batch 64, momentum 0.9, decay 1e-5, crop and flip: the released code's. It pads "
    "by reflection and does not normalise images; here the border is black, and they are.",
    "What the predictor is: all that follows the last convolution, in VGG-11 three layers, in ResNets one. The code "
    "keeps a ResNet's stem at the client, too.",
    "How many search steps a round: 20, one update, so that 40 are reached in round 40.",
    "The size that a sub-model may have: the code's, 0.8 of the operations.",
    "Rewards are of a 'validation dataset', which section 4.2 also reports accuracy on. Here each client keeps back "
    "1,000 of its training images for them, a fifth at most, and tests on others.",
    "The two-layer CNN's rate, and how FEMNIST's writers go to ten clients: 0.01, by user. How figure 7's networks "
    "were trained: by SPATL.",
    "When a client's model is evaluated: before it trains in the round. How many runs. Baselines' own settings: our "
    "defaults. The code evaluates on all test images; the text and we on the client's own.",
)
PROTOCOL: dict[str, Any] = {"says": SAYS, "leaves_open": LEAVES_OPEN}
EVERY = {**COLUMNS, **READINGS}


def tables() -> list[Grid]:
    rows, home = {name: Row(words) for name, words in METHODS.items()}, "spatl/accuracy"
    accuracy = Grid(
        home,
        "clients' personal models on their own test images (figures 4 and 5)",
        rows,
        {**EVERY, **CNN},
        WORDS,
        {("spatl", name): Reported(_ACCURACY[name.partition("-")[0]]) for name in EVERY},
        measure=accuracy_of,
        measured="mean over clients of the accuracy on their own test images, before local training, %",
        notes=(
            "The paper's numbers are the text's; its figure 4 has the other methods as curves only.",
            "fedavg+ft is evaluated after its fine-tuning.",
        ),
        **PROTOCOL,
    )
    traffic = Grid(
        "spatl/table1",
        "what one client sends and receives in one round",
        {name: Row(words, home=home) for name, words in METHODS.items()},
        EVERY,
        WORDS,
        {
            (method, name): Reported(dict(zip(COLUMNS, values, strict=True))[name.partition("-")[0]])
            for method, values in _MEGABYTES.items()
            for name in EVERY
        },
        measure=megabytes_of,
        measured="megabytes up and down, headers included, mean over rounds and clients",
        notes=(
            "The paper counts one way for VGG-11 and both ways for ResNet, and charges FedNova twice although it sends "
            "one number more than FedAvg.",
        ),
        **PROTOCOL,
    )
    return [accuracy, traffic, *_others(home, accuracy.measured)]


def _others(home: str, measured: str) -> list[Grid]:
    """Rows and networks that the paper shows without numbers."""
    ablations = Grid(
        "spatl/ablations",
        "SPATL without its parts, and with other selectors",
        {"spatl": Row(METHODS["spatl"], home=home), **{name: Row(words) for name, words in ABLATIONS.items()}},
        EVERY,
        WORDS,
        measure=accuracy_of,
        measured=measured,
        notes=("The paper has one ablation, figure 6: no gradient control, with VGG-11 and as curves.",),
        **PROTOCOL,
    )
    encoders = Grid(
        "spatl/encoders",
        "clients' personal models where 10,000 images are no client's: the encoders of spatl/transfer",
        {name: Row(METHODS[name]) for name in ("spatl", "scaffold", "fedavg")},
        {name: one for name, one in EVERY.items() if name.startswith("vgg11")},
        tuple(merged_words((*WORDS, *APART)).values()),
        {("spatl", name): Reported(TRANSFER[0]) for name in EVERY if name.startswith("vgg11")},
        measure=accuracy_of,
        measured=measured,
        notes=("Section 4.5: 4,000 images to train and 1,000 to judge at each of ten clients.",),
        **PROTOCOL,
    )
    agents = Grid(
        "spatl/agents",
        "the networks of figure 7, trained by SPATL",
        {"spatl": Row(METHODS["spatl"], home=home)},
        {**SEARCHED, **EVERY},
        WORDS,
        measure=accuracy_of,
        measured=measured,
        **PROTOCOL,
    )
    return [ablations, encoders, agents]


def accuracy_of(result: Any) -> float | None:
    personal = result["personal"]
    return in_percent(personal.get("fine-tuned", personal.get("before", {})).get("mean"))


def megabytes_of(result: Any) -> float | None:
    """All clients, of whom there are ten unless it says so, take part in every round."""
    rounds, clients = result.get("training_rounds") or result["rounds"], result.get("clients", 10)
    return (result["bytes_up"] + result["bytes_down"]) / (clients * rounds) / 1e6


# ---- what a finished run holds ---------------------------------------------------------------------------------------
def personal_accuracies(folder: RunFolder) -> dict[int, tuple[int, float]]:
    """{round of training: (round of the run, mean accuracy of clients' personal models before they train)}"""
    found = points(folder.metrics()).get("personal before", {})
    known = {at: accuracy for at, (accuracy, _) in found.items() if accuracy is not None}
    return rounds_of(folder).counted(known) if known else {}


def bytes_to(folder: RunFolder, target: float) -> dict[str, int] | None:
    """The first round whose mean accuracy of clients' personal models is at least this, and the bytes up to it."""
    reached = next(((round, at) for round, (at, value) in personal_accuracies(folder).items() if value >= target), None)
    if reached is None:
        return None
    return {"round": reached[0], "bytes": bytes_until(folder, [reached[1]])[0]}


def sub_models(path: str | Path, batch: int = BATCH, repeats: int = 9) -> list[SubModel]:
    """Table 2 for a finished run: what its selector left of the last global encoder at every client.

    Latency is that of a batch, the fastest of so many passes; without repeats it is not measured.
    """
    return sub_models_by(path, RULES[:1], batch, repeats)["selected"]


def sub_models_by(
    path: str | Path, rules: Sequence[str] = RULES, batch: int = BATCH, repeats: int = 9, epochs: int | None = None
) -> dict[str, list[SubModel]]:
    """Every client's sub-model by each rule; those that ask no client cut the encoder down to the run's budget.

    With epochs, which may be none, also how well they do on the client's test images, and after training for so many.
    """
    run = OpenedRun.open(path)
    algorithm = run.experiment.algorithm
    if not isinstance(algorithm, SPATL) or algorithm.selector == "all":
        raise BadInput(f"{path} is not a run of spatl that selects filters")
    judge = partial(_judge, run, epochs=epochs)
    return selection.sub_models_by(run, rules, batch, repeats, judge, partial(counted, what="sub-models"))


def _judge(run: OpenedRun, client: int, epochs: int | None) -> Judge:
    """How well a client's model does on its test images when these filters are left of it.

    As it is, with norms anew over the client's images, and after training on these from there.
    """
    mine, test = run.federation.train[client], run.federation.test[client]
    if epochs is None or not len(test):
        return lambda kept: (math.nan, math.nan, math.nan)
    net, weights, seed = run.net, run.model(client), key(run.experiment.seed, "sub-model", client)
    mixed = mine[torch.randperm(len(mine), generator=generator(key(seed, "settled"))).to(mine.device)]

    def cut(kept: Kept, anew: bool) -> nn.Module:
        module = sliced(net, weights, kept)
        with run.at_work():
            batches = Shard(run.federation.data, mixed).chunks(run.experiment.local.batch_size)
            return settled(module, (piece.x for piece in batches)) if anew else module

    def right(module: nn.Module, epochs: int = 0) -> float:
        alone = Network(_Alone(module), net.precision).to(run.experiment.execution.device)
        return judged_alone(run, alone, alone.initial_weights(), (mine, test), seed, epochs)

    def judged(kept: Kept) -> tuple[float, float, float]:
        tuned = right(cut(kept, True), epochs) if epochs else math.nan
        return right(cut(kept, False)), right(cut(kept, True)), tuned

    return judged


def judged_alone(
    run: OpenedRun,
    net: Network,
    weights: Tree,
    images: tuple[torch.Tensor, torch.Tensor],
    seed: int,
    epochs: int,
    part: Literal["head", "all"] = "all",
) -> float:
    """Accuracy on the second of these images, after so many epochs on the first by the clients' own rule."""
    (train, test), experiment = images, run.experiment
    engine = Sequential(net, Federation(run.federation.data, {0: train}, {0: test}, test))
    stage = experiment.plan.errand(FineTune(base=FedAvg(), part=part), epochs=max(epochs, 1))
    job = job_of(Server(net, Tree(model=weights), 1), Turn(stage), seed)
    with run.at_work(), tuned(net):
        if epochs:
            weights = engine.local_training(job, 0, *engine.open(job, 0))
        scores = total(engine.measure(weights))
    return int(scores.correct) / int(scores.examples)


class _Alone(nn.Module):
    """A module as a network that is all features."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.features, self.head = module, nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)
