"""An exported model: a folder that needs nothing of this package, checked before it is there."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import BadInput, RunFailed
from ..core.rng import generator, key
from ..data import decode
from ..engines.process import threads
from ..runs.places import without_folders
from . import predict
from .card import page
from .model import TrainedModel

FORMS = ("torch", "onnx", "exported")
CLOSE = 1e-4  # how far another runtime's logits may be from torch's


def check_form(to: str) -> None:
    """Refuses what cannot be written here, before anything is computed."""
    if to not in FORMS:
        raise BadInput(f"--to is {to!r}, but it should be one of {', '.join(FORMS)}")
    lacking = [name for name in ("onnx", "onnxruntime", "onnxscript") if not importlib.util.find_spec(name)]
    if to == "onnx" and lacking:
        raise BadInput(f"--to onnx needs {', '.join(lacking)}: pip install 'fedlens[onnx]'")


def write(model: TrainedModel, place: Path, to: str = "torch", command: str = "") -> list[str]:
    """Write the folder and return its files; refused where it is there already, or where a copy does not agree."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise BadInput(f"{place} is there already; choose another --out, or remove it")
    check_form(to)
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        _fill(model, aside, to)
        files = sorted(path.name for path in aside.iterdir())
        made = without_folders(command) or f"fedlens export --to {to}"
        card = page(model.facts, model.classes, model.preprocessing, files, made)
        (aside / "README.md").write_text(card, "utf-8")
        if place.exists():
            place.rmdir()
        aside.chmod(0o777 & ~_mask())
        os.rename(aside, place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return ["README.md", *files]


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fill(model: TrainedModel, place: Path, to: str) -> None:
    from safetensors.torch import save_file

    weights = {name: value.detach().contiguous().clone() for name, value in model.module.state_dict().items()}
    save_file(weights, place / "weights.safetensors", metadata={"format": "pt"})
    (place / "preprocessing.json").write_text(json.dumps(model.preprocessing, indent=1) + "\n", "utf-8")
    text = inspect.getsource(predict).replace("from ..data import decode\n", "import decode\n")
    (place / "predict.py").write_text(text, "utf-8")
    shutil.copyfile(inspect.getfile(decode), place / "decode.py")
    x = _example(model)
    if model.source is not None:
        (place / "model.py").write_text(model.source, "utf-8")
    if to == "exported" or model.source is None:
        write_exported(model, place, x)
    if to == "onnx":
        write_onnx(model, place, x)
    name, close = ("model.py", 0.0) if model.source is not None else ("model.pt2", CLOSE)  # another runtime rounds
    with threads(1):
        _agrees(name, predict.logits(predict.load_model(place), x), predict.logits(model.module, x), close)


def _example(model: TrainedModel) -> Tensor:
    """Noise about as large as normalised images."""
    dtype = getattr(torch, model.preprocessing["dtype"])
    return torch.randn(8, *model.preprocessing["shape"], generator=generator(key("export")), dtype=dtype)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what libraries say about packages that are not installed, or about each other."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _agrees(name: str, found: Tensor, wanted: Tensor, close: float = CLOSE) -> None:
    apart = float((found - wanted).abs().max())
    if not apart <= close:
        raise RunFailed(f"{name} differs from the run's model: logits are {apart:.3g} apart, so nothing was written")


def write_exported(model: TrainedModel, place: Path, x: Tensor) -> None:
    """model.pt2, for batches of any size, checked against the module."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    try:
        program = torch.export.export(model.module, (x,), dynamic_shapes=({0: batch},))
    except Exception as error:  # the network may do anything
        raise BadInput(f"torch.export cannot take this network: {str(error).strip().splitlines()[0]}") from None
    torch.export.save(program, place / "model.pt2")
    with torch.no_grad(), threads(1):
        again = torch.export.load(place / "model.pt2").module()
        for some in (x, x[:3]):
            _agrees("model.pt2", again(some), model.module(some))


def write_onnx(model: TrainedModel, place: Path, x: Tensor) -> None:
    """model.onnx, for batches of any size, checked against the module with onnxruntime."""
    shapes = ({0: torch.export.Dim("batch", min=1, max=4096)},)
    try:
        with _quietly():
            torch.onnx.export(
                model.module,
                (x,),
                place / "model.onnx",
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=shapes,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as error:
        raise BadInput(f"ONNX cannot take this network: {str(error).strip().splitlines()[0]}") from None
    with torch.no_grad(), threads(1):
        for some in (x, x[:3]):
            _agrees("model.onnx", predict.onnx_logits(some, place), model.module(some))
