"""What single layers and channels contribute: taps that reduce their gradient inside the one backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..core.errors import BadInput, nearest
from ..core.network import Network
from ..core.tree import Tree
from .cam import plus_plus
from .inputs import Score, Target, prepare, scores
from .operations import CONVOLUTIONS, RELUS, SMOOTH, Operation, Rewriting, Rule, is_relu
from .rules import guided as guided_rule

Norm = Literal["l2", "sqrt_l2", "l1", "l2sq"]
Place = Literal["conv", "relu"]
Cam = Literal["gradcam", "gradcam++"]
Reduce = Literal["mean", "sum"]

# (gradient at a layer's output, the output) -> what is wanted of them; None: nothing
Reduction = Callable[[Tensor, Tensor], Tensor | None]


class _Tap(torch.autograd.Function):
    """A layer's output unchanged, and a leaf whose gradient is the reduction: no map outlives its moment."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, leaf: Tensor, reduction: Reduction) -> Tensor:
        ctx.save_for_backward(out)
        ctx.reduction = reduction
        return torch.ops.aten.alias(out)  # view_as would choose other strides where a side has length one

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return gradients[0], ctx.reduction(gradients[0], ctx.saved_tensors[0]), None


def tapped(out: Tensor, leaf: Tensor, reduction: Reduction) -> Tensor:
    return _Tap.apply(out, leaf, reduction)  # pyright: ignore[reportReturnType]


def layer_saliency(
    net: Network,
    weights: Tree,
    x: Tensor,
    y: Tensor | int | None = None,
    *,
    guided: bool = True,
    times_activation: bool = True,
    norm: Norm = "l2",
    target: Target = "true",
    score: Score = "logit",
    tap: Place = "conv",
    chunk: int | None = None,
) -> Tensor:
    """[images, layers] of FedSLS: the norm of the channel mean of gradient times positive activation, layer by layer.

    Layers are all convolutions (tap=relu: all ReLUs) in the order they run, in one backward pass.
    """
    _known("norm", norm, Norm)
    _known("tap", tap, Place)
    inputs = prepare(net, weights, x, y, target, score, chunk)
    kinds = CONVOLUTIONS if tap == "conv" else RELUS
    if not inputs.kinds & (CONVOLUTIONS if tap == "conv" else {"relu"}):
        raise BadInput(f"layer saliency with tap={tap} needs a {_CALLED[tap]}, and the network has none")

    def reduction(gradient: Tensor, out: Tensor) -> Tensor:
        maps = (gradient * out.clamp(min=0) if times_activation else gradient).mean(1).reshape(len(out), -1)
        if norm == "l1":
            return maps.abs().sum(1)
        squared = (maps * maps).sum(1)
        return {"l2": squared.sqrt, "sqrt_l2": lambda: squared.pow(0.25), "l2sq": lambda: squared}[norm]()

    def layer(step: Operation, out: Tensor) -> Tensor:
        if tap == "relu" and not is_relu(step):
            return out
        leaves.append(out.new_empty(len(out), requires_grad=True))  # its gradient alone is read
        return tapped(out, leaves[-1], reduction)

    rules: list[tuple[frozenset[str], Rule]] = [(RELUS | SMOOTH, guided_rule)] if guided else []
    table = None
    for part, images, wanted in inputs.pieces():
        leaves: list[Tensor] = []
        with torch.enable_grad(), Rewriting(inputs.net, [*rules, (kinds, layer)]):
            total = inputs.each(inputs.logits(images), wanted).sum()
        found = torch.stack(torch.autograd.grad(total, leaves, materialize_grads=True), 1)
        if table is None:  # one block for all: pieces kept would lie between what is freed, and memory would grow
            table = torch.empty(len(x), len(leaves), dtype=found.dtype, device=x.device)
        table[part] = found
    return x.new_zeros(0, len(layer_names(net, weights, x, tap=tap))) if table is None else table


def layer_names(net: Network, weights: Tree, x: Tensor, *, tap: Place = "conv") -> list[str]:
    """The modules behind the columns of `layer_saliency`, in order."""
    _known("tap", tap, Place)
    names: list[str] = []

    def layer(step: Operation, out: Tensor) -> Tensor:
        if tap == "conv" or is_relu(step):
            names.append(step.where)
        return out

    one = x[:1] if len(x) else x.new_zeros(1, *x.shape[1:])
    with torch.no_grad(), Rewriting(net, [(CONVOLUTIONS if tap == "conv" else RELUS, layer)]):
        net(weights, one)
    return names


class ChannelTaps(Rewriting):
    """Within the block, every convolution that runs is tapped; `gradients(score)` reads the taps by layer name.

    For the channels of PSE: the score may be anything computed from what was seen, with other networks in between.
    tap=relu is the ReLU after the convolution, before pooling; where branches are added first, it is the ReLU of each.
    Nothing is read back to the host.
    """

    def __init__(self, net: Network, weights: Tree, *, tap: Place = "relu", cam: Cam = "gradcam"):
        _known("tap", tap, Place)
        _known("cam", cam, Cam)
        super().__init__(net, [(CONVOLUTIONS, self._convolution), (RELUS, self._relu)])
        self.tap, self.cam = tap, cam
        self.any_order = tap == "conv"  # a max pool may run before the ReLU: what reaches a convolution is the same
        self.leaves: dict[str, Tensor] = {}
        self.places: dict[str, int] = {}  # positions in a channel of one image
        self.was_read = False  # set, another way back through the same pass leaves the taps alone
        self._weights = weights  # kept, so that no other tensor gets the identity of one of them
        self._names = {id(value): name.removesuffix(".weight") for name, value in weights.params.items()}
        self._open: list[tuple[str, torch.Size]] = []  # convolutions that no ReLU has followed yet

    def gradients(self, score: Tensor, examples: Tensor | int = 1, reduce: Reduce = "sum") -> Tree:
        """{layer: [channels]}, summed over images and positions; reduce=mean divides by `examples` and positions."""
        _known("reduce", reduce, Reduce)
        if not self.leaves:
            raise BadInput(f"no {_CALLED[self.tap]} was seen: channel gradients need a convolution (tap={self.tap})")
        found = torch.autograd.grad(score, list(self.leaves.values()), retain_graph=True, materialize_grads=True)
        if reduce == "mean":
            found = [g / (examples * n) for g, n in zip(found, self.places.values(), strict=True)]
        return Tree(zip(self.leaves, found, strict=True))

    def _convolution(self, step: Operation, out: Tensor) -> Tensor:
        name = self._names.get(id(step.argument("weight", 1))) or step.where
        if self.tap == "conv":
            return self._tapped([name], out)
        self._open.append((name, out.shape))
        return out

    def _relu(self, step: Operation, out: Tensor) -> Tensor:
        if not self._open or not is_relu(step):
            return out
        names, self._open = [name for name, shape in self._open if shape == out.shape], []
        return self._tapped(names, out) if names else out

    def _tapped(self, names: list[str], out: Tensor) -> Tensor:
        # Sums over many positions need more than the eight bits of mantissa that a map in half precision has.
        leaf = out.new_empty(out.shape[1], dtype=_full(out), requires_grad=True)  # its gradient alone is read
        for name in names:
            if name in self.leaves:
                raise BadInput(f"{name} runs twice in one pass and its channels mix; give each use a layer of its own")
            self.leaves[name], self.places[name] = leaf, out[0, 0].numel()
        reduction = _summed if self.cam == "gradcam" else _plus_plus
        return tapped(out, leaf, lambda gradient, out: None if self.was_read else reduction(gradient, out))


def channel_gradients(
    net: Network,
    weights: Tree,
    batch: Tree,
    *,
    tap: Place = "relu",
    reduce: Reduce = "mean",
    cam: Cam = "gradcam",
    score: Score = "logit",
) -> Tree:
    """{convolution: [channels]}: how much each channel speaks for the true classes of a batch (Grad-CAM's weights)."""
    with torch.enable_grad(), ChannelTaps(net, weights, tap=tap, cam=cam) as taps:
        picked = scores(net(weights, batch.x), score).gather(1, batch.y[:, None])[:, 0]
        return taps.gradients((picked * batch.weight).sum(), batch.weight.sum(), reduce)


def _summed(gradient: Tensor, out: Tensor) -> Tensor:
    return gradient.sum([dim for dim in range(gradient.dim()) if dim != 1], dtype=_full(gradient))


def _plus_plus(gradient: Tensor, out: Tensor) -> Tensor:
    return _summed(plus_plus(out.to(_full(out)), gradient.to(_full(gradient))), out)


def _full(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_CALLED = {"conv": "convolution", "relu": "ReLU"}


def _known(name: str, value: str, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise BadInput(f"{name}={value} is not known; {nearest(str(value), get_args(allowed))}")
