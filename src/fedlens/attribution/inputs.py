"""What is asked of a network: which images, which class, which score, and how many images at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import BadInput, nearest
from ..core.network import Network
from ..core.tree import Tree
from .operations import Operation, Rewriting, Rule, is_relu

Target = Literal["true", "predicted", "given", "all"]
Score = Literal["logit", "logprob", "prob"]

MOST = 2048  # images at a time; beyond it nothing gets faster
CPU_BUDGET = 1 << 30  # bytes at a time
CUDA_SHARE = 16  # one part in so many of the device's memory: of all, not of what is free, so that bits repeat
COPIES = 4  # a pass keeps the activations, their gradients and what the rules add


@dataclass(frozen=True)
class Inputs:
    """Images, what is asked about each, and the network that answers."""

    net: Network
    weights: Tree
    x: Tensor
    y: Tensor | None  # [B] classes, [B, classes] how much each counts, or None: the class that is predicted
    score: Score
    rows: int  # images at a time
    classes: int
    kinds: frozenset[str]  # operations that the network is made of
    doubts: list[tuple[Tensor, Callable[[], str]]] = field(default_factory=list)  # what must hold, or what is wrong

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """In turn: which images, the images on the network's device, how much each class counts."""
        for start in range(0, len(self.x), self.rows):
            part = slice(start, start + self.rows)
            x = self.x[part].to(_like(self.weights))
            finite = x.flatten(1).isfinite().all(1)
            self._demand(finite.all(), partial(_not_finite, start, finite))
            yield part, x, None if self.y is None else self._counted(self.y[part].to(x.device)).to(x)
        self._check()

    def _demand(self, holds: Tensor, said: Callable[[], str]) -> None:
        """Refuses at once, or on a GPU after the last piece: to look at a number there, the host waits for all work."""
        self.doubts.append((holds, said))
        if not holds.is_cuda:
            self._check()

    def _check(self) -> None:
        if self.doubts and not torch.stack([holds for holds, _ in self.doubts]).all():
            raise BadInput(next(said() for holds, said in self.doubts if not holds))
        self.doubts.clear()

    def _counted(self, y: Tensor) -> Tensor:
        return y if y.dim() == 2 else F.one_hot(y.long(), self.classes)

    def logits(self, x: Tensor) -> Tensor:
        logits = self.net(self.weights, x)
        said = "the network's output is not finite; its weights or the scale of the images are off"
        self._demand(logits.detach().isfinite().all(), lambda: said)
        return logits

    def predicted(self, x: Tensor) -> Tensor:
        """How much each class counts when the predicted one is asked about."""
        with torch.no_grad():
            return best(self.logits(x))

    def each(self, logits: Tensor, wanted: Tensor | None) -> Tensor:
        """[B] scores. The gradient of their sum is every image's own: images do not touch each other."""
        wanted = best(logits.detach()) if wanted is None else wanted
        return (scores(logits, self.score) * wanted).sum(1)

    def gradient(self, x: Tensor, wanted: Tensor | None, rules: Iterable[tuple[Iterable[str], Rule]] = ()) -> Tensor:
        """d score / d x of each image, under the given (kinds, rule) pairs."""
        x, rules = x.detach().requires_grad_(), list(rules)
        with torch.enable_grad(), Rewriting(self.net, rules) if rules else nullcontext():
            total = self.each(self.logits(x), wanted).sum()
        return torch.autograd.grad(total, x, materialize_grads=True)[0]


def prepare(
    net: Network,
    weights: Tree,
    x: Tensor,
    y: Tensor | int | None,
    target: Target,
    score: Score,
    chunk: int | None = None,
    *,
    most: int | None = None,
    differentiable: bool = True,
) -> Inputs:
    """Refuses what cannot be answered, in one sentence; looks at the network with one image to know its size."""
    for name, value, known in (("target", target, Target), ("score", score, Score)):
        if value not in get_args(known):
            raise BadInput(f"{name}={value} is not known; {nearest(str(value), get_args(known))}")
    if target == "all" and score == "prob":
        raise BadInput("target=all with score=prob is always one and has no gradient; use score=logit or logprob")
    if chunk is not None and chunk < 1:
        raise BadInput(f"chunk={chunk} images at a time cannot be; give 1 or more, or none to choose by memory")
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        raise BadInput("images must be a floating point tensor [images, ...] as the network takes them, not raw bytes")
    if not weights.params:
        raise BadInput("the network has no parameters: there is nothing to explain")
    for name, part in net.module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is None:
            raise BadInput(f"{name} keeps no running statistics, so that images would explain each other")
        if isinstance(part, torch.jit.ScriptModule):
            raise BadInput(f"{name} is TorchScript, which hides what it does; give the module it was made from")
    net = (
        net.with_precision("fp32") if net.precision == "bf16" else net
    )  # eight bits of mantissa are too few to divide by
    weights = Tree(params=weights.params.map(torch.detach), buffers=weights.buffers.map(torch.detach))
    seen, classes = _probe(net, weights, x, differentiable)
    labels = _labels(x, y, target, classes)
    rows = chunk or min(most or MOST, _rows(seen.bytes, x, weights))
    return Inputs(net, weights, x, labels, score, rows, classes, frozenset(seen.kinds))


def scores(logits: Tensor, score: Score) -> Tensor:
    if score == "logit":
        return logits
    return logits.log_softmax(1) if score == "logprob" else logits.softmax(1)


class _Probe(Rewriting):
    """Counts the bytes that a pass makes, and the kinds of its operations."""

    sees_all = True

    def __init__(self, net: Network):
        super().__init__(net)
        self.bytes, self.kinds = 0, set[str]()

    def perform(self, step: Operation) -> Any:
        out = super().perform(step)
        self.kinds.add("relu" if is_relu(step) else step.name)
        if isinstance(out, Tensor) and out._base is None:
            self.bytes += out.numel() * out.element_size()
        return out


def _probe(net: Network, weights: Tree, x: Tensor, differentiable: bool) -> tuple[_Probe, int]:
    one = x[:1].detach().to(_like(weights))
    if not len(one):
        one = one.new_zeros(1, *x.shape[1:])
    with torch.enable_grad(), _Probe(net) as seen:
        logits = net(weights, one.requires_grad_())
    if logits.dim() != 2:
        raise BadInput(
            f"the network gives {list(logits.shape[1:])} numbers per image; a classifier gives one per class"
        )
    if differentiable and not logits.requires_grad:
        raise BadInput(
            "the network's output has no gradient (torch.no_grad, detach or argmax inside?); "
            "remove that, or use method=score_cam, which needs none"
        )
    if seen.displaced:  # wrong for code that goes on under the old name, and then values differ
        with torch.no_grad():
            plain = net(weights, one.detach().clone())
        if not torch.allclose(plain, logits, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise BadInput(
                f"{seen.displaced} changes a tensor in place and goes on under its old name; "
                "write x = relu(x) instead of relu_(x)"
            )
    return seen, logits.shape[1]


def _labels(x: Tensor, y: Tensor | int | None, target: Target, classes: int) -> Tensor | None:
    if target == "predicted":
        return None
    if target == "all":
        return torch.ones(len(x), classes)
    if y is None:
        raise BadInput(f"target={target} needs y, one class per image; or use target=predicted")
    asked = torch.as_tensor(y)
    labels = asked.expand(len(x)) if asked.dim() == 0 else asked
    if labels.dim() == 2 and target == "given" and labels.shape == (len(x), classes):
        return labels
    if labels.dim() != 1 or len(labels) != len(x) or labels.is_floating_point():
        raise BadInput(
            f"y must hold one class number for each of {len(x)} images, not {list(labels.shape)} of {labels.dtype}"
        )
    low, high = torch.stack(labels.aminmax()).tolist() if len(labels) else (0, 0)
    if len(labels) and not 0 <= low <= high < classes:
        raise BadInput(f"labels go from {low} to {high}, but the network has classes 0 to {classes - 1}")
    return labels


def _not_finite(start: int, finite: Tensor) -> str:
    image = start + int(finite.to(torch.uint8).argmin())
    return f"image {image} has values that are not finite; repair or leave out such images"


def _rows(bytes_of_one: int, x: Tensor, weights: Tree) -> int:
    device = _like(weights).device
    total = torch.cuda.get_device_properties(device).total_memory // CUDA_SHARE if device.type == "cuda" else CPU_BUDGET
    return max(1, min(MOST, total // (COPIES * max(bytes_of_one, 1))))


def best(logits: Tensor) -> Tensor:
    return F.one_hot(logits.argmax(1), logits.shape[1]).to(logits)


def _like(weights: Tree) -> Tensor:
    return next(iter(weights.params.values()))
