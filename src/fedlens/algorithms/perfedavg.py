from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..core.algorithm import Algorithm
from ..core.fields import NonNegative, Positive
from ..core.objective import uniformly
from ..core.rng import fold
from ..core.tree import Tree
from ._own_images import gradient_on


@dataclass(frozen=True)
class PerFedAvg(Algorithm):
    """Fallah et al., 2020: the global model is a start from which one gradient step makes a good personal model.

    A client predicts after one such step on all its own training images, in which norms read their running statistics.
    In training these advance in the first pass of a step alone. local.lr is the paper's beta; it means plain steps:
    give local.momentum=0.

    down: model; up: delta, weight; memory: nothing
    """

    alpha: NonNegative = 0.01  # of the step that personalises; 0 is FedAvg
    order: Literal["first", "hessian_free"] = "first"  # hessian_free: with differences of gradients, twice the work
    delta: Positive = 1e-3  # how far apart these are, in units of the gradient
    batches: Literal["split", "same"] = "split"  # what the passes of a step see: every second, or third, image; or all

    default_weighting = uniformly
    full_rows = True  # a part of a batch may have images of weight zero alone, and is then trained on as it is
    wants_momentum = False
    presets: ClassVar[dict[str, dict[str, Any]]] = {"hf": {"order": "hessian_free"}}

    def gradient(self, client, local, batch):
        """(I - alpha H) g(w - alpha g(w)), each factor on images of its own; first order leaves H out."""
        first, second, third = self.parts(batch)
        still = local.replace(buffers=local.buffers.clone())

        def at(params: Tree, part: Tree) -> Tree:
            return super(PerFedAvg, self).gradient(client, still.replace(params=params), part)

        inner = super().gradient(client, local, first)
        outer = at(local.params - inner * self.alpha, second)
        if self.order == "first":
            return outer
        ahead, behind = (at(local.params + outer * side, third) for side in (self.delta, -self.delta))
        return outer - (ahead - behind) * (self.alpha / (2 * self.delta))

    def parts(self, batch: Tree) -> list[Tree]:
        """What the three passes see. By strides: images of weight zero are at the end of a batch."""
        count = 2 if self.order == "first" else 3
        if self.batches == "same" or len(batch.y) < count:
            return [batch] * 3
        return [part(batch, k % count, count) for k in range(3)]

    def personal(self, client, local=None):
        weights = self.start(client) if local is None else local
        if not len(client.data):
            return weights
        grads = gradient_on(client, weights, client.data, weights.params)
        return weights.replace(params=weights.params - grads * self.alpha)


def part(batch: Tree, k: int, of: int) -> Tree:
    """Every `of`-th image from k on. Where all of them weigh nothing, they count alike: they are the client's own."""
    x, y, weight = (batch[name][k::of] for name in ("x", "y", "weight"))
    weight = torch.where(weight.sum() > 0, weight, torch.ones_like(weight))
    return Tree(x=x, y=y, weight=weight, key=fold(batch.key, f"part {k}"))
