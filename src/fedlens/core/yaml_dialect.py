"""The YAML of configurations: read by the rules of YAML 1.2, written so that both versions read it alike."""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from .errors import BadInput, brief
from .files import read_bytes

MOST = 256 << 10  # bytes of a configuration; every key of an experiment fits into two thousand
_DEEP, _NODES, _DIGITS = 32, 50_000, 40  # levels; values, each as often as aliases repeat it; digits of a whole number


def levels(key: str) -> list[str]:
    """The words of a dotted key, which may nest no deeper than YAML may."""
    if (words := key.split("."))[_DEEP:]:
        raise BadInput(f"{brief(key)} is nested more than {_DEEP} levels deep")
    return words


class Loader(yaml.SafeLoader):
    """Scalars as in YAML 1.2: 1e-3 is a number; dates, yes, no, 010 and 1:30 are text. A key may be set once.

    What is nested deeply, or would grow by aliases, is refused before it is built.
    """

    yaml_implicit_resolvers: ClassVar = {}

    def __init__(self, text: str):
        super().__init__(text)
        self._open: list[str | None] = []  # anchors of the values around this one
        self._sizes: dict[str, int] = {}  # anchor -> values in it
        self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        before = self._count
        if self.check_event(yaml.AliasEvent):
            if event.anchor in self._open:
                raise _refused(f"*{event.anchor} is inside of what it stands for", event)
            self._count += self._sizes.get(event.anchor, 0)
        self._count += 1
        if self._count > _NODES:
            raise _refused(f"it has more than {_NODES:,} values", event)
        if len(self._open) >= _DEEP:
            raise _refused(f"it is nested more than {_DEEP} levels deep", event)
        self._open.append(None if self.check_event(yaml.AliasEvent) else event.anchor)
        node = super().compose_node(parent, index)
        if anchor := self._open.pop():
            self._sizes[anchor] = self._count - before
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        keys: set[str] = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is set twice", node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > _DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number has {len(node.value):,} digits, and {_DIGITS} are allowed", node.start_mark
            )
        return super().construct_yaml_int(node)


def _refused(why: str, event: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(None, None, why, event.start_mark)


def read_yaml(path: Path) -> Any:
    """What a YAML file says. yaml.YAMLError or ValueError, in words, where it is none; OSError where there is none."""
    return parse_yaml(read_bytes(path, MOST).decode("utf-8"))


def parse_yaml(text: str) -> Any:
    """What a text says; yaml.YAMLError where it is not YAML."""
    if len(text) < 20_000:
        return copy.deepcopy((_parse_value if len(text) < 200 else _parse_file)(text))
    return _parse(text)


def _parse(text: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except (ValueError, LookupError, TypeError, AttributeError):  # such as `!!int x` makes PyYAML raise
        raise yaml.YAMLError("a value is not of the type that its tag names") from None


_parse_value = lru_cache(2048)(_parse)  # of values as they are typed: grids of runs ask for the same ones many times
_parse_file = lru_cache(64)(_parse)  # of runs' settings, which a run's report and a comparison read again


class Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would take for something else."""


_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
for _loader, _tag, _pattern, _first in (
    (Loader, "bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (Loader, "null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    (Loader, "int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (Loader, "float", _FLOAT, "-+.0123456789"),
    (Loader, "float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    (Loader, "merge", r"<<", "<"),
    (Dumper, "float", _FLOAT, "-+.0123456789"),
):
    _loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
for _tag in ("binary", "timestamp", "omap", "pairs", "set"):  # no setting is one of these, and JSON has none
    del Loader.yaml_constructors[f"tag:yaml.org,2002:{_tag}"]
