"""Published weights into a module: files, the Hugging Face hub, and runs of one's own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BadInput
from ..core.located import how_to_point, places_of

STAND_IN = Path("weights/resnet18_tinyimagenet32_fp16.safetensors")  # under FEDLENS_DATA
_SAVED = (b"PK\x03\x04", b"\x80\x02\x8a\n")  # as torch.save begins a file; a safetensors header would have 67 MB
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")  # of these tensors alone are read, and no code
_WRAPPERS = ("module.", "_orig_mod.", "model.")  # that training scripts put before every name
_INSIDE = ("state_dict", "model_state_dict", "model", "model_ema")  # where checkpoints keep the weights
_LISTED = 3  # names in a sentence


def load_weights(module: nn.Module, source: str) -> list[str]:
    """Copy the tensors of a file, a hub id or `stand-in` into the module by name; notes list what was left out.

    A last layer for another number of classes, or under another name, starts anew. Layers of which the module has none
    at all are left out. Any other difference is refused: it would be another network.
    """
    own = module.state_dict()
    stored = {name: value for name, value in _renamed(_read(source), own).items() if not _is_counter(name)}
    wanted = {name: value for name, value in own.items() if not _is_counter(name)}
    head, tops = _head(module), {name.partition(".")[0] for name in wanted}
    foreign = [name for name in stored if name.partition(".")[0] not in tops]
    fresh = {name for name in head & wanted.keys() if name not in stored} | _other_classes(head, wanted, stored)
    _check_channels(source, wanted, stored)
    _refuse(source, "lacks", [name for name in wanted if name not in stored and name not in fresh])
    _refuse(source, "has what this model lacks:", [n for n in stored if n not in wanted and n not in foreign])
    other = [n for n in wanted if n not in fresh and wanted[n].shape != stored[n].shape]
    _refuse(source, "has other shapes:", [f"{n} {_shape(stored[n])} for {_shape(wanted[n])}" for n in other])
    odd = [n for n in wanted if n not in fresh and not bool(torch.isfinite(stored[n]).all())]
    _refuse(source, "has numbers that are NaN or infinite in", odd)
    with torch.no_grad():
        for name in wanted.keys() - fresh:
            wanted[name].copy_(stored[name])  # half precision widens here
    return [*_head_note(source, fresh, wanted, stored), *_foreign_note(source, foreign)]


def _head_note(source: str, fresh: set[str], wanted: dict[str, Tensor], stored: dict[str, Tensor]) -> list[str]:
    if not fresh:
        return []
    last = min(fresh)
    want = len(wanted[last])
    if last not in stored:
        return [f"weights={source} has no last layer {last.rpartition('.')[0]}; the one for {want} starts anew"]
    have = len(stored[last])
    return [f"weights={source}: its last layer is for {have} classes and was left out; the one for {want} starts anew"]


def _foreign_note(source: str, names: list[str]) -> list[str]:
    return [f"weights={source}: left out, as this model has no such layers: {_some(names)}"] if names else []


def at_hand(source: str) -> bool:
    """Whether these weights are on this machine: nothing is fetched to find out."""
    if source == "stand-in" or Path(source).expanduser().is_file() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        try:
            return find_weights(source).is_file()
        except BadInput:
            return False
    try:
        from huggingface_hub import try_to_load_from_cache  # pyright: ignore[reportMissingImports]  an extra
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(source, "model.safetensors"), str)


def classes_of(module: nn.Module, source: str, otherwise: int) -> int:
    """How many classes the last layer in a file is for; `otherwise` where it is as the module's own."""
    own = module.state_dict()
    stored = _renamed(_read(source), own)
    other = _other_classes(_head(module), own, stored)
    return len(stored[min(other)]) if other else otherwise


# ---- names -----------------------------------------------------------------------------------------------------------
def _renamed(stored: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the module's own names: without what a training script put before each, or with what wraps the module."""
    for wrapper in _WRAPPERS:
        if stored and all(name.startswith(wrapper) for name in stored) and not any(name in own for name in stored):
            stored = {name.removeprefix(wrapper): value for name, value in stored.items()}
    return {f"body.{name}" if name not in own and f"body.{name}" in own else name: v for name, v in stored.items()}


def _is_counter(name: str) -> bool:
    """BatchNorm counts batches for a kind of average that nothing here uses; files may leave it out."""
    return name.endswith("num_batches_tracked")


def _head(module: nn.Module) -> set[str]:
    """Names of the last layer's parameters."""
    last = getattr(module, "head", nn.Identity())
    inside = {id(value) for value in last.parameters()} if isinstance(last, nn.Module) else set()
    return {name for name, value in module.named_parameters() if id(value) in inside}


def _other_classes(head: set[str], wanted: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> set[str]:
    """Tensors of the head that differ in their number of classes alone."""
    both = head & stored.keys()
    return {n for n in both if wanted[n].shape != stored[n].shape and wanted[n].shape[1:] == stored[n].shape[1:]}


def _check_channels(source: str, wanted: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """A first layer that differs in its input alone is about other images, which data settings can change."""
    first = next((name for name, value in wanted.items() if value.dim() == 4), None)
    if first is None or first not in stored or stored[first].dim() != 4:
        return
    have, want = stored[first].shape[1], wanted[first].shape[1]
    if have != want and (have, want) in ((1, 3), (3, 1)):
        hint = "set data.colour=true" if have == 3 else "set data.colour=false"
        raise BadInput(f"weights={source} are for images of {have} channels, and the data have {want}: {hint}")


def _refuse(source: str, what: str, names: list[str]) -> None:
    if names:
        raise BadInput(f"weights={source} does not fit this model: it {what} {_some(names)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "scalar"


# ---- files -----------------------------------------------------------------------------------------------------------
def _read(source: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = find_weights(source)
    if path.suffix in _PICKLES or _begins(path) in _SAVED:  # a run's own copy has one name, whatever it was made from
        return _read_pickle(source, path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"weights={source} cannot be read as a safetensors file: {error}") from error


def _read_pickle(source: str, path: Path) -> dict[str, Tensor]:
    """The state_dict in a file of torch.save; one that holds anything but tensors and names is refused unopened."""
    try:
        with open(path, "rb") as file:  # by a name that ends in .safetensors torch would take it for such a file
            found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: code in it, no such format, cut off
        if not _begins(path).startswith((b"PK", b"\x80\x02")):  # a zip archive, or a bare pickle of old
            said = f"weights={source} is no file of torch.save; save it by torch.save(model.state_dict(), FILE)"
            raise BadInput(said) from error
        said = "it holds more than tensors, which could be code" if "weights_only" in str(error) else "it is damaged"
        raise BadInput(f"weights={source} cannot be read: {said}; save model.state_dict() alone") from error
    while isinstance(found, dict) and (key := next((k for k in _INSIDE if isinstance(found.get(k), dict)), None)):
        found = found[key]
    named = isinstance(found, dict) and all(isinstance(k, str) for k in found)
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)} if named else {}
    if not tensors:
        raise BadInput(f"weights={source} holds no state_dict: save it by torch.save(model.state_dict(), FILE)")
    return tensors


def _begins(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(4)


def find_weights(source: str) -> Path:
    """The file: the copy that a run has kept, or what the source names; refused where there is none."""
    if kept := [place for place in places_of(source) if place.is_file()]:
        return kept[0]
    if source == "stand-in":
        root = os.environ.get("FEDLENS_DATA")
        if not root or not (Path(root) / STAND_IN).is_file():
            raise BadInput(f"weights=stand-in needs the variable FEDLENS_DATA to name a folder that holds {STAND_IN}")
        return Path(root) / STAND_IN
    path = Path(source).expanduser()
    if os.path.isfile(path):
        return path
    if path.is_dir():
        raise BadInput(f"weights={source} is a folder without a run: name a run, a file, or a hub id")
    typo = path.parent.is_dir() and path.parent != Path(".")  # a run that is not there, rather than somebody's model
    if path.suffix in (".safetensors", *_PICKLES) or typo or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        said = f"weights={source}: no such file or run, and not a hub id such as timm/resnet18.tv_in1k"
        raise BadInput(f"{said}{how_to_point(source, 'model.weights')}")
    return _download(source)


def _download(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download  # pyright: ignore[reportMissingImports]  an extra
    except ImportError as error:
        said = f"weights={name} is fetched from the hub: pip install 'fedlens[hub]'"
        raise BadInput(f"{said}, or give a file of theirs, as model.weights=FILE") from error
    try:
        return Path(hf_hub_download(name, "model.safetensors"))
    except Exception as error:  # offline, unknown id, no such file: the hub has a dozen classes for these
        first = str(error).strip().partition("\n")[0]
        said = f"weights={name} could not be fetched from the hub: {first}"
        raise BadInput(f"{said}; without a network give a file of theirs, as model.weights=FILE") from error
