from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ..core.algorithm import Recipe
from ..core.fields import NonNegative
from ..core.objective import cross_entropy
from .fedavg import FedAvg


@dataclass(frozen=True)
class FedDecorr:
    """Shi et al., 2023: over any base, clients keep the features before the head from collapsing onto few directions.

    Differs from the paper, as its released code does: the penalty is about a batch size larger than the printed one.
    """

    base: Recipe = FedAvg()  # the method whose loss gets the term
    beta: NonNegative = 0.1  # on the scale of the released code

    def stages(self, plan):
        yield from self.base.stages(replace(plan, objective=Decorrelated(self.beta, plan.objective)))


@dataclass(frozen=True)
class Decorrelated:
    """Another objective plus beta times the squared correlation of features, the mean over pairs of them."""

    beta: float
    base: Callable = cross_entropy

    def __call__(self, client, weights, batch, out):
        loss = self.base(client, weights, batch, out)
        return loss + self.beta * correlation(out.features.flatten(1), batch.weight) if self.beta else loss


def correlation(features: Tensor, weight: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Mean over pairs of features of (sum over examples of their standardised product)^2, divided by the examples.

    Examples of weight zero do not exist; of a single one it is zero.
    """
    examples, weight = weight.sum(), weight[:, None]
    centred = features - (features * weight).sum(0) / examples
    variance = (centred.square() * weight).sum(0) / (examples - 1).clamp(min=1)
    # Inside the root: a feature that never moves has no correlation and a gradient of zero.
    standard = centred / (variance + epsilon).sqrt() * weight.sqrt()
    wide = standard.shape[1] > standard.shape[0]
    gram = standard @ standard.T if wide else standard.T @ standard  # of the same norm, and the smaller one
    pairs = gram.square().sum() - standard.square().sum(0).square().sum()
    return pairs / max(features.shape[1] * (features.shape[1] - 1), 1) / examples
