"""A node is its owner's: which data it holds, where it remembers, and what it lets a server ask of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from .. import config
from ..algorithms import ALGORITHMS
from ..core.algorithm import Recipe
from ..core.batches import Federation
from ..core.errors import BadInput, nearest
from ..core.fields import Number, Positive
from ..core.rng import key
from ..core.tree import Tree
from ..core.yaml_dialect import read_yaml
from ..data import PARTITIONS, DataSource, Images
from ..experiment import Experiment
from ..privacy.accounting import Release, total_epsilon
from ..privacy.client_level import ClientPrivacy
from ..simulate.describe import describe


@dataclass(frozen=True)
class Policy:
    """What the owner of a node allows."""

    algorithms: tuple[str, ...] = ()  # names of the registry, bases of a method included; none: all
    raw_derived: bool = False  # whether anything but model updates may leave: masked images, saliency numbers
    epsilon: Positive | None = None  # at most, of each run at this node, by uplink=dp with trust=nobody; None: no limit

    def __post_init__(self):
        for name in self.algorithms:
            if name not in ALGORITHMS:
                raise BadInput(f"policy.algorithms has {name!r}, which is unknown; {nearest(name, ALGORITHMS)}")

    def check(self, experiment: Experiment, images: Images, client: int) -> None:
        """Refuses a whole run before it begins, in a sentence that the server is told."""
        for name in named(experiment.algorithm) if self.algorithms else ():
            if name not in self.algorithms:
                raise BadInput(f"its policy allows {', '.join(self.algorithms)}, and {name} is not among them")
        answers = sorted({name for name in _uploaded(experiment, images) if not is_update({name})})
        if answers and not self.raw_derived:
            raise BadInput(f"its policy lets model updates out alone, and this method sends {', '.join(answers)}")
        if self.epsilon is not None:
            self._check_privacy(experiment, client, self.epsilon)

    def _check_privacy(self, experiment: Experiment, client: int, limit: float) -> None:
        dp = private(experiment.uplink)
        if dp is None:
            raise BadInput("its policy asks for privacy: set uplink=dp with trust=nobody")
        stages = [stage for stage, _, _ in experiment.timetable()]
        if any(dp not in stage.uplink for stage in stages):
            raise BadInput("its policy asks for privacy, and this method has rounds whose answers have no noise")
        if experiment.evaluate.personal != "none":
            raise BadInput("its policy asks for privacy, and accuracies have no noise: set evaluate.personal=none")
        cohorts = (
            stage.cohort(experiment.clients, key(experiment.seed, "cohort", n)) for n, stage in enumerate(stages)
        )
        if (spent := epsilon(dp, sum(client in cohort for cohort in cohorts))) > limit:
            raise BadInput(f"its policy allows epsilon {limit:g} at most, and this run would spend {spent:.4g}")

    def let_out(self, upload: Tree) -> None:
        """The last look before anything leaves."""
        if not self.raw_derived and not is_update(upload.keys()):
            raise BadInput(f"its policy lets model updates out alone, not {', '.join(sorted(upload))}")


def private(uplink: Sequence[Any]) -> ClientPrivacy | None:
    """The mechanism that protects every single upload, where there is one."""
    return next((t for t in uplink if isinstance(t, ClientPrivacy) and t.trust == "nobody"), None)


def epsilon(dp: ClientPrivacy, uploads: int) -> float:
    """What so many uploads of one client spend: another client in its place moves each by two norms."""
    return total_epsilon({Release(dp.multiplier / 2): uploads}, dp.delta)


def is_update(names: Iterable[str]) -> bool:
    """Whether an upload is a model's update with what belongs to it; nothing at all is no secret."""
    return set(names) <= {"delta", "model", "control", "kept", "reach", "weight", "examples"}


def _uploaded(experiment: Experiment, images: Images) -> Iterator[str]:
    plain = replace(experiment, uplink=())  # transforms change values, not what is sent
    channels, _, size = images.x.shape[1:]
    for leaf in describe(plain, len(images.classes), channels, size):
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
    """One client of a federation. Without data of its own it takes its part of the experiment's: a simulation."""

    client: Number
    data: DataSource | None = None
    storage: str = ""  # memories, common payloads, the privacy account; none: Flower's context, lost with the SuperNode
    device: str = "auto"
    policy: Policy = Policy()

    def __post_init__(self):
        if self.policy.epsilon is not None and not self.storage:
            raise BadInput("policy.epsilon needs a storage folder, where the node keeps its account")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Node:
        """From a SuperNode's --node-config: node="FILE.yaml", or partition-id=N for a simulation."""
        if "node" in settings:
            return cls.read(Path(str(settings["node"])))
        if "partition-id" not in settings:
            raise BadInput("a SuperNode needs --node-config 'node=\"FILE.yaml\"', or partition-id=N for a simulation")
        # A simulation has no owner who could mind.
        return cls(client=int(settings["partition-id"]), policy=Policy(raw_derived=True))

    @classmethod
    def read(cls, path: Path) -> Node:
        try:
            raw = read_yaml(path)
        except FileNotFoundError:
            raise BadInput(f"there is no file {path}") from None
        except (yaml.YAMLError, ValueError) as error:
            raise BadInput(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
        if not isinstance(raw, dict) or "client" not in raw:
            raise BadInput(f"{path} must say which client this node is, such as `client: 0`")
        try:
            node = config.resolve(cls, raw)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        return replace(node, storage=str(path.parent.resolve() / node.storage) if node.storage else "")

    def images(self, experiment: Experiment, contract: dict[str, Any]) -> Images:
        """The node's own, prepared as all others' are; refuses those that the run's model is not for."""
        images = (self.data or experiment.data).load()
        asked = contract["data"]
        if list(images.classes) != asked["classes"] or list(images.x.shape[1:]) != asked["shape"]:
            here, there = (
                f"{len(classes)} classes ({', '.join(classes[:5])}, ...) of images {' x '.join(map(str, shape))}"
                for classes, shape in ((images.classes, images.x.shape[1:]), (asked["classes"], asked["shape"]))
            )
            raise BadInput(f"its data have {here}, but this run is about {there}")
        return replace(images, mean=tuple(asked["mean"]), std=tuple(asked["std"]))

    def federation(self, experiment: Experiment, images: Images) -> Federation:
        """What this client owns, under its own number."""
        if self.client >= experiment.clients:
            raise BadInput(f"it is client {self.client}, but the run has clients={experiment.clients}")
        if self.data is None:
            return experiment.federation(images)[0]
        alone, _ = replace(experiment, partition=PARTITIONS["iid"](), clients=1).federation(images)
        return replace(alone, train={self.client: alone.train[0]}, test={self.client: alone.test[0]})
