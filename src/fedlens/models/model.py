"""What every model's configuration and most modules have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from ..core.errors import BadInput

Norm = Literal["batch", "group"]


@dataclass(frozen=True)
class Model:
    """Hyper-parameters of a network; `build` makes the module for given data."""

    smallest: ClassVar[int] = 1  # side of the images below which nothing is left to look at

    def build(self, classes: int, channels: int, size: int) -> nn.Module:
        """A module with `features(x)` and `head`. First weights come from torch's global generator: wrap in seeded."""
        if min(classes, channels) < 1:
            raise BadInput(f"a model needs at least one class and one channel, not {classes} and {channels}")
        if size < self.smallest:
            least, name = self.smallest, type(self).__name__
            raise BadInput(f"the model {name} needs images of at least {least} x {least} pixels, not {size} x {size}")
        return self.network(classes, channels, size)

    def network(self, classes: int, channels: int, size: int) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} does not say what it builds")


class Classifier(nn.Module):
    """A body that ends in one vector per image, and a head from that vector to logits."""

    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def normalisation(norm: Norm, channels: int) -> nn.Module:
    """BatchNorm, or GroupNorm of 16 channels a group (Wu & He, 2018, table 3), which every width here divides into."""
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(channels // 16, channels)


def kaiming(module: nn.Module) -> None:
    """First convolution weights of He et al., 2015, by fan out: gradients keep their spread from layer to layer."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
