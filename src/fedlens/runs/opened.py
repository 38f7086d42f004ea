"""A run's models: the global one, those of single clients, what they predict."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.algorithm import Server
from ..core.batches import Federation, Shard
from ..core.errors import BadInput
from ..core.evaluate import Evaluate, pieces
from ..core.memories import Memories
from ..core.network import Network
from ..core.rng import key
from ..core.run import job_of
from ..core.tree import Tree
from ..data import Images
from ..engines.process import matmuls, threads
from ..engines.sequential import Sequential
from ..experiment import Experiment, to_device
from .folder import Checkpoint, RunFolder
from .places import check_origin, opened
from .read import client_evaluation, method_of, rounds_of, settings_of


@dataclass(frozen=True)
class OpenedRun:
    """A run whose models can be used here, whatever machine it ran on."""

    folder: RunFolder
    experiment: Experiment
    images: Images
    net: Network
    federation: Federation

    @classmethod
    def open(cls, path: str | Path, device: str = "", precision: str = "", words: Sequence[str] = ()) -> OpenedRun:
        """On this device, or a GPU where there is one; in this precision, or the run's own where the device has it.

        Its data are found from wherever this is; words such as data.path=PLACE say where they have gone.
        """
        folder = RunFolder.open(path)
        stored = opened(folder, words)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        has = device != "cpu" or stored.execution.precision in ("fp32", "fp64")
        precision = precision or (stored.execution.precision if has else "fp32")
        experiment = stored.with_execution(device=device, precision=precision)
        images = experiment.images()
        known = not (folder.path / "passport.json").exists() or not folder.passport().get("nodes_own_data")
        seen = experiment if known else experiment.undivided()  # nobody here knows what nodes of a deployment own
        net, (federation, split) = experiment.network(images).to(device), seen.federation(images)
        check_origin(folder, experiment, images, split=split.hash)
        return cls(folder, experiment, images, net, to_device(experiment, federation))

    @property
    def evaluated_on(self) -> str:
        """Which model its clients are evaluated on."""
        return client_evaluation(self.folder)[0]

    def newest(self) -> Checkpoint:
        checkpoint, _ = self.folder.load(rows=False)
        if checkpoint is None:
            raise BadInput(f"{self.folder.path} has no checkpoint yet")
        return checkpoint

    # ---- models ----
    def models(self, clients: Sequence[int] = (), rounds: Sequence[int] = ()) -> dict[str, Tree]:
        """The global model or those of clients, by title; without `rounds` those of the newest checkpoint."""
        for client in clients:
            self.check(client)
        found: dict[str, Tree] = {}
        names, counts = self.folder.names(), rounds_of(self.folder)
        for checkpoint in [self.folder.at(round) for round in rounds] or [self.newest()]:
            when = _when(checkpoint.round, counts.trained(checkpoint.round)) if rounds else ""
            if clients:
                for client, model in self.client_models(checkpoint, clients):
                    found[f"{names.title(client)}, {when}" if when else names.title(client)] = model
                continue
            if (model := self.global_model(checkpoint)) is None:
                raise BadInput(
                    f"{self.folder.path} has no whole global model: clients keep a part; name some with --clients 0,1"
                )
            found[when] = model
        return found

    def global_model(self, checkpoint: Checkpoint | None = None) -> Tree | None:
        """Of this checkpoint or the newest; None when clients keep a part of it."""
        checkpoint = checkpoint or self.newest()
        algorithm = self.experiment.timetable()[checkpoint.round - 1].stage.algorithm
        model, whole = algorithm.global_model(checkpoint.state), self.net.initial_weights()
        if model.params.keys() != whole.params.keys():
            return None
        device = next(iter(whole.params.values())).device
        return model.map(lambda leaf: leaf.to(device))

    def client_models(
        self, checkpoint: Checkpoint, clients: Sequence[int], *, trained: bool = False
    ) -> Iterator[tuple[int, Tree]]:
        """What clients predict with; trained: after one more local training, where the run's tables measure that."""
        experiment, federation = self.experiment, self.federation
        turn = experiment.timetable()[checkpoint.round - 1]
        algorithm, local, device = turn.stage.algorithm, experiment.local, federation.data.x.device
        if trained := trained and "personal after" in algorithm.evaluated_as:
            epochs = algorithm.closing_epochs(local.epochs)
            errand = turn.stage.errand(Evaluate(base=algorithm), epochs=epochs, steps=local.steps)
            turn = turn._replace(stage=errand)
        state = checkpoint.state.map(lambda leaf: leaf.to(device))
        last = key(experiment.seed, "server", checkpoint.round - 1)
        server = Server(self.net, state, len(federation.train), checkpoint.round, last)
        job = job_of(server, turn, experiment.seed)
        memories = Memories(self.folder.memories, versions=checkpoint.versions)
        engine = Sequential(self.net, federation, memories=memories)
        for number in clients:
            client, batches = engine.open(job, number)
            client = replace(client, memory=client.memory.map(lambda leaf: leaf.to(device)))
            after = engine.local_training(job, number, client, batches) if trained and client.steps else None
            model = algorithm.personal(client, after)
            yield number, Tree(params=model.params, buffers=model.buffers)

    def model(self, client: int) -> Tree:
        """The model that this client's accuracy is that of; it may have to be trained once more."""
        self.check(client)
        with self.at_work():
            trained = self.evaluated_on == "personal after"
            _, model = next(self.client_models(self.newest(), [client], trained=trained))
        if not all(leaf.isfinite().all() for leaf in model.leaves() if leaf.is_floating_point()):
            raise BadInput(f"{self.folder.path}: training diverged, and client {client} has no model; lower local.lr")
        return model

    def check(self, client: int) -> None:
        if client not in self.federation.train:
            raise BadInput(f"client {client} does not exist: there are {len(self.federation.train)}, counted from 0")

    def at_work(self) -> ExitStack:
        """Where models compute as in the run."""
        stack = ExitStack()
        stack.enter_context(threads(1))
        stack.enter_context(matmuls(self.experiment.execution.precision))
        return stack

    # ---- what they predict ----
    def predictions(self, weights: Tree, index: Tensor) -> Tensor:
        """The class that a model takes each of these images for."""
        shard = Shard(self.federation.data, index.to(self.federation.pool.device))
        with torch.no_grad(), self.at_work():
            found = [self.net(weights, piece.x).argmax(1).cpu() for piece in pieces(shard)]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.long)

    def confusion(self, client: int) -> Tensor:
        """[classes, classes] images of the client's test shard: true class, and what its model takes them for."""
        self.check(client)
        index, classes = self.federation.test[client].cpu(), len(self.images.classes)
        if not len(index):
            raise BadInput(f"client {client} has no test images; name another one")
        pairs = self.images.y[index] * classes + self.predictions(self.model(client), index)
        return torch.bincount(pairs, minlength=classes**2).view(classes, classes)

    def training_losses(self) -> dict[int, float]:
        """After each round of training with a checkpoint: cross-entropy of clients' models on their training images.

        The mean over clients, before they train again. Where clients keep something of their own, over those that have
        taken part: the rest have it as it began, and would hide how training goes. Training itself records no loss, so
        this is measured afterwards: keep=N leaves a checkpoint every N rounds.
        """
        kept = rounds_of(self.folder).counted({round: round for round in self.folder.rounds()})
        if len(kept) < 2:
            raise BadInput(
                f"{self.folder.path} has no checkpoint of an earlier round: run it with keep=1, or keep=N for less"
            )
        found = {}
        with torch.no_grad(), self.at_work():
            for trained, (round, _) in kept.items():
                checkpoint = self.folder.at(round)
                clients = sorted(checkpoint.versions or self.federation.train)
                losses = [
                    self._loss(model, Shard(self.federation.data, self.federation.train[client]))
                    for client, model in self.client_models(checkpoint, clients)
                ]
                found[trained] = sum(losses) / len(losses)
        return found

    def _loss(self, model: Tree, shard: Shard) -> float:
        sums = (F.cross_entropy(self.net(model, part.x).double(), part.y, reduction="sum") for part in pieces(shard))
        return sum(map(float, sums)) / len(shard)


def _when(round: int, trained: int) -> str:
    """A checkpoint by its number, and by what it counts where that is another."""
    return f"round {round}" + ("" if trained == round else f" ({trained} of training)")


def named(paths: Sequence[str | Path]) -> dict[str, Path]:
    """Runs by their method, or by their folders where two have the same."""
    found = {Path(path): method_of(settings_of(RunFolder.open(path).path)["algorithm"]) for path in paths}
    if len(set(found.values())) == len(paths):
        return {name: path for path, name in found.items()}
    if len(found) < len(paths):
        raise BadInput("the same run is named twice; name each once")
    root = os.path.commonpath([path.absolute().parent for path in found])
    return {os.path.relpath(path.absolute(), root): path for path in found}


def same_split(runs: Mapping[str, OpenedRun]) -> None:
    """Clients can be compared across runs only when they own the same images."""
    cards = {name: run.folder.full_passport() for name, run in runs.items()}
    first = next(iter(cards))
    for name, card in cards.items():
        if (card["split_hash"], card["data"]["sha256"]) != (cards[first]["split_hash"], cards[first]["data"]["sha256"]):
            raise BadInput(f"{name} and {first} have other data or another split: their clients cannot be compared")
