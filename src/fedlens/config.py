"""Experiments as YAML and `key=value` words: names are resolved first, then every field is checked by its type."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from .algorithms import ALGORITHMS
from .core.algorithm import Recipe
from .core.cohort import COHORTS, Cohort
from .core.errors import BadInput, nearest
from .core.optimizer import SCHEDULES, Schedule
from .core.transform import TRANSFORMS, Transform
from .data import DATASETS, PARTITIONS, DataSource, Partition
from .experiment import Experiment
from .models import MODELS, Model

REGISTRIES: dict[type, Mapping[str, type]] = {
    DataSource: DATASETS,
    Partition: PARTITIONS,
    Cohort: COHORTS,
    Model: MODELS,
    Recipe: ALGORITHMS,
    Schedule: SCHEDULES,
    Transform: TRANSFORMS,
}

# What users of other tools type, and what it is called here.
ALIASES = {
    **dict.fromkeys(("dataset", "dataset.name", "data_name"), "data"),
    **dict.fromkeys(("num_clients", "n_clients", "client_num", "num_supernodes", "population"), "clients"),
    **dict.fromkeys(
        ("join_ratio", "fraction_fit", "fraction_train", "eligible_perc", "participation", "sample_ratio", "frac"),
        "cohort",
    ),
    **dict.fromkeys(("clients_per_round", "num_sampled"), "cohort"),
    **dict.fromkeys(("method", "algo", "strategy", "alg"), "algorithm"),
    **dict.fromkeys(
        ("global_rounds", "num_server_rounds", "n_rounds", "num_rounds", "global_epochs", "comm_rounds"), "rounds"
    ),
    **dict.fromkeys(("local_epochs", "local_epoch", "epochs"), "local.epochs"),
    **dict.fromkeys(("local_steps", "steps"), "local.steps"),
    **dict.fromkeys(("batch_size", "local.size", "local_batch_size"), "local.batch_size"),
    **dict.fromkeys(("lr", "learning_rate", "local_learning_rate", "local.learning_rate"), "local.lr"),
    "momentum": "local.momentum",
    **dict.fromkeys(("weight_decay", "wd"), "local.weight_decay"),
    "optimizer": "local.optimizer",
    **dict.fromkeys(("schedule", "lr_schedule"), "local.schedule"),
    **dict.fromkeys(("alpha", "dirichlet_alpha"), "partition.alpha"),
    **dict.fromkeys(("network", "net", "model_name"), "model"),
    **dict.fromkeys(("output", "output_dir", "out_dir", "name"), "out"),
    **dict.fromkeys(("random_seed", "rng_seed"), "seed"),
    "eval_every": "evaluate.every",
}


def read(file: str | Path | None = None, words: Sequence[str] = ()) -> Experiment:
    """The experiment of a YAML file with `key=value` words laid over it; words win over the file, it over defaults."""
    raw: dict[str, Any] = {}
    for key, value in (_from_file(Path(file)) if file else {}).items():
        _put(raw, ALIASES.get(key, key), value)
    # Short keys first: `algorithm.mu=1 algorithm=fedprox` means the same in any order.
    pairs = sorted((_word(word) for word in words), key=lambda pair: pair[0].count("."))
    for key, value in pairs:
        _put(raw, key, value)
    return resolve(Experiment, raw)


def plain(value: Any) -> Any:
    """A configuration as dictionaries, lists and scalars; `resolve` turns it back into an equal value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        name = _names().get(type(value))
        return {"is": name, **fields} if name else fields
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value


def to_yaml(experiment: Experiment) -> str:
    return yaml.safe_dump(plain(experiment), sort_keys=False)


# ---- reading ----
def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        around = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
        raise BadInput(f"there is no file {path}; {nearest(str(path), [str(p) for p in around] or ['none nearby'])}")
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if found is not None and not isinstance(found, dict):
        raise BadInput(f"{path} should hold keys and values, but it holds a {type(found).__name__}")
    return {str(key): value for key, value in (found or {}).items()}


def _word(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals:
        raise BadInput(f"{word!r} is neither a YAML file nor key=value")
    try:
        value = yaml.safe_load(text) if text else text
    except yaml.YAMLError:
        value = text
    key = key.strip().lstrip("-").replace("-", "_")
    return ALIASES.get(key, key), value


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. A part named by a word becomes a dictionary when one of its fields is set."""
    *parents, last = key.split(".")
    for parent in parents:
        inner = raw.get(parent)
        if isinstance(inner, str | int | float) and not isinstance(inner, bool):
            inner = {"is": inner}
        if inner is not None and not isinstance(inner, dict):
            raise BadInput(f"{key} cannot be set: {parent} is {inner!r}, which has no fields")
        raw[parent] = dict(inner or {})
        raw = raw[parent]
    if isinstance(value, dict) and isinstance(raw.get(last), dict):
        value = {**raw[last], **value}
    raw[last] = value


# ---- resolving ----
def resolve(kind: Any, value: Any, path: str = "", default: Any = None) -> Any:
    """A value of this type from plain data, or one sentence about what is wrong with it."""
    registry = REGISTRIES.get(kind) if isinstance(kind, type) else None
    if registry is not None:
        return _part(kind, registry, value, path, default)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else _dataclass(kind, value, path)
    if typing.get_origin(kind) is tuple and (item := typing.get_args(kind)[0]) in REGISTRIES:
        return _parts(item, value, path)
    return _scalar(kind, value, path)


def _part(kind: type, registry: Mapping[str, type], value: Any, path: str, default: Any) -> Any:
    if isinstance(value, tuple(registry.values())) and not isinstance(value, dict | str):
        return _checked(value, path)
    fields = dict(value) if isinstance(value, dict) else {"is": value}
    name = fields.pop("is", None)
    if name is None:
        name = _names()[type(default)]
    name, implied = _shorthand(kind, name)
    if name not in registry:
        raise BadInput(f"{path} {name!r} is unknown; {nearest(str(name), registry)}")
    return _dataclass(registry[name], {**implied, **fields}, path, f"{name}")


def _parts(item: type, value: Any, path: str) -> tuple:
    """Several parts in order: a list, or `a,b`, or {a: {field: value}, b: {}}."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    elif isinstance(value, dict) and "is" in value:  # uplink=clip,topk uplink.clip.norm=2
        named = {name: {"is": name} for name in str(value.pop("is")).split(",")}
        value = [{**named.get(name, {"is": name}), **value.get(name, {})} for name in {**named, **value}]
    elif isinstance(value, dict):
        value = [{"is": name, **(fields or {})} for name, fields in value.items()]
    if not isinstance(value, list | tuple):
        raise BadInput(f"{path} is {value!r}, but it should be a list of names")
    return tuple(resolve(item, part, path) for part in value)


def _shorthand(kind: type, name: Any) -> tuple[Any, dict[str, Any]]:
    """What people type for short: a number of clients, a file, a class, X+ft."""
    if kind is Cohort and isinstance(name, int | float) and not isinstance(name, bool):
        return ("uniform", {"count": name}) if isinstance(name, int) else ("fraction", {"share": name})
    if not isinstance(name, str):
        return name, {}
    if kind is Recipe and name.lower().endswith("+ft"):
        return "finetune", {"base": name[:-3]}
    if kind is Model and ":" in name:
        return "custom", {"path": name}
    if kind is Partition and name.endswith(".json"):
        return "file", {"path": name}
    if kind is DataSource and name.endswith(".npz"):
        return "npz", {"path": name}
    return name.lower().replace("-", "_"), {}


def _dataclass(kind: type, raw: Any, path: str, name: str = "") -> Any:
    if not isinstance(raw, dict):
        raise BadInput(f"{path} is {raw!r}, but it should have fields such as {', '.join(_types(kind))}")
    known, prefix = _types(kind), f"{path}." if path else ""
    for key in raw:
        if key not in known:
            whole = {f"{prefix}{k}" for k in known} | ({*ALIASES} if not path else set())
            owner = f" of {name}" if name else ""
            has = f"; {nearest(f'{prefix}{key}', whole)}" if known else "; it has no settings"
            raise BadInput(f"unknown key {prefix}{key}{owner}{has}")
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    return kind(**{k: resolve(known[k], v, f"{prefix}{k}", defaults[k]) for k, v in raw.items()})


def _checked(value: Any, path: str) -> Any:
    """The same value, every field checked: experiments built in Python get the same sentences as those from YAML."""
    return _dataclass(type(value), {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, path)


def check(experiment: Experiment) -> Experiment:
    return _checked(experiment, "")


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if value == "" and type(None) in typing.get_args(kind):
        value = None
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        what = first["msg"].replace("Input should", "it should").replace("Value error, ", "")
        raise BadInput(f"{path} is {value!r}, but {what[0].lower()}{what[1:]}") from None


@functools.lru_cache(maxsize=512)
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


@functools.lru_cache(maxsize=512)
def _types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: _without_none(hints[f.name]) for f in dataclasses.fields(kind) if f.init}


def _without_none(kind: Any) -> Any:
    """`Part | None` is looked up as Part."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [k for k in typing.get_args(kind) if k is not type(None)]
        if len(rest) == 1 and rest[0] in REGISTRIES:
            return rest[0]
    return kind


@functools.lru_cache(maxsize=1)
def _names() -> dict[type, str]:
    return {part: name for registry in REGISTRIES.values() for name, part in registry.items()}
