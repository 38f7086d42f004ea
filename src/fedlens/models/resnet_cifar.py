"""The thin residual networks that He et al., 2016 made for CIFAR (section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from .model import Model, Norm, kaiming, normalisation


class Shortcut(nn.Module):
    """Option A: every second pixel, and zeros for the channels that the input lacks. Has no parameters."""

    def __init__(self, more: int, stride: int):
        super().__init__()
        self.before, self.after, self.stride = more // 2, more - more // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class ThinBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut without parameters."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = normalisation(norm, width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = normalisation(norm, width)
        self.shortcut = nn.Identity() if inputs == width else Shortcut(width - inputs, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.bn2(self.conv2(out)) + self.shortcut(x))


def thin_stage(inputs: int, width: int, depth: int, stride: int, norm: Norm) -> nn.Sequential:
    """Blocks of one width; the first one may halve the map."""
    first = ThinBlock(inputs, width, stride, norm)
    return nn.Sequential(first, *(ThinBlock(width, width, 1, norm) for _ in range(depth - 1)))


class ThinResidualNetwork(nn.Module):
    """3 x 3 stem, three stages of 16, 32 and 64 channels, mean over positions, `fc`."""

    def __init__(self, depth: int, classes: int, channels: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = normalisation(norm, 16)
        self.relu = nn.ReLU()
        self.layer1 = thin_stage(16, 16, depth, 1, norm)
        self.layer2 = thin_stage(16, 32, depth, 2, norm)
        self.layer3 = thin_stage(32, 64, depth, 2, norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)
        kaiming(self)

    @property
    def head(self) -> nn.Module:
        return self.fc

    def features(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x))))))
        return self.avgpool(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


@dataclass(frozen=True)
class ResNet20(Model):
    """269,722 parameters at 10 classes."""

    depth: ClassVar[int] = 3  # blocks a stage
    norm: Norm = "batch"

    def network(self, classes, channels, size):
        return ThinResidualNetwork(self.depth, classes, channels, self.norm)


@dataclass(frozen=True)
class ResNet32(ResNet20):
    """464,154 parameters at 10 classes."""

    depth: ClassVar[int] = 5


@dataclass(frozen=True)
class ResNet56(ResNet20):
    """853,018 parameters at 10 classes."""

    depth: ClassVar[int] = 9
