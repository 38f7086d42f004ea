"""Writes docs/api.md, from the type hints and docstrings of everything in `fedlens.__all__`.

python docs/api.py            writes it
python docs/api.py --check    only says whether it is stale, by its exit code
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import fedlens
from cards import comments, table

PAGE = Path(__file__).parent / "api.md"
MADE = "<!-- made by `python docs/api.py` from the code: change that -->"
TOP = """You will find every name that `import fedlens` has, with its types and what it does. How to use them:
[from Python](python.md), [use your model](use-your-model.md)."""


def page() -> str:
    parts = ["# API", MADE, TOP]
    for name in fedlens.__all__:
        if not name.startswith("__"):
            parts += described(name, getattr(fedlens, name))
    return "\n\n".join(parts) + "\n"


def described(name: str, value: Any) -> list[str]:
    """A heading, the signature, the docstring, and fields or methods."""
    if not own_text(value) or undocumented(value):
        raise SystemExit(f"fedlens.{name} lacks a docstring or type hints: {', '.join(undocumented(value)) or name}")
    parts = [f"## {name}"]
    if not inspect.isclass(value):
        return [*parts, f"```\n{name}{signature(value)}\n```", text_of(value)]
    parts.append(text_of(value))
    if dataclasses.is_dataclass(value):
        notes = comments(value)
        rows = [
            [
                f"`{f.name}`",
                f"`{shown(f.type)}`",
                default(f),
                notes.get(f.name, "").partition("]  ")[2] or notes.get(f.name, ""),
            ]
            for f in dataclasses.fields(value)
        ]
        parts.append(table(["field", "type", "default", "what it is"], rows))
    elif hasattr(value, "_fields"):
        rows = [[f"`{field}`", f"`{shown(value.__annotations__[field])}`"] for field in value._fields]
        parts.append(table(["field", "type"], rows))
    for method, of in methods(value).items():
        parts += [f"`{name}.{method}{signature(of)}`" if callable(of) else f"`{name}.{method}`", text_of(of)]
    return parts


def own_text(value: Any) -> bool:
    """Whether somebody wrote its docstring: dataclasses without one get their signature."""
    return not (inspect.getdoc(value) or f"{value.__name__}(").startswith(f"{value.__name__}(")


def methods(value: type) -> dict[str, Any]:
    """Public ones of its own, with a docstring."""
    own = {name: each for name, each in vars(value).items() if not name.startswith("_")}
    own = {name: each for name, each in own.items() if inspect.isfunction(each) or isinstance(each, property)}
    return {name: each for name, each in own.items() if inspect.getdoc(each)}


def undocumented(value: Any) -> list[str]:
    """Parameters and results without a type hint, of a function or of a class's own methods."""
    found = []
    functions = {"": value} if inspect.isfunction(value) else {k: v for k, v in methods(value).items() if callable(v)}
    for name, each in functions.items():
        hints = inspect.signature(each)
        found += [
            f"{name}({p.name})" for p in hints.parameters.values() if p.name != "self" and p.annotation is p.empty
        ]
        found += [f"{name}() ->"] if hints.return_annotation is hints.empty else []
    return found


def signature(value: Any) -> str:
    return re.sub(r"'([^']*)'", r"\1", str(inspect.signature(value))).replace("(self, ", "(").replace("(self)", "()")


def text_of(value: Any) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(value) or "").split("\n\n"))


def shown(kind: Any) -> str:
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    return text.replace("|", "or").replace("DataField", "DataSource").replace("ModelField", "Model")


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
        return f"`{type(value).__name__.lower()}`" if dataclasses.is_dataclass(value) else f"`{value!r}`"
    return "needed" if field.default_factory is dataclasses.MISSING else "empty"


def main() -> None:
    text = page()
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text("utf-8") != text:
            raise SystemExit("docs/api.md is stale: python docs/api.py")
        return
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
