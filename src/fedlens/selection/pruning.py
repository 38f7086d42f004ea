"""Which filters stay: by norm and ratio, what is left in operations and parameters, and the smaller network itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from ..core.errors import BadInput
from ..core.network import Network
from ..core.tree import Tree
from .graph import Layer, LayerGraph, layer_graph, pixels, trace

Constraint = Literal["flops", "params"]
Kept = Mapping[str, int]  # layer -> its filters as the bits of a number, the first one lowest; all where none is named


def kept_count(keep: float, filters: int) -> int:
    """Filters that are left of so many; halves round to even, and one always stays."""
    dropped = round((1 - Fraction(str(keep))) * filters)  # in fractions: (1 - 0.9) * 5 is a half, in floats less
    return max(1, filters - dropped)


def ranked(layers: Sequence[Layer], weights: Tree) -> tuple[tuple[int, ...], ...]:
    """Each layer's filters from the largest Euclidean norm to the smallest; among equals the first one first."""
    if not layers:
        return ()
    filters = (weights.params[f"{layer.name}.weight"].detach().flatten(1) for layer in layers)
    orders = [each.norm(dim=1).sort(descending=True, stable=True).indices for each in filters]
    flat = torch.cat(orders).tolist()  # one wait for the device, not one a layer
    ends = [0]
    for order in orders:
        ends.append(ends[-1] + len(order))
    return tuple(tuple(flat[begin:end]) for begin, end in pairwise(ends))


def bits(indices: Sequence[int]) -> int:
    return sum(1 << at for at in indices)


def every(filters: int) -> int:
    return (1 << filters) - 1


def listed(chosen: int) -> list[int]:
    """The places of the ones, in order."""
    return [at for at in range(chosen.bit_length()) if chosen >> at & 1]


# ---- what a choice costs ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Costs:
    """Operations and parameters of sub-models of one network on images of one size."""

    graph: LayerGraph
    pixels: Mapping[str, int]  # layer -> positions of its output

    @classmethod
    def of(cls, net: Network, image: Tensor) -> Costs:
        known = _KNOWN.setdefault(net, {})
        if image.shape not in known:
            known[image.shape] = cls(layer_graph(net), pixels(net, image))
        return known[image.shape]

    def layout(self, kept: Kept, align: int = 1) -> list[int]:
        """Channels that the sub-model computes of every group: those that anyone keeps who writes there.

        Then the first ones that nobody keeps, until their number is a multiple of `align` or all are there.
        """
        graph, found = self.graph, {}

        def of(group: int) -> int:
            if group not in found:
                size, whole, places = graph.groups[group]
                if whole:
                    found[group] = every(size)
                else:
                    found[group] = self._written(group, kept)
                    for source, offset in places:
                        found[group] |= of(source) << offset
                    missing = listed(every(size) & ~found[group])
                    found[group] |= bits(missing[: -found[group].bit_count() % align])
            return found[group]

        return [of(group) for group in range(len(graph.groups))]

    def computed(self, kept: Kept) -> dict[str, int]:
        """The filters that the sub-model has room for: a channel that one layer keeps is there for all who add to it.

        To silence the others' filters would save nothing, so a sub-model has them all.
        """
        layout = self.layout(kept)
        return {layer.name: layout[layer.writes] for layer in self.graph.layers}

    def _written(self, group: int, kept: Kept) -> int:
        chosen = 0
        for layer in self._writers[group]:
            chosen |= kept.get(layer.name, every(layer.filters))
        return chosen

    @cached_property
    def _writers(self) -> dict[int, list[Layer]]:
        return {at: [each for each in self.graph.layers if each.writes == at] for at in range(len(self.graph.groups))}

    def flops(self, kept: Kept) -> int:
        """Of one image through convolutions and fully connected layers, two for each multiply and add."""
        total, layout = 0, self.layout(kept)
        for layer in self.graph.layers:
            products = self._products(layer, layout) * layout[layer.writes].bit_count()
            total += 2 * products * self.pixels[layer.name]
        return total + sum(2 * each.outputs * self._inputs(each, layout) for each in self.graph.dense)

    def parameters(self, kept: Kept) -> int:
        """Of the sub-model: convolutions, the norms behind them, fully connected layers."""
        total, layout = 0, self.layout(kept)
        for layer in self.graph.layers:
            each = self._products(layer, layout) + layer.bias + 2 * len(layer.norms)
            total += each * layout[layer.writes].bit_count()
        return total + sum(each.outputs * (self._inputs(each, layout) + each.bias) for each in self.graph.dense)

    @staticmethod
    def _products(layer: Layer, layout: list[int]) -> int:
        """Weights of one filter."""
        inputs = layer.inputs if layer.reads is None else layout[layer.reads].bit_count()
        return layer.kernel * inputs // layer.groups

    @staticmethod
    def _inputs(each: Any, layout: list[int]) -> int:
        return each.inputs if each.reads is None else layout[each.reads].bit_count() * each.repeat

    def sent(self, kept: Kept) -> int:
        """Parameters of the kept filters, each with all of its inputs: what an upload holds."""
        return sum(
            kept.get(layer.name, every(layer.filters)).bit_count() * entries(layer) for layer in self.graph.layers
        )

    def size(self, constraint: Constraint, kept: Kept) -> float:
        """As a share of the whole."""
        return self._measure(constraint)(kept) / self._whole[constraint]

    def _measure(self, constraint: Constraint) -> Callable[[Kept], int]:
        return self.flops if constraint == "flops" else self.sent

    @cached_property
    def _whole(self) -> dict[str, int]:
        return {each: self._measure(each)({}) for each in get_args(Constraint)}


_KNOWN: WeakKeyDictionary[Network, dict[torch.Size, Costs]] = WeakKeyDictionary()  # a look at an image, once


def entries(layer: Layer) -> int:
    """Parameters that belong to one filter."""
    return layer.kernel * layer.inputs // layer.groups + layer.bias + 2 * len(layer.norms)


@dataclass(frozen=True)
class Choice:
    """The layers that may lose filters, the order they lose them in, and how small the rest has to be."""

    costs: Costs
    layers: tuple[Layer, ...]
    order: tuple[tuple[int, ...], ...]  # of each layer's filters, those that go last first
    constraint: Constraint = "flops"
    budget: float = 0.8
    floor: float = 0.1  # the least ratio of a layer
    spend: bool = False  # whether ratios grow back together until the budget is spent

    def kept(self, ratios: Sequence[float]) -> dict[str, int]:
        """The first filters of each layer's order, as many as its ratio says."""
        counts = (kept_count(ratio, layer.filters) for ratio, layer in zip(ratios, self.layers, strict=True))
        return self.first(list(counts))

    def first(self, counts: Sequence[int]) -> dict[str, int]:
        rows = zip(self.layers, self.order, counts, strict=True)
        return {layer.name: bits(order[:count]) for layer, order, count in rows}

    def size(self, kept: Kept) -> float:
        return self.costs.size(self.constraint, kept)

    def fits(self, kept: Kept) -> bool:
        return self.size(kept) <= self.budget

    def feasible(self) -> Choice:
        """This choice, if the least ratio meets the budget."""
        floor = self.kept([self.floor] * len(self.layers))
        if self.fits(floor):
            return self
        said = f"algorithm.budget={self.budget:g} cannot be met: "
        least = self.first([1] * len(self.layers))
        if self.fits(least):
            raise BadInput(
                f"{said}keep_floor={self.floor:g} of all layers' filters leaves {self.size(floor):.3f} of the "
                f"{self.constraint}; raise budget or lower keep_floor"
            )
        left = self.size(least)
        why = f"one filter in every layer still leaves {left:.3f} of the {self.constraint}"
        why = "nothing of this network can be cut out" if left == 1 else why
        raised = "raise budget, or " if left < 1 else ""
        params = "algorithm.constraint=params or " if self.costs.size("params", floor) <= self.budget else ""
        raise BadInput(f"{said}{why}; {raised}take {params}algorithm.selector=all")

    def projected(self, ratios: Sequence[float]) -> dict[str, int]:
        """These ratios scaled down together, by as little as meets the budget."""

        def at(step: int) -> dict[str, int]:
            return self.kept([max(self.floor, ratio * (1 - step / _STEPS)) for ratio in ratios])

        return at(_first(lambda step: self.fits(at(step)), _STEPS))

    def spent(self, ratios: Sequence[float]) -> dict[str, int]:
        """These ratios, which meet the budget, moved together towards all filters, by as much as still meets it."""

        def at(step: int) -> dict[str, int]:
            return self.kept([1 - (1 - ratio) * step / _STEPS for ratio in ratios])

        return at(_first(lambda step: self.fits(at(step)), _STEPS))

    def uniform(self) -> dict[str, int]:
        """The largest ratio, the same in all layers, that meets the budget."""
        return self.projected([1.0] * len(self.layers))

    def by_norm(self, weights: Tree) -> dict[str, int]:
        """Filters of all layers against each other, the smallest norm going first, down to what meets the budget.

        Norms are per weight (root mean square): layers whose filters have more inputs would win by that alone.
        """
        least = [kept_count(self.floor, layer.filters) for layer in self.layers]
        queue = []
        for at, (layer, order) in enumerate(zip(self.layers, self.order, strict=True)):
            norms = weights.params[f"{layer.name}.weight"].detach().double().flatten(1).pow(2).mean(1).tolist()
            queue += [(norms[index], at, index) for index in order[least[at] :]]
        queue.sort()

        def without(count: int) -> dict[str, int]:
            kept = {layer.name: every(layer.filters) for layer in self.layers}
            for _, at, index in queue[:count]:
                kept[self.layers[at].name] &= ~(1 << index)
            return kept

        return without(_first(lambda count: self.fits(without(count)), len(queue)))


_STEPS = 1000


def _first(holds: Callable[[int], bool], last: int) -> int:
    """The least number up to `last` from which on something holds; it does at the last."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


# ---- rows of weights that belong to filters --------------------------------------------------------------------------
def rows_of(layer: Layer) -> list[str]:
    """Names of the weights that have one row for each of the layer's filters."""
    norms = [f"{norm}.{part}" for norm in layer.norms for part in ("weight", "bias", "running_mean", "running_var")]
    return [f"{layer.name}.weight", f"{layer.name}.bias", *norms]


def packed(kept: Kept, layers: Sequence[Layer]) -> Tensor:
    """One bit for each filter, all layers in a row."""
    whole, shift = 0, 0
    for layer in layers:
        whole |= kept[layer.name] << shift
        shift += layer.filters
    return torch.frombuffer(bytearray(whole.to_bytes(-(-shift // 8), "little")), dtype=torch.uint8)


def unpacked(bitmap: Tensor, layers: Sequence[Layer]) -> dict[str, int]:
    whole, kept = int.from_bytes(bytes(bitmap.tolist()), "little"), {}
    for layer in layers:
        kept[layer.name] = whole & every(layer.filters)
        whole >>= layer.filters
    return kept


def row_indices(kept: Kept, layers: Sequence[Layer], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """{weight: its rows that stay}"""
    found: dict[str, Tensor] = {}
    for layer in layers:
        index = torch.tensor(listed(kept[layer.name]), device=device)
        found |= dict.fromkeys(rows_of(layer), index)
    return found


def gathered(tree: Tree, rows: dict[str, Tensor]) -> Tree:
    """The rows of weights that have some, all else whole."""
    return Tree({name: leaf[rows[name]] if name in rows else leaf for name, leaf in tree.items()})


def scattered(tree: Tree, like: Tree, rows: dict[str, Tensor]) -> Tree:
    """Rows of weights back in their places, with zeros in the rows between."""
    if not rows:
        return tree

    def wide(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tree):
            return scattered(leaf, like[name], rows)
        return torch.zeros_like(like[name]).index_copy_(0, rows[name], leaf) if name in rows else leaf

    return Tree({name: wide(name, leaf) for name, leaf in tree.items()})


def masked(weights: Tree, kept: Kept, graph: LayerGraph) -> Tree:
    """The same network with nothing coming out of filters that are not kept: their norms add no constant, either."""
    params = {}
    for layer in graph.layers:
        if kept.get(layer.name, every(layer.filters)) == every(layer.filters):
            continue
        some = weights.params[f"{layer.name}.weight"]
        mask = torch.zeros(layer.filters, dtype=some.dtype, device=some.device)
        mask[listed(kept[layer.name])] = 1
        for name in rows_of(layer):
            if name in weights.params:
                leaf = weights.params[name]
                params[name] = leaf * mask.view(-1, *[1] * (leaf.dim() - 1))
    return weights | Tree(params=Tree(params))


# ---- the smaller network ---------------------------------------------------------------------------------------------
class Placed(nn.Module):
    """Channels put among zeros: a shortcut that pads, for channels that are left."""

    def __init__(self, places: Sequence[int], channels: int):
        super().__init__()
        self.channels = channels
        self.register_buffer("places", torch.tensor(places, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.new_zeros(x.shape[0], self.channels, *x.shape[2:])
        return wide.index_copy_(1, self.places, x)  # pyright: ignore[reportArgumentType]


def sliced(net: Network, weights: Tree, kept: Kept, align: int = 1) -> nn.Module:
    """A smaller network that predicts what `masked` weights predict.

    A channel goes where nobody keeps it who writes it: layers that are added keep what one of them keeps. Processors
    take channels by vectors: with `align` some silent ones stay, so that the rest is computed without odd ends.
    """
    graph = layer_graph(net)
    whole, layout = masked(weights, kept, graph), Costs(graph, {}).layout(kept, align)
    traced = trace(net.module)
    parts = {name: part for name, part in (*whole.params.items(), *whole.buffers.items())}
    with torch.no_grad():
        for name, value in (*traced.named_parameters(), *traced.named_buffers()):
            if (short := name.removeprefix("module.")) in parts:
                value.copy_(parts[short])
    index = [torch.tensor(listed(channels)) for channels in layout]
    for layer in graph.layers:
        conv: Any = traced.get_submodule(f"module.{layer.name}")
        rows, columns = index[layer.writes], None if layer.reads is None else index[layer.reads]
        _cut(conv, "weight", rows, columns if layer.groups == 1 else None)
        _cut(conv, "bias", rows)
        conv.out_channels, conv.in_channels = conv.weight.shape[0], conv.weight.shape[1] * layer.groups
    for name, (group, can) in graph.norms.items():
        norm: Any = traced.get_submodule(f"module.{name}")
        for part in ("weight", "bias", "running_mean", "running_var") if can else ():
            _cut(norm, part, index[group])
        if can:
            norm.num_features = len(index[group])
    for each in graph.dense:
        if each.reads is not None:
            dense: Any = traced.get_submodule(f"module.{each.name}")
            columns = (index[each.reads][:, None] * each.repeat + torch.arange(each.repeat)).flatten()
            _cut(dense, "weight", None, columns)
            dense.in_features = dense.weight.shape[1]
    _replace_pads(traced, graph, layout)
    return traced.eval()


@torch.no_grad()
def settled(module: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """The same module with running statistics of its own: the mean over the images of these batches, in place.

    Those of the whole network are not what comes out of a smaller one. A batch of one image has none.
    """
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    usual, was, seen = [norm.momentum for norm in norms], module.training, 0
    try:
        for x in batches if norms else ():
            if len(x) < 2:
                continue
            seen += len(x)
            for norm in norms:
                norm.train().momentum = len(x) / seen  # the mean over all so far
            module(x)
    finally:
        for norm, momentum in zip(norms, usual, strict=True):
            norm.momentum = momentum
        module.train(was)
    return module


def _cut(module: Any, part: str, rows: Tensor | None, columns: Tensor | None = None) -> None:
    leaf = getattr(module, part, None)
    if leaf is None:
        return
    value = leaf.detach()
    if rows is not None:
        value = value[rows.to(value.device)]
    if columns is not None:
        value = value[:, columns.to(value.device)]
    value = value.contiguous()
    setattr(module, part, nn.Parameter(value, requires_grad=False) if isinstance(leaf, nn.Parameter) else value)


def _replace_pads(traced: fx.GraphModule, graph: LayerGraph, layout: list[int]) -> None:
    for node in list(traced.graph.nodes):
        if node.name not in graph.pads:
            continue
        source, target = graph.pads[node.name]
        (offset,) = {offset for group, offset in graph.groups[target].places if group == source}
        among = {channel: at for at, channel in enumerate(listed(layout[target]))}
        places = [among[channel + offset] for channel in listed(layout[source])]
        name = f"placed_{node.name}"
        traced.add_submodule(name, Placed(places, len(among)).to(next(traced.parameters()).device))
        with traced.graph.inserting_after(node):
            new = traced.graph.call_module(name, (node.args[0],))
        node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
    traced.recompile()
