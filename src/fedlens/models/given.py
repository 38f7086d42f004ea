"""Modules that a Python program brings: a class, a function or an nn.Module; their source lies beside the run."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import BadInput
from ..core.files import write_atomic
from ..core.located import how_to_point, places_of
from ..core.source_code import NoSource, is_own, standalone

CODE, OBJECT = ".py", ".pickle"
_LIVE: dict[str, Any] = {}  # what this process was given, by the name under which settings know it
_KEPT: dict[str, dict[str, bytes]] = {}  # the files that bring it back elsewhere, by the same name


def given_path(made: Any) -> str:
    """The name under which settings know a class, a function or a module: a file, and what it is called there."""
    if isinstance(made, nn.Module):
        return _given_module(made)
    home, name = getattr(made, "__module__", ""), getattr(made, "__qualname__", "")
    if name.isidentifier() and not is_own(home) and getattr(sys.modules.get(home), name, None) is made:
        return f"{home}:{name}"  # of an installed package
    name = name.rpartition(".")[2].strip("<>") or type(made).__name__
    try:
        text = standalone(made).encode()
    except NoSource as error:
        path = f"model-{id(made):x}{CODE}:{name}"
        _LIVE[path], _KEPT[path] = (made, str(error)), {}
        return path
    file = f"model-{hashlib.sha256(text).hexdigest()[:16]}{CODE}"
    _LIVE[f"{file}:{name}"], _KEPT[f"{file}:{name}"] = (made, ""), {file: text}
    return f"{file}:{name}"


def _given_module(module: nn.Module) -> str:
    digest = hashlib.sha256(f"{type(module).__qualname__}\n{module!r}".encode())
    for name, value in module.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(-1).numpy().tobytes())
    stem = f"model-{digest.hexdigest()[:16]}"
    path = f"{stem}{OBJECT}:{type(module).__name__}"
    kinds = dict.fromkeys(type(part) for part in module.modules() if is_own(type(part).__module__))
    try:
        files = {f"{stem}{CODE}": standalone(*kinds).encode()} if kinds else {}
        files[f"{stem}{OBJECT}"] = pickle.dumps(module)
        said = ""
    except (NoSource, AttributeError, TypeError, pickle.PicklingError) as error:
        files, said = {}, str(error)
    _LIVE[path], _KEPT[path] = (copy.deepcopy(module), said), files
    return path


def is_given(path: str) -> bool:
    """Whether a model's path names a file that a program's code was written to."""
    return path.partition(":")[0].endswith((CODE, OBJECT))


def found_again(path: str) -> str:
    """Why another process cannot have it, in words; empty where it can."""
    return _LIVE[path][1] if path in _LIVE else ""


def keep_beside(path: str, folder: Path) -> None:
    """Write the files that bring it back."""
    for name, data in _KEPT.get(path, {}).items():
        write_atomic(folder / name, data, durable=True)


def maker(path: str) -> Callable[..., Any]:
    """What makes the module: the program's own object, or what the files beside the run define."""
    if str(path) in _LIVE:
        made = _LIVE[str(path)][0]
        return functools.partial(copy.deepcopy, made) if isinstance(made, nn.Module) else made
    file, _, name = path.partition(":")
    found = [Path(str(place).rpartition(":")[0]) for place in places_of(path)] + [Path(file)]
    place = next((each for each in found if each.is_file()), None)
    if place is None:
        said = f"model={path} was given in Python, and {file} is not beside its run"
        raise BadInput(f"{said}{how_to_point(path, 'model.path')}")
    if place.suffix == OBJECT:
        module = _unpickled(place)
        return functools.partial(copy.deepcopy, module)
    made = getattr(_loaded(place.absolute()), name, None)
    if made is None:
        raise BadInput(f"model={path}: {place} defines no {name}")
    return made


@functools.lru_cache(maxsize=16)
def _loaded(place: Path) -> Any:
    name = f"given_{place.stem.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    try:
        spec.loader.exec_module(found)
    except Exception as error:  # the user's code may raise anything
        raise BadInput(f"{place} cannot be run: {type(error).__name__}: {error}") from None
    return found


def _unpickled(place: Path) -> nn.Module:
    beside = place.with_suffix(CODE)
    own = _loaded(beside.absolute()) if beside.is_file() else None

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if own is not None and hasattr(own, name) and not _importable(module, name):
                return getattr(own, name)
            return super().find_class(module, name)

    try:
        return Unpickler(io.BytesIO(place.read_bytes())).load()
    except Exception as error:
        raise BadInput(f"{place} cannot be read: {type(error).__name__}: {error}") from None


def _importable(module: str, name: str) -> bool:
    with contextlib.suppress(ImportError):
        return hasattr(importlib.import_module(module), name)
    return False
