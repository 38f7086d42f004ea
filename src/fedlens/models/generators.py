"""Small networks that make things up: features of a class, images of a class, images once more."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import BadInput
from ..core.network import Network
from ..core.rng import seeded
from ..core.tree import Tree


class LatentGenerator(nn.Module):
    """From noise and labels to what a classifier's head is given (Zhu et al., 2021)."""

    def __init__(self, classes: int, width: int, noise: int, hidden: int):
        super().__init__()
        self.classes = classes
        self.body = nn.Sequential(
            nn.Linear(noise + classes, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
        )

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        return self.body(_labelled(noise, y, self.classes))


class ImageGenerator(nn.Module):
    """From noise and labels to images; as normalised ones, they have mean zero and variance one over a batch.

    Noise and label are projected apart, to half of the first channels each (Zhang et al., 2022). apart=False: one
    projection of both, in which a hundred numbers of noise drown the label.
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], noise: int, width: int, apart: bool = True):
        super().__init__()
        self.classes, self.apart, (channels, *self.sides) = classes, apart, shape
        start = [math.ceil(side / 4) for side in self.sides]
        if apart:
            self.of_noise, self.of_label = (nn.Linear(size, width * math.prod(start)) for size in (noise, classes))
            first = []
        else:
            first = [nn.Linear(noise + classes, 2 * width * math.prod(start), bias=False)]
        self.body = nn.Sequential(
            *first,
            nn.Unflatten(1, (2 * width, *start)),
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Tanh(),
        )
        self.norm = nn.BatchNorm2d(channels, affine=False)

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        high, wide = self.sides
        return self.norm(self.body(self.projected(noise, y))[:, :, :high, :wide])

    def projected(self, noise: Tensor, y: Tensor) -> Tensor:
        """What the convolutions start from."""
        if not self.apart:
            return _labelled(noise, y, self.classes)
        return torch.cat([self.of_noise(noise), self.of_label(F.one_hot(y, self.classes).to(noise))], 1)


class Vae(nn.Module):
    """A variational autoencoder (Kingma & Welling, 2014) of two halvings, for images of any size.

    Each image is normalised by itself: neither its companions in a batch nor those of another client matter.
    """

    def __init__(self, shape: tuple[int, int, int], latent: int, width: int):
        super().__init__()
        channels, *self.sides = shape
        small = [math.ceil(side / 4) for side in self.sides]
        code, half = width * math.prod(small), max(1, width // 2)
        self.encode = nn.Sequential(*self.encoder(channels, half, width), nn.Flatten())
        self.mean, self.log_variance = nn.Linear(code, latent), nn.Linear(code, latent)
        start = nn.Linear(latent, code), nn.Unflatten(1, (width, *small))
        self.decode = nn.Sequential(*start, *self.decoder(width, half, channels))

    def encoder(self, channels: int, half: int, width: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels, half, 4, stride=2, padding=1),
            nn.GroupNorm(1, half),
            nn.ReLU(),
            nn.Conv2d(half, width, 4, stride=2, padding=1),
            nn.GroupNorm(1, width),
            nn.ReLU(),
        ]

    def decoder(self, width: int, half: int, channels: int) -> list[nn.Module]:
        return [
            nn.ConvTranspose2d(width, half, 4, stride=2, padding=1),
            nn.GroupNorm(1, half),
            nn.ReLU(),
            nn.ConvTranspose2d(half, channels, 4, stride=2, padding=1),
        ]

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the image once more, mean and log-variance of its code); noise of zeros gives the mean's image."""
        high, wide = self.sides
        code = self.encode(F.pad(x, (0, -wide % 4, 0, -high % 4)))
        mean, log_variance = self.mean(code), self.log_variance(code)
        again = self.decode(mean + (log_variance / 2).exp() * noise)
        return again[:, :, :high, :wide], mean, log_variance


class ResidualVae(Vae):
    """FedFed's variational autoencoder (Yang et al., 2023): residual blocks between halvings; images in [0, 1]."""

    def encoder(self, channels: int, half: int, width: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels, half, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(),
            nn.Conv2d(half, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            _Residual(width),
            nn.BatchNorm2d(width),
            _Residual(width),
        ]

    def decoder(self, width: int, half: int, channels: int) -> list[nn.Module]:
        return [
            _Residual(width),
            nn.BatchNorm2d(width),
            _Residual(width),
            nn.BatchNorm2d(width),
            nn.ConvTranspose2d(width, half, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(half),
            nn.LeakyReLU(),
            nn.Tanh(),
            nn.ConvTranspose2d(half, channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.Sigmoid(),
        ]


class _Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.LeakyReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _labelled(noise: Tensor, y: Tensor, classes: int) -> Tensor:
    return torch.cat([noise, F.one_hot(y, classes).to(noise)], 1)


@functools.lru_cache(maxsize=64)
def structure(kind: Any, *arguments: Hashable) -> Network:
    """The network without values, which come with every call: nothing is drawn, nothing is remembered."""
    with torch.device("meta"):
        return Network(kind(*arguments))


def first_weights(kind: Any, *arguments: Hashable, seed: int, like: Tensor) -> Tree:
    """Drawn from the seed alone; of the device and type of `like`."""
    with seeded(seed):
        weights = Network(kind(*arguments)).initial_weights()
    return weights.map(lambda leaf: leaf.to(like))


def passed(module: nn.Module, *inputs: Tensor) -> Tensor:
    """A plain forward pass, for Network.call."""
    return module(*inputs)


def diversity(noise: Tensor, made: Tensor) -> Tensor:
    """exp(-mean over pairs of squared distance in noise times distance of what was made): small where they differ."""
    made = made.flatten(1)
    apart = (noise[:, None] - noise).square().mean(2) * (made[:, None] - made).abs().mean(2)
    return (-apart.mean()).exp()


def linear_head(net: Network, name: str) -> tuple[str, str]:
    """Names of the weight and the bias of a head that is one linear layer."""
    head = getattr(net.module, "head", None)
    if type(head) is not nn.Linear or head.bias is None:
        raise BadInput(
            f"{name} needs a model whose head is one linear layer with a bias: model=cnn has one, and so have cnn2 and "
            "vgg11 with model.predictor=linear"
        )
    names = {id(p): weight for weight, p in net.module.named_parameters()}
    return names[id(head.weight)], names[id(head.bias)]


def head_shape(net: Network, name: str) -> tuple[int, int]:
    """(width of the features, classes), as the head's matrices say."""
    found = [p.shape for weight, p in net.module.named_parameters() if weight in net.head and p.dim() == 2]
    if not found:
        raise BadInput(f"{name} needs a model whose head has a linear layer; this one has none")
    return found[0][1], found[-1][0]
