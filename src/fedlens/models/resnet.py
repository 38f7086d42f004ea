"""Residual networks with torchvision's names, so that its published weights load; and the thin ones for CIFAR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from .model import Model, Norm, kaiming, normalisation

Stem = Literal["stock", "cifar"]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut. No ReLU runs twice: attributions tell calls apart by their module."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = normalisation(norm, width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = normalisation(norm, width)
        self.downsample = self.shortcut(inputs, width, stride, norm)
        self.relu2 = nn.ReLU()

    def shortcut(self, inputs: int, width: int, stride: int, norm: Norm) -> nn.Module:
        return projection(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.bn2(self.conv2(out)) + self.downsample(x))


class ThinBlock(BasicBlock):
    """Its shortcut has no parameters (option A of He et al., 2016)."""

    def shortcut(self, inputs: int, width: int, stride: int, norm: Norm) -> nn.Module:
        return nn.Identity() if inputs == width else Padded(width - inputs, stride)


class Padded(nn.Module):
    """Every second pixel, and zeros for the channels that the input lacks."""

    def __init__(self, more: int, stride: int):
        super().__init__()
        self.before, self.after, self.stride = more // 2, more - more // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1 beside a shortcut; the stride is in the 3 x 3, as in torchvision (ResNet "v1.5")."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = normalisation(norm, width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = normalisation(norm, width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = normalisation(norm, outputs)
        self.downsample = projection(inputs, outputs, stride, norm)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        return self.relu3(self.bn3(self.conv3(out)) + self.downsample(x))


def projection(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    """The shortcut: the input itself where it fits, else a 1 x 1 convolution."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), normalisation(norm, outputs))


Block = BasicBlock | Bottleneck


def stage(block: type[Block], inputs: int, width: int, depth: int, stride: int, norm: Norm) -> nn.Sequential:
    """Blocks of one width; the first one may halve the map."""
    first = block(inputs, width, stride, norm)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1, norm) for _ in range(depth - 1)))


class ResidualNetwork(nn.Module):
    """Stem, a stage for each depth, each of twice the channels of the one before, mean over positions, `fc`."""

    notes: tuple[str, ...] = ()  # what a person should know about the weights it was built with

    def __init__(
        self,
        block: type[Block],
        depths: tuple[int, ...],
        classes: int,
        channels: int,
        stem: Stem,
        norm: Norm,
        width: int = 64,
    ):
        super().__init__()
        stock = stem == "stock"
        self.conv1 = nn.Conv2d(channels, width, 7 if stock else 3, 2 if stock else 1, 3 if stock else 1, bias=False)
        self.bn1 = normalisation(norm, width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stock else nn.Identity()
        self.stages, inputs = tuple(f"layer{number}" for number in range(1, len(depths) + 1)), width
        for name, depth in zip(self.stages, depths, strict=True):
            self.add_module(name, stage(block, inputs, width, depth, 1 if name == "layer1" else 2, norm))
            inputs, width = width * block.expansion, 2 * width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        kaiming(self)

    @property
    def head(self) -> nn.Module:
        return self.fc

    def features(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.avgpool(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


@dataclass(frozen=True)
class ResNet18(Model):
    """He et al., 2016: 11,689,512 parameters at 1000 classes."""

    block: ClassVar[type[Block]] = BasicBlock
    depths: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)

    stem: Stem = "stock"  # 7 x 7 stride 2 and a max-pool; cifar: 3 x 3 stride 1 and none
    norm: Norm = "batch"  # normalisation layers

    def network(self, classes, channels, size):
        return ResidualNetwork(self.block, self.depths, classes, channels, self.stem, self.norm)


@dataclass(frozen=True)
class ResNet34(ResNet18):
    """He et al., 2016: 21,797,672 parameters at 1000 classes."""

    depths: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


@dataclass(frozen=True)
class ResNet50(ResNet18):
    """He et al., 2016: 25,557,032 parameters at 1000 classes."""

    block: ClassVar[type[Block]] = Bottleneck
    depths: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


@dataclass(frozen=True)
class ResNet8(Model):
    """The network of FedXDS's released code: one block a stage, 3 x 3 stem, 4,903,242 parameters at 10 classes."""

    norm: Norm = "batch"  # normalisation layers

    def network(self, classes, channels, size):
        return ResidualNetwork(BasicBlock, (1, 1, 1, 1), classes, channels, "cifar", self.norm)


@dataclass(frozen=True)
class ResNet20(Model):
    """The thin network that He et al., 2016 made for CIFAR (section 4.2): 269,722 parameters at 10 classes."""

    depth: ClassVar[int] = 3  # blocks in each of three stages
    norm: Norm = "batch"  # normalisation layers

    def network(self, classes, channels, size):
        return ResidualNetwork(ThinBlock, (self.depth,) * 3, classes, channels, "cifar", self.norm, width=16)


@dataclass(frozen=True)
class ResNet32(ResNet20):
    """464,154 parameters at 10 classes."""

    depth: ClassVar[int] = 5


@dataclass(frozen=True)
class ResNet56(ResNet20):
    """853,018 parameters at 10 classes."""

    depth: ClassVar[int] = 9
