"""Where the files lie that a run's settings name, so that it can be opened from anywhere.

Settings, hashes and reports have what was typed. places.json has whole paths, and never leaves the run's folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import config
from ..core.errors import BadInput
from ..core.files import write_atomic
from ..core.located import PATHS, Located, how_to_point, places_of
from ..data import PARTITIONS, Images
from ..data.paths import own_path
from ..experiment import Experiment
from ..models.given import is_given
from ..models.weights import find_weights
from .folder import RunFolder

FILE = "places.json"
WEIGHTS = "initial.safetensors"  # the run's own copy of published weights that it began with
_PARTS = ("data", "auxiliary", "partition", "model")


# ---- what is named ---------------------------------------------------------------------------------------------------
def typed(experiment: Experiment) -> dict[str, str]:
    """{key: file or folder as it was typed}; code of the user's own, as my_module:MyNet, is none."""
    return {key: value for part in _PARTS for key, value in _named(part, getattr(experiment, part)) if value}


def _named(prefix: str, part: Any) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
        value, key = getattr(part, field.name), f"{prefix}.{field.name}"
        if field.name in PATHS and isinstance(value, str) and (key != "model.path" or is_given(value)):
            yield key, value
        elif dataclasses.is_dataclass(value):
            yield from _named(key, value)


def places(experiment: Experiment) -> dict[str, str]:
    """{key: the whole path of what it names}, of what is there."""
    found = {}
    for key, value in typed(experiment).items():
        try:
            found[key] = str(find_weights(value) if key.endswith("weights") else own_path(value, key))
        except BadInput:
            continue
    return {key: str(Path(place).absolute()) for key, place in found.items()}


# ---- what a run keeps ------------------------------------------------------------------------------------------------
def remember(folder: RunFolder, experiment: Experiment) -> dict[str, Any]:
    """Write down where things lie, and keep a copy of the weights it begins with; what its passport says of those."""
    for part in (experiment.data, experiment.auxiliary, experiment.model):
        if part is not None:
            part.keep_beside(folder.path)
    found = places(experiment)
    if found:
        folder.write_json(FILE, found)
    if "model.weights" not in found:
        return {}
    data = Path(found["model.weights"]).read_bytes()
    write_atomic(folder.path / WEIGHTS, data, durable=True)
    return {"weights": hashlib.sha256(data).hexdigest()}


def located(folder: RunFolder, experiment: Experiment) -> Experiment:
    """The same experiment, whose other processes find what the run's folder holds of a program's own data and code."""
    for key, value in typed(experiment).items():
        if not places_of(value) and (folder.path / value.partition(":")[0]).is_file():
            experiment = _replaced(experiment, key, Located(value, [folder.path.absolute() / value], str(folder.path)))
    return experiment


def point(folder: RunFolder, pointed: Mapping[str, str]) -> None:
    """Remember where files are now."""
    if pointed:
        folder.write_json(FILE, {**stored_places(folder), **pointed})


def remember_moved(path: str | Path, words: Sequence[str]) -> None:
    """Point a run to files that have moved, by words such as data.path=PLACE; refuses other words, and other data."""
    folder = RunFolder.open(path)
    began = config.read(folder.config)
    pointed, others = pointers(began, words)
    if others:
        key, known = others[0].partition("=")[0], sorted(typed(began))
        can = f"where its files are now can ({', '.join(known)})" if known else "it was given no file"
        raise BadInput(f"{key} cannot change for {path}: a run has its own settings, and {can}")
    if pointed.keys() & {"data.path", "model.weights"}:
        experiment = opened(folder, words)
        check_origin(folder, experiment, experiment.data.load())
    point(folder, pointed)
    folder.sync()


def pointers(experiment: Experiment, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """({key: place} of words that say where something lies, the other words)."""
    mine, known = {}, typed(experiment)
    for word in words:
        key, value = config.setting(word)
        if key in known:
            mine[key] = str(Path(str(value)).expanduser().absolute())
            if not Path(mine[key]).exists():
                raise BadInput(f"{key} is {str(value)!r}, but there is no such file or folder")
    return mine, [word for word in words if config.setting(word)[0] not in known]


def opened(folder: RunFolder, words: Sequence[str] = ()) -> Experiment:
    """A run's experiment with `words` over it, whose files are found from wherever this is.

    Words such as data.path=PLACE say where something is now; the setting stays as it was typed.
    """
    began = config.read(folder.config)
    mine, others = pointers(began, words)
    experiment, stored = config.read(folder.config, others) if others else began, stored_places(folder)
    for key, value in typed(experiment).items():
        kept = [*_own_copy(folder, key), *_own_split(folder, experiment, key)]
        known = [mine[key]] if key in mine else [*kept, *_beside(folder, value, stored.get(key))]
        experiment = _replaced(experiment, key, Located(value, known, str(folder.path)))
    return experiment


def stored_places(folder: RunFolder) -> Mapping[str, str]:
    """{key: whole path} as the run found them."""
    found = folder.read_json(FILE) if (folder.path / FILE).exists() else {}
    if not isinstance(found, dict) or not all(isinstance(place, str) for place in found.values()):
        raise BadInput(f"{folder.path / FILE} is damaged: it should hold a path for each key")
    return found


def _beside(folder: RunFolder, value: str, place: str | None) -> list[Path]:
    """Where it was; or it may have moved with the run, and lie as far from it as before."""
    home = folder.path.absolute()
    return [*([Path(place)] if place else []), *(root / value for root in (home, home.parent, home.parent.parent))]


def _own_split(folder: RunFolder, experiment: Experiment, key: str) -> list[Path]:
    """A run that was given a split has it in its folder."""
    given = key == "partition.path" and isinstance(experiment.partition, PARTITIONS["file"])
    return [folder.path.absolute() / "split.json"] if given else []


def _own_copy(folder: RunFolder, key: str) -> list[Path]:
    """The weights that the run itself has kept; a damaged copy is none."""
    path = folder.path / WEIGHTS
    if key != "model.weights" or not path.is_file():
        return []
    return [path.absolute()] if _digest(path) == folder.passport().get("weights") else []


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replaced(part: Any, key: str, value: str) -> Any:
    name, _, rest = key.partition(".")
    return dataclasses.replace(part, **{name: _replaced(getattr(part, name), rest, value) if rest else value})


# ---- whether it is the same ------------------------------------------------------------------------------------------
def check_origin(
    folder: RunFolder, experiment: Experiment, images: Images, public: Images | None = None, split: str | None = None
) -> None:
    """Other data, weights or another split would silently be another experiment."""
    card = folder.passport() if (folder.path / "passport.json").exists() else {}
    for part, found in (("data", images), ("auxiliary", public)):
        if found is not None and part in card and card[part]["sha256"] != found.checksum:
            path = getattr(getattr(experiment, part), "path", "")
            raise _changed(part, card[part]["name"], path, f"{part}.path")
    weights = getattr(experiment.model, "weights", "")
    if weights and "weights" in card and _digest(find_weights(weights)) != card["weights"]:
        raise _changed("weights", weights, weights, "model.weights")
    if split and card.get("split_hash") and card["split_hash"] != split:
        raise BadInput("the split of this run cannot be made again: its hash differs from the one in passport.json")


def _changed(what: str, name: str, path: str, key: str) -> BadInput:
    point = how_to_point(path, key).rpartition("; ")[2]
    more = f"; {point}" if point else ""
    return BadInput(f"the {what} of this run have changed: {name} had another checksum when it began{more}")


# ---- what may be shown -----------------------------------------------------------------------------------------------
def without_folders(text: Any) -> Any:
    """The same with the last name alone of each whole path: where somebody's files lie is nobody else's matter."""
    if not isinstance(text, str):
        return text
    return re.sub(r"(?<![\w.:/~])~?(?:/[^/;,\s][^/;,]*)+", lambda found: found[0].rpartition("/")[2], text)
