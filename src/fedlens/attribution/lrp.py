"""Layer-wise relevance propagation as one gradient: every operation of the pass gets its rule or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.errors import BadInput, nearest
from ..core.network import Network
from .inputs import Inputs
from .operations import CONVOLUTIONS, GATES, LAYERS, QUESTIONS, SMOOTH, Operation, Rewriting, has_ceiling, is_relu
from .rules import AlphaBeta, Composite, Epsilon, Flat, Gamma, Linear, fold, redistributed, stabilised, z_plus

# Their own gradient shares relevance out in proportion to what came in: sums, and what only moves or picks values.
SUMS = frozenset(
    {"add", "sub", "neg", "sum", "mean", "interpolate", "avg_pool1d", "avg_pool2d", "avg_pool3d"}
    | {f"adaptive_avg_pool{d}d" for d in (1, 2, 3)}
)
PICKS = frozenset(
    {"max_pool1d", "max_pool2d", "max_pool3d", "max", "amax", "masked_fill", "dropout", "dropout2d"}
    | {f"adaptive_max_pool{d}d" for d in (1, 2, 3)}
)
MOVES = frozenset(
    {"flatten", "unflatten", "reshape", "view", "view_as", "permute", "transpose", "movedim", "squeeze", "unsqueeze"}
    | {"expand", "expand_as", "repeat", "cat", "concat", "stack", "chunk", "split", "unbind", "getitem", "narrow"}
    | {
        "select",
        "index_select",
        "gather",
        "flip",
        "roll",
        "pixel_shuffle",
        "channel_shuffle",
        "contiguous",
        "clone",
        "as_strided",
    }
    | {"to", "float", "double", "t", "__get__"}
)
PLAIN = SUMS | PICKS | MOVES | {"pad"}
PRODUCTS = frozenset({"mul", "matmul", "bmm", "einsum", "div"})
NONNEGATIVE_STAYS = (PICKS | MOVES | {"sum", "mean", "avg_pool2d", "adaptive_avg_pool2d"}) - {"masked_fill"}

Named = Literal["epsilon_plus_flat", "epsilon_plus", "epsilon", "gamma", "alpha_beta", "z_plus"]


@dataclass(frozen=True)
class Lrp:
    """Bach et al., 2015; Kohlbrenner et al., 2020, for the composite. Relevance of a class's logit, like the image."""

    composite: Named | Composite = "epsilon_plus_flat"  # flat for the first convolution, z-plus, epsilon for linear
    epsilon: float = 1e-6
    gamma: float = 0.25
    alpha: float = 2.0
    beta: float = 1.0

    def __post_init__(self):
        self.rules()  # says what is wrong with them before any pass

    def rules(self) -> Composite:
        if isinstance(self.composite, Composite):
            return self.composite
        if not self.epsilon > 0:
            raise BadInput(
                f"epsilon={self.epsilon} does not keep LRP from dividing by zero; give a small number above 0"
            )
        if self.composite in ("epsilon_plus_flat", "epsilon_plus"):
            first = Flat() if self.composite.endswith("flat") else z_plus(self.epsilon)
            return Composite(first, z_plus(self.epsilon), Epsilon(self.epsilon))
        rules = {
            "epsilon": lambda: Epsilon(self.epsilon),
            "gamma": lambda: Gamma(self.gamma, self.epsilon),
            "alpha_beta": lambda: AlphaBeta(self.alpha, self.beta, self.epsilon),
            "z_plus": lambda: z_plus(self.epsilon),
        }
        if self.composite not in rules:
            raise BadInput(f"composite={self.composite} is not known; {nearest(self.composite, get_args(Named))}")
        rule = rules[self.composite]()
        return Composite(rule, rule, rule)

    def __call__(self, inputs: Inputs, x: Tensor, wanted: Tensor | None) -> Tensor:
        if inputs.score != "logit":
            raise BadInput(f"LRP shares out the logit, not score={inputs.score}; use score=logit")
        x = x.detach().requires_grad_()
        with torch.enable_grad(), Relevance(inputs.net, self.rules(), x, self.epsilon) as seen:
            logits = inputs.logits(x)
            total = inputs.each(logits, wanted).sum()
        flat = isinstance(seen.composite.first, Flat)
        if flat and seen.saw_convolution and not seen.carriers:
            raise BadInput("no convolution reads the image itself, which the flat rule needs; use composite=epsilon")
        gradient, *shares = torch.autograd.grad(total, [x, *seen.carriers], materialize_grads=True)
        return sum(shares, start=x.detach() * gradient)


class _Waiting(NamedTuple):
    """A layer whose output has not been used yet: a BatchNorm may follow and be folded in."""

    kind: str
    layer: Callable[[], Linear]
    x: Tensor


class Relevance(Rewriting):
    """Within the block, activation times gradient is relevance, at the image and at every place in between.

    `carriers` are leaves beside the image: where relevance is not in proportion to pixels (the flat rule), it is the
    gradient of a tensor of ones in place of the image.
    """

    sees_all = True

    def __init__(self, net: Network, composite: Composite, x: Tensor, epsilon: float):
        super().__init__(net)
        self.composite, self.epsilon = composite, epsilon
        self.carriers: list[Tensor] = []
        self.saw_convolution = False
        # What is known about tensors, for as long as the network holds on to them.
        self.waiting, self.settled = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.nonnegative, self.weighing = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.seen, self.pixels = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.seen[x] = self.pixels[x] = True  # pixels: the image, and what was made of it pixel by pixel

    def perform(self, step: Operation) -> Any:
        for t in _tensors(step):
            if t.requires_grad and t not in self.seen:
                raise _refusal(step, "its input, which something unseen made: TorchScript or an autograd.Function")
        out = self._perform(step)
        for part in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(part, Tensor) and part.requires_grad:
                self.seen[part] = True
        return out

    def _perform(self, step: Operation) -> Any:
        if step.name in QUESTIONS or (step.name == "__get__" and not isinstance(_done(step), Tensor)):
            return _done(step)
        if step.name == "batch_norm":
            return self._batch_norm(step)
        step = step._replace(args=self._settle(step.args), options=self._settle(step.options))
        inputs = [t for t in _tensors(step) if t.requires_grad]
        if any(t in self.weighing for t in _tensors(step)):
            return self._weigh(step, inputs)
        if not inputs:
            return _done(step)
        if step.name in LAYERS:
            return self._layer(step)
        out = self._other(step, inputs)
        for part in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(part, Tensor):
                self._remember(step, inputs, part)
        return out

    # ---- layers: their rule waits until it is known whether a BatchNorm follows ----
    def _layer(self, step: Operation) -> Tensor:
        x, weight, bias = (step.argument(n, i) for i, n in enumerate(("input", "weight", "bias")))
        if weight.requires_grad:
            raise _refusal(step, f"{step.name} whose weights depend on the image")
        options = {k: v for k, v in step.options.items() if k not in ("input", "weight", "bias")}
        out, linear = _done(step), Linear(step.call, weight, bias, step.args[3:], options)
        self.waiting[out] = _Waiting(step.name, lambda: linear, x)
        return out

    def _batch_norm(self, step: Operation) -> Tensor:
        if step.call is not F.batch_norm:
            raise _refusal(step, "torch.batch_norm (F.batch_norm has one)")
        x, mean, var, gamma, beta, eps = (step.argument(n, i) for n, i in _BATCH_NORM.items())
        at = self.waiting.get(x)
        if at is None or at.kind not in CONVOLUTIONS | {"linear"}:
            x = self._settle(x)
            return self._pass(x, step.call(x, *step.args[1:], **step.options))
        folded = at._replace(layer=lambda: fold(at.layer(), mean, var, gamma, beta, eps))
        return self._ruled(folded, _done(step))

    def _settle(self, value: Any) -> Any:
        """The same arguments with the rules on: something other than a BatchNorm wants them."""
        if isinstance(value, Tensor) and value in self.waiting:
            if value not in self.settled:
                self.settled[value] = self._ruled(self.waiting[value], value)
            return self.settled[value]
        if isinstance(value, dict):
            return {name: self._settle(part) for name, part in value.items()}
        return type(value)(map(self._settle, value)) if type(value) in (list, tuple) else value

    def _ruled(self, at: _Waiting, out: Tensor) -> Tensor:
        rule = self.composite.linear if at.kind == "linear" else self.composite.convolution
        if at.kind in CONVOLUTIONS:
            self.saw_convolution = True
            rule = self.composite.first if at.x in self.pixels else rule
        if not isinstance(rule, Flat):
            return rule(at.layer, at.x, out, at.x in self.nonnegative)
        carrier = torch.ones_like(at.x, requires_grad=True)
        self.carriers.append(carrier)
        layer = at.layer()
        count = layer(carrier, torch.ones_like(layer.weight))
        return redistributed(out, (count, out / count))

    # ---- everything else ----
    def _other(self, step: Operation, inputs: list[Tensor]) -> Any:
        if step.name in PLAIN or (is_relu(step) and not has_ceiling(step)):
            return _done(step)
        if step.name in SMOOTH or is_relu(step):
            return self._pass(inputs[0], _done(step))
        if step.name in GATES:  # Ali et al., 2022: what weighs the values counts as a constant
            return _done(step).detach()
        if step.name in ("group_norm", "layer_norm"):
            return self._norm(step)
        if step.name == "scaled_dot_product_attention" and len(step.args) >= 3:
            query, key, *rest = step.args
            return step.call(query.detach(), key.detach(), *rest, **step.options)
        if step.name == "div" and isinstance(below := step.argument("other", 1), Tensor) and below.requires_grad:
            raise _refusal(step, "a division by what depends on the image")
        if step.name not in PRODUCTS:
            out = _done(step)
            if not isinstance(out, Tensor) or out.requires_grad:
                raise _refusal(step, step.name)
            return out  # a comparison, an argmax: nothing flows back through it
        if len(inputs) == 1:
            return _done(step)
        out = _done(step).detach()
        self.weighing[out] = _refusal(step, f"{step.name} of two things that both depend on the image")
        return out

    def _weigh(self, step: Operation, inputs: list[Tensor]) -> Any:
        """A product may go on to a gate, as in attention. Anywhere else its relevance would be lost."""
        product = next(self.weighing[t] for t in _tensors(step) if t in self.weighing)
        if inputs or step.name not in PLAIN | PRODUCTS | GATES:
            raise product
        out = _done(step)
        if step.name not in GATES:
            for part in out if isinstance(out, (tuple, list)) else [out]:
                self.weighing[part] = product
        return out

    def _norm(self, step: Operation) -> Tensor:
        """Ali et al., 2022: with its spread held constant a norm is a linear layer, and gets the epsilon rule."""
        out, x, shape, weight = _done(step), step.args[0], step.args[1], step.argument("weight", 2)
        layer_wise = step.name == "layer_norm"
        rows = x.flatten(-len(shape)) if layer_wise else x.reshape(len(x), shape, -1)
        spread = (rows.var(-1, correction=0, keepdim=True) + step.argument("eps", 4, 1e-5)).sqrt().detach()
        y = ((rows - rows.mean(-1, keepdim=True)) / spread).view_as(x)
        if weight is not None:
            y = y * (weight if layer_wise else weight.view(-1, *[1] * (x.dim() - 2)))
        return redistributed(out, (y, out / stabilised(out, self.epsilon)))

    def _pass(self, x: Tensor, out: Tensor) -> Tensor:
        """All of it goes through an elementwise function."""
        return redistributed(out, (x, out / stabilised(x, self.epsilon)))

    def _remember(self, step: Operation, inputs: list[Tensor], out: Tensor) -> None:
        values = [t for t in _tensors(step) if t.is_floating_point()]
        stays = step.name in NONNEGATIVE_STAYS or (step.name == "add" and len(values) == 2)
        if is_relu(step) or (stays and all(t in self.nonnegative for t in values)):
            self.nonnegative[out] = True
        if len(inputs) == 1 and inputs[0] in self.pixels and out.shape == inputs[0].shape:
            self.pixels[out] = True


_BATCH_NORM = {"input": 0, "running_mean": 1, "running_var": 2, "weight": 3, "bias": 4, "eps": 7}  # of F.batch_norm


def _done(step: Operation) -> Any:
    return step.call(*step.args, **step.options)


def _tensors(step: Operation) -> Iterator[Tensor]:
    for value in (*step.args, *step.options.values()):
        yield from (t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor))


def _refusal(step: Operation, what: str) -> BadInput:
    return BadInput(f"{step.where}: LRP has no rule for {what}; use another layer there, or another method")
