"""A node is its owner's: which data it holds, where it remembers, and what it lets a server ask of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from .. import config
from ..algorithms import ALGORITHMS
from ..core.algorithm import Recipe
from ..core.batches import Federation
from ..core.errors import BadInput, nearest
from ..core.fields import Number, Open, Positive
from ..core.rng import key
from ..core.tree import Tree
from ..core.yaml_dialect import read_yaml
from ..data import DataSource, Images
from ..data.classes import OtherClasses, declared
from ..experiment import Experiment
from ..privacy.client_level import ClientPrivacy
from ..simulate.describe import describe
from .ledger import ReleaseLedger, Spent


class NodeRefused(BadInput):
    """What the server is told, and what the owner's log has besides."""

    def __init__(self, told: str, detail: str = ""):
        super().__init__(told)
        self.detail = detail


@dataclass(frozen=True)
class Budget:
    """What may ever leave a data set: over all runs, whoever asks, at the owner's own delta."""

    epsilon: Positive
    delta: Open
    label: str  # of the data set: its ledger's name, which stays when images are added
    ledger: str = "~/.fedlens/ledgers"  # a folder, outside the node's own

    def __post_init__(self):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.label):
            raise BadInput(f"privacy.label is {self.label!r}, but it names a file: letters, digits, dots and dashes")


@dataclass(frozen=True)
class Policy:
    """What the owner of a node allows."""

    algorithms: tuple[str, ...] = ()  # names of the registry, bases of a method included; none: all
    classes: tuple[str, ...] = ()  # code of one's own that contracts may name, as module:Class; none: no code
    raw_derived: bool = False  # whether anything but model updates may leave: masked images, saliency numbers
    contracts: Literal["ask", "any"] = "ask"  # whether the owner reads every new contract before it is carried out

    def __post_init__(self):
        for name in self.algorithms:
            if name not in ALGORITHMS:
                raise BadInput(f"policy.algorithms has {name!r}, which is unknown; {nearest(name, ALGORITHMS)}")

    def check(self, experiment: Experiment, classes: int, channels: int, size: int) -> None:
        """Refuses a whole run before it begins, in a sentence that the server is told."""
        for name in named(experiment.algorithm) if self.algorithms else ():
            if name not in self.algorithms:
                raise BadInput(f"its policy allows {', '.join(self.algorithms)}, and {name} is not among them")
        answers = sorted({name for name in _uploaded(experiment, classes, channels, size) if not is_update({name})})
        if answers and not self.raw_derived:
            raise BadInput(f"its policy lets model updates out alone, and this method sends {', '.join(answers)}")

    def let_out(self, upload: Tree) -> None:
        """The last look before anything leaves."""
        if not self.raw_derived and not is_update(upload.keys()):
            raise BadInput(f"its policy lets model updates out alone, not {', '.join(sorted(upload))}")


def check_privacy(experiment: Experiment, client: int, budget: ReleaseLedger, contract: str = "") -> None:
    """Refuses a run that a budget does not cover, or that has releases without noise.

    `contract`: its digest. Rounds of it that were paid for, before the node was started anew, are not counted again.
    """
    assert budget.epsilon is not None
    dp = private(experiment.uplink)
    if dp is None:
        raise BadInput("its owner asks for privacy: set uplink=dp with trust=nobody")
    stages = [stage for stage, _, _ in experiment.timetable()]
    if any(dp not in stage.uplink for stage in stages):
        raise BadInput("its owner asks for privacy, and this method has rounds whose answers have no noise")
    if experiment.evaluate.personal != "none":
        raise BadInput("its owner asks for privacy, and accuracies have no noise: set evaluate.personal=none")
    if experiment.evaluate.validation:
        raise BadInput("its owner asks for privacy, and validation has no noise: set evaluate.validation=0")
    if experiment.weighting != "uniform":
        raise BadInput("its owner asks for privacy, and the number of its images has no noise: set weighting=uniform")
    times = max(0, rounds_of(experiment, client) - budget.rounds(contract))
    spent, after = budget.spent(), budget.spent(dp.multiplier / 2, times)
    if after > budget.epsilon:
        raise BadInput(
            f"the budget of its data is epsilon {budget.epsilon:g} at delta {budget.delta:g}, of which "
            f"{max(0.0, budget.epsilon - spent):.4g} is left, and with this run {after:.4g} would be spent"
        )


def rounds_of(experiment: Experiment, client: int) -> int:
    """In how many rounds a client takes part."""
    stages = [stage for stage, _, _ in experiment.timetable()]
    cohorts = (stage.cohort(experiment.clients, key(experiment.seed, "cohort", n)) for n, stage in enumerate(stages))
    return sum(client in cohort for cohort in cohorts)


def private(uplink: Sequence[Any]) -> ClientPrivacy | None:
    """The mechanism that protects every single upload, where there is one."""
    return next((t for t in uplink if isinstance(t, ClientPrivacy) and t.trust == "nobody"), None)


def price(uplink: Sequence[Any], what: str) -> Spent:
    """What an upload costs: another client in this one's place moves it by two norms."""
    dp = private(uplink)
    return Spent(None, what) if dp is None else Spent(dp.multiplier / 2, what)


def is_update(names: Iterable[str]) -> bool:
    """Whether an upload is a model's update with what belongs to it; nothing at all is no secret."""
    return set(names) <= {"delta", "model", "control", "kept", "reach", "weight", "examples"}


def _uploaded(experiment: Experiment, classes: int, channels: int, size: int) -> Iterator[str]:
    plain = replace(experiment, uplink=())  # transforms change values, not what is sent
    for leaf in describe(plain, classes, channels, size):
        if leaf.where == "up" and leaf.name != "(header)":
            yield leaf.name.split("/")[0]


def named(recipe: Recipe) -> Iterator[str]:
    """The registry names of a recipe and of all recipes inside it."""
    yield config.to_dict(recipe)["is"]
    for field in dataclasses.fields(recipe):  # pyright: ignore[reportArgumentType]  all recipes are dataclasses
        if hasattr(inner := getattr(recipe, field.name), "stages"):
            yield from named(inner)


# ---- the node --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Node:
    """One client of a federation, with data of its owner's, or with its part of a known data set for a trial."""

    client: Number
    data: DataSource | None = None  # the owner's own
    simulation: DataSource | None = None  # instead: one that all nodes have, of which this client takes its part
    extra_classes: Literal["refuse", "drop"] = "refuse"  # images of classes that a run does not declare
    storage: str = ""  # memories, common payloads, answers; none: Flower's context, lost with the SuperNode
    device: str = "auto"
    privacy: Budget | None = None
    policy: Policy = Policy()

    def __post_init__(self):
        if self.data is not None and self.simulation is not None:
            raise BadInput("data are the owner's own, simulation is a trial with everybody's: remove one of the two")
        if self.privacy is not None and not self.storage:
            raise BadInput("privacy needs a storage folder, where the node keeps its answers")
        if self.privacy is not None and self.data is None:
            raise BadInput("privacy is about data of the owner's own, and this node has none: set data")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Node:
        """From a SuperNode's --node-config partition-id=N, for a simulation; a node with an owner runs the guard."""
        if "partition-id" not in settings:
            raise BadInput("this app is for simulations (--node-config partition-id=N); others: fedlens deploy node")
        # A simulation has no owner who could mind.
        return cls(client=int(settings["partition-id"]), policy=Policy(raw_derived=True, contracts="any"))

    @classmethod
    def read(cls, path: Path) -> Node:
        """A node's file; refused where it does not say whose data these are and what may leave them."""
        try:
            raw = read_yaml(path)
        except FileNotFoundError:
            raise BadInput(f"there is no file {path}") from None
        except (yaml.YAMLError, ValueError) as error:
            raise BadInput(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
        if not isinstance(raw, dict) or "client" not in raw:
            raise BadInput(f"{path} must say which client this node is, such as `client: 0`")
        if isinstance(raw.get("policy"), dict) and "epsilon" in raw["policy"]:
            raise BadInput(f"{path}: policy.epsilon is now `privacy: {{epsilon: 8, delta: 1e-5, label: NAME}}`")
        if raw.get("data") is None and raw.get("simulation") is None:
            raise BadInput(f"{path} names no data: set data for the owner's own, or simulation for a trial")
        if raw.get("data") is not None and "privacy" not in raw:
            raise BadInput(
                f"{path} does not say what may leave its data: set `privacy: none`, or "
                "`privacy: {epsilon: 8, delta: 1e-5, label: NAME}`"
            )
        try:
            node = config.resolve(cls, raw)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        return replace(node, storage=str(path.parent.resolve() / node.storage) if node.storage else "")

    @property
    def ledger(self) -> ReleaseLedger | None:
        """Of this node's data; without a budget releases are written down and none is refused."""
        if self.data is None or not self.storage:
            return None
        own = Path(self.storage)
        if self.privacy is None:
            return ReleaseLedger(own / "releases.jsonl", own / "releases.anchor", None, 1e-5)
        folder, label = Path(self.privacy.ledger).expanduser(), self.privacy.label
        # An anchor for each ledger: an owner may set a budget later, or another label.
        anchor = own / f"{label}.anchor"
        return ReleaseLedger(folder / f"{label}.jsonl", anchor, self.privacy.epsilon, self.privacy.delta)

    def images(self, experiment: Experiment, contract: dict[str, Any]) -> Images:
        """The node's own, prepared as all others' are; refuses those that the run's model is not for."""
        source = self.data or self.simulation or experiment.data
        asked = contract["data"]
        try:
            images = source.load(labelled=self.data is None)
        except BadInput as error:  # may name the owner's files
            raise NodeRefused("its data cannot be read", str(error)) from None
        if list(images.x.shape[1:]) != asked["shape"]:
            here, there = (" x ".join(map(str, shape)) for shape in (images.x.shape[1:], asked["shape"]))
            raise NodeRefused("its images have another shape", f"images here are {here}, and the run is about {there}")
        images = as_declared(images, tuple(asked["classes"]), self.extra_classes == "drop")
        return replace(images, mean=tuple(asked["mean"]), std=tuple(asked["std"]))

    def federation(self, experiment: Experiment, images: Images) -> Federation:
        """What this client owns, under its own number."""
        if self.client >= experiment.clients:
            raise BadInput(f"it is client {self.client}, but the run has clients={experiment.clients}")
        if self.data is None:
            return experiment.federation(images)[0]
        try:
            alone, _ = experiment.undivided().federation(images)
        except BadInput as error:  # may name the owner's classes, groups or files
            raise NodeRefused("its data do not suit this run", str(error)) from None
        mine = {
            name: {self.client: part[0]} for name in ("train", "test", "validation") if (part := getattr(alone, name))
        }
        return replace(alone, **mine)


def as_declared(images: Images, classes: tuple[str, ...], drop: bool = False) -> Images:
    """With labels as the run numbers its classes. A site may lack some; one that has others refuses, or drops them.

    The server hears that classes differ and no more: their names stay in the owner's log.
    """
    told = "its classes differ from those that the run declares"
    try:
        return declared(images, classes, drop)
    except OtherClasses as error:
        names = ", ".join(error.names)
        detail = f"the run does not declare {names}; `extra_classes: drop` leaves such images out"
        raise NodeRefused(told, detail) from None
    except BadInput:
        raise NodeRefused(told, "none of the images here is of a class that the run declares") from None
