"""What clients get out of a run: accuracy of each and how fair that is, confusions, training loss over rounds."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import config
from ..core.batches import Federation, Shard
from ..core.errors import BadInput
from ..core.evaluate import pieces
from ..core.network import Network
from ..core.tree import Tree
from ..data import Images
from ..experiment import Experiment, build
from ..report.figures import personal_accuracies
from ..simulate.run import matmuls, spread, threads
from .folder import RunFolder
from .models import global_model, newest, own_models

LOOKS = ("fine-tuned", "personal after", "personal before")  # what clients are judged by, the best trained first


@dataclass(frozen=True)
class OpenedRun:
    """A run whose models can be looked at here, whatever machine it ran on."""

    folder: RunFolder
    experiment: Experiment
    images: Images
    net: Network
    federation: Federation

    @classmethod
    def open(cls, path: str | Path) -> OpenedRun:
        folder = RunFolder.open(path)
        stored = config.read(folder.config)
        gpu = torch.cuda.is_available()
        precision = stored.precision if gpu or stored.precision in ("fp32", "fp64") else "fp32"
        experiment = replace(stored, device="cuda" if gpu else "cpu", precision=precision)
        return cls(folder, experiment, experiment.data.load(), *build(experiment))

    @property
    def look(self) -> str:
        """By which model its clients are judged."""
        return judged(self.folder)[0]

    def global_model(self) -> Tree | None:
        """None when clients keep a part of it."""
        return global_model(self.experiment, self.net, newest(self.folder))

    def model(self, client: int) -> Tree:
        """The model that this client's accuracy is that of; it may have to be trained once more."""
        self.check(client)
        with self.at_work():
            trained = self.look == "personal after"
            where = self.folder, self.experiment, self.net, self.federation, newest(self.folder)
            _, model = next(own_models(*where, [client], trained=trained))
        if not all(leaf.isfinite().all() for leaf in model.leaves() if leaf.is_floating_point()):
            raise BadInput(f"{self.folder.path}: training diverged, and client {client} has no model; lower local.lr")
        return model

    def check(self, client: int) -> None:
        if client not in self.federation.train:
            raise BadInput(f"client {client} does not exist: there are {len(self.federation.train)}, counted from 0")

    def predictions(self, weights: Tree, index: Tensor) -> Tensor:
        """The class that a model takes each of these images for."""
        shard = Shard(self.federation.data, index.to(self.federation.pool.device))
        with torch.no_grad(), self.at_work():
            found = [self.net(weights, piece.x).argmax(1).cpu() for piece in pieces(shard)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)

    def at_work(self) -> ExitStack:
        """Where models compute as in the run."""
        stack = ExitStack()
        stack.enter_context(threads(1))
        stack.enter_context(matmuls(self.experiment.precision))
        return stack


def measure_of(models: Collection[str]) -> str | None:
    """By which of these a run is judged: what it fine-tuned at its end, or else its global model, or clients' own."""
    return next((model for model in ("fine-tuned", "global", *LOOKS) if model in models), None)


def judged(folder: RunFolder) -> tuple[str, dict[int, float]]:
    """(which model, accuracy of each client with it on its own test images) at the last look."""
    found = personal_accuracies(folder)
    for look in LOOKS:
        if look in found:
            return look, found[look]
    raise BadInput(f"{folder.path} has no accuracies of single clients: run it to its end with evaluate.personal=both")


def fairness(accuracies: Sequence[float]) -> dict[str, float]:
    """Mean, deviation, mean of the worst tenth, and Jain's index: (sum x)^2 / (n sum x^2), one when all are alike."""
    x = torch.tensor(accuracies, dtype=torch.float64)
    squares = len(x) * x.square().sum().item()
    return {**spread(list(accuracies)), "jain": x.sum().item() ** 2 / squares if squares else 1.0}


def confusion(run: OpenedRun, client: int) -> Tensor:
    """[classes, classes] images of the client's test shard: true class, and what its model takes them for."""
    run.check(client)
    index, classes = run.federation.test[client].cpu(), len(run.images.classes)
    if not len(index):
        raise BadInput(f"client {client} has no test images; name another one")
    pairs = run.images.y[index] * classes + run.predictions(run.model(client), index)
    return torch.bincount(pairs, minlength=classes**2).view(classes, classes)


def training_losses(run: OpenedRun) -> dict[int, float]:
    """After each round with a checkpoint: cross-entropy of clients' models on their own training images.

    The mean over all clients, before they train again; one that has not taken part yet has the private part it began
    with. Training itself records no loss, so this is measured afterwards: keep=N leaves a checkpoint every N rounds.
    """
    if len(run.folder.rounds()) < 2:
        raise BadInput(
            f"{run.folder.path} has no checkpoint of an earlier round: run it with keep=1, or keep=N for less"
        )
    found, clients = {}, sorted(run.federation.train)
    with torch.no_grad(), run.at_work():
        for round in run.folder.rounds():
            models = own_models(run.folder, run.experiment, run.net, run.federation, run.folder.at(round), clients)
            losses = [_loss(run, model, Shard(run.federation.data, run.federation.train[c])) for c, model in models]
            found[round] = sum(losses) / len(losses)
    return found


def _loss(run: OpenedRun, model: Tree, shard: Shard) -> float:
    parts_of = [F.cross_entropy(run.net(model, part.x).double(), part.y, reduction="sum") for part in pieces(shard)]
    return sum(map(float, parts_of)) / len(shard)


def named(paths: Sequence[str | Path]) -> dict[str, Path]:
    """Runs by their method, or by their folders where two have the same."""
    found = {Path(path): _method(config.plain(config.read(RunFolder.open(path).config).algorithm)) for path in paths}
    if len(set(found.values())) == len(paths):
        return {name: path for path, name in found.items()}
    if len(found) < len(paths):
        raise BadInput("the same run is named twice; name each once")
    root = os.path.commonpath([path.absolute().parent for path in found])
    return {os.path.relpath(path.absolute(), root): path for path in found}


def _method(algorithm: Mapping[str, str]) -> str:
    base = algorithm.get("base")
    return f"{_method(base)}+ft" if algorithm["is"] == "finetune" and isinstance(base, Mapping) else algorithm["is"]


def same_split(runs: Mapping[str, OpenedRun]) -> None:
    """Clients can be compared across runs only when they own the same images."""
    cards = {name: run.folder.passport() for name, run in runs.items()}
    first = next(iter(cards))
    for name, card in cards.items():
        if (card["split_hash"], card["data"]["sha256"]) != (cards[first]["split_hash"], cards[first]["data"]["sha256"]):
            raise BadInput(f"{name} and {first} have other data or another split: their clients cannot be compared")
