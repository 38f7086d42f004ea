from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from ..core.algorithm import Recipe
from ..core.fields import Share
from .fedavg import FedAvg
from .fedlc import Counted

Rule = Literal["missing", "share"]


@dataclass(frozen=True)
class FedRS:
    """Li and Zhan, 2021: over any base, a client's loss scales down the logits of classes that it does not have.

    Clients that never see a class then push its part of the head away less. Predictions, and fine-tuning by `+ft`, use
    plain logits. The preset official scales every class by its share, as the authors' code does.
    """

    base: Recipe = FedAvg()  # the method whose loss changes
    alpha: Share = 0.5  # the factor of a missing class
    rule: Rule = "missing"  # share: alpha + (1 - alpha) count / largest count, for every class

    presets: ClassVar[dict[str, dict[str, Any]]] = {"official": {"rule": "share"}}

    def stages(self, plan):
        yield from self.base.stages(replace(plan, objective=Restricted(plan.objective, self.alpha, self.rule)))


@dataclass(frozen=True)
class Restricted(Counted):
    alpha: float = 0.5
    rule: Rule = "missing"

    def __call__(self, client, weights, batch, out):
        if self.alpha == 1:
            return self.base(client, weights, batch, out)
        counts = client.memory.labels.to(out.logits)
        share = counts / counts.max().clamp(min=1) if self.rule == "share" else (counts > 0).to(counts)
        factors = torch.lerp(torch.full_like(share, self.alpha), torch.ones_like(share), share)
        return self.base(client, weights, batch, out.replace(logits=out.logits * factors))
