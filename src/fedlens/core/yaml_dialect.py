"""The YAML of configurations: read by the rules of YAML 1.2, written so that both versions read it alike."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml


class Loader(yaml.SafeLoader):
    """Scalars as in YAML 1.2: 1e-3 is a number; dates, yes, no, 010 and 1:30 are text. A key may be set once."""

    yaml_implicit_resolvers: ClassVar = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is set twice", node.start_mark)
        return super().construct_mapping(node, deep)


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
