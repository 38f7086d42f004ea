"""VGG-11 for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Lt
from torch import nn

from ..core.network import Dropout
from .cnn import Parts, split
from .model import Model, kaiming, normalisation

WIDTHS = ((64,), (128,), (256, 256), (512, 512), (512, 512))  # configuration A, a pool after each group


@dataclass(frozen=True)
class Vgg11(Model):
    """Simonyan & Zisserman, 2015, as in SPATL: 9,220,480 parameters of the encoder, 530,442 of the predictor.

    First weights are those of its released code (He et al., 2015). With PyTorch's own, and no norm, what the encoder
    makes of two images hardly differs: the spread over images is 0.4 % of what it is with these.
    """

    norm: Literal["none", "batch", "group"] = "none"  # normalisation layers
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.5  # share of hidden units that rest in a step
    predictor: Literal["mlp", "linear"] = "mlp"  # the head: all that follows the encoder, or the last layer

    def network(self, classes, channels, size):
        encoder = Parts()
        for group, widths in enumerate(WIDTHS, 1):
            for layer, width in enumerate(widths, 1):
                encoder[f"conv{group}_{layer}"] = nn.Conv2d(channels, width, 3, padding=1)
                if self.norm != "none":
                    encoder[f"norm{group}_{layer}"] = normalisation(self.norm, width)
                encoder[f"relu{group}_{layer}"] = nn.ReLU()
                channels = width
            # Rounding up changes nothing at 32 pixels and leaves something to pool at 28.
            encoder[f"pool{group}"] = nn.MaxPool2d(2, ceil_mode=True)
        encoder |= {"mean": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}  # one position already at 32 pixels
        hidden = Parts(
            dropout1=Dropout(self.dropout),
            fc1=nn.Linear(512, 512),
            relu1=nn.ReLU(),
            dropout2=Dropout(self.dropout),
            fc2=nn.Linear(512, 512),
            relu2=nn.ReLU(),
        )
        module = split(encoder, hidden, nn.Linear(512, classes), self.predictor)
        kaiming(module)
        return module
