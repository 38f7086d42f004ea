"""Any nn.Module of the user."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.errors import BadInput, nearest
from ..core.network import Network
from ..core.rng import key, uniform
from .model import Model

ADVICE = "give it self.head (its last layer) and features(x), so that forward(x) is self.head(self.features(x))"


class Wrapped(nn.Module):
    """A module whose forward ends in its `head`, seen as features and head."""

    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        body.head = nn.Identity()
        self.body, self.head = body, head

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@dataclass(frozen=True)
class Custom(Model):
    """A class or function that makes an nn.Module; it is given classes, channels and size if it has such arguments."""

    path: str = ""  # my_module:MyNet

    def network(self, classes, channels, size):
        make = _find(self.path)
        module = _call(self.path, make, classes=classes, channels=channels, size=size)
        x = uniform(torch.tensor(key("probe")), 2, channels, size, size)
        before = _probe(self.path, module, x)
        head = getattr(module, "head", None)
        if not isinstance(head, nn.Module):
            raise BadInput(f"model={self.path} has no head: {ADVICE}")
        if not callable(getattr(module, "features", None)):
            module = Wrapped(module, head)
        _check(self.path, module, x, before, classes)
        return module


def _find(path: str) -> Callable:
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


def _call(path: str, make: Callable, **known: int) -> nn.Module:
    wanted = inspect.signature(make).parameters
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    lacking = [n for n, p in wanted.items() if p.default is p.empty and n not in known and p.kind not in collecting]
    if lacking:
        raise BadInput(f"model={path} asks for {', '.join(lacking)}; it can be given classes, channels and size only")
    try:
        module = make(**{name: value for name, value in known.items() if name in wanted})
    except Exception as error:
        raise BadInput(f"model={path} cannot be made: {_first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"model={path} makes a {type(module).__name__}, not an nn.Module")
    return module


def _probe(path: str, module: nn.Module, x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            out = module.eval()(x)
    except Exception as error:
        shape = " x ".join(map(str, x.shape[1:]))
        raise BadInput(f"model={path} cannot take images of {shape}: {_first_line(error)}") from error
    if not isinstance(out, Tensor):
        raise BadInput(f"model={path} returns a {type(out).__name__}, not the logits")
    return out


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
