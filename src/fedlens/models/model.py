"""What every model's configuration and most modules have in common."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor, nn

from ..core.errors import BadInput
from ..core.source_code import standalone
from .weights import load_weights

Norm = Literal["batch", "group"]
# What an exported network does without: weights come from a file of its own, and nothing is random in prediction.
_STAND_INS = {
    "fedlens.models.model:Model": 'class {name}:\n    """Hyper-parameters of a network; `network` makes the module."""',
    "fedlens.models.weights:": "{name} = None",
    "fedlens.core.network:Dropout": "{name} = nn.Dropout",
}


@dataclass(frozen=True)
class Model:
    """Hyper-parameters of a network; `build` makes the module for given data."""

    smallest: ClassVar[int] = 1  # side of the images below which nothing is left to look at
    # First weights: a file, a run of one's own, an id of the Hugging Face hub such as timm/resnet18.tv_in1k, stand-in.
    weights: str = field(default="", kw_only=True)

    def build(self, classes: int, channels: int, size: int) -> nn.Module:
        """A module with `features(x)` and `head`. First weights come from torch's global generator: wrap in seeded."""
        if min(classes, channels) < 1:
            raise BadInput(f"a model needs at least one class and one channel, not {classes} and {channels}")
        if size < self.smallest:
            least, name = self.smallest, type(self).__name__
            raise BadInput(f"the model {name} needs images of at least {least} x {least} pixels, not {size} x {size}")
        module = self.network(classes, channels, size)
        if self.weights:  # what a person should know about them goes with the module
            module.notes = tuple(load_weights(module, self.weights))  # pyright: ignore[reportArgumentType]
        return module

    def network(self, classes: int, channels: int, size: int) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__} does not say what it builds")

    def keep_beside(self, folder: Path) -> None:
        """Write into a run's folder what another process needs to make the network; usually nothing."""

    def lost(self) -> str:
        """Why another process cannot make the network, in words; usually it can."""
        return ""

    def source(self, classes: int, channels: int, size: int) -> str:
        """A Python file whose `build()` makes the same network without this package; NoSource where it cannot be."""
        kind = type(self)
        given = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "weights")
        return built_by(f"{kind.__name__}({given}).network({classes}, {channels}, {size})", source_of(kind))


def source_of(made: object) -> str:
    """The source of a class or a function, with all that it needs; refused by NoSource."""
    return standalone(made, stand_ins=_STAND_INS)


def built_by(call: str, source: str) -> str:
    """A file that ends with the function that makes the network."""
    return f"{source}\n\ndef build():\n    return {call}\n"


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
