from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.fields import Count, Momentum, NonNegative, Share
from ..core.objective import weighted
from ..core.tree import Tree, mean
from ._own_images import gradient_on, random_part


@dataclass(frozen=True)
class Elastic(Algorithm):
    """Chen et al., 2023: weights that the outputs are sensitive to move less than the mean update, others move more.

    Clients measure it under the received model, on their images without labels. Where nothing is sensitive at all, the
    mean update counts unchanged.

    down: model; up: delta, sensitivity, weight; memory: nothing
    """

    tau: NonNegative = 0.5  # the factor of the most sensitive weight; that of one without any is tau + 1
    mu: Momentum = 0.95  # how much of earlier batches stays
    scope: Literal["tensor", "model"] = "tensor"  # among which weights the most sensitive is looked for
    data: Share = 1.0  # of its images that a client measures with
    batch: Count = 32  # images that are measured at a time

    discloses: ClassVar = "how sensitive the outputs on each client's images are to every weight leaves unprotected"

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        model = self.start(client)
        found = model.params.zeros()
        for piece in random_part(client, self.data, "sensitivity").chunks(self.batch):
            slope = gradient_on(replace(client, objective=size_of_output), model, piece, model.params)
            found = found * self.mu + slope.map(torch.abs) * (1 - self.mu)
        return upload.replace(sensitivity=found), memory

    def aggregate(self, server, uploads):
        weights = [u.weight for u in uploads]
        delta = mean([u.delta for u in uploads], weights)
        found = mean([u.sensitivity for u in uploads], weights)
        largest = found.map(torch.max)
        if self.scope == "model":
            whole = torch.stack(largest.leaves()).max()
            largest = largest.map(lambda _: whole)
        pairs = zip(found.leaves(), largest.leaves(found), strict=True)
        factors = found.rebuild(iter([self.factor(leaf, most) for leaf, most in pairs]))
        return self.advance(server, delta.replace(params=delta.params * factors))

    def factor(self, sensitivity: Tensor, most: Tensor) -> Tensor:
        """How far each weight goes along the mean update."""
        relative = sensitivity / torch.where(most > 0, most, torch.ones_like(most))
        return torch.where(most > 0, 1 + self.tau - relative, torch.ones_like(relative))


def size_of_output(client, weights: Tree, batch: Tree, out: Tree) -> Tensor:
    return weighted(out.logits.square().sum(1), batch)
