from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.algorithm import Client, Errand, Recipe
from ..core.fields import NonNegative
from ..core.objective import by_examples
from ..core.tree import Tree
from ..models.generators import head_shape
from ._weighted import Weighted, reweighed, with_weights
from .fedavg import FedAvg

Discrepancy = Literal["kl", "l1", "l2", "cosine"]


@dataclass(frozen=True)
class FedDISCO:
    """Ye et al., 2023: over any base, a client counts less the further its labels are from a target distribution.

    Its share is proportional to ReLU(p - a d + b): p its share of examples, d the discrepancy of its labels.

    Needs what others do not: label counts. With target=uniform one number about them leaves in each round, with
    target=global the counts themselves, once. Where no share is above zero, or nobody's labels differ, p counts.
    """

    base: Recipe = FedAvg()  # the method whose weights change
    a: NonNegative = 0.5  # how much the discrepancy takes from a share
    b: NonNegative = 0.1  # added to every share
    discrepancy: Discrepancy = "kl"  # of the client's labels from the target; kl: divided by the cohort's sum of it
    target: Literal["uniform", "global"] = "uniform"  # labels that a client is compared with

    reweighs: ClassVar[bool] = True  # there can be one such method
    sends: ClassVar[str] = "as its base, discrepancy"

    def stages(self, plan):
        counted = replace(plan, weighting=plan.weighting or by_examples)
        find = CountLabels() if self.target == "global" else None
        yield from reweighed(self.base, counted, find, ByDiscrepancy(by=self))


@dataclass(frozen=True)
class CountLabels(Errand):
    """Every client says how many examples of each class it has. down: as its base; up: counts"""

    evaluated_as: ClassVar = ()  # no model moves
    discloses: ClassVar = "each client's label counts leave unprotected"

    def finish(self, client, local):
        return Tree(counts=label_counts(client)), Tree()

    def aggregate(self, server, uploads):
        counts = torch.stack([upload.counts for upload in uploads]).sum(0).double()
        return server.state.replace(target=counts / counts.sum().clamp(min=1))


def label_counts(client: Client) -> Tensor:
    """[classes] how many examples of each the client has."""
    _, classes = head_shape(client.net, "counting labels")
    return torch.bincount(client.data.y, minlength=classes).to(torch.int32)


@dataclass(frozen=True)
class ByDiscrepancy(Weighted):
    """Training whose weights follow the labels: all else is the base's.

    down: as its base, target if that is global; up: as its base, discrepancy; memory: as its base
    """

    by: FedDISCO = FedDISCO()

    say: ClassVar = "labels have"

    def setup(self, server):
        state = self.base.setup(server)
        if self.by.target == "uniform":
            return state
        _, classes = head_shape(server.net, "feddisco")
        return state.replace(
            target=torch.full((classes,), 1 / classes, dtype=torch.float64)
        )  # until labels are counted

    def broadcast(self, server):
        down = self.base.broadcast(server)
        return down if self.by.target == "uniform" else down.replace(target=server.state.target)

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        counts = label_counts(client).double()
        target = client.received.get("target", torch.full_like(counts, 1 / len(counts)))
        return upload.replace(discrepancy=discrepancy(self.by.discrepancy, counts, target)), memory

    def aggregate(self, server, uploads):
        weights, apart = ([float(upload[name]) for upload in uploads] for name in ("weight", "discrepancy"))
        return self.base.aggregate(server, with_weights(uploads, weighed(weights, apart, self.by)))

    def notes(self, replies):
        return self.base.notes(replies)


def discrepancy(kind: Discrepancy, counts: Tensor, target: Tensor) -> Tensor:
    """How far a client's labels are from the target; zero for a client without examples."""
    if not counts.sum():
        return torch.zeros_like(counts[0])
    mine = counts / counts.sum()
    if kind == "kl":
        return (torch.xlogy(mine, mine) - torch.xlogy(mine, target)).sum()
    if kind == "cosine":
        return 1 - F.cosine_similarity(mine, target, dim=0)
    return (mine - target).norm(p=1 if kind == "l1" else 2)


def weighed(weights: Sequence[float], apart: Sequence[float], by: FedDISCO) -> list[float]:
    """ReLU(p - a d + b) of every client of a cohort; those without examples count nothing, whatever b."""
    total, differ = sum(weights), sum(apart)
    if not total or not differ:
        return list(weights)
    scale = differ if by.discrepancy == "kl" else 1.0
    found = [
        max(0.0, weight / total - by.a * d / scale + by.b) if weight else 0.0
        for weight, d in zip(weights, apart, strict=True)
    ]
    return found if sum(found) else list(weights)
