"""A comparison as a table for LaTeX: booktabs, the best in bold, deviations over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.measures import LOWER_IS_BETTER
from .verdict import LEVEL

_MODELS = {
    "global_last": "global",
    "global_end": "global, end",
    "personal_before": "before",
    "personal_after": "after",
    "fine-tuned": "fine-tuned",
}
_MEANINGS = {
    "global": "global model, mean of the last evaluations",
    "global, end": "global model after the last round",
    "before": "personal models before local training",
    "after": "personal models after local training",
    "fine-tuned": "fine-tuned models",
}
_SIGNS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_SIGNS |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
Rows = Sequence[Mapping[str, Any]]


def latex(settings: Mapping[str, Rows], measure: str, about: str) -> str:
    """One setting: a column a model. Several: a column a setting, by what methods are ranked by."""
    several = len(settings) > 1
    columns = _by_setting(settings) if several else _by_model(next(iter(settings.values())), measure)
    methods = list(dict.fromkeys(row["method"] for rows in settings.values() for row in rows))
    has_star = any(is_close for column in columns.values() for _, _, is_close in column.values())
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}[t]",
        r"\centering\small\setlength{\tabcolsep}{3.5pt}",
        rf"\caption{{{_caption(about, measure, columns, has_star)}}}",
        r"\label{tab:compare}",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["method", *map(escaped, columns)]) + r" \\",
        r"\midrule",
    ]
    for method in methods:
        cells = [_cell(column, method, measure) for column in columns.values()]
        lines.append(" & ".join([escaped(method), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


Column = dict[str, tuple[float | None, float | None, bool]]  # method -> mean, deviation, cannot be told from the best


def _by_setting(settings: Mapping[str, Rows]) -> dict[str, Column]:
    return {
        setting: {row["method"]: (row["mean"], row["std"], _is_close(row)) for row in rows}
        for setting, rows in settings.items()
    }


def _by_model(rows: Rows, measure: str) -> dict[str, Column]:
    if measure != "accuracy":
        return {measure: {row["method"]: (row["mean"], row["std"], _is_close(row)) for row in rows}}
    shown = [name for name in _MODELS if any(row[name] is not None for row in rows)]
    # What the ranking is by is tested; other columns have their best in bold, and nothing more.
    ranked = {name for name in shown if all(row["mean"] == row[name] for row in rows)}
    return {
        _MODELS[name]: {
            row["method"]: (row[name], row[f"{name}_std"], name in ranked and _is_close(row)) for row in rows
        }
        for name in shown
    }


def _is_close(row: Mapping[str, Any]) -> bool:
    return row["rank"] is not None and row["rank"] > 1 and row["p_seeds"] is not None and row["p_seeds"] >= LEVEL


def _cell(column: Column, method: str, measure: str) -> str:
    value, spread, is_close = column.get(method, (None, None, False))
    if value is None:
        return "--"
    scale, digits = (1, 3) if measure == "loss" else (100, 1)
    known = [one for one, _, _ in column.values() if one is not None]
    is_best = value == (min(known) if measure in LOWER_IS_BETTER else max(known))
    text = f"{scale * value:.{digits}f}"
    deviation = "" if spread is None else rf" \pm {scale * spread:.{digits}f}"
    number = rf"\mathbf{{{text}}}" if is_best else text
    return f"${number}{deviation}$" + ("$^*$" if is_close else "")


def _caption(about: str, measure: str, columns: Iterable[str], has_star: bool) -> str:
    unit = "" if measure == "loss" else r" in \%"
    said = f"{_title(measure)}{unit}, mean $\\pm$ standard deviation over seeds. {escaped(about)}"
    star = f" $^*$: not told from the best (paired t-test, $p \\geq {LEVEL}$)." if has_star else ""
    meanings = "; ".join(f"{name}: {_MEANINGS[name]}" for name in columns if name in _MEANINGS)
    return f"{said} {meanings.capitalize()}. Bold: the best.{star}" if meanings else f"{said} Bold: the best.{star}"


def _title(measure: str) -> str:
    """balanced_accuracy as Balanced accuracy; the name of a class stays as it is."""
    base, slash, label = measure.partition("/")
    return base.capitalize().replace("_", " ") + (f" of {escaped(label)}" if slash else "")


def escaped(text: str) -> str:
    """As LaTeX shows it."""
    return "".join(_SIGNS.get(sign, sign) for sign in text)
