"""What SPATL's figures have in common: the runs of networks that are at hand, their names, tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import config
from ...core.files import write_atomic
from ...data import DATASETS
from ...runs.folder import RunFolder
from ...runs.grid import Cell
from ..figure_runs import SEED, Wanted, at_hand, finished
from ..quick import SAID
from .tables import tables

Runs = dict[str, dict[str, Path]]  # network -> row -> folder


def cells(wanted: Wanted, table: str, rows: Sequence[str], usual: Sequence[str]) -> list[Cell]:
    """The runs of these rows with the networks that were asked for, or else with the paper's."""
    grid = wanted.table(tables(), table)
    return grid.cells(rows, wanted.chosen([*grid.columns], usual), wanted.words)


def shown(wanted: Wanted, table: str, rows: Sequence[str], usual: Sequence[str]) -> tuple[Runs, list[str]]:
    """(folders of these runs, carried out where they are missing; a sentence for each network that needs more)."""
    grid = wanted.table(tables(), table)
    networks, told = at_hand(wanted, grid, rows, wanted.chosen([*grid.columns], usual))
    return {network: finished(wanted, grid, rows, network) for network in networks}, told


def titled(network: str, runs: Mapping[str, Path]) -> str:
    """The network of a column, and what really ran where the user or quick mode changed it or its data."""
    experiment = config.read(RunFolder(next(iter(runs.values()))).config)
    model, _, data = network.partition("-")
    ran = [called(runs)] if called(runs) != model else []
    if experiment.data.name != (data if data in DATASETS else "cifar10"):
        ran.append(Path(getattr(experiment.data, "path", experiment.data.name)).stem)
    return f"{network} (here {', '.join(ran)})" if ran else network


def called(runs: Mapping[str, Path]) -> str:
    """The model of these runs, which the user may have changed."""
    return config.to_dict(config.read(RunFolder(next(iter(runs.values()))).config).model)["is"]


def listed(
    wanted: Wanted, about: str, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]
) -> Path:
    """A table in Markdown, beside the numbers."""
    path, words = wanted.path, wanted.words
    lines = [f"# spatl/{path.name}: {about}", "", f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    changes = " ".join(word for word in words if config.affects_results(word.partition("=")[0]))
    changed = f"Changed from the paper's protocol: `{changes}`." if changes else "The paper's protocol."
    changed = SAID if wanted.quick else changed
    lines += ["", *(f"- {each}" for each in (*notes, changed, f"Seed {SEED}."))]
    for heading, said in wanted.protocol.items():
        lines += ["", f"## {heading}", "", *(f"- {each}" for each in said)]
    beside = path.with_name(f"{path.name}.md")
    write_atomic(beside, ("\n".join(lines) + "\n").encode())
    return beside
