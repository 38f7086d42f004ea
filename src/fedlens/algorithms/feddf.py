from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.algorithm import Algorithm, Server
from ..core.batches import Dataset, Plan, Shard, plan
from ..core.errors import BadInput
from ..core.evaluate import pieces
from ..core.fields import Count, Number, Positive
from ..core.network import Network
from ..core.objective import weighted
from ..core.optimizer import Adam, Cosine
from ..core.rng import key
from ..core.tree import Tree, grad


@dataclass(frozen=True)
class FedDF(Algorithm):
    """Lin et al., 2020: the average is taught, on public images without labels, what the clients' models say of them.

    down: model; up: delta, weight; memory: nothing

    Needs what others do not: public data (auxiliary=...) and, after each round, training at the server.

    Teachers that know a few classes each can drown each other: where the mean of their logits is at chance, so is the
    student.

    Differs from the paper: a fixed number of steps, where it stops at 10,000 or earlier by labelled images, which a
    server here does not have. Running statistics stay the clients' mean: public images should not move them.
    """

    steps: Number = 1000  # of distillation after each round; 0: FedAvg
    batch: Count = 128  # public images a step
    lr: Positive = 1e-3  # of Adam, to zero by a cosine within each round

    @property
    def needs_public_data(self) -> bool:
        return self.steps > 0

    def setup(self, server):
        if self.needs_public_data:
            public(server, "feddf")
        check_whole(server.net, "feddf")
        return super().setup(server)

    def aggregate(self, server, uploads):
        state = super().aggregate(server, uploads)
        return self.taught(server, state, uploads) if self.steps else state

    def brief(self):
        return replace(self, steps=min(self.steps, 1))

    def taught(self, server: Server, state: Tree, uploads: Sequence[Tree]) -> Tree:
        """The state with its model after distillation."""
        data = public(server, "feddf")
        chosen = self.chosen(server, data).to(data.x.device)
        batches = plan(len(chosen), self.batch, key(server.key, "distil"), steps=self.steps)
        seen, where = batches.rows.unique(return_inverse=True)  # images that no step looks at need no teacher
        targets = self.ensemble(server, uploads, data, chosen, seen)
        student = distilled(
            server.net, state.model, Shard(data, chosen[seen]), targets, batches._replace(rows=where), self.lr
        )
        return state.replace(model=student)

    def chosen(self, server: Server, data: Dataset) -> Tensor:
        """Which public images are distilled on."""
        return torch.arange(len(data))

    def ensemble(self, server: Server, uploads: Sequence[Tree], data: Dataset, chosen: Tensor, seen: Tensor) -> Tensor:
        """[seen, classes] mean logits of the clients' models on these of the chosen images; one model at a time."""
        total = sum(logits(server.net, teacher, Shard(data, chosen[seen])) for teacher in teachers(server, uploads))
        assert isinstance(total, Tensor)
        return total / len(uploads)


def public(server: Server, name: str) -> Dataset:
    if server.auxiliary is None:
        raise BadInput(f"{name} distils on public data that no client owns: name some by auxiliary=, as in cifar100")
    return server.auxiliary


def check_whole(net: Network, name: str) -> None:
    if net.private:
        raise BadInput(f"{name} asks the clients' whole models at the server: use buffers=average")


def teachers(server: Server, uploads: Sequence[Tree]) -> Iterator[Tree]:
    """The clients' models, made one at a time: a cohort of them need not fit into memory."""
    return (server.state.model + upload.delta for upload in uploads)


def logits(net: Network, weights: Tree, shard: Shard) -> Tensor:
    """[images, classes] in pieces, so that memory does not grow with the images."""
    with torch.no_grad():
        found = [net(weights, piece.x) for piece in pieces(shard)]
    return torch.cat(found) if found else next(iter(weights.params.values())).new_zeros(0, 0)


def distilled(net: Network, model: Tree, shard: Shard, targets: Tensor, batches: Plan, lr: float) -> Tree:
    """The model after a step on each batch of KL(softmax(targets) || softmax(model)), by Adam."""
    student, descent = model.clone(), Adam(lr)
    state, said = descent.init(student.params), targets.softmax(1)
    for t, (row, weight) in enumerate(zip(batches.rows, batches.weights, strict=True)):
        x, target = Shard(shard.whole, shard.index[row]).x, said[row.to(said.device)]
        state = state.replace(lr=torch.full_like(state.lr, lr * Cosine()(t, len(batches.rows))))
        params = student.params.map(lambda leaf: leaf.detach().requires_grad_())
        with torch.enable_grad():
            log = net.forward(student.replace(params=params), x).logits.log_softmax(1)
            loss = weighted(F.kl_div(log, target, reduction="none").sum(1), Tree(weight=weight.to(x)))
            grads = grad(loss, params)
        descent.update_(student.params, grads, state)
    return student
