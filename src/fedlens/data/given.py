"""Data that a Python program brings: tensors, arrays, torch and Hugging Face data sets; their copy lies beside the run.

A value is taken apart once. What stands for it in settings is the name of its content: the same tensors have the same
name in every process, and a run that was killed finds them in its folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadInput
from ..core.files import make_durable
from ..core.located import how_to_point, places_of
from ..core.rng import key
from .cache import checksum, moments
from .formats import stratified
from .images import Found, Images
from .source import DataSource

# (x, y), (x, y, x_test, y_test), a data set, one of each for every client, Hugging Face's or Flower's by their looks.
GivenData = tuple[Any, ...] | Mapping[str, Any] | list[Any] | torch.utils.data.Dataset | Any
HOLDOUT = 0.2  # of images that come without a test part
_LIVE: dict[str, Images] = {}  # what this process was given, by the name of its content
_SPLITS = ("test", "validation", "valid", "val")
_IMAGES, _LABELS = ("image", "img", "images", "pixel_values", "x"), ("label", "labels", "fine_label", "character", "y")
_TEXTS = ("classes", "owner_names")


@dataclass(frozen=True)
class Tensors(DataSource):
    """Images from Python. `path` names their copy, which a run keeps in its folder."""

    path: str = ""
    name = "tensors"

    def load(self, *, labelled: bool = True) -> Images:
        images = _LIVE.get(str(self.path)) or self._stored()
        if labelled and len(images.classes) < 2:
            raise BadInput("data has one class only; a classifier needs at least two")
        return images

    def find(self) -> Found:
        raise BadInput("data were given in Python: they have no files but the copy beside their run")

    def owners(self) -> int:
        users = self.load(labelled=False).users
        return 0 if users is None else int(users.max()) + 1

    def keep_beside(self, folder: Path) -> None:
        """Write the copy; it is durable when this returns."""
        from safetensors.torch import save_file

        place, images = folder / self.path, self.load(labelled=False)
        parts = {name: getattr(images, name) for name in ("x", "y", "train", "test", "users")}
        texts = {name: "\n".join(getattr(images, name)) for name in _TEXTS}
        texts |= {name: " ".join(map(repr, getattr(images, name))) for name in ("mean", "std")}
        aside = place.with_name(f".{place.name}.part")
        tensors = {name: part.contiguous() for name, part in parts.items() if part is not None}
        save_file(tensors, aside, metadata={**texts, "checksum": images.checksum})
        make_durable([aside])
        os.replace(aside, place)

    def _stored(self) -> Images:
        from safetensors import SafetensorError, safe_open

        found = next((place for place in (*places_of(self.path), Path(self.path)) if place.is_file()), None)
        if found is None or not self.path:
            said = f"the data of this run were given in Python, and their copy {str(self.path)!r} is not beside it"
            raise BadInput(f"{said}{how_to_point(self.path, 'data.path')}")
        try:
            with safe_open(found, "pt") as file:
                parts, texts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
            lists = {name: tuple(texts[name].split("\n")) if texts[name] else () for name in _TEXTS}
            lists |= {name: tuple(map(float, texts[name].split())) for name in ("mean", "std")}
            images = _images(parts, lists, texts["checksum"])
        except (SafetensorError, OSError, KeyError, ValueError):
            raise BadInput(f"{found} is damaged: the data of its run cannot be read") from None
        if checksum(images.x.numpy(), images.y.numpy()) != images.checksum:
            raise BadInput(f"{found} is damaged: its checksum differs")
        return images


def _images(parts: Mapping[str, Tensor], lists: Mapping[str, Any], digest: str) -> Images:
    return Images(
        **{name: parts[name] for name in ("x", "y", "train", "test")},
        **lists,
        users=parts.get("users"),
        domains=None,
        checksum=digest,
        origin="given in Python",
        name=Tensors.name,
    )


# ---- taking a value apart --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Part:
    """Images [N, C, H, W] and their labels, as numbers or words."""

    x: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...] = ()


def given_data(value: Any) -> Tensors:
    """A data source of what a program has: a tuple, a data set, one for each client. Refused in a sentence."""
    if hasattr(value, "load_partition"):
        owners, parts, pooled = _federated(value)
    elif isinstance(value, Mapping) and not _is_split(value):
        owners = tuple(map(str, value))
        parts, pooled = [_both(each, f"data[{name!r}]") for name, each in value.items()], None
    elif isinstance(value, list):
        if value and not all(_is_own_set(each) or isinstance(each, tuple | Mapping) for each in value):
            raise BadInput("data is a list, which has a data set for each client; give tensors as a tuple (x, y)")
        owners = tuple(str(number) for number in range(len(value)))
        parts, pooled = [_both(each, f"data[{number}]") for number, each in enumerate(value)], None
    else:
        owners, parts, pooled = (), [_both(value, "data")], None
    if not parts:
        raise BadInput("data is empty: give at least one client some images")
    images = _joined(parts, owners, pooled)
    digest = hashlib.sha256(images.checksum.encode())
    for index in (images.train, images.test, *([] if images.users is None else [images.users])):
        digest.update(index.numpy().tobytes() + b"/")
    digest.update(repr((images.classes, images.owner_names, images.mean)).encode())
    path = f"data-{digest.hexdigest()[:16]}.safetensors"
    _LIVE[path] = images
    return Tensors(path)


def _is_dataset(value: Any) -> bool:
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, Sequence | Mapping)


def _is_split(value: Mapping[Any, Any]) -> bool:
    """Whether it is one data set in parts, as the hub has them, and not a dictionary of clients."""
    return "train" in value and all(hasattr(part, "column_names") for part in value.values())


def _federated(value: Any) -> tuple[tuple[str, ...], Sequence[tuple[_Part, _Part | None]], _Part | None]:
    """Flower's FederatedDataset: the partitions of its training part, and its test part as everyone's."""
    partitioners = getattr(value, "partitioners", None) or {}
    if "train" not in partitioners:
        raise BadInput("data is a FederatedDataset without a partitioner of its split 'train'")
    count = partitioners["train"].num_partitions
    parts = [(_part(value.load_partition(number, "train"), f"partition {number}"), None) for number in range(count)]
    try:
        pooled = _part(value.load_split("test"), "split 'test'")
    except (KeyError, ValueError):
        pooled = None  # it has none: each client keeps some of its own
    return tuple(map(str, range(count))), parts, pooled


def _both(value: Any, what: str) -> tuple[_Part, _Part | None]:
    """Training part, and test part where there is one."""
    if isinstance(value, Mapping):
        if not _is_split(value):
            raise BadInput(f"{what} is a dictionary, but it should be (x, y), a data set, or one with a split 'train'")
        test = next((value[name] for name in _SPLITS if name in value), None)
        return _part(value["train"], what), None if test is None else _part(test, what)
    if isinstance(value, tuple) and len(value) == 4:
        return _part(value[:2], what), _part(value[2:], what)
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(p, tuple) or _is_own_set(p) for p in value):
        return _part(value[0], what), _part(value[1], what)
    return _part(value, what), None


def _is_own_set(value: Any) -> bool:
    return _is_dataset(value) and not isinstance(value, Tensor | np.ndarray)


def _part(value: Any, what: str) -> _Part:
    if isinstance(value, tuple):
        if len(value) != 2:
            raise BadInput(f"{what} has {len(value)} parts, but it should be (x, y) or (x, y, x_test, y_test)")
        return _checked(_array(value[0]), _array(value[1]), what)
    if hasattr(value, "column_names"):
        return _from_columns(value, what)
    if isinstance(value, torch.utils.data.TensorDataset) and len(value.tensors) == 2:
        x, y = value.tensors
        return _checked(_array(x), _array(y), what)
    if _is_own_set(value):
        rows = [value[index] for index in range(len(value))]  # each example once, whatever a transform draws
        return _from_rows(rows, what, getattr(value, "classes", ()))
    raise BadInput(f"{what} is a {type(value).__name__}, but it should be (x, y), a data set, or one for each client")


def _from_rows(rows: list[Any], what: str, classes: Any = ()) -> _Part:
    """Examples (image, label); what else they hold is left out."""
    if not rows or not all(isinstance(row, tuple | list) and len(row) >= 2 for row in rows):
        found = type(rows[0]).__name__ if rows else "none"
        raise BadInput(f"{what} should hold (image, label) examples, and it has {found}")
    images = [_array(row[0]) for row in rows]
    if len({image.shape for image in images}) > 1:
        raise BadInput(f"{what} has images of different sizes or channels; make them alike in the data set")
    part = _checked(np.stack(images), np.array([_label(row[1]) for row in rows]), what)
    return replace(part, classes=tuple(map(str, classes)) if part.y.dtype.kind == "i" else ())


def _from_columns(dataset: Any, what: str) -> _Part:
    """A data set of the Hugging Face hub: its columns of images and labels are found by type, then by name."""
    names, features = list(dataset.column_names), getattr(dataset, "features", {}) or {}
    kinds = {name: type(features.get(name)).__name__ for name in names}
    image = next((n for n in names if kinds[n] == "Image"), None) or next((n for n in _IMAGES if n in names), None)
    label = next((n for n in names if kinds[n] == "ClassLabel"), None) or next((n for n in _LABELS if n in names), None)
    if image is None or label is None:
        lacking = "images" if image is None else "labels"
        raise BadInput(f"{what} has the columns {', '.join(names)}, and none is known to hold {lacking}")
    rows = [(row[image], row[label]) for row in dataset]
    return _from_rows(rows, what, getattr(features.get(label), "names", None) or ())


def _label(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.ndarray | np.generic) and np.ndim(value) == 0 else value


def _array(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if hasattr(value, "convert"):  # a picture of Pillow
        value = value if value.mode in ("L", "RGB") else value.convert("L" if value.mode in ("1", "LA") else "RGB")
    return np.asarray(value)


def _checked(x: np.ndarray, y: np.ndarray, what: str) -> _Part:
    """Images as [N, C, H, W], bytes or float32; labels as whole numbers or words."""
    shape = x.shape
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim != 4 or not x.size:
        raise BadInput(
            f"{what} has images of shape {shape}, but they should be [N, C, H, W], [N, H, W] or [N, H, W, C]"
        )
    if x.dtype != np.uint8:
        if not np.issubdtype(x.dtype, np.floating):
            raise BadInput(f"{what} has images of {x.dtype}; they should be bytes (uint8) or floats")
        x = x.astype(np.float32)
        if odd := int((~np.isfinite(x)).any(axis=(1, 2, 3)).sum()):
            raise BadInput(f"{what}: in {odd} of {len(x)} images some numbers are NaN or infinite")
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.shape != (len(x),):
        raise BadInput(f"{what} has {len(x)} images and labels of shape {y.shape}; each image needs one label")
    if y.dtype.kind in "iub":
        if y.min(initial=0) < 0:
            raise BadInput(f"{what} has the label {y.min()}; number classes from 0")
        return _Part(np.ascontiguousarray(x), y.astype(np.int64))
    if y.dtype.kind in "UO" and all(isinstance(each, str) for each in y):
        return _Part(np.ascontiguousarray(x), y.astype(str))
    raise BadInput(f"{what} has labels of {y.dtype}; they should be whole numbers or words")


def _joined(parts: Sequence[tuple[_Part, _Part | None]], owners: tuple[str, ...], pooled: _Part | None) -> Images:
    """One data set: the training parts of all, then the test parts."""
    trains, tests = [train for train, _ in parts], [test for _, test in parts]
    if any(tests) and not all(tests):
        lacking = owners[[test is None for test in tests].index(True)]
        raise BadInput(f"data[{lacking!r}] has no test part, but others have one; give one to all or to none")
    last = [test for test in tests if test is not None] + ([pooled] if pooled else [])
    every = [*trains, *last]
    for part in every:
        if part.x.shape[1:] != every[0].x.shape[1:] or part.x.dtype != every[0].x.dtype:
            one, other = (f"{p.x.dtype} {p.x.shape[1:]}" for p in (every[0], part))
            raise BadInput(f"data has images of {one} and of {other}; they should be of one size and type")
    classes, y = _labels(every)
    x = np.concatenate([part.x for part in every])
    whose = [*range(len(trains)), *(range(len(trains)) if any(tests) else ()), *([-1] if pooled else [])]
    users = np.repeat(whose, [len(part.y) for part in every])
    if last:
        train, test = np.split(np.arange(len(y)), [sum(len(part.y) for part in trains)])
    else:
        train, test = stratified(users * len(classes) + y, HOLDOUT, key("given", "test part"))
    if x.dtype == np.uint8:
        mean, std = moments(x, train)
    else:  # taken as they are: Prepare's own scale is undone
        mean, std = (0.0,) * x.shape[1], (1 / 255,) * x.shape[1]
    parts_ = {"x": x, "y": y, "train": train, "test": test, **({"users": users} if owners else {})}
    lists = {"classes": classes, "mean": mean, "std": std, "owner_names": owners}
    return _images({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in parts_.items()}, lists, checksum(x, y))


def _labels(parts: Iterable[_Part]) -> tuple[tuple[str, ...], np.ndarray]:
    """Classes, and everyone's labels as numbers."""
    parts = list(parts)
    kinds = {part.y.dtype.kind for part in parts}
    if len(kinds) > 1:
        raise BadInput("data has labels that are numbers and labels that are words; make them all one kind")
    together = np.concatenate([part.y for part in parts])
    if kinds == {"U"}:
        found, number = np.unique(together, return_inverse=True)
        return tuple(map(str, found)), number.astype(np.int64)
    highest = int(together.max())
    named = next((part.classes for part in parts if len(part.classes) > highest), ())
    if highest >= max(len(together), 100_000):
        raise BadInput(f"the highest label is {highest}, and there are {len(together)} images; number classes from 0")
    return named or tuple(map(str, range(highest + 1))), together
