"""Optimizers as init/update pairs over Trees, and the schedules of their rate over rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from .errors import BadInput
from .fields import Count, Momentum, NonNegative, Positive, Share
from .tree import Tree


@dataclass(frozen=True)
class Schedule:
    """The rate's factor in round `at` of a stage of `rounds`. This one is constant."""

    def __call__(self, at: int, rounds: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Exponential(Schedule):
    decay: Positive = 0.99  # per round

    def __call__(self, at, rounds):
        return self.decay**at


@dataclass(frozen=True)
class Cosine(Schedule):
    floor: Share = 0.0  # the factor of the last round

    def __call__(self, at, rounds):
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * at / max(rounds - 1, 1))) / 2


@dataclass(frozen=True)
class Staircase(Schedule):
    every: Count = 50  # rounds
    factor: Positive = 0.1  # by which the rate is multiplied then

    def __call__(self, at, rounds):
        return self.factor ** (at // self.every)


SCHEDULES = {"constant": Schedule, "exponential": Exponential, "cosine": Cosine, "staircase": Staircase}


@dataclass(frozen=True)
class Optimizer:
    """State starts anew each round. The rate lives in the state, so that a recorded step sees each round's."""

    lr: Positive = 0.01
    weight_decay: NonNegative = field(default=0.0, kw_only=True)
    schedule: Schedule = field(default=Schedule(), kw_only=True)

    def at(self, at: int, rounds: int) -> Optimizer:
        """This optimizer in round `at` of a stage of `rounds`."""
        return replace(self, lr=self.lr * self.schedule(at, rounds), schedule=Schedule())

    def init(self, params: Tree) -> Tree:
        # Fused kernels read the rate as double on the CPU, as float on CUDA.
        leaves = params.leaves()
        device = leaves[0].device if leaves else torch.device("cpu")
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        return Tree(lr=torch.full((), self.lr, dtype=dtype, device=device))  # a fill: a copy from the host would wait

    def update_(self, params: Tree, grads: Tree, state: Tree) -> None:
        """Move the parameters that have a gradient, in place; the others, and their state, rest."""
        raise NotImplementedError(f"{type(self).__name__} does not say how parameters move")

    def effective_steps(self, steps: int) -> float:
        """How many gradients of weight lr a constant gradient travels in `steps` steps (FedNova's normaliser)."""
        raise BadInput(
            f"this method needs local.optimizer=sgd: {type(self).__name__.lower()} has no fixed reach per step"
        )


@dataclass(frozen=True)
class Sgd(Optimizer):
    momentum: Momentum = 0.0

    def init(self, params):
        return super().init(params).replace(velocity=params.zeros() if self.momentum else Tree())

    def update_(self, params, grads, state):
        if not grads:
            return
        velocity: Any = state.velocity.within(grads).leaves(grads) if self.momentum else []
        torch._fused_sgd_(
            params.within(grads).leaves(grads),
            grads.leaves(),
            velocity,
            lr=state.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def effective_steps(self, steps):
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Kingma & Ba, 2015, with decoupled weight decay left out: decay is added to the gradient."""

    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    epsilon: Positive = 1e-8

    kernel: ClassVar = staticmethod(torch._fused_adam_)

    def init(self, params):
        steps = params.map(lambda p: torch.zeros((), dtype=torch.float32, device=p.device))
        return super().init(params).replace(first=params.zeros(), second=params.zeros(), steps=steps)

    def update_(self, params, grads, state):
        if not grads:
            return
        first, second, steps = (state[name].within(grads).leaves(grads) for name in ("first", "second", "steps"))
        torch._foreach_add_(steps, 1)
        self.kernel(
            params.within(grads).leaves(grads),
            grads.leaves(),
            first,
            second,
            [],
            steps,
            lr=state.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True)
class AdamW(Adam):
    """Loshchilov & Hutter, 2019: decay shrinks the weights themselves and stays out of the moments."""

    kernel: ClassVar = staticmethod(torch._fused_adamw_)
