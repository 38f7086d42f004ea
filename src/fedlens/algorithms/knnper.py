from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..core.algorithm import Errand, Recipe
from ..core.evaluate import pieces
from ..core.fields import Count, Positive, Share
from ..core.network import Network
from ..core.tree import Tree
from .fedavg import FedAvg


@dataclass(frozen=True)
class KNNPer:
    """Marfoq et al., 2022: after the last round of any base, clients ask their own images that look alike, too.

    A client predicts by a mix of the final model and of the labels of its nearest training images, in the features that
    the model gives them. Nothing is trained, and nothing more leaves.

    Differs from the paper: the neighbours' share is the same for all clients, and there each client tunes its own.
    Nearness is that of the authors' code, exp(-d² / (width scale)), in place of exp(-d).
    """

    base: Recipe = FedAvg()  # the method whose model gives the features
    neighbours: Count = 10  # k
    share: Share = 0.5  # lambda, of the neighbours in the prediction; 0 is the base
    scale: Positive = 1.0  # sigma, of squared distances divided by the width of the features

    def stages(self, plan):
        *before, last = self.base.stages(plan)
        yield from (*before, last)
        yield last.errand(AskNeighbours(base=last.algorithm, by=self), fresh=False)


@dataclass(frozen=True)
class AskNeighbours(Errand):
    """The last stage of KNNPer. down: as its base; up: nothing; memory: what its base remembers"""

    by: KNNPer = KNNPer()

    evaluated_as: ClassVar = ("personal before",)  # there is nothing to train

    def finish(self, client, local):
        return Tree(), Tree()

    def personal(self, client, local=None):
        """What the base predicts with, and every image of the client's: its features, its label."""
        weights = self.base.personal(client)
        found = [(features(client.net, weights, piece.x), piece.y) for piece in pieces(client.data)]
        if not found:
            return weights
        z, y = (torch.cat(part) for part in zip(*found, strict=True))
        return weights.replace(store=Tree(features=z, labels=y))

    def predictions(self, client, weights, x):
        """The logarithm of what is predicted, whose softmax it is again."""
        model = Tree(params=weights.params, buffers=weights.buffers)
        logits = super().predictions(client, model, x).double()
        if "store" not in weights:
            return logits
        z, shares = features(client.net, model, x), logits.softmax(1)
        near = nearest(z, weights.store, self.by.neighbours, self.by.scale, shares.shape[1])
        return (self.by.share * near + (1 - self.by.share) * shares).clamp(min=1e-300).log()


def features(net: Network, weights: Tree, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.forward(weights, x).features.flatten(1).double()


def nearest(z: torch.Tensor, store: Tree, neighbours: int, scale: float, classes: int) -> torch.Tensor:
    """How much of the nearest images' nearness each class has; of equally near ones those that come first."""
    apart = torch.cdist(z, store.features, compute_mode="donot_use_mm_for_euclid_dist").square()
    apart, order = (part[:, :neighbours] for part in apart.sort(dim=1, stable=True))
    near = (-(apart - apart[:, :1]) / (z.shape[1] * scale)).exp()  # of the nearest 1, or all could be zero
    labels = F.one_hot(store.labels[order], classes).to(near)
    return (near[..., None] * labels).sum(1) / near.sum(1, keepdim=True)
