"""Classifies images with the model in this folder: python predict.py IMAGES

Needs torch, numpy, Pillow and safetensors; pydicom for DICOM; onnxruntime for --use onnx. It does not need FedLens.
IMAGES is an image, a folder of images, or a .npy file. Where images lie in folders named after the classes, it also
says how many are right.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import decode

HERE = Path(__file__).resolve().parent
BATCH = 250  # images of a pass; a run evaluates as many at once on a CPU


# ---- from files to network input: as the run's own loader does it ----------------------------------------------------
def image_files(place: Path) -> list[Path]:
    """All images at any depth below, in a fixed order; or the one file."""
    if place.is_file():
        return [place]
    found = (path for path in sorted(place.rglob("*")) if not path.name.startswith("."))
    return [path for path in found if path.is_file() and path.suffix.lower() in decode.ENDINGS]


def opened(file: Any, about: dict[str, Any]) -> Tensor:
    """One picture as bytes [C, H, W], decoded, cut and scaled by the loader's own code, decode.py."""
    wanted = decode.Decoding(**about["images"])
    return torch.from_numpy(decode.decode(file, wanted)[0].copy()).permute(2, 0, 1)


def prepared(x: Tensor, about: dict[str, Any]) -> Tensor:
    """Network input of bytes [N, C, H, W]; floats are taken for network input already."""
    dtype = getattr(torch, about["dtype"])
    if x.dtype != torch.uint8:
        return x.to(dtype)
    out = x.to(dtype, copy=True)
    for channel, (mean, std) in enumerate(zip(about["mean"], about["std"], strict=True)):
        out[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
    return out


def laid_out(x: Tensor) -> Tensor:
    """Channels side by side in memory, which is how the run computed: the same kernels give the same bits."""
    if x.shape[1] != 1:
        return x.contiguous(memory_format=torch.channels_last)
    high, wide = x.shape[2:]
    return x.contiguous().as_strided(x.shape, (high * wide, 1, wide, 1))


# ---- the model -------------------------------------------------------------------------------------------------------
def read_about(folder: Path = HERE) -> dict[str, Any]:
    """Size, channels, mean, standard deviation and classes."""
    return json.loads((folder / "preprocessing.json").read_text("utf-8"))


def load_model(folder: Path = HERE) -> nn.Module:
    """The module of model.py with weights.safetensors, or the exported program where there is no model.py."""
    from safetensors.torch import load_file

    if not (folder / "model.py").exists():
        return torch.export.load(folder / "model.pt2").module()
    spec = importlib.util.spec_from_file_location("exported_model", folder / "model.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["exported_model"] = made
    spec.loader.exec_module(made)
    module, weights = made.build(), load_file(folder / "weights.safetensors")
    module.to(next(each.dtype for each in weights.values() if each.is_floating_point()))
    module.load_state_dict(weights)
    return module.eval()


@torch.no_grad()
def logits(module: nn.Module, x: Tensor) -> Tensor:
    """Of network input [N, C, H, W], a batch at a time."""
    side_by_side = any(isinstance(part, nn.Conv2d) for part in module.modules())
    found = [module(laid_out(part) if side_by_side else part) for part in x.split(BATCH)]
    return torch.cat(found) if found else torch.empty(0)


def onnx_logits(x: Tensor, folder: Path = HERE) -> Tensor:
    """The same by onnxruntime."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    found = [torch.from_numpy(session.run(None, {name: part.numpy()})[0]) for part in x.split(BATCH)]
    return torch.cat(found) if found else torch.empty(0)


# ---- the command -----------------------------------------------------------------------------------------------------
def inputs(place: Path, about: dict[str, Any]) -> Iterator[tuple[list[str], Tensor]]:
    """(names, network input) of a batch at a time; a file that is no image is named and left out."""
    if place.suffix == ".npy":
        import numpy

        x = torch.from_numpy(numpy.load(place))
        for start in range(0, len(x), BATCH):
            some = x[start : start + BATCH]
            yield [f"{place.name}[{start + at}]" for at in range(len(some))], prepared(some, about)
        return
    if about["images"] is None:
        raise SystemExit(f"this model was trained on tensors that were given ready-made: name a .npy file, not {place}")
    files = image_files(place)
    for start in range(0, len(files), BATCH):
        names, pictures = [], []
        for path in files[start : start + BATCH]:
            try:
                pictures.append(opened(path, about))
                names.append(str(path))
            except Exception as error:  # a damaged picture can raise anything
                print(f"left out {path}: {error}", file=sys.stderr)
        if pictures:
            yield names, prepared(torch.stack(pictures), about)


def is_right(name: str, label: str, classes: Sequence[str]) -> bool | None:
    """None where the image does not lie in a folder named after a class."""
    of = [part for part in Path(name).parts[:-1] if part in classes]
    return of[-1] == label if of else None


def classified(place: Path, about: dict[str, Any], use: str) -> Iterable[dict[str, Any]]:
    """A row for each image."""
    module = load_model() if use == "torch" else None
    for names, x in inputs(place, about):
        found = onnx_logits(x) if module is None else logits(module, x)
        for name, row in zip(names, found, strict=True):
            best = int(row.argmax())
            share = float(row.softmax(0)[best])
            yield {"image": name, "class": about["classes"][best], "probability": round(share, 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify images with the model in this folder.")
    parser.add_argument("images", type=Path, help="an image, a folder of images, or a .npy file")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each image")
    parser.add_argument("--threads", type=int, default=1, help="1 gives the very numbers of the run")
    parser.add_argument("--use", choices=("torch", "onnx"), default="torch")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    about, right, total = read_about(), [], 0
    if not asked.images.exists():
        raise SystemExit(f"there is no {asked.images}")
    for row in classified(asked.images, about, asked.use):
        print(json.dumps(row) if asked.json else f"{row['image']}\t{row['class']}\t{100 * row['probability']:.2f} %")
        total += 1
        right.append(is_right(row["image"], row["class"], about["classes"]))
    if not total:
        raise SystemExit(f"there are no images in {asked.images}")
    known = [each for each in right if each is not None]
    if known and len(known) == total:
        said = {"right": sum(known), "images": total, "accuracy": sum(known) / total}
        print(
            json.dumps(said) if asked.json else f"{sum(known)} of {total} are right: {100 * sum(known) / total:.2f} %"
        )


if __name__ == "__main__":
    main()
