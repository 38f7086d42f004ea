"""Gradient rules: a layer keeps its value and gets another gradient, as an output replacement.

Under the LRP rules, relevance is activation times gradient at every place of the network. Sums, means, averages,
reshapes and max-pools then need no rule: their own gradient shares relevance out in proportion to what came in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import BadInput
from .operations import SMOOTH, Step, is_relu


class _PositiveGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(min=0)


def guided(step: Step, out: Tensor) -> Tensor:
    """Springenberg et al., 2015: only positive gradients pass, and through active units alone (the ReLU's own part)."""
    if step.name in SMOOTH:
        raise BadInput(
            f"{step.where}: guided backpropagation is defined for ReLU, not for {step.name}; use nn.ReLU there, or "
            "method=gradient"
        )
    return _PositiveGradient.apply(out) if is_relu(step) else out  # pyright: ignore[reportReturnType]


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, share: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def keep(value: Tensor, share: Tensor) -> Tensor:
    """The numbers of `value` with the gradient of `share`."""
    return _Keep.apply(value.detach(), share)  # pyright: ignore[reportReturnType]


def stabilised(z: Tensor, epsilon: float) -> Tensor:
    """Away from zero on its own side; zero itself counts as positive."""
    return z + torch.where(z >= 0, epsilon, -epsilon)


class Linear(NamedTuple):
    """A convolution or fully connected layer, with whatever follows it folded in."""

    call: Callable
    weight: Tensor
    bias: Tensor | None
    rest: tuple[Any, ...]  # stride, padding, ...
    options: dict[str, Any]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.call(x, weight, bias, *self.rest, **self.options)


LrpRule = Callable[[Linear, Tensor, Tensor, bool], Tensor]  # (layer, input, output, is the input known to be >= 0)


@dataclass(frozen=True)
class Epsilon:
    """Bach et al., 2015: in proportion to the contributions, a little of it lost where they cancel."""

    epsilon: float = 1e-6

    def __call__(self, layer: Linear, x: Tensor, out: Tensor, nonnegative: bool) -> Tensor:
        return keep(out, out * (out / stabilised(out, self.epsilon)).detach())


@dataclass(frozen=True)
class Gamma:
    """Montavon et al., 2019: positive weights count 1 + gamma times."""

    gamma: float = 0.25
    epsilon: float = 1e-6

    def __call__(self, layer: Linear, x: Tensor, out: Tensor, nonnegative: bool) -> Tensor:
        bias = None if layer.bias is None else layer.bias + self.gamma * layer.bias.clamp(min=0)
        z = layer(x, layer.weight + self.gamma * layer.weight.clamp(min=0), bias)
        return keep(out, z * (out / stabilised(z, self.epsilon)).detach())


@dataclass(frozen=True)
class AlphaBeta:
    """Bach et al., 2015: positive contributions get alpha, negative ones -beta; alpha - beta = 1 conserves."""

    alpha: float = 2.0
    beta: float = 1.0
    epsilon: float = 1e-6

    def __post_init__(self):
        if self.beta < 0 or abs(self.alpha - self.beta - 1) > 1e-9:
            raise BadInput(f"alpha={self.alpha} and beta={self.beta} lose relevance; take beta >= 0, alpha = 1 + beta")

    def __call__(self, layer: Linear, x: Tensor, out: Tensor, nonnegative: bool) -> Tensor:
        share = self._part(layer, x, out, nonnegative, self.alpha, positive=True)
        if self.beta:
            share = share - self._part(layer, x, out, nonnegative, self.beta, positive=False)
        return keep(out, share)

    def _part(self, layer: Linear, x: Tensor, out: Tensor, nonnegative: bool, factor: float, positive: bool) -> Tensor:
        up, down = layer.weight.clamp(min=0), layer.weight.clamp(max=0)
        bias = layer.bias if layer.bias is None else layer.bias.clamp(min=0) if positive else layer.bias.clamp(max=0)
        z = layer(x if nonnegative else x.clamp(min=0), up if positive else down, bias)
        if not nonnegative:
            z = z + layer(x.clamp(max=0), down if positive else up)
        ratio = factor * out / (z + self.epsilon if positive else z - self.epsilon)
        return z * ratio.detach()


def z_plus(epsilon: float = 1e-6) -> AlphaBeta:
    """Montavon et al., 2017: positive contributions alone; the positive part of the bias takes its share."""
    return AlphaBeta(1.0, 0.0, epsilon)


class Flat:
    """Lapuschkin et al., 2019: evenly over the receptive field; for the layer that sees the image."""


@dataclass(frozen=True)
class Composite:
    """Which rule which layer gets. `first` is for the convolutions that read the image itself."""

    first: LrpRule | Flat
    convolution: LrpRule
    linear: LrpRule


def fold(layer: Linear, mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Linear:
    """The one layer that a convolution or linear layer and the BatchNorm after it are, in prediction."""
    scale = (var + eps).rsqrt() if gamma is None else gamma * (var + eps).rsqrt()
    shift = -mean if layer.bias is None else layer.bias - mean
    bias = shift * scale if beta is None else beta + shift * scale
    weight = layer.weight * scale.view(-1, *[1] * (layer.weight.dim() - 1))
    return layer._replace(weight=weight, bias=bias)
