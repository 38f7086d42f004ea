"""The floor plan holds: who imports whom, where a method may be named, and how large a thing may be.

The floors and the drawing of the import graph are those of docs/architecture.py. An entry of PENDING is known and to be
mended; one that is mended has to leave the list.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlens.algorithms import ALGORITHMS
from scripts import script

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedlens"
plan = script("docs/architecture.py")

# FedAvg is the default; "local" and "finetune" are words of every method's settings.
METHODS = {*ALGORITHMS} - {"fedavg", "local", "finetune"}
MAY_NAME = {"models", "models.pse_net"}  # networks named after papers
PENDING: set[str] = set()


# ---- what is amiss in a package --------------------------------------------------------------------------------------
def upward(source: Path, package: str) -> Iterator[str]:
    for each in plan.imports(source, package):
        if not each.by or each.by == "__main__" or plan.room(each.by) == plan.room(each.of):
            continue
        if not each.of:  # the package itself: its version number
            if plan.room(each.by) == "core":
                yield f"{each.by} imports the package"
        elif plan.floor(each.of) >= plan.floor(each.by):
            yield f"{each.by} imports {each.of}"


def cycles(source: Path, package: str) -> Iterator[str]:
    """Each set of modules that reach each other."""
    graph = defaultdict(set)
    for each in plan.imports(source, package):
        if each.by and each.of:
            graph[each.by].add(each.of)

    def reached(start: str) -> set[str]:
        found, todo = set(), [start]
        while todo:
            for other in graph[todo.pop()] - found:
                found.add(other)
                todo.append(other)
        return found

    reach = {module: reached(module) for module in list(graph)}
    rings = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in reach if a in reach[a]}
    for ring in sorted(map(sorted, rings)):
        yield f"cycle of {', '.join(ring)}"


def words(tree: ast.Module) -> Iterator[str]:
    """Identifiers and strings, without what only describes: docstrings."""
    described = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        if isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            yield node.value
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def named(source: Path, package: str) -> Iterator[str]:
    """Methods that a module knows by name, as one word of an identifier or of a string."""
    method = re.compile(rf"(?<![a-z])({'|'.join(sorted(METHODS))})(?![a-z])")
    for module, path in plan.modules(source).items():
        if module in MAY_NAME or plan.room(module) in ("algorithms", "papers"):
            continue
        found = set()
        for word in words(plan.parsed(path.read_text("utf-8"))):
            split = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word)  # OfficialSPATL
            found |= {*method.findall(word.lower()), *method.findall(split.lower())}
        yield from (f"{module} names {one}" for one in sorted(found))


def large(source: Path, package: str) -> Iterator[str]:
    if len(root := [*source.glob("*.py")]) > 6:
        yield f"{len(root)} modules at the root"
    for module, path in plan.modules(source).items():
        text = path.read_text("utf-8")
        if text.count("\n") > 450:
            yield f"{module} has more than 450 lines"
        for node in ast.walk(plan.parsed(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60:
                yield f"{module}.{node.name} has more than 60 lines"


def twice(source: Path, package: str) -> Iterator[str]:
    homes = defaultdict(list)
    for module, path in plan.modules(source).items():
        for node in plan.parsed(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    yield from (f"class {name} in {' and '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1)


RULES = (upward, cycles, named, large, twice)


def amiss(source: Path, package: str = "fedlens") -> set[str]:
    return {one for rule in RULES for one in rule(source, package)}


# ---- our own ---------------------------------------------------------------------------------------------------------
def test_the_library_keeps_to_the_plan():
    found = amiss(SOURCE)
    assert sorted(found - PENDING) == [], "new"
    assert sorted(PENDING - found) == [], "mended: take these from PENDING"


def test_every_room_has_its_floor():
    rooms = {plan.room(module) for module in plan.modules(SOURCE)} - {"", "__main__"}
    assert rooms == {room for floor in plan.FLOORS for room in floor}


# ---- what is planted is found ----------------------------------------------------------------------------------------
HOUSE = {
    "__init__.py": '__version__ = "1"\n',
    "core/__init__.py": "",
    "core/tree.py": "class Tree: ...\n",
    "core/run.py": "from .tree import Tree\n",
    "algorithms/__init__.py": "from ..core.run import Tree\nALGORITHMS = {'scaffold': Tree}\n",
    "simulate/__init__.py": '"""Runs SCAFFOLD, too."""\n\ndef run():\n    from ..algorithms import ALGORITHMS\n',
    "papers/__init__.py": "from ..simulate import run\n",
    "cli/main.py": "from .. import __version__\nfrom ..papers import run\n",
}


def built(place: Path, **planted: str) -> Path:
    for name, text in {**HOUSE, **{name.replace("__", "/") + ".py": text for name, text in planted.items()}}.items():
        (file := place / "small" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return place / "small"


def test_a_house_in_order(tmp_path):
    assert amiss(built(tmp_path), "small") == set()


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (
            {"core__tree": "from .run import Tree\n"},
            {"cycle of core.run, core.tree"},
        ),
        (
            {"core__tree": "def late():\n    from .run import Tree\n    return Tree\n"},
            {"cycle of core.run, core.tree"},
        ),
        (
            {"core__run": "from .tree import Tree\ndef step():\n    from ..simulate import run\n    return run\n"},
            {"core.run imports simulate", "cycle of algorithms, core.run, simulate"},
        ),
        ({"core__rng": "from .. import __version__\n"}, {"core.rng imports the package"}),
        ({"simulate__panel": "import small.papers\n"}, {"simulate.panel imports papers"}),
        ({"report__page": "from ..ui import server\n", "ui__server": ""}, {"report.page imports ui.server"}),
        ({"simulate__panel": "x = 'as spatl does'\n"}, {"simulate.panel names spatl"}),
        ({"simulate__panel": "class OfficialSPATL: ...\n"}, {"simulate.panel names spatl"}),
        ({"simulate__panel": "def fedprox_term(): ...\n"}, {"simulate.panel names fedprox"}),
        ({"simulate__panel": "class Tree: ...\n"}, {"class Tree in core.tree and simulate.panel"}),
        ({"simulate__panel": "x = 1\n" * 451}, {"simulate.panel has more than 450 lines"}),
        (
            {"simulate__panel": "def f():\n" + "    x = 1\n" * 60},
            {"simulate.panel.f has more than 60 lines"},
        ),
        ({name: "" for name in "abcdef"}, {"7 modules at the root"}),
    ],
)
def test_what_is_planted_is_found(planted, said, tmp_path):
    assert amiss(built(tmp_path, **planted), "small") == said
