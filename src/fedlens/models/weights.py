"""Published weights into a module: files and the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from ..core.errors import BadInput
from ..core.located import how_to_point, places_of

STAND_IN = Path("weights/resnet18_tinyimagenet32_fp16.safetensors")  # under FEDLENS_DATA


def load_weights(module: nn.Module, source: str) -> list[str]:
    """Copy the tensors of a file, a hub id or `stand-in` into the module; notes say what was left out.

    A last layer for another number of classes keeps its first weights. Any other difference is refused.
    """
    stored, own = _read(source), module.state_dict()
    stored = {name: value for name, value in stored.items() if not _is_counter(name)}
    wanted = {name: value for name, value in own.items() if not _is_counter(name)}
    fresh = _other_classes(module, wanted, stored)
    _refuse(source, "lacks", [name for name in wanted if name not in stored])
    _refuse(source, "has what this model lacks:", [name for name in stored if name not in wanted])
    other = [n for n in wanted if n not in fresh and wanted[n].shape != stored[n].shape]
    _refuse(source, "has other shapes:", [f"{n} {_shape(stored[n])} for {_shape(wanted[n])}" for n in other])
    with torch.no_grad():
        for name in wanted.keys() - fresh:
            wanted[name].copy_(stored[name])  # half precision widens here
    if not fresh:
        return []
    last = min(fresh)
    have, want = len(stored[last]), len(wanted[last])
    return [f"weights={source}: its last layer is for {have} classes and was left out; the one for {want} starts anew"]


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
    stored, own = _read(source), module.state_dict()
    other = _other_classes(module, own, stored)
    return len(stored[min(other)]) if other else otherwise


def _is_counter(name: str) -> bool:
    """BatchNorm counts batches for a kind of average that nothing here uses; files may leave it out."""
    return name.endswith("num_batches_tracked")


def _other_classes(module: nn.Module, wanted: dict[str, Tensor], stored: dict[str, Tensor]) -> set[str]:
    """Tensors of the head that differ in their number of classes alone."""
    last = getattr(module, "head", nn.Identity())
    inside = {id(value) for value in last.parameters()}
    head = {name for name, value in module.named_parameters() if id(value) in inside} & stored.keys()
    return {n for n in head if wanted[n].shape != stored[n].shape and wanted[n].shape[1:] == stored[n].shape[1:]}


def _refuse(source: str, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise BadInput(f"weights={source} does not fit this model: it {what} {', '.join(names[:3])}{more}")


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "scalar"


def _read(source: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = find_weights(source)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"weights={source} cannot be read as a safetensors file: {error}") from error


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
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise BadInput(
            f"weights={source}: only safetensors files are read, because the others can run code; convert it"
        )
    if os.path.isfile(path):
        return path
    if path.suffix == ".safetensors" or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        said = f"weights={source}: no such file, and not a hub id such as timm/resnet18.tv_in1k"
        raise BadInput(f"{said}{how_to_point(source, 'model.weights')}")
    return _download(source)


def _download(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download  # pyright: ignore[reportMissingImports]  an extra
    except ImportError as error:
        raise BadInput(
            f"weights={name} is fetched from the hub: install the extra by `pip install fedlens[hub]`"
        ) from error
    try:
        return Path(hf_hub_download(name, "model.safetensors"))
    except Exception as error:  # offline, unknown id, no such file: the hub has a dozen classes for these
        first = str(error).strip().partition("\n")[0]
        raise BadInput(f"weights={name} could not be fetched from the hub: {first}") from error
