from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.algorithm import Recipe, chain
from ..core.errors import BadInput
from ..core.fields import NonNegative
from ..core.objective import cross_entropy, weighted
from ..core.tree import Tree
from .fedavg import FedAvg
from .feddisco import label_counts

Denominator = Literal["all", "others"]


@dataclass(frozen=True)
class FedLC:
    """Zhang et al., 2022: over any base, a client's loss lowers logits by margins that are wide for its rare classes.

    A class that the client does not have leaves its loss. Predictions, and fine-tuning by `+ft`, use plain logits.

    Differs from the paper: the true class stays in the denominator, as in all public code, since without it the loss
    has no lower bound. The preset paper leaves it out.
    """

    base: Recipe = FedAvg()  # the method whose loss changes
    tau: NonNegative = 1.0  # of the margin tau / count^(1/4)
    denominator: Denominator = "all"  # others: without the true class, as printed
    min_count: NonNegative = 0.0  # the count of a missing class; 0 leaves it out of the loss

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"denominator": "others", "min_count": 1e-8}}

    def __post_init__(self):
        if self.denominator == "others" and not self.min_count:
            raise BadInput("fedlc: denominator=others needs min_count above 0: else one class alone divides by zero")

    def stages(self, plan):
        objective = Calibrated(plan.objective, self.tau, self.denominator, self.min_count)
        yield from self.base.stages(replace(plan, objective=objective))


@dataclass(frozen=True)
class Counted:
    """Another objective on logits that depend on how many images of each class the client trains on."""

    base: Callable = cross_entropy

    for_training_alone: ClassVar[bool] = True  # fine-tuning goes without it

    def __post_init__(self):
        if any(isinstance(inner, Counted) for inner in chain(self.base)):
            raise BadInput("fedlc and fedrs each change the logits of a client's loss: name one of them, and once")

    def initial_memory(self, client) -> Tree:
        return Tree(labels=label_counts(client))


@dataclass(frozen=True)
class Calibrated(Counted):
    tau: float = 1.0
    denominator: Denominator = "all"
    min_count: float = 0.0

    def __call__(self, client, weights, batch, out):
        if not self.tau:
            return self.base(client, weights, batch, out)
        truth = batch.y[:, None] == torch.arange(out.logits.shape[1], device=batch.y.device)
        lower = out.logits - self.margins(client.memory.labels.to(out.logits), truth)
        loss = self.base(client, weights, batch, out.replace(logits=lower))
        if self.denominator == "all":
            return loss
        others = lower.masked_fill(truth, -torch.inf).logsumexp(1)
        return loss + weighted(others - lower.logsumexp(1), batch)

    def margins(self, counts: Tensor, truth: Tensor) -> Tensor:
        """[examples, classes]. No example loses its own class: one that is held back may have a class of its own."""
        margins = self.tau * counts.clamp(min=self.min_count) ** -0.25
        return margins.expand(truth.shape).masked_fill(truth & (counts == 0), 0) if not self.min_count else margins
