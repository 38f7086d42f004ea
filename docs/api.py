"""Writes the API pages, from the type hints and docstrings of everything in `fedlens.__all__`.

python docs/api.py            writes docs/api.md and docs/api-experiment.md
python docs/api.py --check    only says whether one is stale, by its exit code
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fedlens
from cards import comments, table

HERE = Path(__file__).parent
MADE = "<!-- made by `python docs/api.py` from the code: change that -->"
SETTINGS = ("Experiment", "LocalTraining", "Evaluation", "Execution")  # on a page of their own
TOP = """You will find what `import fedlens` runs, loads and returns, with its types. Settings of an experiment have a
[page of their own](api-experiment.md). How to use them: [from Python](python.md),
[use your model](use-your-model.md)."""
TOP_SETTINGS = """You will find every setting of an experiment, with its type and default. What runs one and what comes
back: [API](api.md). How to use them: [from Python](python.md)."""


def pages() -> dict[Path, str]:
    """Both pages: each public name is on one of them."""
    names = [name for name in fedlens.__all__ if not name.startswith("__")]
    rest = [name for name in names if name not in SETTINGS]
    return {
        HERE / "api.md": page("API", TOP, rest),
        HERE / "api-experiment.md": page("API: settings of an experiment", TOP_SETTINGS, SETTINGS),
    }


def page(title: str, top: str, names: Iterable[str]) -> str:
    parts = [f"# {title}", MADE, top]
    for name in names:
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
    texts = pages()
    if "--check" in sys.argv:
        stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
        if stale:
            raise SystemExit(f"docs/{' and docs/'.join(stale)} stale: python docs/api.py")
        return
    for path, text in texts.items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
