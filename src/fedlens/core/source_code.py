"""The source of a class or a function with all that it needs, as one file that imports installed packages alone."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import sys
import sysconfig
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PLAIN = (int, float, str, bytes, bool, complex, type(None))
_KEPT_IN_ANNOTATIONS = ("ClassVar", "InitVar")  # dataclasses look for these, though annotations stay texts


class NoSource(Exception):
    """Why something cannot be written down as source, in words."""


def standalone(*roots: Any, stand_ins: Mapping[str, str] | None = None) -> str:
    """Python source that defines all roots under their own names; refused by NoSource where a part has no source.

    `stand_ins`: a line in place of a definition, by "module:name" or by "module:".
    """
    gathered = _Gathered(stand_ins or {})
    for root in roots:
        gathered.add(root)
    lines = ["from __future__ import annotations", "", *sorted(gathered.imports), "", ""]
    return "\n".join(lines) + "\n\n\n".join(gathered.parts) + "\n"


class _Gathered:
    """Definitions in the order in which they can be run."""

    def __init__(self, stand_ins: Mapping[str, str]):
        self.stand_ins = stand_ins
        self.imports: set[str] = set()
        self.parts: list[str] = []
        self.homes: dict[str, str] = {}  # name -> the module it is from
        self.begun: set[str] = set()

    def add(self, made: Any) -> None:
        name, home = getattr(made, "__name__", ""), getattr(made, "__module__", "")
        if not name.isidentifier() or getattr(made, "__qualname__", name) != name:
            raise NoSource(f"{getattr(made, '__qualname__', repr(made))} is defined inside a function, or has no name")
        if free := getattr(getattr(made, "__code__", None), "co_freevars", ()):
            raise NoSource(f"{name} uses {', '.join(free)} of the function around it")
        if self._known(name, home):
            return
        if line := self.stand_ins.get(f"{home}:{name}") or self.stand_ins.get(f"{home}:"):
            self._stand_in(name, line)
            return
        text = _source(made)
        self._needs(ast.parse(text), home)
        self.parts.append(text.rstrip())

    def _known(self, name: str, home: str) -> bool:
        if self.homes.setdefault(name, home) != home:
            raise NoSource(f"{self.homes[name]} and {home} both define {name}")
        if name in self.begun:  # a class may name itself, and two functions each other
            return True
        self.begun.add(name)
        return False

    def _stand_in(self, name: str, line: str) -> None:
        self.imports |= {"from torch import nn"} if "nn." in line else set()
        self.parts.append(line.format(name=name))

    def _needs(self, tree: ast.Module, home: str) -> None:
        around = vars(sys.modules[home]) if home in sys.modules else {}
        for name in _names(tree):
            if name in around and not (hasattr(builtins, name) and around[name] is getattr(builtins, name)):
                self._name(name, around[name], home)

    def _name(self, name: str, value: Any, home: str) -> None:
        if isinstance(value, types.ModuleType):
            if is_own(value.__name__):
                raise NoSource(f"{home} uses the whole module {value.__name__}: import names from it")
            self.imports.add(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
            return
        origin, own_name = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if isinstance(value, type | types.FunctionType) and isinstance(origin, str) and isinstance(own_name, str):
            if not is_own(origin):
                self._import(origin, own_name, name, value)
                return
            self.add(value)
            if own_name != name:
                self._assign(name, f"{name} = {own_name}", home)
            return
        if (line := _assignment(home, name)) is not None:
            self._assign(name, line, home)
        elif where := _imported_from(home, name):
            self._import(where[0], where[1], name, value)
        elif _is_plain(value):
            self._assign(name, f"{name} = {value!r}", home)
        else:
            raise NoSource(f"{name} of {home} is a {type(value).__name__}, which has no source")

    def _assign(self, name: str, line: str, home: str) -> None:
        if not self._known(name, f"{home}:{name}"):
            self._needs(ast.parse(line), home)
            self.parts.append(line)

    def _import(self, origin: str, own_name: str, name: str, value: Any) -> None:
        if is_own(origin):
            if line := self.stand_ins.get(f"{origin}:"):
                self._assign(name, line.format(name=name), origin)
                return
            self._name(name if own_name == name else own_name, value, origin)
            return
        found = getattr(sys.modules.get(origin), own_name, None)
        if found is not value:
            raise NoSource(f"{origin} has no {own_name} to import")
        self.imports.add(f"from {origin} import {own_name}" + ("" if own_name == name else f" as {name}"))


def is_own(module: str) -> bool:
    """Whether a module is neither of the standard library nor an installed package but this one: it travels along."""
    top = module.partition(".")[0]
    if top in (__name__.partition(".")[0], "__main__"):
        return True
    if top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    paths = sysconfig.get_paths()
    return bool(file) and not any(Path(file).is_relative_to(paths[kind]) for kind in ("purelib", "platlib", "stdlib"))


def _names(tree: ast.AST) -> dict[str, None]:
    """Names that are read, in order; annotations stay texts and need none of theirs but a few."""
    found: dict[str, None] = {}

    def visit(node: ast.AST, annotation: bool = False) -> None:
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""
        if name and (not annotation or name in _KEPT_IN_ANNOTATIONS):
            found[name] = None
        for field, value in ast.iter_fields(node):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST):
                    visit(inner, annotation or field in ("annotation", "returns"))

    visit(tree)
    return found


def _targets(node: ast.AST) -> list[Any]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def _source(made: Any) -> str:
    try:
        text = _cell(made) or textwrap.dedent(inspect.getsource(made))
        body = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, IndexError):
        raise NoSource(f"{made.__name__} has no source that can be read") from None
    if len(body) != 1 or getattr(body[0], "name", None) != made.__name__:
        raise NoSource(f"{made.__name__} is not defined by a class or def of its own")
    return text


def _cell(made: Any) -> str:
    """The source of a class of a notebook, whose cells are no files: found through its methods."""
    files = {code.co_filename for each in vars(made).values() if (code := getattr(each, "__code__", None))}
    for lines in (linecache.getlines(file) for file in files if isinstance(made, type) and not Path(file).exists()):
        for node in ast.parse("".join(lines)).body:
            if isinstance(node, ast.ClassDef) and node.name == made.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno])
    return ""


@functools.lru_cache(maxsize=64)
def _tree(module: str) -> ast.Module | None:
    try:
        return ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError, KeyError):
        return None  # a notebook, say


def _assignment(module: str, name: str) -> str | None:
    """The line that gives a name of a module its value."""
    tree = _tree(module)
    for node in tree.body if tree else ():
        if any(getattr(target, "id", None) == name for target in _targets(node)):
            return ast.unparse(node)
    return None


def _imported_from(module: str, name: str) -> tuple[str, str] | None:
    """(module, name there) of something that a module imports by name."""
    tree, package = _tree(module), getattr(sys.modules.get(module), "__package__", "") or ""
    for node in (each for each in (tree.body if tree else ()) if isinstance(each, ast.ImportFrom)):
        for alias in node.names:
            if name == (alias.asname or alias.name):
                base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
                return ".".join([*base, *([node.module] if node.module else [])]), alias.name
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    return isinstance(value, _PLAIN)
