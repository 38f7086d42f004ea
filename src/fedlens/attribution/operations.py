"""Every operation of a pass, seen one at a time: modules and functions alike, whoever wrote the network."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..core.network import Network

CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
LAYERS = CONVOLUTIONS | TRANSPOSED | {"linear"}
RELUS = frozenset({"relu", "relu6", "hardtanh", "clamp", "clamp_min"})  # those that cut at zero: see is_relu
SMOOTH = frozenset({"leaky_relu", "prelu", "elu", "celu", "selu", "gelu", "silu", "mish", "tanh", "hardswish"})
GATES = frozenset({"softmax", "sigmoid", "hardsigmoid"})
QUESTIONS = frozenset({"dim", "ndimension", "size", "numel", "stride", "is_floating_point", "is_contiguous", "__len__"})
ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


class Operation(NamedTuple):
    """One operation on its way to being done."""

    net: Network
    name: str  # add for a + b, a += b, torch.add and Tensor.add_
    call: Callable
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def where(self) -> str:
        """The module whose code runs this operation, found on the stack: only asked for when something is refused."""
        names = {id(part): name for name, part in self.net.module.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            name = names.get(id(frame.f_locals.get("self")), "")
            if name:
                return name
            frame = frame.f_back
        return "the network"

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.options.get(name, default)


Rule = Callable[[Operation, Tensor], Tensor]  # keeps the value, changes the gradient


class Rewriting(TorchFunctionMode):
    """Within the block, every operation of these kinds gives rule(step, output) in place of its output.

    In-place operations on what is being differentiated give a new tensor: a rule may still need the old one.
    """

    sees_all = False  # else only what has a rule comes to `perform`: a pass has hundreds of operations

    def __init__(self, net: Network, rules: Iterable[tuple[Iterable[str], Rule]] = ()):
        super().__init__()
        self.net = net
        self.table: dict[str, list[Rule]] = {}
        self.displaced = ""  # where an in-place operation was done out of place, if one was
        for kinds, rule in rules:
            for kind in kinds:
                self.table.setdefault(kind, []).append(rule)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, call, in_place = operation(func)
        options = {} if kwargs is None else kwargs
        in_place = in_place or options.get("inplace", False)
        if not (in_place or self.sees_all or name in self.table):
            return func(*args, **options)
        if not (in_place and _differentiated(args)):
            return self.perform(Operation(self.net, name, func, args, options))
        step = Operation(self.net, name, call, args, {k: v for k, v in options.items() if k != "inplace"})
        self.displaced = self.displaced or step.where
        return self.perform(step)

    def perform(self, step: Operation) -> Any:
        out = step.call(*step.args, **step.options)
        for rule in self.table.get(step.name, ()):
            out = rule(step, out)
        return out


@cache
def operation(func: Callable) -> tuple[str, Callable, bool]:
    """Plain name, the function that leaves its arguments alone, and whether `func` is the one that does not."""
    name = getattr(func, "__name__", "?")
    if name.startswith("__") and name.endswith("__"):
        plain = name.strip("_")
        if plain[1:] in ARITHMETIC | {"truediv"} and plain[0] in "ir":  # a += b arrives as __iadd__, 1 - a as __rsub__
            base = plain[1:].replace("truediv", "div")
            return base, getattr(torch, base) if plain[0] == "i" else func, plain[0] == "i"
        return {"truediv": "div", "getitem": "getitem", "matmul": "matmul"}.get(plain, name), func, False
    if name.endswith("_") and name[:-1] in RELUS | SMOOTH | GATES | ARITHMETIC:
        plain = name[:-1]
        return plain, getattr(torch, plain, None) or getattr(F, plain), True
    return name, func, False


def is_relu(step: Operation) -> bool:
    """Whether this operation is a ReLU, with or without a ceiling; nn.ReLU6 arrives as a hard tanh from 0 to 6."""
    if step.name in ("hardtanh", "clamp", "clamp_min"):
        low = step.argument("min_val" if step.name == "hardtanh" else "min", 1)
        return isinstance(low, (int, float)) and low == 0
    return step.name in RELUS


def has_ceiling(step: Operation) -> bool:
    """Whether this ReLU is flat above as well."""
    return step.name in ("relu6", "hardtanh") or (step.name == "clamp" and step.argument("max", 2) is not None)


def _differentiated(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].requires_grad
