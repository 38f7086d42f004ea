from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.algorithm import Client, Errand, Recipe
from ..core.batches import Shard, plan
from ..core.fields import Count
from ..core.network import Network
from ..core.objective import weighted
from ..core.optimizer import Adam
from ..core.rng import seeded
from ..core.tree import Tree, grad
from ._weighted import reweighed
from .fedavg import FedAvg
from .fedsls import Normalize, SaliencyWeighted, finite_images, summed, unusable, weighting

Factor = Literal[2, 4, 8]
Down = Literal["avgpool", "bilinear", "autoencoder"]


@dataclass(frozen=True)
class FedSL:
    """FedSLS's ablation: a client counts by its images themselves, made smaller; no network, no labels.

    An image's number is the norm of the small image, the mean over channels of pixels in [0, 1]: about its brightness.
    """

    base: Recipe = FedAvg()  # the method whose weights change
    f: Factor = 2  # how much smaller each side is
    down: Down = "avgpool"  # the paper does not say how
    epochs: Count = 20  # of the autoencoder
    normalize: Normalize = "sum"  # mean: a client's number of images does not matter

    reweighs: ClassVar[bool] = True  # there can be one such method
    sends: ClassVar[str] = "as its base, examples; once saliency"

    def stages(self, plan):
        counted = replace(plan, weighting=weighting("fedsl", plan, self.normalize))
        weigh = WeighPixels(f=self.f, down=self.down, epochs=self.epochs)
        yield from reweighed(self.base, counted, weigh, SaliencyWeighted())


@dataclass(frozen=True)
class WeighPixels(Errand):
    """down: seed of the autoencoder's first weights; up: saliency; memory: saliency"""

    f: Factor = 2
    down: Down = "avgpool"
    epochs: Count = 20

    evaluated_as: ClassVar = ()  # no model moves
    may_be_nan: ClassVar = ("saliency",)

    def broadcast(self, server):
        return Tree(seed=torch.tensor(server.key)) if self.down == "autoencoder" else Tree()

    def initial_memory(self, client):
        return Tree()

    def begin(self, client):
        return Tree()

    def step(self, client, local, batch):
        return local

    def finish(self, client, local):
        encode = self.encoder(client)
        saliency = summed(client, lambda piece: encode(pixels(piece)).mean(1).flatten(1).norm(dim=1))
        return Tree(saliency=saliency), Tree(saliency=saliency)

    def encoder(self, client: Client) -> Callable[[Tensor], Tensor]:
        """From images [B, C, H, W] to latents of sides H/f and W/f, rounded up."""
        if self.down == "autoencoder" and client.examples:
            net, weights = autoencoder(client, self.f, self.epochs)
            return lambda x: net.forward(weights, x).features
        return average_pool(self.f) if self.down == "avgpool" else bilinear(self.f)

    def notes(self, replies):
        return unusable(replies)


def pixels(piece: Shard) -> Tensor:
    """Images in [0, 1] as they are stored, before any normalisation."""
    x = piece.whole.x[piece.index]
    return x / 255 if x.dtype == torch.uint8 else finite_images(piece, x)


def average_pool(f: int) -> Callable[[Tensor], Tensor]:
    return lambda x: F.avg_pool2d(x, f, ceil_mode=True)


def bilinear(f: int) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, [math.ceil(side / f) for side in x.shape[2:]], mode="bilinear")


class SaliencyAutoencoder(nn.Module):
    """log2(f) convolutions of stride two and back; the code is not negative, so that its channels do not cancel."""

    WIDTH, CODE = 16, 4  # channels

    def __init__(self, channels: int, f: int):
        super().__init__()
        stages = int(math.log2(f))
        down = [channels, *[self.WIDTH] * (stages - 1), self.CODE]
        up = [*down[:0:-1], channels]
        self.encode = nn.Sequential()
        for at in range(stages):
            self.encode.append(nn.Conv2d(down[at], down[at + 1], 3, stride=2, padding=1))
            self.encode.append(nn.ReLU())
        self.head = nn.Sequential()
        for at in range(stages):
            self.head.append(nn.ConvTranspose2d(up[at], up[at + 1], 4, stride=2, padding=1))
            self.head.append(nn.ReLU() if at + 1 < stages else nn.Identity())

    def features(self, x: Tensor) -> Tensor:
        return self.encode(x)


def autoencoder(client: Client, f: int, epochs: int) -> tuple[Network, Tree]:
    """Trained on the client's own images, from first weights that all share; yet every client's code has its scale."""
    like = pixels(Shard(client.data.whole, client.data.index[:1]))
    with seeded(int(client.received.seed)):
        net = Network(SaliencyAutoencoder(like.shape[1], f)).to(like.device)
    weights = net.initial_weights().map(lambda leaf: leaf.to(like))
    descent = Adam(lr=0.01)
    state = descent.init(weights.params)
    rows, counts, _ = plan(client.examples, 32, client.key, epochs=epochs)
    for row, count in zip(rows, counts, strict=True):
        x = pixels(Shard(client.data.whole, client.data.index[row.to(client.data.index.device)]))
        params = weights.params.map(lambda leaf: leaf.detach().requires_grad_())
        with torch.enable_grad():
            again = net.forward(weights.replace(params=params), x).logits[..., : x.shape[2], : x.shape[3]]
            grads = grad(weighted((again - x).square().flatten(1).mean(1), Tree(weight=count.to(x))), params)
        descent.update_(weights.params, grads, state)
    return net, weights
