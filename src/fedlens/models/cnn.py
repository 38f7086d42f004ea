"""Plain convolutional and fully connected networks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from ..core.fields import Count
from .model import Classifier, Model

Parts = OrderedDict[str, nn.Module]


@dataclass(frozen=True)
class Cnn(Model):
    """The CNN of McMahan et al., 2017: 1,663,370 parameters on 28 x 28 grey images of 10 classes."""

    smallest: ClassVar[int] = 4

    def network(self, classes, channels, size):
        return _two_convolutions(classes, channels, pixels=(size // 2 // 2) ** 2, padding=2)


@dataclass(frozen=True)
class CnnSmall(Model):
    """The same without padding: 582,026 parameters on 28 x 28 grey images of 10 classes."""

    smallest: ClassVar[int] = 16

    def network(self, classes, channels, size):
        return _two_convolutions(classes, channels, pixels=_left_after_two(size) ** 2, padding=0)


@dataclass(frozen=True)
class Cnn2(Model):
    """The 2-layer CNN of SPATL (Yu et al., 2022) and NIID-Bench: 62,006 parameters on 32 x 32 colour images.

    Differs from SPATL's released code, which has no ReLU after its convolutions and so is linear up to the pools.
    """

    smallest: ClassVar[int] = 16
    predictor: Literal["mlp", "linear"] = "mlp"  # the head: all that follows the pools, or the last layer

    def network(self, classes, channels, size):
        encoder = Parts(
            conv1=nn.Conv2d(channels, 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
        )
        hidden = Parts(
            fc1=nn.Linear(16 * _left_after_two(size) ** 2, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
        )
        return split(encoder, hidden, nn.Linear(84, classes), self.predictor)


@dataclass(frozen=True)
class Mlp(Model):
    """Fully connected; two layers of 200 are McMahan's 2NN, 199,210 parameters on 28 x 28 grey images."""

    hidden: Count = 200  # units of a hidden layer
    layers: Count = 1  # hidden layers

    def network(self, classes, channels, size):
        body, width = Parts(flatten=nn.Flatten()), channels * size**2
        for layer in range(1, self.layers + 1):
            body |= {f"fc{layer}": nn.Linear(width, self.hidden), f"relu{layer}": nn.ReLU()}
            width = self.hidden
        return Classifier(nn.Sequential(body), nn.Linear(width, classes))


def split(encoder: Parts, hidden: Parts, last: nn.Module, predictor: Literal["mlp", "linear"]) -> nn.Module:
    """One network, cut into body and head before or after its hidden layers."""
    if predictor == "mlp":
        return Classifier(nn.Sequential(encoder), nn.Sequential(hidden | {"last": last}))
    return Classifier(nn.Sequential(encoder | hidden), last)


def _left_after_two(size: int) -> int:
    """Side of the map after two 5 x 5 convolutions without padding, each halved by a pool."""
    return ((size - 4) // 2 - 4) // 2


def _two_convolutions(classes: int, channels: int, pixels: int, padding: int) -> nn.Module:
    body = Parts(
        conv1=nn.Conv2d(channels, 32, 5, padding=padding),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 5, padding=padding),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * pixels, 512),
        relu3=nn.ReLU(),
    )
    return Classifier(nn.Sequential(body), nn.Linear(512, classes))
