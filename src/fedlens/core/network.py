"""An nn.Module seen as a function of its weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .pool_first import pool_first
from .rng import fold, uniform
from .tree import Tree

Precision = Literal["fp32", "tf32", "bf16", "fp64"]
Buffers = Literal["average", "local"]


class Network:
    """An nn.Module with `features(x)` and `head`, seen as a function of its weights; the module keeps none that matter.

    `precision` is that of the forward pass; weights, gradients and results keep the weights' dtype.
    `buffers` says what becomes of running statistics: averaged like parameters, or kept by each client.
    `compile`: training passes run as kernels that torch.compile makes of the module, once, in half a minute or so.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: Precision = "fp32",
        buffers: Buffers = "average",
        compile: bool = False,
    ):
        self.module = copy.deepcopy(module)
        pool_first(self.module)
        self.precision: Precision = precision
        self.buffers: Buffers = buffers
        self.compile = compile
        if precision == "fp64":
            self.module.double()
        # Convolutions are faster on pixels whose channels lie side by side. Weights stay as they are: every tree has
        # one layout, or sums over it would round differently in another engine.
        self.layout = torch.channels_last if any(isinstance(m, nn.Conv2d) for m in module.modules()) else None
        self._under = _Under(self.module)
        for name, part in self.module.named_modules():
            if isinstance(part, _DropoutNd):
                raise ValueError(f"{name} draws from a global generator; use fedlens.models.Dropout")
            if isinstance(part, _BatchNorm):
                if part.momentum is None:
                    raise ValueError(f"{name}: a cumulative average (momentum=None) needs the batch counter we drop")
                part.num_batches_tracked = None  # an integer that BatchNorm counts but does not need
        initial = self.initial_weights()
        self.private = frozenset(initial.buffers if buffers == "local" else ())
        self._names = frozenset(f"module.{k}" for part in initial.values() for k in part)
        self.head = self._names_under(getattr(self.module, "head", None))
        self._dropouts = [(n, m) for n, m in self.module.named_modules() if isinstance(m, Dropout)]
        self.norms = [(n, m) for n, m in self.module.named_modules() if isinstance(m, _BatchNorm)]
        every = dict(self.module.named_parameters(remove_duplicate=False))
        self._tied = len(every) > len(dict(self.module.named_parameters()))
        self._places = {f"module.{name}": _place(self.module, name) for part in initial.values() for name in part}
        self._mode: object = None
        self._others: dict[Precision, Network] = {precision: self}
        products = self.names_of(nn.Conv2d, nn.Linear)
        self._halved = sorted(f"module.{name}" for name in products if name in initial.params)

    def with_precision(self, precision: Precision) -> Network:
        """The same network in another precision, made once."""
        if precision not in self._others:
            self._others[precision] = Network(self.module, precision, self.buffers, self.compile)
        return self._others[precision]

    def copy(self) -> Network:
        """Another module of the same values, for another device."""
        return Network(self.module, self.precision, self.buffers, self.compile)

    def to(self, device: torch.device | str) -> Network:
        self.module.to(device)
        return self

    def initial_weights(self) -> Tree:
        """params get gradients; buffers are running statistics. Constants and integers stay in the module."""
        params = Tree({k: v.detach().clone() for k, v in self.module.named_parameters()})
        running = ((k, v) for k, v in self.module.named_buffers() if _is_running(k, v))
        return Tree(params=params, buffers=Tree({k: v.clone() for k, v in running}))

    def start_from(self, weights: Tree) -> Network:
        """The same network with these first weights; KeyError where they are another network's."""
        mine = dict(self.initial_weights().paths())
        theirs = dict(weights.paths())
        if {k: (v.shape, v.dtype) for k, v in mine.items()} != {k: (v.shape, v.dtype) for k, v in theirs.items()}:
            raise KeyError("first weights differ from the network's in names, shapes or types")
        owned = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        with torch.no_grad():
            for part in weights.values():
                for name, value in part.items():
                    owned[name].copy_(value)
        self._others = {self.precision: self}
        return self

    def _names_under(self, part: object) -> frozenset[str]:
        """Names of the weights of one part of the module, by whatever attribute it is reached."""
        inside = {id(m) for m in part.modules()} if isinstance(part, nn.Module) else set()
        return frozenset(
            f"{name}.{weight}" if name else weight
            for name, part in self.module.named_modules()
            if id(part) in inside
            for weight in [*part._parameters, *part._buffers]
        )

    def names_of(self, *kinds: type) -> frozenset[str]:
        """Names of all weights that belong to modules of these kinds (FedBN: the norms)."""
        found = ((name, part) for name, part in self.module.named_modules() if isinstance(part, kinds))
        return frozenset(f"{name}.{weight}" for name, part in found for weight in [*part._parameters, *part._buffers])

    def __call__(self, weights: Tree, x: Tensor) -> Tensor:
        """Logits for prediction: running statistics are read, nothing is written."""
        return self.forward(weights, x).logits

    def forward(
        self, weights: Tree, x: Tensor, *, train: bool = False, key: Tensor | None = None, only: Tree | None = None
    ) -> Tree:
        """features and logits of one forward pass. With `train`, weights.buffers advance in place.

        `only` are the parameters that train when not all do: a frozen norm reads its statistics, writes none.
        """
        features, logits = self.apply(weights, _features_and_logits, x, train=train, key=key, only=only)
        dtype = next(iter(weights.params.values())).dtype
        return Tree(features=features.to(dtype), logits=logits.to(dtype))

    def apply(
        self,
        weights: Tree,
        f: Callable[..., Any],
        *inputs: Tensor,
        train: bool = False,
        key: Tensor | None = None,
        only: Tree | None = None,
        in_step: bool = False,
    ) -> Any:
        """f(module, *inputs) under these weights, in this network's precision.

        `in_step`: a pass of a local step that does not train, which is compiled as those are that do.
        """
        self._set_mode(train, only)
        inputs = tuple(map(self.laid_out, inputs))
        for name, part in self._dropouts if train else ():
            assert key is not None, "a training pass through dropout needs the step's key"
            part.key = fold(key, name)
        named = {f"module.{k}": v for k, v in (*weights.params.items(), *weights.buffers.items())}
        if named.keys() != self._names:  # functional_call would fall back on the module's own weights
            raise KeyError(f"weights differ from the network's in {', '.join(sorted(self._names ^ named.keys()))}")
        device = inputs[0].device.type
        if self._halves(inputs[0]):
            named.update(_halved({name: named[name] for name in self._halved}))
        # What is compiled must not be watched: it would be left out by taps and rewritten rules.
        compiled = self.compile and (train or in_step) and not torch._C._len_torch_function_stack()
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "bf16"):
            if compiled or self._tied:
                run = _compiled() if compiled else functional_call
                return run(self._under, named, (f, *inputs), tie_weights=self._tied)
            with self._swapped(named):
                return f(self.module, *inputs)

    @contextmanager
    def _swapped(self, named: dict[str, Tensor]) -> Iterator[None]:
        """The module under these weights, as functional_call does it; which looks for their places at each step."""
        before = [(where, name, where[name]) for where, name in map(self._places.__getitem__, named)]
        try:
            for (where, name, _), value in zip(before, named.values(), strict=True):
                where[name] = value
            yield
        finally:
            for where, name, value in before:
                where[name] = value

    def laid_out(self, x: Tensor) -> Tensor:
        """The same images as passes want them in memory: made once, they serve several passes."""
        return x if self.layout is None or x.dim() != 4 else _side_by_side(x)

    def in_halves(self, params: Tree) -> Tree:
        """The same parameters as passes on their device use them: made once, they serve several passes.

        Else each pass would make its own, and a step that has three would add up three gradients of every parameter.
        """
        named = {f"module.{name}": leaf for name, leaf in params.items()}
        if not named or not self._halves(next(iter(named.values()))):
            return params
        named.update(_halved({name: named[name] for name in self._halved if name in named}))
        return Tree(zip(params, named.values(), strict=True))

    def _halves(self, like: Tensor) -> bool:
        """Whether weights are made bfloat16 before a pass; elsewhere autocast does it one by one."""
        return self.precision == "bf16" and like.device.type == "cuda"

    @torch.no_grad()
    def with_batch_statistics(self, weights: Tree, x: Tensor) -> Tree:
        """These weights with the running statistics that all norms have on this batch alone; one image has none."""
        if not self.norms or len(x) < 2:
            return weights
        weights, usual = weights.replace(buffers=weights.buffers.clone()), [part.momentum for _, part in self.norms]
        self._set_mode(False, None)
        try:
            for _, part in self.norms:  # and nothing else: dropout would spread what reaches them
                part.train().momentum = 1.0
            self.forward(weights, x)
        finally:
            for (_, part), momentum in zip(self.norms, usual, strict=True):
                part.eval().momentum = momentum
        return weights

    def _set_mode(self, train: bool, only: Tree | None) -> None:
        mode = train, None if only is None else frozenset(only)
        if self._mode == mode:
            return
        self.module.train(train)
        if train and only is not None:
            for name, part in self.norms:
                part.train(any(f"{name}.{weight}" in only for weight, _ in part.named_parameters(recurse=False)))
        self._mode = mode

    @contextmanager
    def replacing_outputs(
        self, f: Callable[[str, nn.Module, Tensor, Tensor], Any], kinds: tuple[type, ...]
    ) -> Iterator[None]:
        """Within the block, every module of these kinds returns f(name, module, input, output)."""
        handles = [
            m.register_forward_hook(lambda m, args, out, n=n: f(n, m, args[0], out))
            for n, m in self.module.named_modules()
            if isinstance(m, kinds)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _place(module: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """Where a module keeps this weight: (the parameters or buffers of its owner, its name there)."""
    above, _, name = path.rpartition(".")
    owner: Any = module.get_submodule(above)
    return (owner._parameters if name in owner._parameters else owner._buffers), name


def _side_by_side(x: Tensor) -> Tensor:
    """Channels next to each other in memory, which convolutions and pools on a CPU or a GPU are fastest on."""
    if x.shape[1] != 1:
        return x.contiguous(memory_format=torch.channels_last)
    # With one channel both layouts hold the same bytes, and torch takes the slow one unless the strides say otherwise.
    high, wide = x.shape[2:]
    return x.contiguous().as_strided(x.shape, (high * wide, 1, wide, 1))


def _is_running(name: str, buffer: Tensor) -> bool:
    """A running statistic: counters and masks are no part of a message, and integers are never averaged."""
    return name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()


def _halved(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of matrix products in bfloat16, as autocast would cast them one by one: here in one launch."""
    new: dict[str, Tensor] = {}
    named = {name: leaf for name, leaf in named.items() if leaf.dtype != torch.bfloat16}
    for trained in (True, False):  # a frozen weight must not make its layer compute a gradient for it
        some = {name: leaf for name, leaf in named.items() if leaf.requires_grad == trained}
        if some:
            new.update(zip(some, _Cast.apply(torch.bfloat16, *some.values()), strict=True))
    return new


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = leaves[0].dtype
        ctx.set_materialize_grads(False)  # what has none would get zeros, one launch for each
        return _cast(leaves, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = iter(_cast(tuple(g for g in grads if g is not None), ctx.dtype))
        return None, *(g if g is None else next(found) for g in grads)


def _cast(leaves: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    new = [torch.empty_like(leaf, dtype=dtype) for leaf in leaves]
    if new:
        torch._foreach_copy_(new, list(leaves))
    return tuple(new)


class Dropout(nn.Module):
    """Dropout whose mask depends on the step's key alone."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate, self.key = rate, torch.tensor(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * (uniform(self.key, *x.shape) >= self.rate) / (1 - self.rate) if self.training else x


class _Under(nn.Module):
    """Whatever is asked of the module, asked as a forward pass: only those can be given other weights."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, f: Callable[..., Any], *inputs: Tensor) -> Any:
        return f(self.module, *inputs)


def _features_and_logits(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    features = module.features(x)
    return features, module.head(features)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch._dynamo import config as tracing
    from torch._functorch import config as differentiation

    # One function serves all networks and shapes of a process: by torch's limit of eight the ninth would run as it is.
    tracing.recompile_limit = tracing.accumulated_recompile_limit = 4096
    differentiation.donated_buffer = False  # a step may go back through the same pass twice
    return torch.compile(functional_call, dynamic=False)
