"""Writes docs/architecture.md and its picture from the code: `python docs/architecture.py`.

FLOORS is the floor plan: a room imports lower floors only. tests/test_floor_plan.py holds the code to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedlens"
FLOORS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("plots",),
    ("models", "attribution", "selection", "privacy", "robust", "devices", "data", "engines"),
    ("algorithms",),
    ("experiment",),
    ("config",),
    ("runs",),
    ("simulate",),
    ("audit", "explain", "compare", "recommend", "export", "flower"),
    ("league", "report"),
    ("ui",),
    ("papers",),
    ("cli",),
)
ABOUT = {
    "core": "hooks, trees, the round loop, messages, randomness",
    "models": "networks",
    "attribution": "saliency and relevance maps",
    "selection": "which filters to send: graph, agent, pruning",
    "privacy": "mechanisms, accounting, privacy.json",
    "robust": "attacks, robust aggregators, faults",
    "devices": "device profiles, simulated seconds",
    "data": "sources, partitions, cache",
    "engines": "where client hooks run",
    "plots": "one style for all figures",
    "algorithms": "one file per paper",
    "experiment": "an experiment as a value",
    "config": "YAML and key=value words",
    "runs": "run folders: write, read, compare, reuse",
    "simulate": "run, resume, observers, progress",
    "audit": "attacks on what a server received",
    "explain": "maps of what models look at",
    "compare": "methods on equal terms",
    "recommend": "which method to try first",
    "export": "models for use without this package",
    "flower": "the same run over real machines",
    "league": "which method wins, over many worlds",
    "report": "the HTML report",
    "ui": "the live page",
    "papers": "tables and figures of the four papers",
    "cli": "the commands",
}


class Import(NamedTuple):
    """Module `by` imports module `of` at this line; both dotted, below fedlens."""

    by: str
    of: str
    line: int


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module by its dotted name below the package; the package itself is the empty name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@lru_cache(1024)
def parsed(text: str) -> ast.Module:
    """A module's syntax tree; several rules read the same ones."""
    return ast.parse(text)


def imports(source: Path = SOURCE, package: str = "fedlens") -> Iterator[Import]:
    """All imports of the package's own modules, those inside functions too; not those for type checkers alone."""
    known = modules(source)
    for name, path in known.items():
        tree = parsed(path.read_text("utf-8"))
        typing_only = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) in typing_only:
                continue
            if isinstance(node, ast.Import):
                targets = [a.name.partition(".")[2] for a in node.names if a.name.partition(".")[0] == package]
            elif isinstance(node, ast.ImportFrom):
                targets = _targets(node, name, path.name == "__init__.py", known, package)
            else:
                continue
            yield from (Import(name, target, node.lineno) for target in targets if target != name)


def _targets(node: ast.ImportFrom, name: str, is_package: bool, known: dict[str, Path], package: str) -> list[str]:
    if node.level:
        here = name.split(".") if name else []
        here = here[: len(here) - node.level + is_package]
        base = [*here, *(node.module.split(".") if node.module else [])]
    elif node.module and node.module.partition(".")[0] == package:
        base = node.module.split(".")[1:]
    else:
        return []
    named = [".".join([*base, alias.name]) for alias in node.names]
    return list(dict.fromkeys(one if one in known else ".".join(base) for one in named))


def room(module: str) -> str:
    return module.partition(".")[0]


def floor(module: str) -> int:
    """The number of a module's floor; the package's own root stands above all."""
    return next((at for at, rooms in enumerate(FLOORS) if room(module) in rooms), len(FLOORS))


def picture() -> str:
    """The floors as an SVG, the lowest at the bottom."""
    width, height, gap, left = 1180, 62, 12, 16
    rows = FLOORS[::-1]
    whole = gap + len(rows) * (height + gap)
    shades = ("#dbe9f6", "#e4f2e0", "#fdf0d5", "#eeeeee")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" font-family="sans-serif">',
        f'<rect width="{width}" height="{whole}" fill="white"/>',
    ]
    for at, rooms in enumerate(rows):
        y = gap + at * (height + gap)
        wide = (width - 2 * left - gap * (len(rooms) - 1)) / len(rooms)
        for column, name in enumerate(rooms):
            x, middle = left + column * (wide + gap), left + column * (wide + gap) + wide / 2
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{height}" rx="8" '
                f'fill="{shades[at % 4]}" stroke="#56606e"/>'
            )
            parts.append(_text(middle, y + 22, name, 'font-size="15" font-weight="bold"'))
            for row, text in enumerate(_wrapped(ABOUT[name], int(wide / 7.2))[:2]):
                parts.append(_text(middle, y + 39 + 15 * row, text, 'font-size="12"'))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: int, text: str, font: str) -> str:
    return f'<text x="{x:.0f}" y="{y}" text-anchor="middle" {font}>{text}</text>'


def _wrapped(text: str, width: int) -> list[str]:
    rows = [""]
    for word in text.split():
        if rows[-1] and len(rows[-1]) + len(word) + 1 > width:
            rows.append(word)
        else:
            rows[-1] = f"{rows[-1]} {word}".strip()
    return rows


PAGE = """# Architecture

You will know where things live, who may call whom, and what happens in a run. `python docs/architecture.py` writes this
page from the code.

![The rooms of the package, floor by floor: core at the bottom, the command line at the top](images/architecture.svg)

A room imports lower floors only. `core` imports nothing of the package. Only `cli` imports `papers`.
`tests/test_floor_plan.py` draws the import graph, imports inside functions counted.
It fails on a cycle or an upward import.

{table}

## Three ideas

- An **algorithm** is a frozen dataclass of hyper-parameters with pure hooks. The defaults are FedAvg.
- Everything that moves or is remembered is a **Tree** of named tensors.
- An **engine** decides only where client hooks run and how many at a time.

The one file to read before writing a method: [core/algorithm.py](../src/fedlens/core/algorithm.py).

## The way of one `fedlens run`

1. `cli/run.py` reads words and files; `config` turns them into an `Experiment` or refuses with one sentence.
2. `simulate/run.py` loads the data, splits them, builds the network, and checks all of it before it writes anything.
3. `runs/folder.py` makes the run folder: configuration, passport, split.
4. An engine is chosen (`engines/`): `sequential`, `workers`, `lanes` or `ray`.
5. `core/run.py` is the round loop: `broadcast`, one job for the cohort, replies, `aggregate`.
6. `core/replies.py` decides which replies count.
7. Observers in `simulate/` evaluate, count bytes, account for privacy and write checkpoints after each round.
8. `runs/figure.py` draws the finished run; `report/` and `ui/` read the folder and nothing else.

## The way of one client's bytes in a deployment

1. `flower/server_app.py` starts the same session with `flower/engine.py` as its engine.
2. The engine sends the contract (`flower/contract.py`) and the download (`flower/messages.py`).
3. The door (`flower/door.py`) lets in signed calls of known keys. At the node the guard (`flower/guard.py`) takes them.
   `flower/identity.py` signs and checks every message; `flower/membership.py` is how nodes join.
4. `flower/node.py` checks the contract against the owner's policy and refuses what the owner did not allow.
5. `flower/client.py` runs the same client hooks as the simulator, with the node's own data and memory.
6. The upload passes the uplink transforms, is encoded by `core/wire.py`, and travels back.
7. `core/check.py` and `core/replies.py` refuse what is malformed, too large or late, before anything is averaged.

## Where to look

| question | place |
| --- | --- |
| what a method may do | `core/algorithm.py` |
| where a reply is refused | `core/check.py`, `core/replies.py` |
| where a damaged checkpoint is refused | `runs/checkpoints.py`: `load`, `at` |
| how a setting is parsed, and its sentence when it is wrong | `config.py` |
| where the report chooses its headline | `report/summary_text.py`: `told` |
| which rounds count as training | `runs/rounds.py` |
| where a server optimizer acts | `advance` in `core/algorithm.py`; `algorithms/fedavgm.py` |
| how a figure looks, which colour a method has | `plots/style.py`, `plots/methods.json` |
| what a paper reports | `papers/` |
| why something was decided so | [decisions](decisions.md) |
"""


def page() -> str:
    uses: dict[str, set[str]] = {}
    for one in imports():
        if room(one.of) and room(one.by) != room(one.of):
            uses.setdefault(room(one.by), set()).add(room(one.of))
    rows = ["| room | what it holds | imports |", "| --- | --- | --- |"]
    for name in (name for rooms in FLOORS for name in rooms):
        below = ", ".join(sorted(uses.get(name, ()), key=lambda other: (floor(other), other)))
        rows.append(f"| `{name}` | {ABOUT[name]} | {below or 'nothing'} |")
    return PAGE.format(table="\n".join(rows))


def main() -> None:
    (ROOT / "docs" / "architecture.md").write_text(page(), "utf-8")
    (ROOT / "docs" / "images" / "architecture.svg").write_text(picture(), "utf-8")


if __name__ == "__main__":
    main()
