from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

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
from ..core.optimizer import Adam
from ..core.phases import counted, phase
from ..core.rng import fold, generator, key
from ..core.tree import Tree, clipped, grad

Schedule = Literal["cosine", "constant", "to_zero"]


@dataclass(frozen=True)
class FedDF(Algorithm):
    """Lin et al., 2020: the average is taught, on public images without labels, what the clients' models say of them.

    down: model; up: delta, weight; memory: nothing

    Needs what others do not: public data (auxiliary=...) and, after each round, training at the server.

    Teachers that know a few classes each can drown each other: look at the mean of their logits, too, before a low
    accuracy is put down to the distillation (`python benchmarks/distillation.py`).

    Differs from the released code: 1,000 steps a round, there up to 10,000. There labelled images choose the best
    student and when to stop. A server here has none: held-back public images choose the student nearest to the
    ensemble. Running statistics stay the clients' mean, where there public images move them:
    `train_mode=true` is that, and `feddf/paper` both. Results published before gradients were clipped and images
    augmented are those of `feddf/earlier`, of 100 steps. Not compared: models of several architectures.
    """

    steps: Number = 1000  # of distillation after each round; 0: FedAvg
    batch: Count = 64  # public images a step
    lr: Positive = 1e-3  # of Adam
    schedule: Schedule = "cosine"  # of the rate within a round; to_zero: a cosine whose last step stands still
    kept: bool = False  # whether Adam goes on where it was in the round before
    clip: Positive | None = 5.0  # of a gradient's norm
    augment: bool = True  # whether public images are cropped and flipped, for teachers and student alike
    train_mode: bool = False  # whether the student's norms learn from public images
    validation: Number = 1000  # public images held back, a tenth of them at most, to choose the best student by
    check_every: Count = 100  # steps
    patience: Count = 1000  # steps without a better student before it stops

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"steps": 10_000, "train_mode": True},
        "earlier": {"batch": 128, "schedule": "to_zero", "clip": None, "augment": False, "validation": 0},
    }

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
        learned, held = self.held_back(chosen)
        batches = plan(len(learned), self.batch, key(server.key, "distil"), steps=self.steps)
        looks, rows = self.looks(server, learned, batches)
        own = sum(len(look.place) for look in looks)
        phase("asking the clients' models at the server")
        told = self.ensemble(server, uploads, data, chosen, [*looks, *([Look(held)] if len(held) else [])]).softmax(1)
        descent = Adam(self.lr)
        adam = descent.init(state.model.params)
        if self.kept and "adam" in state:
            adam = state.adam.map(torch.clone).replace(lr=adam.lr)
        student, best, least, since = state.model.clone(), None, math.inf, 0
        steps = [*zip(batches.rows, batches.weights, strict=True)]
        for t, (row, weight) in enumerate(counted(steps, "distilling at the server")):
            at = self.step_key(server, t)
            x = Look(learned[row.to(learned.device)], at if self.augment else None).images(data, chosen)
            adam = adam.replace(lr=torch.full_like(adam.lr, self.lr * self.pace(t, len(batches.rows))))
            grads = self.lesson(server.net, student, x, told[rows[t].to(told.device)], weight.to(x), at)
            descent.update_(student.params, grads, adam)
            if len(held) and ((t + 1) % self.check_every == 0 or t + 1 == len(batches.rows)):
                found = distance(server.net, student, Shard(data, chosen[held]), told[own:])
                if not found < least and t - since >= self.patience:
                    break
                if found < least:
                    best, least, since = student.clone(), found, t
        state = state.replace(model=best or student)
        return state.replace(adam=Tree({name: adam[name] for name in adam if name != "lr"})) if self.kept else state

    def step_key(self, server: Server, t: int) -> Tensor:
        """What is random in a step."""
        device = next(iter(server.state.model.params.values())).device
        return torch.tensor(key(server.key, "public views", t), device=device)

    def pace(self, t: int, steps: int) -> float:
        """The rate's factor in step t of so many."""
        if self.schedule == "constant":
            return 1.0
        last = steps if self.schedule == "cosine" else max(steps - 1, 1)
        return (1 + math.cos(math.pi * t / last)) / 2

    def lesson(self, net: Network, student: Tree, x: Tensor, said: Tensor, weight: Tensor, at: Tensor) -> Tree:
        """The clipped gradient of KL(said || softmax(student)); in train mode its statistics move."""
        params = student.params.map(lambda leaf: leaf.detach().requires_grad_())
        with torch.enable_grad():
            out = net.forward(student.replace(params=params), x, train=self.train_mode, key=fold(at, "network"))
            apart = F.kl_div(out.logits.log_softmax(1), said, reduction="none").sum(1)
            grads = grad(weighted(apart, Tree(weight=weight)), params)
        return grads if self.clip is None else clipped(grads, self.clip)

    def chosen(self, server: Server, data: Dataset) -> Tensor:
        """Which public images may be distilled on."""
        return torch.arange(len(data))

    def held_back(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Places among the chosen that are learned from, and those that the student is judged by; in all rounds."""
        order = torch.arange(len(chosen))
        if held := min(self.validation, len(chosen) // 10):
            order = torch.randperm(len(chosen), generator=generator(key("public images held back")))
        order = order.to(chosen.device)
        return order[held:], order[:held]

    def looks(self, server: Server, learned: Tensor, batches: Plan) -> tuple[list[Look], Tensor]:
        """What teachers are asked about, and where in their answers each step finds its own."""
        if self.augment:
            looks = [
                Look(learned[row.to(learned.device)], self.step_key(server, t)) for t, row in enumerate(batches.rows)
            ]
            return looks, torch.arange(batches.rows.numel()).view(batches.rows.shape)
        seen, where = batches.rows.unique(return_inverse=True)  # images that no step looks at need no teacher
        return [Look(learned[seen.to(learned.device)])], where

    def ensemble(
        self, server: Server, uploads: Sequence[Tree], data: Dataset, chosen: Tensor, looks: Sequence[Look]
    ) -> Tensor:
        """[images, classes] mean logits of the clients' models on all that they are asked; one model at a time."""
        total = sum(logits(server.net, teacher, data, chosen, looks) for teacher in teachers(server, uploads))
        assert isinstance(total, Tensor)
        return total / len(uploads)


class Look(NamedTuple):
    """Some public images, as they are or as a key moves them."""

    place: Tensor  # among those that were chosen
    key: Tensor | None = None

    def images(self, data: Dataset, chosen: Tensor) -> Tensor:
        return data.prepare(data.x[chosen[self.place]], self.key)


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


def logits(net: Network, weights: Tree, data: Dataset, chosen: Tensor, looks: Sequence[Look]) -> Tensor:
    """[images, classes] in pieces, so that memory does not grow with the images."""
    found = []
    with torch.no_grad():
        for look in looks:
            if look.key is None:
                found += [net(weights, piece.x) for piece in pieces(Shard(data, chosen[look.place]))]
            else:
                found.append(net(weights, look.images(data, chosen)))
    return torch.cat(found) if found else next(iter(weights.params.values())).new_zeros(0, 0)


def distance(net: Network, weights: Tree, shard: Shard, said: Tensor) -> float:
    """Mean KL(said || softmax(model)) over these images, as they are."""
    with torch.no_grad():
        log = torch.cat([net(weights, piece.x) for piece in pieces(shard)]).log_softmax(1)
    return float(F.kl_div(log.double(), said.double(), reduction="batchmean"))
