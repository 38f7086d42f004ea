"""An experiment is a value: data x partition x model x algorithm x local training x seed, and where it runs."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from annotated_types import Le
from torch import nn

from .algorithms import FedAvg, name_of
from .core.algorithm import Recipe, Stage, chain, disclosures
from .core.batches import Dataset, Federation
from .core.cohort import Cohort, Everyone, Uniform
from .core.errors import BadInput
from .core.fields import Count, Momentum, NonNegative, Number, Positive, Share
from .core.network import Buffers, Network, Precision
from .core.objective import WEIGHTINGS, ClassWeighted, cross_entropy
from .core.optimizer import Adam, Optimizer, Schedule, Sgd
from .core.policy import RoundPolicy
from .core.rng import key, seeded
from .core.run import Turn, timetable
from .core.transform import Transform
from .data import DATASETS, PARTITIONS, DataSource, Images, Partition, Prepare, Split, federate
from .data.classes import declared
from .data.federation import Augment
from .data.given import GivenData, given_data
from .data.groups import check_apart
from .data.images import alike
from .data.partition.base import parted_users
from .devices.profiles import Devices
from .models import MODELS, Model
from .models.given import given_path
from .robust.attacks import Attack
from .robust.defence import Defence
from .robust.faults import Faults


@dataclass(frozen=True)
class LocalTraining:
    """What a client does in a round."""

    epochs: Number = 1  # epochs of a client in a round
    steps: Count | None = None  # steps of a client in a round, in place of epochs
    batch_size: Count = 32  # images of a step
    optimizer: Literal["sgd", "adam"] = "sgd"  # optimizer of clients
    lr: Positive = 0.01  # learning rate of clients' steps
    momentum: Momentum = 0.9  # of sgd; starts at zero each round
    weight_decay: NonNegative = 0.0  # how much weights shrink, times the rate
    schedule: Schedule = Schedule()  # of the rate, over rounds
    class_weights: Literal["none", "balanced"] = "none"  # balanced: a client's rare classes count more in its loss

    @property
    def rule(self) -> Optimizer:
        common = {"weight_decay": self.weight_decay, "schedule": self.schedule}
        return Sgd(self.lr, momentum=self.momentum, **common) if self.optimizer == "sgd" else Adam(self.lr, **common)


@dataclass(frozen=True)
class Evaluation:
    """When models are evaluated, and which."""

    every: Number = 1  # rounds between evaluations of the global model; 0: only after the last round
    closing: Number = 0  # last rounds that are all evaluated, whatever `every` says
    personal: Literal["both", "before", "after", "none"] = "both"  # personal models, before or after local training
    personal_every: Number = 0  # rounds between evaluations of them; 0: only after the last round
    last: Number = 0  # evaluations that the closing mean is over, the last ones; 0: a quarter of them, at most 10
    targets: tuple[Share, ...] = ()  # accuracies whose first round and bytes are reported
    measures: Literal["accuracy", "all"] = "accuracy"  # all: balanced accuracy, AUROC, ECE, and each class, too
    validation: Share = 0.0  # of each client's training images, kept for choosing the best round; 0: none is chosen
    watch: str = "loss"  # decides which is best: accuracy, loss, balanced_accuracy, auroc, ece; of a class: auroc/ill
    patience: Number = 0  # validation results in a row without a better one that end the run; 0: never


@dataclass(frozen=True)
class RayCluster:
    """Where engine=ray finds its machines."""

    address: str = ""  # such as 10.0.0.1:6379; without one: $RAY_ADDRESS, or a cluster on this machine alone


@dataclass(frozen=True)
class Execution:
    """Where and how an experiment is computed, and what is kept of it. Its keys have no prefix: device=cpu."""

    # The one rule of what is not science: results depend on none of these settings but
    AFFECTS_RESULTS: ClassVar = ("devices", "device", "precision", "compile")
    # which of these leave a result as it was before they existed, and so a hash,
    UNHASHED: ClassVar = (("compile", False), ("compile", "auto"), ("classes", []))
    # and a resumed run may change all of them but
    FIXED: ClassVar = (*AFFECTS_RESULTS, "transcript", "out")

    devices: Devices | None = None  # what clients run on, for simulated seconds; changes nothing that is learned
    engine: Literal["auto", "sequential", "workers", "lanes", "ray"] = "auto"  # on a CPU all give the same bits
    workers: Number = 0  # processes, or actors of engine=ray; 0: one per core (ray on GPUs: one per GPU)
    ray: RayCluster = RayCluster()
    lanes: Number = 0  # clients side by side on a GPU; 0: as many as fit
    device: str = "auto"  # cpu, cuda or cuda:N
    residency: Literal["auto", "device", "host"] = "auto"  # where images lie; auto: on the GPU when they fit
    precision: Literal["auto", Precision] = "auto"  # of the computation; auto: fp32 on a CPU, bf16 on a GPU
    compile: bool | Literal["auto"] = "auto"  # training passes through torch.compile; auto: in lanes, where it pays
    memory: Positive = 1.0  # GiB of client memories that each process holds in RAM; the rest is on disk
    checkpoint: Number = 1  # rounds between checkpoints; 0: only after the last round
    keep: Number = 0  # rounds between checkpoints that stay, to look at later; 0: only the last two
    durable: bool = True  # checkpoints outlive a power cut; false: do not wait for a slow disk
    picture: bool = True  # draw the run when it is complete
    transcript: NonNegative = 0.0  # MiB at most of what crosses that is kept for `fedlens audit`; 0: nothing
    track: tuple[Literal["tensorboard", "mlflow", "wandb", "trackio"], ...] = ()  # tools that are told of every round
    out: str = ""  # the run's folder; without one: runs/DATA-ALGORITHM-N


if TYPE_CHECKING:

    class DataField:
        """What a program may give as data; what it reads is a data source."""

        def __get__(self, experiment: Any, kind: Any = None) -> DataSource: ...
        def __set__(self, experiment: Any, value: DataSource | GivenData) -> None: ...

    class ModelField:
        """The same of a model."""

        def __get__(self, experiment: Any, kind: Any = None) -> Model: ...
        def __set__(self, experiment: Any, value: Model | nn.Module | Callable[..., nn.Module]) -> None: ...
else:
    DataField, ModelField = DataSource, Model


@dataclass(frozen=True)
class Experiment:
    """Data x partition x model x algorithm x local training x seed, and where it runs: a value that `run` carries out.

    Tensors, arrays, data sets, classes and modules of a program's own work too; docs/python.md lists them.
    """

    data: DataField = cast(Any, DATASETS["mnist5k"]())  # which images; in Python also tensors and data sets
    classes: tuple[str, ...] = ()  # those that the run is about, in order; none: those of the data. Data may lack some
    auxiliary: DataSource | None = None  # public data at the server, for methods that need some (feddf, fedaux)
    partition: Partition = PARTITIONS["dirichlet"]()  # who owns which of them
    clients: Count = 20  # clients in all
    cohort: Cohort = Uniform(5)  # who takes part in a round: a number, a share, or everyone
    model: ModelField = cast(Any, MODELS["cnn"]())  # the network; in Python also a class, a function, a module
    algorithm: Recipe = FedAvg()  # the method; METHOD/PRESET for one of its presets, METHOD+ft to fine-tune at the end
    local: LocalTraining = LocalTraining()  # what a client does in a round
    rounds: Annotated[Count, Le(999_999)] = 20  # rounds of training; names of checkpoints have six digits
    weighting: Literal["auto", "samples", "uniform", "batches"] = "auto"  # how clients count; auto: as its paper does
    buffers: Buffers = "average"  # running statistics of BatchNorm: averaged, or kept by each client
    uplink: tuple[Transform, ...] = ()  # what is done to uploads, in order
    defences: tuple[Defence, ...] = ()  # what the server does to uploads before it averages them, in order
    attack: Attack | None = None  # hostile clients, in simulation
    policy: RoundPolicy = RoundPolicy()  # whom a round asks, how long it waits, when it counts
    faults: Faults = Faults()  # what goes wrong on the way, in simulation
    augment: Augment = "none"  # how training images are augmented
    evaluate: Evaluation = Evaluation()  # when models are evaluated, and which
    seed: int = 0  # of all that is drawn; the same seed gives the same bits
    execution: Execution = Execution()  # where and how it is computed

    def __post_init__(self):
        """What a program brings itself becomes a part with a name: tensors and data sets, classes and modules."""
        for name in ("data", "auxiliary"):
            value = getattr(self, name)
            named = isinstance(value, DataSource | str | None) or (isinstance(value, dict) and "is" in value)
            if not named:
                object.__setattr__(self, name, given := given_data(value))
                if name == "data" and (owners := given.owners()):
                    self._keep_apart(owners)
        if isinstance(self.model, nn.Module) or (callable(self.model) and not isinstance(self.model, Model)):
            object.__setattr__(self, "model", MODELS["custom"](path=given_path(self.model)))  # pyright: ignore[reportCallIssue]

    def _keep_apart(self, owners: int) -> None:
        """Data that came apart by client stay apart where nobody has chosen otherwise."""
        usual = {each.name: each.default for each in fields(self)}
        if self.partition is usual["partition"]:
            object.__setattr__(self, "partition", PARTITIONS["by_user"]())
            if self.clients == usual["clients"]:
                object.__setattr__(self, "clients", owners)
            if self.cohort is usual["cohort"] and owners < self.cohort.size(sys.maxsize):
                object.__setattr__(self, "cohort", Everyone())

    @property
    def plan(self) -> Stage:
        """What the recipe is asked to carry out."""
        local = self.local
        return Stage(
            None,
            self.rounds,
            self.cohort,
            local.rule,
            epochs=local.epochs,
            steps=local.steps,
            size=local.batch_size,
            objective=ClassWeighted() if local.class_weights == "balanced" else cross_entropy,
            weighting=WEIGHTINGS.get(self.weighting),
            uplink=self.uplink,
            defences=self.defences,
        )

    def images(self) -> Images:
        """The data, under the classes that the run declares; refused where there are others."""
        images = self.data.load(labelled=not self.classes)
        return declared(images, self.classes) if self.classes else images

    def with_execution(self, **changes: Any) -> Experiment:
        """The same experiment, computed otherwise: with_execution(device="cpu", out="runs/again")."""
        return replace(self, execution=replace(self.execution, **changes))

    def resolved(self) -> Experiment:
        """The same experiment with engine, workers, device and precision decided for this machine.

        compile=auto is decided as well, but in lanes on a GPU: there `simulate` measures whether it pays.
        """
        where = self.execution
        device, precision, engine = where.device, where.precision, where.engine
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        check_device(device)
        if precision == "auto":
            precision = "fp32" if device == "cpu" else "bf16"
        if precision in ("bf16", "tf32") and device == "cpu":
            raise BadInput(f"precision={precision} needs a GPU; on the CPU use fp32 or fp64")
        self._check_accounts()
        largest = max((stage.cohort.size(self.clients) for stage, _, _ in self.timetable()), default=1)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = where.workers or min(cores, largest)
        if engine == "auto":
            several = os.name == "posix" and min(workers, largest) > 1 and self.importable
            engine = "lanes" if device != "cpu" else "workers" if several else "sequential"
        if engine == "workers" and device != "cpu":
            raise BadInput("engine=workers runs on the CPU; on a GPU use engine=lanes")
        if engine == "workers" and not self.importable:
            raise BadInput(
                "engine=workers needs classes that other processes can import: move those of your script or notebook "
                "to a module beside it, or use engine=sequential"
            )
        if engine == "ray" and device.startswith("cuda:"):
            raise BadInput(f"engine=ray gives every actor a GPU of its own: device=cuda, not {device}")
        workers = workers if engine == "workers" else where.workers if engine == "ray" else 1
        open_still = where.compile == "auto" and engine == "lanes" and device != "cpu"
        compiled = where.compile if open_still else where.compile is True
        return self.with_execution(engine=engine, workers=workers, device=device, precision=precision, compile=compiled)

    def _check_accounts(self) -> None:
        """uplink=dp states what it does of the cohorts that are drawn; with trust=aggregator, of everyone's noise."""
        for transform in self.uplink:
            trust = getattr(transform, "trust", None)
            if trust and (self.policy.oversample or self.policy.max_failures):
                raise BadInput(
                    "uplink dp accounts for cohorts as they are drawn: no policy.oversample, policy.max_failures"
                )
            if trust == "aggregator" and self.faults:
                raise BadInput(
                    "uplink dp with trust=aggregator counts on everyone's noise, which faults take away: trust=nobody"
                )
            if trust == "aggregator" and self.defences:
                raise BadInput(
                    "uplink dp with trust=aggregator counts on the sum of all uploads, which defences take apart: "
                    "trust=nobody"
                )

    @property
    def importable(self) -> bool:
        """Whether another process can import all parts; a method that a script or a notebook defines, it cannot."""
        try:
            return not self.model.lost() and b"__main__" not in pickle.dumps(self)
        except (AttributeError, TypeError, pickle.PicklingError):
            return False

    def timetable(self) -> list[Turn]:
        return timetable(self.algorithm, self.plan)

    def federation(self, images: Images) -> tuple[Federation, Split]:
        """Who owns which images; the same for every method, engine and model."""
        dtype = torch.float64 if self.execution.precision == "fp64" else torch.float32
        how = {"augment": self.augment, "dtype": dtype, "validation": self.evaluate.validation}
        federation, split = federate(images, self.partition, self.clients, self.seed, **how)
        check_apart(images, split)
        found = () if self.data.known else (images.summary, *images.notes, *alike(images.classes))
        found += parted_users(images, split)
        if lost := self.model.lost():
            found += (f"this run cannot be resumed, since its model cannot be found again: {lost}",)
        if self.auxiliary is not None and not self.needs_public_data:
            found += (f"auxiliary is not used: {name_of(self.algorithm)} needs no public data",)
        found += self._start_notes([len(mine) for mine in federation.train.values()])
        split = replace(split, notes=(*found, *split.notes), found=found)
        if self.attack is not None:
            federation = self.attack.poisoned(federation, len(images.classes), self.seed)
        return federation, split

    def _start_notes(self, sizes: Sequence[int]) -> tuple[str, ...]:
        """What the methods of all stages have to say about clients of these sizes, each thing once."""
        stages = dict.fromkeys(turn.stage for turn in self.timetable())
        pairs = ((stage, part) for stage in stages for part in chain(stage.algorithm) if hasattr(part, "start_notes"))
        said = [
            note
            for stage, part in pairs
            for note in (*part.start_notes([stage.local_steps(size) for size in sizes]), *_momentum_note(stage, part))
        ]
        return tuple(dict.fromkeys([*said, *self._uncovered()]))

    @property
    def discloses(self) -> dict[str, str]:
        """What leaves clients beside updates, or whom it reaches: a sentence under each algorithm's name."""
        return {name: said for turn in self.timetable() for name, said in disclosures(turn.stage.algorithm).items()}

    def _uncovered(self) -> list[str]:
        """What leaves clients without the transforms that updates pass."""
        names = ", ".join(transform.name for transform in self.uplink)
        return [f"uplink={names} does not act on this: {said}" for said in self.discloses.values() if names]

    @property
    def needs_public_data(self) -> bool:
        """Whether the server trains on data of its own; refused where it should and has none."""
        needed = self._distils(self.algorithm)
        if needed and self.auxiliary is None:
            *_, part = takewhile(self._distils, chain(self.algorithm))
            raise BadInput(
                f"{name_of(part)} needs public data that no client owns: set auxiliary, as in auxiliary=cifar100"
            )
        return needed

    def _distils(self, recipe: Recipe) -> bool:
        """Whether some stage of a recipe takes public data."""
        return any(_needs_public_data(stage.algorithm) for stage, _, _ in timetable(recipe, self.plan))

    def public(self, found: Images, images: Images) -> Dataset:
        """The training images of an auxiliary data set, as the network takes the clients' images; on the device."""
        dtype = torch.float64 if self.execution.precision == "fp64" else torch.float32
        if torch.uint8 not in (found.x.dtype, images.x.dtype) or found.x.dtype != images.x.dtype:
            raise BadInput("auxiliary and data must both be bytes (uint8): floats have no scale that others share")
        x = resized(found.x[found.train], images.x.shape[1:]).to(self.execution.device)
        border = max(1, x.shape[3] // 8)
        # Moved where a step asks for it by a key, whatever `augment` says of clients' own images.
        prepare = Prepare(images.mean, images.std, border, flip=True, dtype=dtype)
        return Dataset(x, found.y[found.train].to(self.execution.device), prepare)

    def undivided(self) -> Experiment:
        """The same with all of its data in one hand, as of a party to whom others show none of theirs."""
        return replace(self, partition=PARTITIONS["iid"](), clients=1)

    def network(self, images: Images) -> Network:
        """The model with its first weights, the same for every method and engine."""
        channels, height, width = images.x.shape[1:]
        if height != width:
            raise BadInput(f"data: images of {height} x {width} pixels are not square")
        with seeded(key(self.seed, "init")):
            module = self.model.build(len(images.classes), channels, height)
        try:
            precision = "fp32" if self.execution.precision == "auto" else self.execution.precision
            return Network(module, precision, self.buffers, self.execution.compile is True)
        except ValueError as error:
            raise BadInput(f"model: {error}") from None


def _needs_public_data(part: Any) -> bool:
    """Whether an algorithm, or one that it is made over, trains on data of the server's own."""
    return any(getattr(inner, "needs_public_data", False) for inner in chain(part))


def resized(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Bytes [N, C, H, W] as images of this shape: grey or coloured, larger or smaller."""
    channels, *sides = shape
    if x.shape[1] != channels:
        x = x.float().mean(1, keepdim=True).round().to(torch.uint8).expand(-1, channels, -1, -1)
    if list(x.shape[2:]) == sides:
        return x
    smaller = sides[0] < x.shape[2]
    parts = (F.interpolate(some.float(), sides, mode="bilinear", antialias=smaller) for some in x.split(2048))
    return torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])


def check_device(device: str) -> None:
    """One sentence about a device that cannot be had here."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
        raise BadInput(f"device is {device!r}, but it should be auto, cpu, cuda or cuda:N")
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= (count := torch.cuda.device_count()):
        raise BadInput(f"device is {device!r}, but torch sees {count or 'no'} GPU here; device=cpu works everywhere")


def build(experiment: Experiment) -> tuple[Network, Federation]:
    """What an engine needs, built anew from the configuration: in this process or in a worker."""
    images = experiment.images()
    net, (federation, _) = experiment.network(images), experiment.federation(images)
    return net.to(experiment.execution.device), to_device(experiment, federation)


def to_device(experiment: Experiment, federation: Federation) -> Federation:
    """On the experiment's device; the images stay on the host when that is asked for, or when they do not fit."""
    where = experiment.execution
    too_large = where.residency == "auto" and federation.data.x.nbytes > room_for_images(where.device)
    hosted = where.residency == "host" or too_large
    return (federation.on_host() if hosted else federation).to(where.device)


def devices(device: str) -> list[str]:
    """All visible GPUs, unless one was named."""
    return [f"cuda:{n}" for n in range(torch.cuda.device_count())] if device == "cuda" else [device]


def room_for_images(device: str) -> float:
    """Bytes: half of what is free on every GPU, the rest is for training. A CPU reads them where they are mapped."""
    return min(torch.cuda.mem_get_info(each)[0] / 2 for each in devices(device)) if device != "cpu" else float("inf")


def _momentum_note(stage: Stage, part: Any) -> list[str]:
    """What to say where local steps have a momentum that the method does not mean."""
    momentum = getattr(stage.optimizer, "momentum", 0)
    if not momentum or getattr(part, "wants_momentum", True):
        return []
    return [f"{name_of(part)} means plain local steps, and local.momentum is {momentum:g}: try local.momentum=0"]
