"""The only file to read before writing an algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .batches import Dataset, Shard
from .check import shape_mismatch
from .cohort import Cohort, Everyone
from .errors import BadInput
from .fields import Positive
from .network import Network
from .objective import by_examples, cross_entropy
from .optimizer import Optimizer, Sgd
from .tree import Tree, grad, mean


@dataclass(frozen=True)
class Client:
    """All that a client can see in one round."""

    net: Network
    received: Tree  # the server's broadcast
    memory: Tree  # what it kept from earlier rounds
    shared: Tree  # one-off common payload (FedXDS, FedFed); empty otherwise
    objective: Callable  # (client, weights, batch, out) -> scalar
    optimizer: Any
    phase: str = ""  # which kind of local step this is (FedRep: "head", then "body")
    # Known to begin, finish and the weighting, but not to step: a recorded step would keep the first client's for ever.
    weighting: Any = None
    examples: Any = None
    steps: Any = None  # local steps this round
    round: Any = None  # since memories began
    key: Any = None  # this client's randomness in this round
    data: Shard | Any = None
    held: Shard | Any = None  # what it keeps back of its own examples, where the algorithm asks for that
    test: Shard | Any = None
    validation: Shard | Any = None  # images for choosing a round or stopping, where the run keeps some

    def inside(self, **static: Any) -> Client:
        """The view that `step` gets. What differs between clients or rounds reaches it through local and batch."""
        hidden = dict.fromkeys(("weighting", "examples", "steps", "round", "key", "data", "held", "test", "validation"))
        return replace(self, optimizer=replace(self.optimizer, lr=math.nan), **hidden, **static)


@dataclass(frozen=True)
class Server:
    """All that the server can see."""

    net: Network
    state: Tree
    population: int
    round: int = 0
    key: int = 0  # its randomness in this round
    auxiliary: Dataset | None = None


@dataclass(frozen=True)
class Stage:
    """Run `algorithm` for `rounds` rounds. Complete: nothing about local training is known elsewhere."""

    algorithm: Any  # an Algorithm; the plan that a recipe is asked to carry out has none yet
    rounds: int
    cohort: Cohort
    optimizer: Optimizer = Sgd()
    epochs: int = 1
    steps: int | None = None  # in place of epochs
    size: int = 32  # of a batch
    objective: Callable = cross_entropy
    weighting: Any = None  # how much a client counts: a function of the client; None: what the algorithm prefers
    uplink: tuple[Any, ...] = ()  # encode(client, upload) -> (upload, memory); decode(server, upload)
    defences: tuple[Any, ...] = ()  # defence(server, uploads) -> uploads that may be believed, after decode
    fresh: bool = False  # forget server state (but `shared`) and client memories first
    augment: bool = True  # whether a client's own images are changed in training, as the experiment says

    def __post_init__(self) -> None:
        for transform in self.uplink[:-1]:
            if transform.packs:
                raise BadInput(f"uplink: nothing can follow {transform.name}, which packs the update: put it last")
        if len({type(transform) for transform in self.uplink}) < len(self.uplink):
            raise BadInput("uplink: the same transform twice would draw the same numbers twice; name it once")

    @property
    def parts(self) -> tuple[Any, ...]:
        """All that may declare memory, by a method initial_memory(client)."""
        return self.algorithm, *chain(self.objective), self.weighting, *self.uplink

    def local_steps(self, examples: int) -> int:
        """How many steps a round a client with so many examples takes."""
        trained = examples - self.algorithm.holdout_size(examples)
        return (self.epochs * math.ceil(trained / self.size) if self.steps is None else self.steps) if trained else 0

    def errand(self, algorithm: Errand, **changes: Any) -> Stage:
        """One round with everyone, without training unless `epochs` says so, sent as it is."""
        usual = dict(algorithm=algorithm, rounds=1, cohort=Everyone(), epochs=0, steps=None, uplink=(), defences=())
        return replace(self, **usual | changes)


class Recipe(Protocol):
    """An algorithm, or something made of stages over another recipe (FedSLS, FedXDS, fine-tuning)."""

    def stages(self, plan: Stage) -> Iterator[Stage]: ...


def chain(recipe: Any) -> Iterator[Any]:
    """A recipe, the one it is made over, and so on down to the innermost."""
    while recipe is not None:
        yield recipe
        recipe = getattr(recipe, "base", None)


def disclosures(algorithm: Any) -> dict[str, str]:
    """What an algorithm and those it is made over let out beside updates: a sentence under each one's name."""
    said = ((type(part).__name__, getattr(part, "discloses", "")) for part in chain(algorithm))
    return {name: sentence for name, sentence in said if sentence}


@dataclass(frozen=True)
class Algorithm:
    """Hyper-parameters as fields, behaviour as pure hooks. The defaults are FedAvg."""

    server_lr: Positive = field(default=1.0, kw_only=True)  # learning rate of the server, times the mean update
    default_weighting: ClassVar[Callable] = by_examples
    needs_effective_steps: ClassVar[bool] = False  # True: it divides the local path by optimizer.effective_steps(steps)
    wants_momentum: ClassVar[bool] = True  # False: its rule is of plain local steps, and a run with others says so
    needs_every_reply: ClassVar[bool] = False  # True: a round without one is lost, and faults that lose some refused
    capturable: ClassVar[bool] = True  # False: its step cannot be recorded and runs eagerly
    full_rows: ClassVar[bool] = False  # True: it looks at examples of weight zero, too, as norms of its own do
    # Clients' models that are evaluated: before and after local training.
    evaluated_as: ClassVar[tuple[str, ...]] = ("personal before", "personal after")
    usual_model: ClassVar[str] = "cnn"  # what it is described with where no model is named
    described_with: ClassVar[tuple[str, ...]] = ()  # settings without which it is refused, as a user gives them
    updates_model: ClassVar[bool] = True  # False: its rounds leave the global model as it is
    may_be_nan: ClassVar[tuple[str, ...]] = ()  # entries of an upload that may be NaN; aggregate copes with it
    sends_update: ClassVar[bool] = True  # False: a delta is not one of the model that was broadcast
    discloses: ClassVar[str] = ""  # what else leaves its clients, or who else sees it; in cards and privacy.json

    # ---- server -------------------------------------------------------------------------------
    def setup(self, server: Server) -> Tree:
        """State before the first round."""
        return Tree(model=self.shared_part(server.net, server.net.initial_weights()))

    def broadcast(self, server: Server) -> Tree:
        """What every client of the cohort receives."""
        return Tree(model=server.state.model)

    def aggregate(self, server: Server, uploads: list[Tree]) -> Tree:
        """Next state from the cohort's uploads (at least one), in client order."""
        return self.advance(server, mean([u.delta for u in uploads], [u.weight for u in uploads]))

    def validate_upload(self, server: Server, upload: Tree, expected: Tree) -> str:
        """What speaks against an upload with the names and types of the expected one, in words; usually nothing."""
        return shape_mismatch(upload, expected)

    def advance(self, server: Server, delta: Tree) -> Tree:
        """Next state from the mean delta. A server optimizer acts on delta.params; buffers are averages and stay so."""
        if self.server_lr != 1:
            delta = delta.replace(params=delta.params * self.server_lr)
        return server.state.replace(model=server.state.model + delta)

    def global_model(self, state: Tree) -> Tree:
        """The weights that count as the global model when it is judged."""
        return state.model

    # ---- client -------------------------------------------------------------------------------
    def initial_memory(self, client: Client) -> Tree:
        """What a client remembers before its first round; it sees exactly the names declared here."""
        own = self.private_part(client.net, client.net.initial_weights())
        return Tree(private=own) if own.leaves() else Tree()

    def holdout_size(self, examples: int) -> int:
        """How many of so many examples a client never trains on (SPATL: those that rewards are measured on)."""
        return 0

    def start(self, client: Client) -> Tree:
        """Weights that local training starts from: what was received, and what never left."""
        model = client.received.model
        return model | client.memory.private if "private" in client.memory else model

    def begin(self, client: Client) -> Tree:
        """Local variables: all that is this client's and step reads or updates. The engine copies them."""
        weights = self.start(client)
        return weights.replace(optimizer=client.optimizer.init(weights.params))

    def phase(self, epoch: int) -> str:
        """The kind of step that an epoch is made of; an engine records one step per kind."""
        return ""

    def closing_phase(self, epoch: int) -> str:
        """The same in the training after which clients' personal models are evaluated, and nothing is sent."""
        return self.phase(epoch)

    def closing_epochs(self, epochs: int) -> int:
        """How many epochs that training has where a round was asked to have so many."""
        return epochs

    def trains(self, client: Client, name: str) -> bool:
        """Whether this parameter moves (in client.phase)."""
        return True

    def loss(self, client: Client, weights: Tree, batch: Tree, out: Tree) -> Tensor:
        """Of one training pass: out.features and out.logits."""
        return client.objective(client, weights, batch, out)

    def gradient(self, client: Client, local: Tree, batch: Tree) -> Tree:
        """Gradient of the loss at local, for the parameters that train; advances local.buffers in place."""
        params = local.params.select(lambda name: self.trains(client, name)).map(lambda p: p.detach().requires_grad_())
        only = params if len(params) < len(local.params) else None
        with torch.enable_grad():
            weights = local | Tree(params=params)
            out = client.net.forward(weights, batch.x, train=True, key=batch.key, only=only)
            return grad(self.loss(client, weights, batch, out), params)

    def step(self, client: Client, local: Tree, batch: Tree) -> Tree:
        """One local step; consumes `local`. The only hook that must be recordable."""
        client.optimizer.update_(local.params, self.gradient(client, local, batch), local.optimizer)
        return local

    def finish(self, client: Client, local: Tree) -> tuple[Tree, Tree]:
        """(upload, what changed in memory) at the end of local training."""
        weight = torch.as_tensor(client.weighting(client), dtype=torch.float64)
        upload = Tree(delta=self.shared_part(client.net, local) - client.received.model, weight=weight)
        return upload, Tree(private=self.private_part(client.net, local)) if "private" in client.memory else Tree()

    # ---- both ---------------------------------------------------------------------------------
    def is_private(self, net: Network, name: str) -> bool:
        """Whether this weight stays at its client (FedPer: the head). Never sent, never averaged."""
        return name in net.private

    def shared_part(self, net: Network, weights: Tree) -> Tree:
        """The part of the weights that leaves the client."""
        whole = Tree(params=weights.params, buffers=weights.buffers)
        return whole.select(lambda name: not self.is_private(net, name))

    def private_part(self, net: Network, weights: Tree) -> Tree:
        """The part of the weights that stays."""
        return Tree(params=weights.params, buffers=weights.buffers).select(lambda name: self.is_private(net, name))

    def brief(self) -> Any:
        """The same with hardly any training at the server, for dry runs: messages and clients' work stay the same."""
        return self

    def notes(self, replies: Sequence[Any]) -> list[str]:
        """What a person should know about this round's replies; usually nothing."""
        return []

    def start_notes(self, steps: Sequence[int]) -> list[str]:
        """What a person should know before the first round, of how many local steps each client takes a round."""
        return []

    def personal(self, client: Client, local: Tree | None = None) -> Tree:
        """Weights the client predicts with; `local` when it has just trained."""
        return self.start(client) if local is None else local

    def predictions(self, client: Client, weights: Tree, x: Tensor) -> Tensor:
        """Logits of what a client predicts with, which `personal` returned: more than weights where this says so."""
        return client.net(weights, x)

    # ---- for people ---------------------------------------------------------------------------
    def report(self, opened: Callable[[], Any], repeats: int = 0, progress: Callable[[Any], Any] = iter) -> dict:
        """What a report shows of this method alone, from its run once it is opened; usually nothing.

        sub_models: a row for each client; timed: how their latency was measured, by the fastest of `repeats` passes.
        """
        return {}

    def sent_rows(self, net: Network, upload: Tree) -> dict[str, Tensor]:
        """The rows of each weight that an upload holds; weights that are not named are there as a whole."""
        return {}

    def stages(self, plan: Stage) -> Iterator[Stage]:
        """The phases of a run that was asked for as `plan`."""
        if self.needs_effective_steps:
            plan.optimizer.effective_steps(1)  # refused here, before anything is trained
        yield replace(plan, algorithm=self, weighting=plan.weighting or type(self).default_weighting)


@dataclass(frozen=True)
class Errand(Algorithm):
    """Something asked of clients through the eyes of another algorithm: an exchange, a measurement. Moves no model.

    A subclass writes `finish`, and `aggregate` when the answers change the state; with epochs=0 nothing is trained.
    """

    base: Algorithm = Algorithm()

    updates_model: ClassVar[bool] = False

    @property
    def capturable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.capturable

    @property
    def full_rows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.full_rows

    def setup(self, server):
        return self.base.setup(server)

    def broadcast(self, server):
        return self.base.broadcast(server)

    def initial_memory(self, client):
        return self.base.initial_memory(client)

    def holdout_size(self, examples):
        return self.base.holdout_size(examples)

    def begin(self, client):
        return self.base.begin(client)

    def phase(self, epoch):
        return self.base.phase(epoch)

    def closing_phase(self, epoch):
        return self.base.closing_phase(epoch)

    def closing_epochs(self, epochs):
        return self.base.closing_epochs(epochs)

    def trains(self, client, name):
        return self.base.trains(client, name)

    def step(self, client, local, batch):
        return self.base.step(client, local, batch)

    def aggregate(self, server, uploads):
        return server.state

    def validate_upload(self, server, upload, expected):
        return self.base.validate_upload(server, upload, expected)

    def global_model(self, state):
        return self.base.global_model(state)

    def is_private(self, net, name):
        return self.base.is_private(net, name)

    def brief(self):
        return replace(self, base=self.base.brief())

    def personal(self, client, local=None):
        return self.base.personal(client, local)

    def predictions(self, client, weights, x):
        return self.base.predictions(client, weights, x)
