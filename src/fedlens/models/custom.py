"""Any nn.Module of the user."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.errors import BadInput, nearest
from ..core.network import Dropout, Network
from ..core.rng import key, uniform
from ..core.source_code import NoSource
from .given import found_again, is_given, keep_beside, maker
from .model import Model, built_by, source_of

ADVICE = "give it self.head (its last layer) and features(x), so that forward(x) is self.head(self.features(x))"
# What a class may call what it is given.
ARGUMENTS = {
    "classes": ("classes", "num_classes", "n_classes"),
    "channels": ("channels", "in_channels", "num_channels", "in_chans"),
    "size": ("size", "image_size", "img_size"),
}


class Wrapped(nn.Module):
    """A module whose forward ends in one layer, seen as features and head; `place` is what it calls that layer."""

    def __init__(self, body: nn.Module, head: nn.Module, place: str = "head"):
        super().__init__()
        body.set_submodule(place, nn.Identity())
        self.body, self.head, self.place = body, head, place

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def plain_module(module: nn.Module) -> nn.Module:
    """A copy of a network's module as its author wrote it: its own names of weights, torch's own dropout."""
    module = copy.deepcopy(module)
    if isinstance(module, Wrapped):
        body, head, place = module.body, module.head, module.place
        body.set_submodule(place, head)
        module = body
    for name, part in [*module.named_modules()]:
        if isinstance(part, Dropout) and name:
            module.set_submodule(name, nn.Dropout(part.rate))
    return module


@dataclass(frozen=True)
class Custom(Model):
    """A class or function that makes an nn.Module; it is given classes, channels and size if it has such arguments."""

    path: str = ""  # my_module:MyNet, or a file and a name in it: my_nets.py:MyNet

    def network(self, classes, channels, size):
        make = _find(self.path)
        module = call(self.path, make, classes=classes, channels=channels, size=size)
        return checked_module(self.path, module, classes, channels, size)

    def keep_beside(self, folder):
        keep_beside(self.path, folder)

    def lost(self):
        return found_again(self.path)

    def source(self, classes, channels, size):
        make = _find(self.path)
        file, _, name = self.path.partition(":")
        if isinstance(make, functools.partial):  # a module that was given ready-made
            raise NoSource(f"nobody knows with which arguments {name} was made")
        given = ", ".join(f"{k}={v}" for k, v in arguments(make, classes=classes, channels=channels, size=size).items())
        try:
            return built_by(f"{name}({given})", source_of(make))
        except NoSource:  # it has to be importable where the model is used
            if is_given(self.path):
                raise
            return built_by(f"{name}({given})", f"from {file} import {name}\n")


def checked_module(path: str, module: nn.Module, classes: int, channels: int, size: int) -> nn.Module:
    """The same as features and head; refused in a sentence where it is no classifier of such images."""
    for name, part in [*module.named_modules()]:
        if type(part) is nn.Dropout and name:  # whose masks no seed would bring back
            module.set_submodule(name, Dropout(part.p))
    x = uniform(torch.tensor(key("probe")), 2, channels, size, size).to(_dtype(module))
    before, last = _probe(path, module, x)
    head = getattr(module, "head", None)
    place = "head" if isinstance(head, nn.Module) else last
    if not any(True for _ in module.parameters()):
        raise BadInput(f"model={path} has nothing to train: none of its layers has weights")
    if not place:
        raise BadInput(f"model={path} has no head: {ADVICE}")
    if place != "head" or not callable(getattr(module, "features", None)):
        module = Wrapped(module, module.get_submodule(place), place)
    _check(path, module, x, before, classes)
    return module


def _dtype(module: nn.Module) -> torch.dtype:
    return next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), torch.float32)


def _find(path: str) -> Callable:
    if is_given(path):
        return maker(path)
    file, colon, name = path.partition(":")
    if not (file and colon and name):
        raise BadInput(f"model.path={path!r} should name a module and a class in it, like my_module:MyNet")
    here = os.getcwd()
    if here not in sys.path:  # last, so that it hides nothing; left there, because workers import the class again
        sys.path.append(here)
    try:
        module = importlib.import_module(file)
    except Exception as error:  # user code may raise anything
        raise BadInput(f"model={path}: importing {file} failed with {_first_line(error)}") from error
    if not callable(getattr(module, name, None)):
        made = [n for n, value in vars(module).items() if inspect.isclass(value) and issubclass(value, nn.Module)]
        raise BadInput(f"model={path}: {file} has no {name}; {nearest(name, made) if made else 'nor any nn.Module'}")
    return getattr(module, name)


def arguments(make: Callable, **known: int) -> dict[str, int]:
    """What of classes, channels and size it asks for, under the names that it has for them."""
    wanted = inspect.signature(make).parameters
    return {name: value for of, value in known.items() for name in ARGUMENTS[of] if name in wanted}


def call(path: str, make: Callable, **known: int) -> nn.Module:
    """The module that a class or function of the user's makes."""
    given, wanted = arguments(make, **known), inspect.signature(make).parameters
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    lacking = [n for n, p in wanted.items() if p.default is p.empty and n not in given and p.kind not in collecting]
    if lacking:
        raise BadInput(f"model={path} asks for {', '.join(lacking)}; it can be given classes, channels and size only")
    try:
        module = make(**given)
    except Exception as error:
        raise BadInput(f"model={path} cannot be made: {_first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"model={path} makes a {type(module).__name__}, not an nn.Module")
    return module


def _probe(path: str, module: nn.Module, x: Tensor) -> tuple[Tensor, str]:
    """What it says of two images, and the name of the layer that says it, where it is one with weights."""
    seen: dict[str, Tensor] = {}

    def look(name: str) -> Callable:
        return lambda part, args, out: seen.update({name: out})

    layers = [(name, part) for name, part in module.named_modules() if name and [*part._parameters.values()]]
    handles = [part.register_forward_hook(look(name)) for name, part in layers]
    try:
        with torch.no_grad():
            out = module.eval()(x)
    except Exception as error:
        shape = " x ".join(map(str, x.shape[1:]))
        raise BadInput(f"model={path} cannot take images of {shape}: {_first_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(out, Tensor):
        raise BadInput(f"model={path} returns a {type(out).__name__}, not the logits")
    return out, next((name for name, found in seen.items() if found is out), "")


def _check(path: str, module: nn.Module, x: Tensor, before: Tensor, classes: int) -> None:
    """What the rest of the package takes for granted."""
    try:
        net = Network(module)
    except ValueError as error:
        raise BadInput(f"model={path}: {error}") from error
    try:
        out = net.forward(net.initial_weights(), x)
    except Exception as error:
        raise BadInput(f"model={path}: head(features(x)) failed with {_first_line(error)}; {ADVICE}") from error
    if out.features.dim() != 2:
        shape = " x ".join(map(str, out.features.shape[1:]))
        raise BadInput(f"model={path}: features(x) should be one vector for each image, it is {shape}; flatten it")
    if out.logits.shape != (2, classes):
        got = " x ".join(map(str, out.logits.shape[1:]))
        raise BadInput(f"model={path} gives {got} numbers for each image, but the data have {classes} classes")
    if out.logits.shape != before.shape or not torch.allclose(out.logits, before, rtol=1e-4, atol=1e-5):
        raise BadInput(f"model={path}: head(features(x)) is not forward(x); {ADVICE}")
    module.train()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
