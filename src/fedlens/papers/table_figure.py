"""A paper's table as a picture: our runs, a dot a seed, beside the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

from ..plots.style import COLOURS, caption, pyplot, save
from ..runs.grid import Reported, mean
from .table import PaperTable

WIDE = 3  # columns of the table beside each other
_GREY = "#666666"


def draw(table: PaperTable) -> Path | None:
    """Beside the table; None where nothing has been run."""
    shown = {cell.row for cell in table.shown}
    rows = [row for row in table.grid.rows if row in shown]
    ran = {column: _values(table, rows, column) for column in dict.fromkeys(cell.column for cell in table.shown)}
    columns = [column for column, by_row in ran.items() if any(by_row.values())]
    if not columns:
        return None
    if len(rows) > 2 and all(_number(row) is not None for row in rows):
        return _over_rows(table, rows, {column: ran[column] for column in columns})
    high, wide = math.ceil(len(columns) / WIDE), min(WIDE, len(columns))
    size = 3.6 * wide + 1.4, (0.36 * len(rows) + 0.8) * high
    figure, axes = pyplot().subplots(high, wide, figsize=size, squeeze=False, sharey=True)
    for axis, column in zip(axes.flat, columns, strict=False):
        for at, row in enumerate(rows):
            _mark(axis, at, ran[column][row], table.paper(row, column), "{:.3g}" if counts_rounds(table) else "{:.1f}")
        axis.set(title=table.grid.titles.get(column, column), ylim=(len(rows) - 0.6, -0.8))
        axis.set_yticks(range(len(rows)), rows)
        axis.margins(x=0.08)  # room for the means
        if counts_rounds(table):
            axis.set_xlim(left=0)
            axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes.flat[len(columns) :]:
        axis.set_visible(False)
    figure.tight_layout()
    several = any(len(values) > 1 for by_row in ran.values() for values in by_row.values())
    theirs = any(table.paper(row, column) for row in rows for column in columns)
    means = "lines and numbers: their means" if several else "above them their mean"
    caption(figure, _told(table, columns, means, theirs))
    return save(figure, table.out / f"{table.name}.png")  # with an ending: names of protocols have dots


def _over_rows(table: PaperTable, rows: list[str], ran: dict[str, dict[str, list[float]]]) -> Path:
    """Where rows are values of a setting: a line for each column, over them."""
    figure, axis = pyplot().subplots(figsize=(6.4, 3.8))
    at, theirs = [_number(row) for row in rows], False
    for (column, by_row), colour in zip(ran.items(), cycle(COLOURS)):
        for x, row in zip(at, rows, strict=True):
            axis.plot([x] * len(by_row[row]), by_row[row], "o", color=colour, markersize=5, alpha=0.75)
        points = [(x, mean(by_row[row])) for x, row in zip(at, rows, strict=True) if by_row[row]]
        axis.plot(
            *zip(*points, strict=True), "-", color=colour, linewidth=1.5, label=table.grid.titles.get(column, column)
        )
        for x, row in zip(at, rows, strict=True):
            if (paper := table.paper(row, column)) is not None:
                axis.errorbar(x, paper.mean, yerr=paper.std, fmt="D", color=colour, mfc="white", ms=5.5, lw=1)
                theirs = True
    percent = table.grid.measured.endswith("%")
    axis.set(xlabel=table.grid.about, ylabel="accuracy, %" if percent and "accuracy" in table.grid.measured else "")
    axis.set_xticks(at, rows)
    axis.legend(fontsize=8)
    figure.tight_layout()
    caption(figure, _told(table, ran, "lines: their means", theirs))
    return save(figure, table.out / f"{table.name}.png")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _values(table: PaperTable, rows: Iterable[str], column: str) -> dict[str, list[float]]:
    return {row: [one.value for one in table.done.get((row, column), {}).values()] for row in rows}


def counts_rounds(table: PaperTable) -> bool:
    return table.grid.measured.startswith("rounds to ")


def _mark(axis, at: int, values: list[float], paper: Reported | None, form: str) -> None:
    if paper is not None:
        axis.errorbar(paper.mean, at, xerr=paper.std, fmt="D", color=_GREY, mfc="white", ms=5.5, lw=1, capsize=2)
    axis.plot(values, [at] * len(values), "o", color=COLOURS[0], markersize=6, alpha=0.75)
    middle = mean(values)
    if middle is None:
        return
    if len(values) > 1:
        axis.plot([middle] * 2, [at - 0.2, at + 0.2], color="black", linewidth=1.4)
    axis.annotate(form.format(middle), (middle, at), (0, 7), textcoords="offset points", fontsize=8, ha="center")


def _told(table: PaperTable, columns: Iterable[str], means: str, theirs: bool) -> str:
    parts = [f"{table.grid.name}: {table.grid.measured}.", f"Dots: our runs, one a seed; {means}."]
    if counts_rounds(table):
        parts.append("No dot, or no panel: not reached.")
    if theirs:
        parts.append("Diamonds: the paper's numbers and their deviations.")
    shown = [cell for cell in table.shown if cell.column in columns]
    unsaid = {change for cell in shown for change in cell.instead} if table.grid.smaller else set()
    changed = sorted({change for cell in shown for change in cell.changes} - unsaid)
    if changed:
        parts.append(f"Changed from the paper's protocol: {' '.join(changed)}.")
    return " ".join(parts)
