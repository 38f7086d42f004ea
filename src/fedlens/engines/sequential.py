"""One client after another: the reference that every other engine must agree with."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..core.algorithm import Client, Stage
from ..core.batches import Federation, Plan, Shard, plan, split_holdout
from ..core.engine import Job, OnProgress, Reply, ignore
from ..core.errors import BadInput, ClientFailed
from ..core.evaluate import pieces, score
from ..core.files import Seal
from ..core.memories import Memories, Version
from ..core.network import Network
from ..core.rng import key
from ..core.tree import Tree


class Sequential:
    """Owns the clients' data and memories; trains one client after another."""

    def __init__(
        self, net: Network, federation: Federation, *, memories: Memories | None = None, checked: bool = False
    ):
        self.net, self.federation, self.checked = net, federation, checked
        self.population = len(federation.train)
        self.heard: OnProgress = ignore
        self.memories = Memories() if memories is None else memories
        self._declared: dict[Stage, frozenset[str]] = {}

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        replies = []
        for i in cohort:
            replies.append(self.train(job, i))
            self.heard(len(replies), len(cohort))
        return replies

    def measure(self, weights: Tree, detailed: bool = False) -> list[Tree]:
        return [score(self.net, weights, piece, detailed) for piece in self.pieces()]

    def save(self, round: int) -> dict[Version, Seal]:
        return self.memories.save()

    def close(self) -> None:
        pass

    def pieces(self) -> list[Shard]:
        return pieces(Shard(self.federation.data, self.federation.pool))

    def train(self, job: Job, i: int) -> Reply:
        try:
            client, batches = self.open(job, i)
            with unchanged(client) if self.checked else nullcontext():
                with tuned(self.net):
                    local = self.local_training(job, i, client, batches)
                return self.conclude(job, i, client, local)
        except (BadInput, ClientFailed, MemoryError):
            raise
        except Exception as error:
            raise ClientFailed(i, job.round + 1, traceback.format_exc()) from error

    def local_training(self, job: Job, i: int, client: Client, batches: Plan) -> Tree:
        algorithm, data = job.stage.algorithm, self.federation.data
        local = algorithm.begin(client).clone()  # from here on the engine owns it, and step may write it
        device, rows = data.x.device, client.data.index[batches.rows.to(client.data.index.device)]
        seeds = [key(job.seed, "step", job.round, i, t) for t in range(len(rows))]
        # At once: of each step's own the host would make a dozen small tensors.
        each = zip(batches.epochs, rows, batches.weights, torch.tensor(seeds, device=device), strict=True)
        view = None
        for t, (epoch, row, weight, seed) in enumerate(each):
            if view is None or view.phase != algorithm.phase(epoch):
                view = client.inside(phase=algorithm.phase(epoch))
            size = len(row) if algorithm.full_rows else looked_at(batches, t, self.net, device)
            if size < len(row):
                row, weight = row[:size], weight[:size]
            local = algorithm.step(view, local, data.batch(row, weight, seed, job.stage.augment))
        return local

    def open(
        self, job: Job, i: int, net: Network | None = None, federation: Federation | None = None
    ) -> tuple[Client, Plan]:
        """The client's view of this round, and its batches; on another device with its network and data there."""
        client, batches = self._view(job, i, net, federation)
        return replace(client, memory=self.recall(job, i, client)), batches

    def _view(
        self, job: Job, i: int, net: Network | None = None, federation: Federation | None = None
    ) -> tuple[Client, Plan]:
        """The same without its memory."""
        federation = federation or self.federation
        stage = job.stage
        mine, held = (Shard(federation.data, index) for index in owned(stage, i, federation.train[i]))
        seed = key(job.seed, "batches", job.round, i)
        batches = plan(len(mine), stage.size, seed, epochs=stage.epochs, steps=stage.steps)
        client = Client(
            net=net or self.net,
            received=job.download,
            memory=Tree(),
            shared=job.shared,
            objective=stage.objective,
            optimizer=stage.optimizer.at(job.at, stage.rounds),
            weighting=stage.weighting,
            examples=len(mine),
            steps=len(batches.rows),
            round=job.round - job.since,
            key=key(job.seed, "client", job.round, i),
            data=mine,
            held=held,
            test=Shard(federation.data, federation.test[i]),
            validation=Shard(federation.data, federation.validation.get(i, mine.index[:0])),
        )
        return client, batches

    def conclude(
        self, job: Job, i: int, client: Client, local: Tree, own: Callable[[Tree], Tree] = lambda tree: tree
    ) -> Reply:
        """What the client sends and remembers; `own` sees to it that nothing of it lies in storage that is reused."""
        upload, changed = map(own, job.stage.algorithm.finish(client, local))
        for transform in job.stage.uplink:
            upload, more = transform.encode(client, upload)
            changed = changed.replace(**more)
        if changed:
            kept = self.kept(job, i).replace(**changed, seen=torch.tensor(job.round))
            self.memories.put(i, kept, job.round)
        return Reply(i, upload)

    def kept(self, job: Job, i: int) -> Tree:
        memory = self.memories.get(i)
        return memory if memory and int(memory.seen) >= job.since else Tree()

    def recall(self, job: Job, i: int, client: Client) -> Tree:
        """Exactly the memory that the parts of this stage declare: kept where there is some, else initial."""
        kept, names = self.kept(job, i), self._declared.get(job.stage)
        if names is None or not names <= kept.keys():
            initial = declared(job.stage, client)
            self._declared[job.stage] = names = frozenset(initial)
            kept = Tree({**initial, **kept})
        return Tree({name: kept[name] for name in sorted(names)})

    def remembers(self, job: Job) -> bool:
        """Whether clients have anything to remember in this stage. Looks at no client's memory: it may be elsewhere."""
        if job.stage not in self._declared:
            client, _ = self._view(job, next(iter(self.federation.train)))
            self._declared[job.stage] = frozenset(declared(job.stage, client))
        return bool(self._declared[job.stage])


def owned(stage: Stage, i: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """What a client trains on in this stage, and what it keeps back."""
    return split_holdout(index, stage.algorithm.holdout_size(len(index)), i)


def looked_at(batches: Plan, t: int, net: Network, device: torch.device) -> int:
    """How many examples of a row a step sees. Those of weight zero fill it up for recorded steps and for BatchNorm;
    a CPU need not compute what nobody counts."""
    return batches.rows.shape[1] if net.norms or device.type != "cpu" else batches.size(t)


@contextmanager
def tuned(net: Network) -> Iterator[None]:
    """Convolutions by the fastest kernel, found by trying all. It pays where a shape comes again and again, as in
    training; test shards and saliency have a shape for every client."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or net.precision in ("bf16", "tf32")
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def declared(stage: Stage, client: Client) -> Tree:
    """The initial memory of all parts of a stage; each name has one owner."""
    found = Tree()
    for part in stage.parts:
        more = part.initial_memory(client) if hasattr(part, "initial_memory") else Tree()
        if twice := found.keys() & more.keys():
            raise ValueError(f"two parts of a stage remember under the same name: {', '.join(sorted(twice))}")
        found = found.replace(**more)
    return found


@contextmanager
def unchanged(client: Client) -> Iterator[None]:
    """Fails when anything read-only was written. By value: BatchNorm and fused kernels raise no version counter."""
    trees = {name: getattr(client, name) for name in ("received", "memory", "shared")}
    before = {name: tree.clone() for name, tree in trees.items()}
    yield
    for name, tree in trees.items():
        for (path, now), was in zip(tree.paths(), before[name].leaves(tree), strict=True):
            if not torch.equal(now.nan_to_num(), was.nan_to_num()):
                raise RuntimeError(f"{name}/{path} is read-only and was written")
