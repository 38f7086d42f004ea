"""The smaller network of selected filters, as a plain module and as source."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence

import torch
from torch import fx, nn

from ..core.errors import BadInput
from ..core.network import Dropout, Network
from ..core.tree import Tree
from ..selection.pruning import Costs, Kept, Placed, sliced

_KINDS = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d)
_KINDS += (nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity)
_PAGE = '''from __future__ import annotations

import torch
from torch import nn


def put(root, name, part):
    """A layer under a dotted name."""
    *above, last = name.split(".")
    for each in above:
        if each not in root._modules:
            root.add_module(each, nn.Module())
        root = root._modules[each]
    root.add_module(last, part)

{placed}
class SubModel(nn.Module):
    """What is left of a network when the selected filters stay."""

    def __init__(self):
        super().__init__()
{layers}

{forward}

def build():
    return SubModel()
'''


def sub_model(net: Network, weights: Tree, kept: Kept, shape: Sequence[int]) -> tuple[nn.Module, str]:
    """(module, source) of what is left when these filters stay; layers have the names of the whole network."""
    image = torch.zeros(1, *shape, dtype=next(iter(weights.params.values())).dtype)
    traced = sliced(net, weights, Costs.of(net, image).computed(kept))
    assert isinstance(traced, fx.GraphModule)
    source = _source(traced)
    namespace: dict[str, object] = {}
    exec(source, namespace)
    module: nn.Module = namespace["build"]()  # pyright: ignore[reportCallIssue]
    values = {name.removeprefix("module."): value for name, value in traced.state_dict().items()}
    module.to(image.dtype).load_state_dict(values)
    return module.eval().requires_grad_(False), source


def _source(traced: fx.GraphModule) -> str:
    called = dict.fromkeys(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
    layers = [*_lines(traced, called)]
    placed = any("Placed(" in line for line in layers)
    definition = f"\n{textwrap.dedent(inspect.getsource(Placed))}\n".replace(": Sequence[int]", "") if placed else ""
    definition = definition.replace(": Tensor", ": torch.Tensor").replace("-> Tensor", "-> torch.Tensor")
    forward = textwrap.indent(traced.code.strip().replace("self.module.", "self."), "    ")
    return _PAGE.format(placed=definition, layers="\n".join(layers), forward=forward + "\n")


def _lines(traced: fx.GraphModule, called: dict[str, None]) -> Iterator[str]:
    for target in called:
        part, name = traced.get_submodule(target), target.removeprefix("module.")
        if isinstance(part, Placed):
            places = part.get_buffer("places").tolist()
            made = f"Placed({places}, {part.channels})"
        elif isinstance(part, Dropout):
            made = "nn.Identity()"
        elif type(part) in _KINDS:
            made = f"nn.{part!r}"
        else:
            raise BadInput(f"a sub-model with a layer of type {type(part).__name__} cannot be written down")
        yield f"        put(self, {name!r}, {made})"
