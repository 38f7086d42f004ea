"""FedSLS's figure 1: how far it is ahead of FedAvg and FedAU, by alpha."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...plots.style import caption, colour_of, pyplot, save
from ...runs.grid import Cell, mean
from ..figure_runs import Wanted, at_hand, finished, note
from ..quick import titled
from ..table import PaperTable, gather
from .tables import ALPHAS, panels, tables

PANELS = panels("cifar10", "cinic10")
AGAINST = ("fedavg", "fedau")
_ROWS = (*AGAINST, "fedsls")
SIZES = "-client: clients of equal sizes, the split that the paper cites; without it sizes differ."
Gains = dict[str, dict[str, dict[str, float]]]  # panel -> method -> alpha -> points


def gain_runs(wanted: Wanted) -> list[Cell]:
    return wanted.table(tables(), "fedsls/table1").cells(_ROWS, _columns(wanted), wanted.words)


def _columns(wanted: Wanted) -> list[str]:
    """Of table 1: by the split that the text cites, unless others are asked for."""
    return [f"{panel}/{alpha}" for panel in wanted.chosen(PANELS, PANELS[:2]) for alpha in ALPHAS]


def gain(wanted: Wanted) -> list[Path]:
    """A panel for each data set: accuracy of FedSLS less that of the other, in points, from table 1's runs."""
    grid = wanted.table(tables(), "fedsls/table1")
    here, told = at_hand(wanted, grid, _ROWS, _columns(wanted))
    for column in here:
        finished(wanted, grid, _ROWS, column)
    table = gather(grid, wanted.out, wanted.words)
    ours, theirs = _ours(table, here), _theirs(table, here)
    figure, axes = pyplot().subplots(1, len(ours), figsize=(4.4 * len(ours), 3.4), squeeze=False, sharey=True)
    for axis, (panel, by_method) in zip(axes[0], ours.items(), strict=True):
        for method, by_alpha in by_method.items():
            at = [ALPHAS.index(alpha) for alpha in by_alpha]
            axis.plot(at, [*by_alpha.values()], "o-", color=colour_of(method), label=f"over {method}")
            if paper := theirs.get(panel, {}).get(method):
                axis.plot(at, [*paper.values()], "D--", color=colour_of(method), mfc="white", lw=1, alpha=0.8)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(titled(panel, panel.partition("-")[0]) if wanted.quick else panel)
        axis.set_xlabel("alpha: from even to skewed")
        axis.set_xticks(range(len(ALPHAS)), ALPHAS)
    axes[0, 0].set_ylabel("gain of FedSLS, points")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    said = ["Dots: our runs; above the line FedSLS is ahead.", SIZES, *told]
    said += ["Diamonds: the paper's table 1."] if theirs else []
    caption(figure, " ".join(said))
    numbers = {"gain": ours, "paper": theirs, "not run": told}
    return [save(figure, wanted.path), note(wanted, numbers)]


def _ours(table: PaperTable, columns: list[str]) -> Gains:
    """By the means over all seeds that there are."""
    reached = {where: mean([one.value for one in done.values()]) for where, done in table.done.items()}
    return _gains({where: value for where, value in reached.items() if value is not None}, columns)


def _theirs(table: PaperTable, columns: list[str]) -> Gains:
    known = {(row, column): table.paper(row, column) for row in _ROWS for column in columns}
    return _gains({where: one.mean for where, one in known.items() if one is not None}, columns)


def _gains(reached: Mapping[tuple[str, str], float], columns: list[str]) -> Gains:
    found: Gains = {}
    for column in columns:
        panel, _, alpha = column.partition("/")
        for method in AGAINST:
            if ("fedsls", column) in reached and (method, column) in reached:
                ahead = reached["fedsls", column] - reached[method, column]
                found.setdefault(panel, {}).setdefault(method, {})[alpha] = ahead
    return found
