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
from .operations import SMOOTH, Operation, is_relu


class _PositiveGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(min=0)


def guided(step: Operation, out: Tensor) -> Tensor:
    """Springenberg et al., 2015: only positive gradients pass, and through active units alone (the ReLU's own part)."""
    if step.name in SMOOTH or (step.name == "hardtanh" and not is_relu(step)):
        raise BadInput(
            f"{step.where}: guided backpropagation is defined for ReLU, not for {step.name}; use nn.ReLU there, or "
            "method=gradient"
        )
    return _PositiveGradient.apply(out) if is_relu(step) else out  # pyright: ignore[reportReturnType]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts[1::2])
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(g for share in ctx.saved_tensors for g in (gradients[0] * share, None))


def redistributed(out: Tensor, *parts: tuple[Tensor, Tensor]) -> Tensor:
    """The numbers of `out`; its gradient goes to each z of the pairs (z, share), times share."""
    flat = [t for z, share in parts for t in (z, share.detach())]
    return _Redistribute.apply(out.detach(), *flat)  # pyright: ignore[reportReturnType]


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


# (makes the layer, input, output, whether the input is known to be >= 0) -> output with the rule's gradient. Layers are
# made when asked for: folding a norm into weights costs as much as a small pass.
LrpRule = Callable[[Callable[[], Linear], Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Epsilon:
    """Bach et al., 2015: in proportion to the contributions, a little of it lost where they cancel."""

    epsilon: float = 1e-6

    def __call__(self, layer: Callable[[], Linear], x: Tensor, out: Tensor, nonnegative: bool) -> Tensor:
        return redistributed(out, (out, out / stabilised(out, self.epsilon)))


@dataclass(frozen=True)
class Gamma:
    """Montavon et al., 2019: positive contributions count 1 + gamma times; negative ones where the output is negative.

    The second half is the generalised rule (Andeol et al., 2023): residual branches pass relevance to negative outputs,
    where more of the positive would divide by what cancels.
    """

    gamma: float = 0.25
    epsilon: float = 1e-6

    def __call__(self, layer: Callable[[], Linear], x: Tensor, out: Tensor, nonnegative: bool) -> Tensor:
        up, down = (contributions(layer(), x, nonnegative, positive) for positive in (True, False))
        is_up = out >= 0
        share = out / stabilised(out + self.gamma * torch.where(is_up, up, down), self.epsilon)
        return redistributed(out, (out, share), (up, self.gamma * share * is_up), (down, self.gamma * share * ~is_up))


@dataclass(frozen=True)
class AlphaBeta:
    """Bach et al., 2015: positive contributions get alpha, negative ones -beta; alpha - beta = 1 conserves."""

    alpha: float = 2.0
    beta: float = 1.0
    epsilon: float = 1e-6

    def __post_init__(self):
        if self.beta < 0 or abs(self.alpha - self.beta - 1) > 1e-9:
            raise BadInput(f"alpha={self.alpha} and beta={self.beta} lose relevance; take beta >= 0, alpha = 1 + beta")

    def __call__(self, layer: Callable[[], Linear], x: Tensor, out: Tensor, nonnegative: bool) -> Tensor:
        linear = layer()
        up = contributions(linear, x, nonnegative, positive=True)
        parts = [(up, (out if self.alpha == 1 else self.alpha * out) / (up + self.epsilon))]
        if self.beta:
            down = contributions(linear, x, nonnegative, positive=False)
            parts.append((down, -self.beta * out / (down - self.epsilon)))
        return redistributed(out, *parts)


def contributions(layer: Linear, x: Tensor, nonnegative: bool, positive: bool) -> Tensor:
    """The sum of a layer's positive (negative) contributions to each output, its bias among them."""
    signed = (lambda t: t.clamp(min=0)) if positive else (lambda t: t.clamp(max=0))
    z = layer(
        x if nonnegative else x.clamp(min=0), signed(layer.weight), None if layer.bias is None else signed(layer.bias)
    )
    return z if nonnegative else z + layer(x.clamp(max=0), -signed(-layer.weight))  # negative twice is positive


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
