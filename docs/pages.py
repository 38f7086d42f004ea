"""Writes verdicts and runs at the papers' own protocols into results/ and docs/papers.md, and what the league says.

python docs/pages.py            writes what stands between the marks of each page
python docs/pages.py --check    only says whether a page is stale, by its exit code

claims.yaml has the claims and our verdicts; results/data/evidence.json the runs (`benchmarks/evidence.py --collect`).
A new run fills its cells by itself; whether a verdict changes is for a reader of the numbers to say.
What docs/league.md and docs/choose.md say of the league is from results/data/league.json.
"""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedlens.league.again import checks
from fedlens.league.page import beside
from fedlens.league.standings import MEASURES, Standings
from fedlens.league.words import extent, findings, first
from fedlens.league.words import table as standings
from fedlens.papers.registry import reproducible

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
VERDICTS = ("holds", "holds partly", "not confirmed", "does not hold", "not tested")
STAND_IN = "model.weights=stand-in"
HEAD = ("claim", "protocol, run/paper", "paper", "ours", "verdict", "why")
SELECTORS = {"whole": "whole model", "agent": "agent, {updates} updates", "agent, spend, settle": "agent of `smaller`"}
SELECTORS |= {"by norm": "smallest norms", "uniform": "the same share of every layer"}
NETWORKS = {"resnet20": "ResNet-20", "resnet18 stand-in": "ResNet-18, stand-in weights"}  # of submodels.json
TOLD = "rounds", "local.epochs", "local.steps"  # of words over a row: their values have a column
AFTER = "cut out", "norms anew", "after an epoch"
LOOKS = "Global models: the mean of their last evaluations (`evaluate.last`), and the best one."
COSTS = ("value", 1), ("seconds", 0)  # of a run, with their digits
Runs = Mapping[tuple[str, ...], Sequence[Mapping[str, Any]]]


def runs() -> Runs:
    """Runs of all seeds under (table, row, column, words over it)."""
    file = RESULTS / "data" / "evidence.json"
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for cell in json.loads(file.read_text("utf-8")) if file.is_file() else []:
        found.setdefault((cell["table"], cell["row"], cell["column"], *cell["over"]), []).append(cell)
    return found


def filled(text: str, known: Runs) -> str:
    """With the numbers of cells in the place of their names; where none of them has run, no more than that."""
    named = re.findall(r"\{([^}]+)\}", text)
    if named and not any(known.get(tuple(name.split("|"))) for name in named):
        return "not run"

    def number(match: re.Match[str]) -> str:
        values = [run["value"] for run in known.get(tuple(match[1].split("|")), ())]
        return f"{statistics.mean(values):.1f}" if values else "not run"

    return re.sub(r"\{([^}]+)\}", number, text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdicts(paper: Mapping[str, Any], known: Runs, docs: bool = False) -> str:
    """One row for each claim; in docs/ links begin there, and the claim's paper stands first."""
    rows = []
    for one in paper["claims"]:
        assert one["verdict"] in VERDICTS, f"{one['verdict']!r} is no verdict; {', '.join(VERDICTS)}"
        row = [filled(one[key], known) for key in ("claim", "share", "paper", "ours", "verdict", "why")]
        row[4] = f"**{row[4]}**"
        rows.append([f"[{paper['name']}](../results/{paper['page']})", *row[:1], row[4]] if docs else row)
    return table(("paper", "claim", "verdict") if docs else HEAD, rows)


def counted(claims: Mapping[str, Any]) -> str:
    """How many claims have each verdict."""
    found = [one["verdict"] for paper in claims.values() for one in paper["claims"]]
    return f"{len(found)} claims: {', '.join(f'{verdict} {found.count(verdict)}' for verdict in VERDICTS)}."


def cells(name: str, known: Runs) -> str:
    """What has run at the paper's own protocol, in percent; a paper's number never stands beside stand-in weights."""
    grids, rows = reproducible(), []
    for (grid, row, column, *over), found in known.items():
        if grid.partition("/")[0] != name:
            continue
        values = [run["value"] for run in found]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        first, theirs = found[0], grids[grid].paper.get((row, column))
        shown = "" if theirs is None or STAND_IN in first["words"] else f"{theirs.mean:.2f}"
        changed = [word for word in over if word.partition("=")[0] not in TOLD]
        where = " ".join((column, *(f"`{word}`" for word in changed)))
        last, best = (_mean(found, f"accuracy_{which}") for which in ("last", "best"))
        whole = f"{last:.2f} ({best:.1f})" if last and best else ""
        mean = statistics.mean(values)
        rows.append((where, -mean, [row, where, _size(first), str(len(values)), f"{mean:.2f}{spread}", whole, shown]))
    if not rows:
        return "Nothing was run at the paper's full protocol."
    head = ("row", "column", "rounds x epochs", "seeds", "ours, %", "global model, end (best), %", "paper, %")
    lines = [line for *_, line in sorted(rows)]  # the best of a column first
    ran = f"`python benchmarks/evidence.py --papers {name} --runs DIR device=cuda precision=bf16` runs them"
    more = f"{LOOKS} Curves, commands and seconds: [data/evidence.json](data/evidence.json)."
    where = machines(name, known)
    cpu = ", those of a CPU with `device=cpu`" if "CPU" in where else ""
    return f"{table(head, lines)}\n\n{ran}{cpu}; {where}. {more}"


def machines(name: str, known: Runs) -> str:
    """What a paper's cells ran on; of several machines each with its columns, or with its rows of another's column."""
    ran: dict[str, dict[str, list[str]]] = {}  # column: machine: rows
    for (grid, row, column, *_), found in known.items():
        if grid.partition("/")[0] == name:
            for run in found:
                ran.setdefault(column, {}).setdefault(run["machine"], []).append(row)
    of: dict[str, list[str]] = {machine: [] for by in ran.values() for machine in by}
    if len(of) == 1:
        return next(iter(of))
    for column, by in ran.items():
        usual = max(by, key=lambda machine: len(by[machine]))
        for machine, rows in by.items():
            of[machine].append(column if machine == usual else f"{column} {' and '.join(dict.fromkeys(rows))}")
    return "; ".join(f"{machine}: {', '.join(columns)}" for machine, columns in sorted(of.items()))


def queue() -> Any:
    """benchmarks/evidence.py, which knows the runs that are wanted."""
    spec = importlib.util.spec_from_file_location("evidence_queue", DOCS.parent / "benchmarks" / "evidence.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def progress(wanted: Sequence[Any], known: Runs) -> str:
    """How many of the wanted runs are done, what each cost and where it ran, and what waits."""
    done = {(*name, run["seed"]): run for name, found in known.items() for run in found}
    ran = {one: done.get((one.grid, one.row, one.column, *one.words, one.seed)) for one in wanted}
    counts = [[run is not None for one, run in ran.items() if one.required is kind] for kind in (True, False)]
    said = ", ".join(
        f"{sum(of)} of {len(of)} {kind}" for of, kind in zip(counts, ("required", "optional"), strict=True)
    )
    groups: dict[tuple[str, ...], list[tuple[Any, Any]]] = {}
    for one, run in ran.items():
        words = [f"`{word}`" for word in one.words if not word.startswith("evaluate.")]
        groups.setdefault((f"`{one.grid}`", one.row, " ".join((one.column, *words))), []).append((one, run))
    there: list[list[str]] = []
    waits: dict[tuple[str, ...], list[str]] = {}  # rows by all else
    for name, found in groups.items():
        seeds = [(str(one.seed), run) for one, run in found if run is not None]
        if seeds:
            numbers = [" / ".join(f"{run[key]:.{digits}f}" for _, run in seeds) for key, digits in COSTS]
            machines = ", ".join(dict.fromkeys(run["machine"] for _, run in seeds))
            there.append([*name, ", ".join(seed for seed, _ in seeds), _size(seeds[0][1]), *numbers, machines])
        if len(seeds) < len(found):
            missing = ", ".join(str(one.seed) for one, run in found if run is None)
            kind = "required" if found[0][0].required else "optional"
            waits.setdefault((name[0], name[2], missing, kind), []).append(name[1])
    ours = table(("table", "row", "column", "seeds", "rounds x epochs", "result, %", "seconds", "machine"), there)
    left = [[*name, ", ".join(rows)] for name, rows in waits.items()]
    return f"{said}.\n\n## Done\n\n{ours}\n\n## Waiting\n\n" + table(("table", "column", "seeds", "need", "rows"), left)


def _size(run: Mapping[str, Any]) -> str:
    return f"{run['rounds']} x {run['epochs'] or '{} steps'.format(run['steps'])}"


def submodels(rows: Sequence[Mapping[str, Any]]) -> str:
    """What selectors leave of a network (`benchmarks/submodels.py`, --paper or --stand-in), a value for each seed."""
    rows = sorted((row for row in rows if row["paper"]), key=lambda row: row["seed"])

    def values(found: Sequence[Mapping[str, Any]], key: str, scale: float = 1.0) -> str:
        return " / ".join(f"{scale * row[key]:.1f}" for row in found if key in row)

    lines = []
    for network, named in NETWORKS.items():
        for choice, name in SELECTORS.items():
            if found := [row for row in rows if (row["model"], row["choice"]) == (network, choice)]:
                seeds = ", ".join(str(row["seed"]) for row in found)
                left = values(found, "flops", 100) or "100"
                lines.append([named, name.format(**found[0]), seeds, left, *(values(found, key) for key in AFTER)])
    return table(("network", "chosen by", "seeds", "operations left", *AFTER), lines)


def _mean(found: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """In percent, where all have it."""
    values = [run.get(key) for run in found]
    return None if None in values else 100 * statistics.mean(filter(None, values))


def replaced(text: str, mark: str, body: str) -> str:
    """With this between the marks."""
    begin, end = f"<!-- {mark}: made by `python docs/pages.py` -->", f"<!-- end of {mark} -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"no {begin} ... {end}")
    return f"{before}{begin}\n\n{body}\n\n{end}{rest.partition(end)[2]}"


def league(found: Standings, again: Sequence[Standings]) -> str:
    """How much of it is done, what to try first, the picture, the table, the findings and the checks by hand."""
    parts = [f"{extent(found)} All numbers: [results/league.md](../results/league.md).", *first(found)]
    if any(found.ranking(measure) for measure in MEASURES):
        parts.append("![Mean ranks; a bar joins methods that cannot be told apart](../results/league.png)")
    if rows := standings(found):
        head = ("method", *(f"{measure} {what}" for measure in MEASURES for what in ("rank", "over fedavg")), "privacy")
        wanted = [key.replace(" over", ", over") for key in head]
        parts += [table(head, [[row[key] for key in wanted] for row in rows]), "Over fedavg: points of accuracy."]
    return "\n\n".join([*parts, *findings(found), *(line for one in again for line in checks(found, one))])


def pages() -> dict[Path, str]:
    claims, known = yaml.safe_load((DOCS / "claims.yaml").read_text("utf-8")), runs()
    made = {}
    for name, paper in claims.items():
        path = RESULTS / paper["page"]
        text = replaced(path.read_text("utf-8"), "verdicts", verdicts(paper, known))
        made[path] = replaced(text, "cells", cells(name, known))
    selected, rows = RESULTS / "spatl_submodels.md", (RESULTS / "data" / "submodels.json").read_text("utf-8")
    made[selected] = replaced(selected.read_text("utf-8"), "submodels", submodels(json.loads(rows)))
    wanted, asked = RESULTS / "protocol_runs.md", queue()
    text = progress(asked.queue([*asked.PAPERS]), known)
    made[wanted] = replaced(wanted.read_text("utf-8"), "progress", text)
    every = [verdicts(paper, known, docs=True).splitlines() for paper in claims.values()]
    whole = "\n".join([counted(claims), "", *every[0][:2], *(line for lines in every for line in lines[2:])])
    made[DOCS / "papers.md"] = replaced((DOCS / "papers.md").read_text("utf-8"), "verdicts", whole)
    book = RESULTS / "data" / "league.json"
    found = Standings.read(book)
    made[DOCS / "league.md"] = replaced((DOCS / "league.md").read_text("utf-8"), "league", league(found, beside(book)))
    advice = "\n\n".join(first(found))
    made[DOCS / "choose.md"] = replaced((DOCS / "choose.md").read_text("utf-8"), "league", advice)
    return made


def main() -> None:
    made = pages()
    stale = [path for path, text in made.items() if path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"stale, run `python docs/pages.py`: {', '.join(path.name for path in stale)}" if stale else 0)
    for path in stale:
        path.write_text(made[path], "utf-8")
    print(f"{len(made)} pages, {len(stale)} of them written anew")


if __name__ == "__main__":
    main()
