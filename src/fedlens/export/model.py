"""A run's model as a plain nn.Module, with what turns images into its input and its answers into names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import BadInput
from ..core.network import Network
from ..core.source_code import NoSource
from ..core.tree import Tree
from ..data import DataSource, Images
from ..engines.process import threads
from ..models.custom import plain_module
from ..models.model import Model
from ..runs.opened import OpenedRun
from ..runs.read import client_accuracies, client_evaluation, evaluations, rounds_of
from ..selection.sub_models import kept_filters
from . import predict as standalone
from .card import facts_of
from .submodel import sub_model as smaller_network


class Predictions(NamedTuple):
    """What a model says of some images, in their order."""

    labels: list[str]
    probabilities: Tensor  # [images, classes]


@dataclass(frozen=True)
class TrainedModel:
    """A model that is ready to use: `module` is a plain nn.Module in eval mode, `predict` also preprocesses images."""

    module: nn.Module  # its weights have the names that its own class gives them
    classes: tuple[str, ...]
    preprocessing: dict[str, Any]  # size, mode, resize, mean, std: what predict.py reads
    source: str | None = None  # a Python file whose build() makes the module; None: it cannot be written down
    facts: dict[str, Any] = field(default_factory=dict)  # where it comes from, for the model card

    def preprocess(self, images: Any) -> Tensor:
        """Network input [N, C, H, W] of files, a folder, pictures, or arrays: bytes are normalised, floats are not."""
        return standalone.prepared(_bytes_of(images, self.preprocessing), self.preprocessing)

    def logits(self, images: Any) -> Tensor:
        """[N, classes], by one thread, as the run computes them."""
        with threads(1):
            return standalone.logits(self.module, self.preprocess(images))

    def predict(self, images: Any) -> Predictions:
        """Classes by name, and probabilities, of whatever `preprocess` takes."""
        found = self.logits(images)
        return Predictions([self.classes[at] for at in found.argmax(1).tolist()], found.softmax(1))


def _bytes_of(images: Any, about: dict[str, Any]) -> Tensor:
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(images)
    if isinstance(images, Tensor):
        channels = about["shape"][0]
        if images.dim() == 3 and images.shape[0] != channels:
            images = images[:, None]  # [N, H, W]
        elif images.dim() == 3:
            images = images[None]
        if list(images.shape[1:]) != about["shape"]:
            want = " x ".join(map(str, about["shape"]))
            raise BadInput(f"images are {' x '.join(map(str, images.shape[1:]))}, but this model takes {want}")
        return images
    if about["images"] is None:
        raise BadInput("this model was trained on tensors that were given ready-made: give it tensors, not files")
    if isinstance(images, str | Path):
        files: Iterable[Any] = standalone.image_files(Path(images))
    else:
        files = images if isinstance(images, Sequence) else [images]
    found = [standalone.opened(_file(each), about) for each in files]
    if not found:
        raise BadInput(f"there are no images in {images!s:.100}")
    return torch.stack(found)


def _file(picture: Any) -> Any:
    """Pictures of Pillow are decoded as the file that they would be."""
    if not hasattr(picture, "save"):
        return picture
    import io

    file = io.BytesIO()
    picture.save(file, "PNG")
    file.seek(0)
    return file


# ---- from runs -------------------------------------------------------------------------------------------------------
def load(
    run: str | Path,
    client: int | str | None = None,
    round: int | Literal["best"] | None = None,
    *,
    sub_model: bool = False,
) -> TrainedModel:
    """The model of a finished run: the global one, a client's own (by number or name), that of an earlier round.

    round="best": the best on validation images, which a run with evaluate.validation keeps. The test set has no say.
    With sub_model: the smaller network that is left of a client's model when only the filters that it selected stay.
    Refused in a sentence where the run has no such model, or where its data cannot be found.
    """
    opened = OpenedRun.open(run, device="cpu")
    number = None if client is None else opened.folder.names().number(str(client))
    is_best = round == "best"
    at = _best_round(opened) if round == "best" else round
    weights, accuracy = _weights(opened, number, at)
    facts = {**facts_of(opened, number, at, accuracy), "best": is_best}
    model = trained(opened.net, weights, opened.experiment.model, opened.images, opened.experiment.data, facts)
    if not sub_model:
        return model
    if number is None:
        raise BadInput("a sub-model is a client's: name one with --client")
    return _smaller(opened, weights, number, at, model)


def _best_round(run: OpenedRun) -> int:
    """Chosen on validation images; refused where there are none, or where nothing was kept of it."""
    path = run.folder.path
    if (result := run.folder.result()) is None:
        raise BadInput(f"{path} is not complete, so it has no best round yet; go on with `fedlens resume`")
    if not result.get("best"):
        raise BadInput(
            f"{path} has no best round, as it kept no validation images: run it with evaluate.validation=0.1"
        )
    best = result["best"]["round"]
    if best not in run.folder.rounds():
        raise BadInput(f"{path} was best after round {best}, and its checkpoint is not there any more")
    return best


def trained(
    net: Network, weights: Tree, model: Model, images: Images, data: DataSource | None, facts: dict[str, Any]
) -> TrainedModel:
    """A network under these weights as a plain module."""
    module = plain_module(_filled(net, weights)).eval().requires_grad_(False)
    channels, size, _ = images.x.shape[1:]
    try:
        source = model.source(len(images.classes), channels, size)
    except NoSource:
        source = None
    about = preprocessing(images, data, next(iter(weights.params.values())).dtype)
    return TrainedModel(module, images.classes, about, source, facts)


def _filled(net: Network, weights: Tree) -> nn.Module:
    module = net.copy().module
    stored = {**weights.params, **weights.buffers}
    with torch.no_grad():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if name in stored:
                value.copy_(stored[name])
    return module.cpu()


def preprocessing(images: Images, data: DataSource | None, dtype: torch.dtype) -> dict[str, Any]:
    """How files become network input, as predict.py reads it; images: None where tensors were given ready-made."""
    channels, size, _ = images.x.shape[1:]
    files = {"mode": "L" if channels == 1 else "RGB", "size": size, "resize": getattr(data, "resize", "crop")}
    files["bits"] = getattr(data, "bits", 0)
    return {
        "shape": [channels, size, size],
        "images": files if images.x.dtype == torch.uint8 else None,
        "mean": list(images.mean),
        "std": list(images.std),
        "dtype": str(dtype).removeprefix("torch."),
        "classes": list(images.classes),
    }


def _weights(run: OpenedRun, client: int | None, round: int | None) -> tuple[Tree, float | None]:
    """The model that was asked for, and its accuracy as the run's tables have it."""
    metrics, counts = run.folder.metrics(), rounds_of(run.folder)
    checkpoint = run.newest() if round is None else run.folder.at(round)
    if client is None:
        model = run.global_model(checkpoint)
        if model is None:
            raise BadInput(f"{run.folder.path} has no whole global model: clients keep a part; name one with --client")
        by_round = dict(evaluations(metrics, "accuracy", counts).values())
        return model, by_round.get(checkpoint.round)
    if run.folder.passport()["engine"] == "flower":
        raise BadInput(f"client {client}'s model never leaves its node: run `fedlens deploy export NODE` there")
    if round is None and client_accuracies(metrics):
        return run.model(client), client_evaluation(run.folder)[1].get(client)
    run.check(client)
    with run.at_work():
        _, model = next(run.client_models(checkpoint, [client]))
    rows = zip(*(metrics[name].to_pylist() for name in ("round", "client", "model", "metric", "value")), strict=True)
    wanted = (checkpoint.round, client, "personal before", "accuracy")
    return model, next((value for *row, value in rows if tuple(row) == wanted), None)


def _smaller(run: OpenedRun, weights: Tree, client: int, round: int | None, whole: TrainedModel) -> TrainedModel:
    checkpoint = run.newest() if round is None else run.folder.at(round)
    memory = run.folder.client_memories(checkpoint.round).get(client)
    stage = run.experiment.timetable()[checkpoint.round - 1].stage
    kept = None if memory is None else kept_filters(stage.algorithm, run.net, memory)
    if kept is None:
        raise BadInput(f"client {client} has selected no filters: its method has no sub-models, or it never took part")
    module, source = smaller_network(run.net, weights, kept, run.images.x.shape[1:])
    facts = {**whole.facts, "accuracy": None, "sub_model": True}
    return TrainedModel(module, whole.classes, whole.preprocessing, source, facts)
