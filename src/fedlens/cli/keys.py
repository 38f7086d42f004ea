"""`fedlens run --keys`: every key with its meaning, type, unit and default, from the fields and their comments."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from annotated_types import Ge, Gt, Le, Lt

from .. import config
from ..core.errors import BadInput, nearest
from ..core.located import PATHS
from ..experiment import Execution, Experiment

GROUPS = {  # in this order; the rest of an experiment's own fields come first
    "experiment": "what is run",
    "data": "which images",
    "auxiliary": "public images at the server",
    "partition": "who owns which images",
    "cohort": "who takes part in a round",
    "model": "the network",
    "algorithm": "the method",
    "local": "how clients train",
    "uplink": "what is done to uploads",
    "defences": "what the server does to uploads",
    "attack": "hostile clients",
    "policy": "whom a round asks, how long it waits, when it counts",
    "faults": "what goes wrong on the way",
    "evaluate": "when models are evaluated, and which",
    "execution": "where and how it is computed, and what is kept; results depend on device and precision alone",
}
LISTED = ("data", "partition", "model", "algorithm")  # so many names that they have a list of their own
OPTIONAL = ("uplink", "defences", "attack", "devices")  # none by default: keys only of those that are named
_UNITS = {"rounds", "epochs", "steps", "seconds", "clients", "images", "pixels", "processes", "features", "units"}
_UNITS |= {"dimensions", "channels", "heads", "GiB", "MiB", "Mbit/s", "GFLOP/s", "percent", "replies", "layers"}
_BOUNDS = {Ge: ("ge", "from {}"), Gt: ("gt", "above {}"), Le: ("le", "to {}"), Lt: ("lt", "below {}")}


class Key(NamedTuple):
    group: str
    key: str
    value: Any
    default: Any
    type: str
    unit: str
    meaning: str

    @property
    def line(self) -> str:
        """A word that can be typed, and a comment about it."""
        return f"{self.word}  # {self.meaning} [{self.about}]"

    @property
    def word(self) -> str:
        return f"{self.key}={shown(self.value)}"

    @property
    def about(self) -> str:
        unit = f", {self.unit}" if self.unit else ""
        return f"{self.type}{unit}; default {shown(self.default) or 'empty'}"

    def lines(self, width: int, indent: int) -> list[str]:
        """The same within so many columns, the comment from one column on; a long word has a line of its own."""
        told = [part for text in (self.meaning, f"[{self.about}]") for part in textwrap.wrap(text, width - indent - 2)]
        first = [self.word] if len(self.word) > indent - 2 else []
        words = ["", *[""] * len(told)] if first else [self.word, *[""] * len(told)]
        return [*first, *(f"{word:{indent}}# {part}" for word, part in zip(words, told, strict=False))]


def keys_of(experiment: Experiment) -> list[Key]:
    """Every key of this experiment, group by group."""
    rows = [*_walk(experiment, "", Experiment())]
    return [row for group in GROUPS for row in rows if row.group == group]


def chosen(words: list[str], experiment: Experiment) -> list[Key]:
    """The keys that are asked for: of a group, of a part such as fedprox or topk, or one by its name, as local.lr."""
    groups, single = [], []
    parts = _parts()
    for word in words:
        if word in GROUPS:
            groups.append(word)
        elif (name := word.partition("/")[0].removesuffix("+ft")) in parts:
            for key in parts[name]:
                experiment = _with(experiment, key, word)
                (groups if key in GROUPS else single).append(key)
        else:
            single.append(word)
    rows = keys_of(experiment)
    for word in single:
        if not any(_is_within(row.key, word) for row in rows):
            raise BadInput(f"--keys {word!r} is no group of keys; {nearest(word, [*GROUPS, *parts])}")
    if not words:
        return rows
    return [row for row in rows if row.group in groups or any(_is_within(row.key, word) for word in single)]


def _with(experiment: Experiment, key: str, word: str) -> Experiment:
    """With the part that the word names; beside those of a list."""
    part, before = config.resolve(_kinds()[key], word, key), getattr(experiment, key, None)
    if key in _hints(Execution):
        return experiment.with_execution(**{key: part})
    return dataclasses.replace(experiment, **{key: (*before, part) if isinstance(before, tuple) else part})


def names_of(key: str) -> list[str]:
    """What a key of an experiment's parts may be."""
    return sorted(config.REGISTRIES[_kinds()[key]])


def _is_within(key: str, word: str) -> bool:
    return key == word or key.startswith(f"{word}.")


def _parts() -> dict[str, list[str]]:
    """{name of a part: the keys that take it}; clip is one of uplink and one of defences."""
    found: dict[str, list[str]] = {}
    for key, kind in _kinds().items():
        for name in config.REGISTRIES[kind]:
            found.setdefault(name, []).append(key)
    return found


@cache
def _kinds() -> dict[str, Any]:
    """{key: the kind of its parts}; public images are of the same kind as data, and are left out."""
    hints = {**_hints(Experiment), **_hints(Execution)}
    inner = {
        key: next((kind for kind in (hint, *typing.get_args(hint)) if _is_kind(kind)), None)
        for key, hint in hints.items()
    }
    return {key: kind for key, kind in inner.items() if kind is not None and key != "auxiliary"}


def _is_kind(hint: Any) -> bool:
    return isinstance(hint, type) and hint in config.REGISTRIES


def _walk(owner: Any, prefix: str, usual: Any, group: str = "") -> Iterator[Key]:
    """`usual`: an owner of the same class with its defaults."""
    told, hints = meanings(type(owner)), _hints(type(owner))
    for field in dataclasses.fields(owner):
        value, name = getattr(owner, field.name), f"{prefix}{field.name}"
        if isinstance(value, Execution):
            yield from _walk(value, "", Execution(), "execution")
            continue
        mine = group or (field.name if field.name in GROUPS else "experiment")
        default, inside = getattr(usual, field.name, None), dataclasses.is_dataclass(value)
        if not inside or _is_part(value):
            kind = type_of(hints[field.name], field.name)
            about = kind, unit_of(told[field.name], kind), told[field.name]
            yield Key(mine, name, _plain(value), _plain(default), *about)
        for part in value if isinstance(value, tuple) else ():
            if _is_part(part):  # uplink.clip.norm
                yield from _walk(part, f"{name}.{_plain(part)}.", _usual(part, None), mine)
        if inside:
            yield from _walk(value, f"{name}.", _usual(value, default), mine)


def _is_part(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and "is" in config.to_dict(value)


def _plain(value: Any) -> Any:
    """A part is its name."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return config.to_dict(value)["is"] if _is_part(value) else config.to_dict(value)


def _usual(value: Any, default: Any) -> Any:
    if type(default) is type(value):
        return default
    try:
        return type(value)()
    except TypeError:  # a class of the user's own that has no defaults
        return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


@cache
def meanings(cls: type) -> dict[str, str]:
    """field -> what the comment beside or above it says; that of a base where a class has none of its own."""
    found = {field.name: "" for field in dataclasses.fields(cls)}
    for base in reversed(cls.__mro__):
        try:
            lines = inspect.getsource(base).splitlines() if dataclasses.is_dataclass(base) else []
        except (OSError, TypeError):  # made in an interpreter
            continue
        for at, line in enumerate(lines):
            if (field := re.match(r"    (\w+)\s*:", line)) and field[1] in found:
                found[field[1]] = _comment(lines, at) or found[field[1]]
    return found


def _comment(lines: list[str], at: int) -> str:
    """Beside a field, within its brackets, or in the lines above it."""
    if "#" in lines[at] and "# pyright:" not in lines[at]:
        return lines[at].partition("# ")[2]
    if lines[at].endswith("("):
        inside = lines[at + 1 : at + 3]
        return next((line.partition("# ")[2] for line in inside if "# " in line), "")
    above: list[str] = []
    while at and lines[at - 1].lstrip().startswith("# "):
        at -= 1
        above.insert(0, lines[at].strip().removeprefix("# "))
    return " ".join(above)


def type_of(hint: Any, name: str = "") -> str:
    """A type in words, with its bounds."""
    inner, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is typing.Annotated:
        bounds = [
            how.format(f"{getattr(b, at):g}")
            for b in inner[1:]
            for kind, (at, how) in _BOUNDS.items()
            if type(b) is kind
        ]
        return " ".join([type_of(inner[0], name), *bounds])
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, _literals(hint)))
    if origin in (typing.Union, types.UnionType):
        kinds = [type_of(kind, name) for kind in inner if kind is not types.NoneType]
        return " or ".join(kinds + ["none"] * (types.NoneType in inner))
    if origin is tuple:
        return f"a list: {type_of(inner[0], name)}"
    if hint is str and (name in PATHS or name == "out"):
        return "a file or folder"
    if hint in config.REGISTRIES:
        is_listed = hint in (_hints(Experiment)[key] for key in LISTED)
        return "a name" if is_listed else f"one of {', '.join(sorted(config.REGISTRIES[hint]))}"
    plain = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return plain.get(hint) or getattr(hint, "__name__", "a value")


def _literals(hint: Any) -> Iterator[Any]:
    """Also of literals within literals."""
    for each in typing.get_args(hint):
        yield from _literals(each) if typing.get_origin(each) is typing.Literal else [each]


def unit_of(meaning: str, kind: str) -> str:
    """The unit of a number: what its meaning begins with."""
    if "number" not in kind:
        return ""
    if kind.endswith("0 to 1") or re.search(r"\bshare\b", meaning):
        return "share"
    if kind.endswith("0 to 100"):
        return "%"
    first = re.split(r"[,;:(]", meaning)[0].split()[:2]
    return next((word for word in first if word in _UNITS and "of" not in first[: first.index(word)]), "")


def shown(value: Any) -> str:
    """As it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
