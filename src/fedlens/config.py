"""Experiments as YAML and `key=value` words: names are resolved first, then every field is checked by its type."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import operator
import os
import re
import sys
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from .algorithms import ALGORITHMS, FORMERLY
from .core.algorithm import Recipe
from .core.aliases import ALIASES, RATIOS, RENAMED, SYNONYMS
from .core.cohort import COHORTS, Cohort
from .core.errors import BadInput, brief, nearest
from .core.located import Located, as_typed
from .core.names import is_text, strangers_may_name
from .core.optimizer import SCHEDULES, Schedule
from .core.transform import TRANSFORMS, Transform
from .core.yaml_dialect import Dumper, levels, parse_yaml, read_yaml
from .data import DATASETS, OWN_FILES, PARTITIONS, DataSource, Partition
from .data.partition.base import ByUser
from .devices.profiles import DEVICES, Devices
from .experiment import Execution, Experiment
from .models import MODELS, Model
from .privacy.client_level import ClientPrivacy
from .robust.aggregators import DEFENCES
from .robust.attacks import ATTACKS, Attack
from .robust.defence import Defence

REGISTRIES: dict[type, Mapping[str, type]] = {
    DataSource: DATASETS,
    Partition: PARTITIONS,
    Cohort: COHORTS,
    Model: MODELS,
    Recipe: ALGORITHMS,
    Schedule: SCHEDULES,
    Transform: {**TRANSFORMS, ClientPrivacy.name: ClientPrivacy},
    Defence: DEFENCES,
    Attack: ATTACKS,
    Devices: DEVICES,
}


def read(file: str | Path | None = None, words: Sequence[str] = ()) -> Experiment:
    """The experiment of a YAML file with `key=value` words laid over it; words win over the file, it over defaults."""
    raw: dict[str, Any] = {}
    typed = [pair for word in words for pair in _flat(dict([setting(word)])).items()]
    for pairs in (_from_file(Path(file)) if file else [], typed):
        merged(raw, pairs)
    return resolve(Experiment, _with_owners(raw))


def check(experiment: Experiment) -> Experiment:
    """The same experiment, every field checked: one built in Python gets the same sentences as one from YAML."""
    return _checked(experiment, "")


def to_dict(value: Any) -> Any:
    """A configuration as dictionaries, lists and scalars; `resolve` turns it back into an equal value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: to_dict(inner) for name, inner in _fields(value).items()}
        return {"is": _name(type(value)), **fields} if _is_part(value) else fields
    return [to_dict(v) for v in value] if isinstance(value, tuple | list) else as_typed(value)


def to_yaml(experiment: Experiment) -> str:
    return yaml.dump(to_dict(experiment), Dumper=Dumper, sort_keys=False)


def affects_results(key: str) -> bool:
    """Whether a setting can change a result, or only where and how it is computed."""
    name = key.partition(".")[0]
    return name not in _types(Execution) or name in Execution.AFFECTS_RESULTS


def science(experiment: Experiment) -> dict[str, Any]:
    """All settings that can change a result."""
    return {k: v for k, v in to_dict(experiment).items() if affects_results(k) and (k, v) not in Execution.UNHASHED}


# ---- reading ----
def _from_file(path: Path) -> list[tuple[str, Any]]:
    if not os.path.isfile(path):  # pathlib's raises for a name that is too long
        raise BadInput(_no_file(path))
    try:
        found = read_yaml(path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}" if mark else ""
        raise BadInput(f"{path} cannot be read as YAML: {error.problem or error.context}{where}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    if found is not None and not isinstance(found, dict):
        what = "a list" if isinstance(found, list) else brief(found)
        raise BadInput(f"{path} should hold keys and values such as `rounds: 20`, but it holds {what}")
    return [(_canonical(str(key)), _meant_as(str(key), value)) for key, value in _flat(found or {}).items()]


def _no_file(path: Path) -> str:
    if os.path.isdir(path):
        run = "; go on with a run by `fedlens resume`" if (path / "config.yaml").is_file() else ""
        return f"{path} is a folder, not a YAML file{run}"
    if path.suffix.lower() in (".yaml", ".yml"):
        around = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        return f"there is no file {path}" + (f"; {nearest(str(path), around)}" if around else "")
    for key, kind in _types(Experiment).items():
        if path.name in REGISTRIES.get(kind, ()):
            return f"'{path}' is neither a YAML file nor key=value; did you mean {key}={path}?"
    return f"{brief(str(path))} is neither a YAML file nor key=value"


def setting(word: str) -> tuple[str, Any]:
    """Key and value of a `key=value` word, under the name that the key has here."""
    typed, equals, text = word.partition("=")
    typed = typed.strip().lstrip("-").replace("-", "_")
    if not equals or not typed:
        raise BadInput(f"{brief(word)} is not of the form key=value")
    key = RENAMED.get(typed) or _canonical(typed)
    if typed in RENAMED:
        warnings.warn(f"{typed} is now called {key}", FutureWarning, stacklevel=2)
    if _types(Experiment).get(key) is str:
        return key, text  # the name of a file or a folder, as it was typed
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        value = text
    return key, _meant_as(typed, text if value is None and text not in ("null", "~") else value)


def is_section(word: str) -> bool:
    """Whether a word sets a field of one of an experiment's own sections, as local.epochs=2 does."""
    section, _, name = setting(word)[0].partition(".")
    kind = _types(Experiment).get(section)
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and name in _types(kind)


def _canonical(key: str) -> str:
    """What a key is called here; one that other tools call by another name may have fields, too."""
    words = levels(key.removeprefix("execution."))
    for count in range(len(words), 0, -1):
        if (name := ".".join(words[:count])) in ALIASES:
            return ".".join([ALIASES[name], *words[count:]])
    return ".".join(words)


def _meant_as(key: str, value: Any) -> Any:
    """join_ratio=1 is everyone, while cohort=1 is one client."""
    return float(value) if key in RATIOS and type(value) is int else value


def merged(raw: dict[str, Any], pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Settings laid over others. Short keys first: `algorithm.mu=1 algorithm=fedprox` means the same in any order."""
    for key, value in sorted(((str(key), value) for key, value in pairs), key=lambda pair: pair[0].count(".")):
        _put(raw, key, value)
    return raw


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. A part named by a word, or a list of parts, becomes a dictionary when a field of it is set."""
    *parents, last = levels(key)
    for parent in parents:
        inner = raw.get(parent)
        raw[parent] = dict(inner) if isinstance(inner, dict) else {} if inner is None else {"is": inner}
        raw = raw[parent]
    before = raw.get(last)
    if isinstance(value, dict) and "is" not in value and before is not None:
        value = {**(before if isinstance(before, dict) else {"is": before}), **value}
    raw[last] = value


def _with_owners(raw: dict[str, Any]) -> dict[str, Any]:
    """Data that lies apart by client stays apart, and nobody has to count its clients, unless it is said otherwise."""
    asked = raw.get("partition")
    fields = {} if asked is None else asked if isinstance(asked, dict) else {"is": asked}
    if "data" not in raw or not ("is" in fields or fields.keys() <= _types(ByUser).keys()):
        return raw
    partition = resolve(Partition, {"is": "by_user", **fields}, "partition")
    if not isinstance(partition, ByUser) or ("is" in fields and "clients" in raw):
        return raw
    try:
        owners = resolve(DataSource, raw["data"], "data", Experiment.data).owners()
    except BadInput:  # said when it is resolved or loaded; who prepares a deployment need not have the data
        return raw
    if not owners:
        return raw
    counted: dict[str, Any] = {} if "clients" in raw else {"clients": owners}
    if counted and owners < Experiment.cohort.size(sys.maxsize):  # nobody has chosen either number
        counted["cohort"] = "everyone"
    return {**counted, **raw, "partition": partition}


# ---- resolving ----
def resolve(kind: Any, value: Any, path: str = "", default: Any = None) -> Any:
    """A value of this type from plain data, or one sentence about what is wrong with it."""
    kinds = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType) and types.NoneType in kinds:
        if value is None or (isinstance(value, str) and value.lower() in ("", "none")):
            return None
        given = functools.reduce(operator.or_, (k for k in kinds if k is not types.NoneType))
        return resolve(given, value, path, default)
    if typing.get_origin(kind) is tuple and kinds[-1] is ...:
        return _parts(kinds[0], value, path) if kinds[0] in REGISTRIES else _scalar(kind, _listed(value), path)
    if kind in REGISTRIES:
        return _part(kind, value, path, default)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _checked(value, path) if isinstance(value, kind) else _dataclass(kind, value, path)
    return _scalar(kind, value, path)


def _part(kind: type, value: Any, path: str, default: Any = None, listed: bool = False) -> Any:
    """One of a registry's classes, or one of the user's own."""
    if _is_part(value, kind):
        return _checked(value, path)
    fields = dict(value) if isinstance(value, dict) else {"is": value}
    name = fields.pop("is", None)
    if name is None and not _is_part(default, kind):
        raise BadInput(f"{path} has no name, only {', '.join(map(str, fields))}; {nearest('', REGISTRIES[kind])}")
    name = _name(type(default)) if name is None else name
    name, implied = (name, {}) if strangers_may_name() is not None else _shorthand(kind, name, path)
    cls = _class(kind, name, path)
    return _dataclass(cls, merged(implied, fields.items()), f"{path}.{name}" if listed else path, str(name))


def _parts(kind: type, value: Any, path: str) -> tuple:
    """Parts in order: `a,b`, a list, {a: {field: value}, b: {}}, or names with fields beside them, as words do."""
    if isinstance(value, dict):
        fields = {name: inner for name, inner in value.items() if name != "is"}
        named = [part if isinstance(part, dict) else {"is": part} for part in _listed(value.get("is", [*fields]))]
        if len(named) == 1 and not fields.keys() & {*REGISTRIES[kind], named[0].get("is")}:
            fields = {named[0].get("is"): fields}  # uplink=topk uplink.share=0.1
        known = [part.get("is") for part in named]
        named += [{"is": name} for name in fields if name not in known]
        for name, inner in fields.items():
            if not isinstance(inner, dict | None):
                has = ", ".join(_types(_class(kind, name, path))) or "no settings"
                raise BadInput(f"{path}.{name} is {brief(inner)}, but it should be one of its settings: {has}")
        value = [{**part, **(fields.get(part.get("is")) or {})} for part in named]
    return tuple(_part(kind, part, path, listed=True) for part in _listed(value))


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip().lower() not in ("", "none")]
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _shorthand(kind: type, name: Any, path: str) -> tuple[Any, dict[str, Any]]:
    """What people type for short: a number of clients, a file, a class, X+ft, a method's preset as METHOD/PRESET."""
    if kind is Cohort and isinstance(name, int | float) and not isinstance(name, bool):
        return ("uniform", {"count": name}) if isinstance(name, int) else ("fraction", {"share": name})
    if not isinstance(name, str):
        return name, {}
    if kind is Recipe:
        name = FORMERLY.get(name.lower().replace("-", "_"), name)
    if kind is Recipe and name.lower().endswith("+ft"):
        return "finetune", {"base": name[:-3]}
    if kind is Recipe and "/" in name and ":" not in name:
        method, _, preset = name.partition("/")
        return method, _preset(method, preset.lower(), path)
    if kind is Model and ":" in name:
        return "custom", {"path": name}
    if kind is Partition and name.endswith(".json"):
        return "file", {"path": name}
    if kind is DataSource and (source := OWN_FILES.get(Path(name).suffix.lower())):
        return source, {"path": name}
    return name, {}


def _preset(method: str, preset: str, path: str) -> dict[str, Any]:
    """Settings that a method's file has under a name."""
    known = getattr(_class(Recipe, method, path), "presets", {})
    if preset not in known:
        said = nearest(preset, known) if known else "it has its defaults alone"
        raise BadInput(f"{path} {method} has no preset {brief(preset)}; {said}")
    return dict(known[preset])


def _class(kind: type, name: Any, path: str) -> type:
    registry = REGISTRIES[kind]
    if isinstance(name, str):
        spelled = {known.replace("_", ""): known for known in registry}
        if known := spelled.get(name.lower().replace("-", "").replace("_", "")):
            return registry[known]
        allowed = strangers_may_name()
        if ":" in name and (allowed is None or name in allowed):
            return _imported(kind, name, path)
    raise BadInput(f"{path} {brief(name)} is unknown; {nearest(str(name), registry)}")


def _imported(kind: type, name: str, path: str) -> type:
    """A class of the user's own, as module:Class."""
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # last, so that it hides nothing; worker processes look there, too
        sys.path.append(here)
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:  # the user's module may raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise BadInput(f"{path} {brief(name)} cannot be imported: {reason}") from None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and _fits(found, kind)):
        base = "Algorithm" if kind is Recipe else kind.__name__
        raise BadInput(f"{path} {brief(name)} is not a frozen dataclass derived from {base}")
    return found


def _is_part(value: Any, kind: type | None = None) -> bool:
    return any(_fits(type(value), each) for each in ([kind] if kind else REGISTRIES))


def _fits(cls: type, kind: type) -> bool:
    return hasattr(cls, "stages") if kind is Recipe else issubclass(cls, kind)


def _name(cls: type) -> str:
    return _names().get(cls) or f"{cls.__module__}:{cls.__qualname__}"


@functools.lru_cache(maxsize=1)
def _names() -> dict[type, str]:
    return {part: name for registry in REGISTRIES.values() for name, part in registry.items()}


# ---- fields ----
def _dataclass(kind: type, raw: Any, path: str, name: str = "") -> Any:
    known, prefix = _types(kind), f"{path}." if path else ""
    if not isinstance(raw, dict):
        raise BadInput(f"{path} is {brief(raw)}, but it should have fields such as {', '.join(known)}")
    raw = _flat(raw) if kind is Experiment else raw
    raw = {RENAMED.get(f"{prefix}{key}", f"{prefix}{key}").rpartition(".")[2]: value for key, value in raw.items()}
    for key in raw:
        if key not in known:
            owner = f" of {name}" if name else ""
            raise BadInput(f"unknown key {prefix}{key}{owner}; {_meant(kind, prefix, str(key))}")
    parts = (kind, Execution) if kind is Experiment else (kind,)
    defaults = {f.name: f.default for part in parts for f in dataclasses.fields(part)}
    found = {k: resolve(known[k], v, f"{prefix}{k}", defaults[k]) for k, v in raw.items()}
    required = (f.name for f in dataclasses.fields(kind) if f.init and _is_required(f))
    if lacking := next((name for name in required if name not in found), None):
        raise BadInput(f"{prefix}{lacking} is missing")
    if kind is Experiment:
        found["execution"] = Execution(**{k: found.pop(k) for k in _types(Execution) if k in found})
    return kind(**found)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _checked(value: Any, path: str) -> Any:
    return _dataclass(type(value), _fields(value), path)


def _fields(value: Any) -> dict[str, Any]:
    """Fields by name; those of an experiment's execution are its own, as they are typed."""
    found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return _flat(found) if isinstance(value, Experiment) else found


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """Settings with those of a section `execution` beside the others."""
    section = raw.get("execution", {})
    inner = _fields(section) if isinstance(section, Execution) else section
    if not isinstance(inner, dict):
        raise BadInput(f"execution is {brief(inner)}, but it should have fields such as {', '.join(_types(Execution))}")
    return {**{key: value for key, value in raw.items() if key != "execution"}, **inner}


def _meant(kind: type, prefix: str, key: str) -> str:
    """A closing half-sentence: where this key belongs, or the nearest one that belongs here."""
    word = SYNONYMS.get(key, key)
    if alias := ALIASES.get(f"{prefix}{key}") or ALIASES.get(f"{prefix}{word}"):
        return f"did you mean {alias!r}?"
    registry = next((registry for registry in REGISTRIES.values() if kind in registry.values()), {})
    if owners := [name for name, part in registry.items() if key in _types(part)]:
        return f"it belongs to {', '.join(owners)}"
    here = {name: f"{prefix}{name}" for name in _types(kind)}
    if alike := [place for name, place in here.items() if word in (name, *name.split("_"))]:
        return f"did you mean {alike[0]!r}?"
    # To a part's settings those of another kind of part are nothing: uplink.dp has no use for algorithm.epsilon.
    if elsewhere := [place for place in _places(of_parts=not registry) if place.rpartition(".")[2] in (key, word)]:
        return f"did you mean {elsewhere[0]!r}?"
    near = here if prefix else {**ALIASES, **here}
    if close := difflib.get_close_matches(key.lower(), near, n=1, cutoff=0.5):
        return f"did you mean {near[close[0]]!r}?"
    return f"known are {', '.join(here.values())}" if here else "it has no settings"


@functools.lru_cache(maxsize=2)
def _places(of_parts: bool) -> list[str]:
    """Every dotted key that all experiments have, or some because of their parts; short ones first."""

    def below(kind: Any, prefix: str) -> Iterator[str]:
        for name, inner in _types(kind).items():
            yield f"{prefix}{name}"
            for part in REGISTRIES.get(inner, {}).values() if of_parts else ():
                yield from (f"{prefix}{name}.{field}" for field in _types(part))
            if inner not in REGISTRIES and dataclasses.is_dataclass(inner):
                yield from below(inner, f"{prefix}{name}.")

    return sorted(below(Experiment, ""), key=lambda place: place.count("."))


def _scalar(kind: Any, value: Any, path: str) -> Any:
    allowed = strangers_may_name()
    if allowed is not None and value not in ("", [], None, *allowed) and is_text(kind):
        raise BadInput(f"{path} is a text, and a contract has names and numbers alone")
    if kind is str and isinstance(value, Located):
        return value
    if isinstance(value, bool) and (typing.get_args(kind) or (kind,))[0] in (int, float):
        raise BadInput(f"{path} is {str(value).lower()}, but it should be a number")
    if isinstance(value, bool) and str(value).lower() in typing.get_args(kind):
        return str(value).lower()  # target=true is a name there; YAML takes it for an answer
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        what = error.errors()[0]["msg"].replace("Input should", "it should").replace("Value error, ", "")
        answer = "true, false or auto" if "auto" in str(kind) else "true or false"
        what = re.sub(", (unable to|got a number with) .*", "", what).replace("a valid boolean", answer)
        raise BadInput(f"{path} is {brief(value)}, but {what[0].lower()}{what[1:]}") from None


@functools.lru_cache(maxsize=512)
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


@functools.lru_cache(maxsize=512)
def _types(kind: type) -> dict[str, Any]:
    """Of what type each setting is."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}
    if kind is Experiment:
        del found["execution"]
        found |= _types(Execution)
    return found
