"""A run that begins where another one ended: model.weights=runs/a."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save

from .. import config
from ..core.errors import BadInput
from ..core.files import write_atomic
from ..core.located import Located, places_of
from ..core.tree import Tree
from ..data.cache import cache_folder
from ..experiment import Experiment
from .folder import RunFolder


def with_run_weights(experiment: Experiment) -> Experiment:
    """The same; where model.weights names a run, its global model is written to a file that everybody here can read."""
    typed = experiment.model.weights
    if not typed or places_of(typed) or not (Path(typed).expanduser() / "config.yaml").is_file():
        return experiment
    file = _stored(global_weights(Path(typed).expanduser(), typed))
    return replace(experiment, model=replace(experiment.model, weights=Located(typed, [file])))


def global_weights(path: Path, typed: str) -> dict[str, object]:
    """Tensors of a run's global model by the names of its network; parts that clients keep are not among them."""
    folder = RunFolder.open(path)
    checkpoint, _ = folder.load()
    if checkpoint is None or not checkpoint.round:
        raise BadInput(f"model.weights={typed} has no checkpoint yet: let it train a round, or name another run")
    recipe = config.read(folder.config).timetable()[checkpoint.round - 1].stage.algorithm
    model = recipe.global_model(checkpoint.state)
    found = {
        name: leaf.contiguous() for part in model.values() if isinstance(part, Tree) for name, leaf in part.items()
    }
    if not all(leaf.isfinite().all() for leaf in found.values() if leaf.is_floating_point()):
        raise BadInput(f"model.weights={typed}: its training diverged, so that it has no weights to begin with")
    return found


def _stored(tensors: dict[str, object]) -> Path:
    """A file named after what is in it."""
    data = save(tensors)  # pyright: ignore[reportArgumentType]
    file = cache_folder() / "weights" / f"{hashlib.sha256(data).hexdigest()[:24]}.safetensors"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, data)
    return file.absolute()
