"""Residual networks with torchvision's names, so that its published weights load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from .model import Model, Norm, kaiming, normalisation
from .weights import load_weights

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
        self.downsample = projection(inputs, width, stride, norm)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        return self.relu2(self.bn2(self.conv2(out)) + self.downsample(x))


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
    """Stem, four stages, mean over positions, `fc`."""

    notes: tuple[str, ...] = ()  # what a person should know about the weights it was built with

    def __init__(
        self, block: type[Block], depths: tuple[int, ...], classes: int, channels: int, stem: Stem, norm: Norm
    ):
        super().__init__()
        stock = stem == "stock"
        self.conv1 = nn.Conv2d(channels, 64, 7 if stock else 3, 2 if stock else 1, 3 if stock else 1, bias=False)
        self.bn1 = normalisation(norm, 64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stock else nn.Identity()
        wide = block.expansion
        self.layer1 = stage(block, 64, 64, depths[0], 1, norm)
        self.layer2 = stage(block, 64 * wide, 128, depths[1], 2, norm)
        self.layer3 = stage(block, 128 * wide, 256, depths[2], 2, norm)
        self.layer4 = stage(block, 256 * wide, 512, depths[3], 2, norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * wide, classes)
        kaiming(self)

    @property
    def head(self) -> nn.Module:
        return self.fc

    def features(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.avgpool(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


@dataclass(frozen=True)
class ResNet18(Model):
    """He et al., 2016: 11,689,512 parameters at 1000 classes."""

    block: ClassVar[type[Block]] = BasicBlock
    depths: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)

    stem: Stem = "stock"  # 7 x 7 stride 2 and a max-pool; cifar: 3 x 3 stride 1 and none
    norm: Norm = "batch"
    weights: str = ""  # a safetensors file, an id on the Hugging Face hub such as timm/resnet18.tv_in1k, or stand-in

    def network(self, classes, channels, size):
        module = ResidualNetwork(self.block, self.depths, classes, channels, self.stem, self.norm)
        if self.weights:
            module.notes = tuple(load_weights(module, self.weights))
        return module


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

    norm: Norm = "batch"

    def network(self, classes, channels, size):
        return ResidualNetwork(BasicBlock, (1, 1, 1, 1), classes, channels, "cifar", self.norm)
