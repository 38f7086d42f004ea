from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from ..core.algorithm import Client
from ..core.errors import BadInput
from ..core.fields import Count, Number, Positive
from ..core.objective import weighted
from ..core.tree import Tree, dot
from ..models.generators import head_shape
from ._own_images import class_sums, gradient_on
from .fedper import FedPer


@dataclass(frozen=True)
class FedAS(FedPer):
    """Yang et al., 2024: FedPer, in which a received body is first fitted to the client's own head.

    Fitting pulls the features of each class to their mean under the client's last model. A client counts by the squared
    gradients that its trained model still has, batch by batch. Both passes read running statistics. Differs from the
    released code: in a client's first round nothing is fitted.

    down: model; up: delta, weight; memory: counts, private, prototypes
    """

    align_epochs: Number = 1  # of fitting, from a client's second round on
    align_rate: Positive = 0.01  # of plain steps, when it fits
    batch: Count = 32  # images of a pass that fits, and of one whose gradient counts
    weight: Literal["gradients", "samples"] = "gradients"  # what a client counts by

    reweighs: ClassVar[bool] = True  # there can be one such method
    discloses: ClassVar = "how large each client's gradients still are leaves unprotected, as its weight"

    def stages(self, plan):
        if plan.weighting is not None and self.weight == "gradients":
            raise BadInput("fedas finds out itself how much a client counts: leave out weighting")
        yield from super().stages(plan)

    def initial_memory(self, client):
        width, classes = head_shape(client.net, "fedas")
        like = next(iter(client.net.initial_weights().params.values()))
        nothing = Tree(prototypes=like.new_zeros(classes, width), counts=like.new_zeros(classes))
        return super().initial_memory(client).replace(**nothing)

    def start(self, client):
        """The received body, fitted, under the client's own head."""
        weights, known = super().start(client), client.memory.counts
        if not known.any():
            return weights
        means = client.memory.prototypes

        def near(client, weights, batch, out):
            apart = (out.features.flatten(1) - means[batch.y]).square().mean(1)
            return weighted(apart * (known[batch.y] > 0), batch)

        fitting = replace(client, objective=near)
        for _ in range(self.align_epochs):
            for piece in client.data.chunks(self.batch):
                body = weights.params.select(lambda name: not self.is_private(client.net, name))
                slope = gradient_on(fitting, weights, piece, body)
                weights = weights | Tree(params=body - slope * self.align_rate)
        return weights

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        found = class_sums(client.net, local, client.data)
        means = found.sums / found.counts.clamp(min=1)[:, None]
        like = client.memory.prototypes
        memory = memory.replace(prototypes=means.to(like), counts=found.counts.to(like))
        if self.weight == "gradients":
            upload = upload.replace(weight=self.unlearned(client, local).cpu())
        return upload, memory

    def unlearned(self, client: Client, weights: Tree) -> torch.Tensor:
        """The squared length of each batch's gradient, all of them added up."""
        total = torch.zeros((), dtype=torch.float64)
        for piece in client.data.chunks(self.batch):
            slope = gradient_on(client, weights, piece, weights.params)
            total = total + dot(slope, slope).double().cpu()
        return total

    def aggregate(self, server, uploads):
        """Where nobody has anything left to learn, all count alike."""
        if not any(float(u.weight) for u in uploads):
            uploads = [u.replace(weight=torch.ones_like(u.weight)) for u in uploads]
        return super().aggregate(server, uploads)
