"""A network as a graph of its convolutions: what feeds what, and which channels come and go together."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import BadInput
from ..core.network import Network

# Operations that treat every channel alone and make zeros of zeros.
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_BENDS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Hardswish, nn.Identity)
_SAME = {
    torch.relu,
    torch.tanh,
    F.relu,
    F.relu6,
    F.leaky_relu,
    F.elu,
    F.gelu,
    F.silu,
    F.hardswish,
    F.max_pool2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
    F.adaptive_max_pool2d,
    "relu",
    "relu_",
    "tanh",
    "contiguous",
}
_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_FLATTENINGS = {torch.flatten, "flatten"}


class Layer(NamedTuple):
    """A convolution. `reads` and `writes` are groups of channels; None: channels that nothing can be taken from."""

    name: str
    inputs: int
    filters: int
    kernel: int  # weights of a filter for each of its inputs
    stride: int
    groups: int
    bias: bool
    norms: tuple[str, ...]  # that follow it at once: their entries belong to its filters
    statistics: bool  # whether these norms have running ones
    reads: int | None
    writes: int
    joins: bool  # whether its output is added to another


class Dense(NamedTuple):
    """A fully connected layer. It reads `repeat` positions of each channel of a group."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    reads: int | None
    repeat: int


class Group(NamedTuple):
    """Channels of one size that are added to one another somewhere, so that all who write them keep the same ones."""

    size: int
    whole: bool  # something reads them that can do without none
    places: tuple[tuple[int, int], ...]  # (group, offset): another group's channels, put among zeros from there on


@dataclass(frozen=True)
class LayerGraph:
    layers: tuple[Layer, ...]  # in the order they run
    edges: tuple[tuple[int, int], ...]  # from layer to layer, as data flow without a convolution between
    dense: tuple[Dense, ...]
    groups: tuple[Group, ...]
    norms: dict[str, tuple[int, bool]]  # norm -> the group it is in, and whether it can be cut
    pads: dict[str, tuple[int, int]]  # node of the trace that puts one group's channels into another's


_KNOWN: WeakKeyDictionary[Network, LayerGraph] = WeakKeyDictionary()  # tracing takes longer than a step


def layer_graph(net: Network) -> LayerGraph:
    """The network's convolutions and how they hang together, whatever its weights."""
    if net not in _KNOWN:
        _KNOWN[net] = _Walk(trace(net.module)).graph()
    return _KNOWN[net]


class Whole(nn.Module):
    """features, then head, as the rest of the package calls them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module.head(self.module.features(x))  # pyright: ignore[reportCallIssue]


def trace(module: nn.Module) -> fx.GraphModule:
    """A copy of the module as a list of operations, for prediction."""
    whole = Whole(copy.deepcopy(module)).eval()
    try:
        return fx.symbolic_trace(whole)
    except Exception as error:  # the user's forward may do anything with what stands for a tensor
        why = str(error).partition("\n")[0]
        raise BadInput(
            f"the operations of this network cannot be listed ({why}): features(x) must not branch on values "
            "or take shapes apart"
        ) from None


def pixels(net: Network, image: Tensor) -> dict[str, int]:
    """Positions that every convolution is computed at for one image, [1, channels, height, width]."""
    seen: dict[str, int] = {}

    def look(name: str, module: nn.Module, x: Tensor, out: Tensor) -> Tensor:
        seen[name] = seen.get(name, 0) + out.shape[2] * out.shape[3]
        return out

    with net.replacing_outputs(look, (nn.Conv2d,)), torch.no_grad():
        net(net.initial_weights(), image)
    return seen


class _Flow(NamedTuple):
    """What a node's output is made of."""

    group: int | None = None
    flat: bool = False  # one vector an image
    layers: frozenset[int] = frozenset()  # convolutions that reach it without another between


@dataclass
class _Draft:
    name: str
    module: nn.Conv2d
    reads: int | None
    writes: int
    norms: list[str] = field(default_factory=list)
    joins: bool = False


class _Walk:
    """One look at every operation of a trace, in order."""

    def __init__(self, traced: fx.GraphModule):
        self.modules = dict(traced.named_modules())
        self.sizes: list[int] = []
        self.parents: list[int] = []
        self.whole: set[int] = set()
        self.places: list[tuple[int, int, int]] = []  # from, offset, to
        self.drafts: list[_Draft] = []
        self.edges: set[tuple[int, int]] = set()
        self.dense: list[Dense] = []
        self.norms: dict[str, tuple[int, bool]] = {}
        self.pads: dict[str, tuple[int, int]] = {}
        self.flows: dict[fx.Node, _Flow] = {}
        nodes = list(traced.graph.nodes)
        self.calls = Counter(node.target for node in nodes if node.op == "call_module")
        for node in nodes:
            self.flows[node] = self._visit(node)

    def graph(self) -> LayerGraph:
        root = self._root
        order = {group: at for at, group in enumerate(sorted({root(g) for g in range(len(self.sizes))}))}

        def number(group: int | None) -> int | None:
            return None if group is None else order[root(group)]

        whole = {root(g) for g in self.whole}
        groups = [
            Group(
                self.sizes[g],
                g in whole,
                tuple((order[root(a)], offset) for a, offset, b in self.places if root(b) == g),
            )
            for g in order
        ]
        return LayerGraph(
            tuple(self._layer(draft, number) for draft in self.drafts),
            tuple(sorted(self.edges)),
            tuple(each._replace(reads=number(each.reads)) for each in self.dense),
            tuple(groups),
            {name: (order[root(group)], cut) for name, (group, cut) in self.norms.items()},
            {name: (order[root(a)], order[root(b)]) for name, (a, b) in self.pads.items()},
        )

    def _layer(self, draft: _Draft, number: Any) -> Layer:
        conv = draft.module
        norms = [self.modules[f"module.{name}"] for name in draft.norms]
        return Layer(
            name=draft.name,
            inputs=conv.in_channels,
            filters=conv.out_channels,
            kernel=conv.kernel_size[0] * conv.kernel_size[1],
            stride=conv.stride[0],
            groups=conv.groups,
            bias=conv.bias is not None,
            norms=tuple(draft.norms),
            statistics=any(isinstance(norm, _BatchNorm) and norm.track_running_stats for norm in norms),
            reads=number(draft.reads),
            writes=number(draft.writes),
            joins=draft.joins,
        )

    # ---- groups of channels ----
    def _new(self, size: int) -> int:
        self.sizes.append(size)
        self.parents.append(len(self.parents))
        return len(self.parents) - 1

    def _root(self, group: int) -> int:
        while self.parents[group] != group:
            group = self.parents[group]
        return group

    def _keep_whole(self, *flows: _Flow) -> None:
        self.whole |= {flow.group for flow in flows if flow.group is not None}

    # ---- operations ----
    def _visit(self, node: fx.Node) -> _Flow:
        inputs = [self.flows[each] for each in node.all_input_nodes]
        first = inputs[0] if inputs else _Flow()
        if node.op == "call_module":
            return self._module(node, self.modules[str(node.target)], first)
        if node.op in ("call_function", "call_method"):
            if node.target in _ADDITIONS and len(inputs) == 2 and not node.kwargs:
                return self._sum(*inputs)
            if len(inputs) == 1:
                if node.target in _SAME or _cuts_pixels(node) or _pads_pixels(node):
                    return first
                if _flattens(node):
                    return first._replace(flat=True)
                if (widths := _pads_channels(node)) and first.group is not None and not first.flat:
                    group = self._new(self.sizes[first.group] + sum(widths))
                    self.places.append((first.group, widths[0], group))
                    self.pads[node.name] = first.group, group
                    return first._replace(group=group)
            if _asks_shape(node):
                return _Flow()
            # view(n, -1) reads the images and the number that size(0) made of them
            shaped = [flow for flow in inputs if flow != _Flow()]
            if _flattens_by_view(node) and len(shaped) <= 1:
                return first._replace(flat=True)
        self._keep_whole(*inputs)
        return _Flow(layers=frozenset().union(*(flow.layers for flow in inputs)))

    def _module(self, node: fx.Node, module: nn.Module, flow: _Flow) -> _Flow:
        name, once = str(node.target).removeprefix("module."), self.calls[node.target] == 1
        if isinstance(module, nn.Conv2d):
            return self._convolution(name, module, flow, once)
        if isinstance(module, _BatchNorm | nn.GroupNorm):
            return self._norm(node, name, module, flow, once)
        if isinstance(module, nn.Linear):
            size = self.sizes[flow.group] if flow.group is not None else 0
            cut = flow.flat and once and size > 0 and module.in_features % size == 0
            if not cut:
                self._keep_whole(flow)
            reads, repeat = (flow.group, module.in_features // size) if cut else (None, 1)
            outputs = module.out_features
            self.dense.append(Dense(name, module.in_features, outputs, module.bias is not None, reads, repeat))
            return _Flow(flat=flow.flat, layers=flow.layers)
        if isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1:
            return flow._replace(flat=True)
        if isinstance(module, (*_BENDS, *_POOLS)):
            return flow
        self._keep_whole(flow)
        return _Flow(layers=flow.layers)

    def _convolution(self, name: str, module: nn.Conv2d, flow: _Flow, once: bool) -> _Flow:
        known = {draft.name: at for at, draft in enumerate(self.drafts)}
        if name in known:  # it runs again on other maps
            at = known[name]
        else:
            at = len(self.drafts)
            self.drafts.append(_Draft(name, module, flow.group, self._new(module.out_channels)))
        out = _Flow(self.drafts[at].writes, layers=frozenset({at}))
        if module.groups > 1 or not once:
            self._keep_whole(flow, out)
        self.edges |= {(source, at) for source in flow.layers}
        return out

    def _norm(self, node: fx.Node, name: str, module: Any, flow: _Flow, once: bool) -> _Flow:
        source = node.all_input_nodes[0]
        behind = source.op == "call_module" and isinstance(self.modules[str(source.target)], nn.Conv2d)
        affine = module.affine if isinstance(module, nn.GroupNorm) else module.affine and module.track_running_stats
        belongs = behind and affine and once and self.calls[source.target] == 1
        if belongs:
            self.drafts[next(iter(flow.layers))].norms.append(name)
        # A norm over several channels, or one that makes something of zeros, needs all of them.
        if not belongs or isinstance(module, nn.GroupNorm):
            self._keep_whole(flow)
        if flow.group is not None:
            self.norms[name] = flow.group, isinstance(module, _BatchNorm)
        return flow

    def _sum(self, a: _Flow, b: _Flow) -> _Flow:
        layers = a.layers | b.layers
        for at in layers:
            self.drafts[at].joins = True
        if a.group is None or b.group is None or a.flat != b.flat or self.sizes[a.group] != self.sizes[b.group]:
            self._keep_whole(a, b)
            return _Flow(flat=a.flat and b.flat, layers=layers)
        self.parents[self._root(b.group)] = self._root(a.group)
        return _Flow(a.group, a.flat, layers)


def _cuts_pixels(node: fx.Node) -> bool:
    """x[:, :, ::2, ::2]"""
    where = node.args[1] if node.target is operator.getitem and len(node.args) == 2 else ()
    return isinstance(where, tuple) and len(where) >= 2 and where[:2] == (slice(None), slice(None))


def _pads_pixels(node: fx.Node) -> bool:
    widths: Any = node.args[1] if len(node.args) > 1 else None
    return node.target is F.pad and _zeros(node) and isinstance(widths, tuple) and len(widths) <= 4


def _pads_channels(node: fx.Node) -> tuple[int, int] | None:
    """(before, after) of F.pad(x, (0, 0, 0, 0, before, after)) with zeros."""
    if node.target is not F.pad or not _zeros(node) or len(node.args) < 2:
        return None
    widths: Any = node.args[1]
    whole = isinstance(widths, tuple) and len(widths) == 6 and not any(widths[:4])
    return (widths[4], widths[5]) if whole and min(widths[4:]) >= 0 else None


def _zeros(node: fx.Node) -> bool:
    plain = len(node.args) <= 2 and node.kwargs.keys() <= {"mode", "value"}
    return plain and node.kwargs.get("mode", "constant") == "constant" and not node.kwargs.get("value")


def _flattens(node: fx.Node) -> bool:
    """flatten(1), or the mean over positions."""
    if node.target in _FLATTENINGS:
        return tuple(node.args[1:]) == (1,) and not node.kwargs
    if node.target not in (torch.mean, "mean") or node.kwargs.get("keepdim"):
        return False
    over: Any = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
    return isinstance(over, tuple | list) and sorted(over) in ([2, 3], [-2, -1])


def _asks_shape(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] == "shape"
    if node.target == "size":
        return True
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and _asks_shape(source)


def _flattens_by_view(node: fx.Node) -> bool:
    return node.target in ("view", "reshape") and len(node.args) == 3 and bool(node.args[2] == -1)
