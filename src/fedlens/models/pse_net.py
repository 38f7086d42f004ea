"""The network of PSE: a shared extractor, and attention over its maps that another model's maps can take part in."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..core.errors import BadInput
from ..core.fields import Count
from .model import Model

WIDTHS = (32, 64, 128)

Tokens = Literal["channel", "spatial"]
Heads = Literal["groups", "projection"]
Projected = Literal["pointwise", "depthwise", "scalar"]


class Projection(nn.Module):
    """1 x 1 convolution of maps, `copies` times over: [B, c, h, w] to [B, copies, c, h, w].

    pointwise mixes all channels, depthwise has one factor per channel, scalar one factor in all.
    """

    def __init__(self, kind: Projected, channels: int, copies: int):
        super().__init__()
        inputs, groups = (1, 1) if kind == "scalar" else (channels, channels if kind == "depthwise" else 1)
        self.kind, self.copies = kind, copies
        self.conv = nn.Conv2d(inputs, inputs * copies, 1, groups=groups, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        batch, channels, *side = maps.shape
        if self.kind == "pointwise":
            return self.conv(maps).unflatten(1, (self.copies, channels))
        singles = maps.flatten(0, 1)[:, None] if self.kind == "scalar" else maps
        return self.conv(singles).reshape(batch, channels, self.copies, *side).transpose(1, 2)  # copies vary fastest


class PseNetwork(nn.Module):
    """Extractor, attention, two fully connected layers. Self-attention is attend(*project(maps))."""

    def __init__(self, config: PseNet, classes: int, channels: int, size: int):
        super().__init__()
        layers = OrderedDict[str, nn.Module]()
        for at, width in enumerate(WIDTHS, 1):
            layers[f"conv{at}"] = nn.Conv2d(channels, width, config.kernel, padding=config.kernel // 2)
            layers[f"relu{at}"] = nn.ReLU()
            layers[f"pool{at}"] = nn.MaxPool2d(2, ceil_mode=config.ceil)
            channels = width
        side = -(-size // 8) if config.ceil else size // 8
        left = (side + config.ceil) // 2 if side >= 2 else 1  # of a side, after the pool behind the attention
        self.tokens, self.heads, self.count, self.residual = config.tokens, config.heads, config.count, config.residual
        self.ceil = config.ceil
        self.extractor = nn.Sequential(layers)
        copies = config.count if config.heads == "projection" else 1
        self.query = Projection(config.proj, channels, copies)
        self.key = Projection(config.proj, channels, copies)
        self.value = Projection(config.proj, channels, copies)
        self.position = nn.Parameter(0.02 * torch.randn(channels, side, side)) if config.position else None
        self.pool = nn.MaxPool2d(2, ceil_mode=config.ceil) if side >= 2 else nn.Identity()
        self.hidden = nn.Linear(channels * left**2, config.hidden)
        self.relu = nn.ReLU()
        self.head = nn.Linear(config.hidden, classes)

    def maps(self, x: Tensor) -> Tensor:
        """F, [B, c, h, w]."""
        return self.extractor(x)

    def project(self, maps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of maps, [B, copies, c, h, w] each; those of two models may be mixed in `attend`."""
        return self.query(maps), self.key(maps), self.value(maps)

    def attention(self, query: Tensor, key: Tensor) -> Tensor:
        """softmax((Q K' + Q P') / scale), [B, heads, tokens, tokens]; rows sum to one."""
        if self.position is not None:
            key = key + self.position  # Q K' + Q P' = Q (K + P)'
        query, key = self._as_tokens(query), self._as_tokens(key)
        return (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, maps: Tensor | None = None) -> Tensor:
        """O, [B, c, h, w]; `maps` are what a residual network adds to it, those that key and value were made of."""
        out = self._as_maps(self.attention(query, key) @ self._as_tokens(value), value.shape)
        if not self.residual:
            return out
        if maps is None:
            raise ValueError("a network with residual=True needs the maps that attention is added to")
        return out + maps

    def embed(self, attended: Tensor) -> Tensor:
        """The vector before the last layer."""
        return self.relu(self.hidden(self.pool(attended).flatten(1)))

    def features(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        return self.embed(self.attend(*self.project(maps), maps))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def _as_tokens(self, projected: Tensor) -> Tensor:
        """[B, copies, c, h, w] to [B, heads, tokens, width of a token]."""
        rows = projected.flatten(3)
        if self.heads == "groups":  # each head sees its own part of the channels
            rows = rows.reshape(rows.shape[0], self.count, -1, rows.shape[-1])
        return rows if self.tokens == "channel" else rows.transpose(-1, -2)

    def _as_maps(self, attended: Tensor, shape: torch.Size) -> Tensor:
        """The way back; heads with projections of their own are averaged."""
        rows = attended if self.tokens == "channel" else attended.transpose(-1, -2)
        maps = rows.reshape(shape)
        return maps.flatten(1, 2) if shape[1] == 1 else maps.mean(1)


@dataclass(frozen=True)
class PseNet(Model):
    """The network of PSE (Xia, Li & Ding): conv 32-64-128, attention of 4 heads, two fully connected layers.

    Where the paper is silent or contradicts itself: 3 x 3 convolutions with a max-pool each and no norm, channels as
    tokens (it scales by sqrt(hw) and speaks of channel similarity), heads as groups of channels, 128 hidden units.
    Pools drop what is left over, as torch's do by default: of 28 pixels the last five rows and columns hardly count,
    as maps of 7 x 7 become 3 x 3, and these 1 x 1. With ceil=True all count. Sides that 16 divides leave nothing over.
    """

    smallest: ClassVar[int] = 8

    tokens: Tokens = "channel"  # spatial: positions are tokens, scaled by the root of their channels
    heads: Heads = "groups"  # projection: each head projects all channels in its own way, and the outputs are averaged
    count: Count = 4  # heads
    proj: Projected = "pointwise"  # how queries, keys and values are made
    position: bool = True  # P; off is the paper's ablation v3
    residual: bool = False  # add the input of the attention to its output
    kernel: Literal[3, 5] = 3  # pixels of a convolution's side
    hidden: Count = 128  # units of the hidden layer
    ceil: bool = False  # pools keep rows and columns that are left over, as 28 pixels leave some

    def network(self, classes, channels, size):
        if self.heads == "groups" and WIDTHS[-1] % self.count:
            raise BadInput(f"model.count={self.count} heads do not divide {WIDTHS[-1]} channels; take 1, 2, 4, 8 or so")
        if self.tokens == "spatial" and size < 16:
            raise BadInput(
                f"model.tokens=spatial attends to places, and images of {size} pixels leave one; "
                "take model.tokens=channel"
            )
        return PseNetwork(self, classes, channels, size)
