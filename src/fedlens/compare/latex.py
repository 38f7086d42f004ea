"""A comparison as a table for LaTeX: booktabs, the best and what equals it in bold, deviations over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.format import joined
from ..core.measures import LOWER_IS_BETTER
from ..runs.measures import window
from .verdict import close_because

_MODELS = {
    "global_last": "global",
    "global_end": "global, end",
    "personal_before": "before",
    "personal_after": "after",
    "fine-tuned": "fine-tuned",
}
_MEANINGS = {
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
    why = [close_because(rows) for rows in settings.values() if any(row["is_close"] for row in rows)]
    marked = [name for name, column in columns.items() if any(is_close for _, _, is_close in column.values())]
    where = f"in column {joined(marked)} also " if marked and not several and len(columns) > 1 else "and "
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}[t]",
        r"\centering\small\setlength{\tabcolsep}{3.5pt}\setlength{\belowcaptionskip}{4pt}",
        rf"\caption{{{_caption(about, measure, _meanings(settings, columns), where, why if marked else [])}}}",
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
        setting: {row["method"]: (row["mean"], row["std"], row["is_close"]) for row in rows}
        for setting, rows in settings.items()
    }


def _by_model(rows: Rows, measure: str) -> dict[str, Column]:
    if measure != "accuracy":
        return {measure: {row["method"]: (row["mean"], row["std"], row["is_close"]) for row in rows}}
    shown = [name for name in _MODELS if any(row[name] is not None for row in rows)]
    if max(row["last"] for row in rows) < 2 and "global_last" in shown:
        shown.remove("global_last")  # which is that of the last round
    # What the ranking is by is tested; other columns have their best in bold, and nothing more.
    ranked = {name for name in shown if all(row["mean"] == row[name] for row in rows)}
    return {
        _MODELS[name]: {
            row["method"]: (row[name], row[f"{name}_std"], name in ranked and row["is_close"]) for row in rows
        }
        for name in shown
    }


def _meanings(settings: Mapping[str, Rows], columns: Iterable[str]) -> str:
    """What columns are; the closing mean is over the rounds of the first setting's first method."""
    first = next(row for rows in settings.values() for row in rows)
    meanings = {"global": f"global model, {window(first['last'], first['last_rounds'])}", **_MEANINGS}
    return "; ".join(f"{name}: {meanings[name]}" for name in columns if name in meanings)


def _cell(column: Column, method: str, measure: str) -> str:
    value, spread, is_close = column.get(method, (None, None, False))
    if value is None:
        return "--"
    scale, digits = (1, 3) if measure == "loss" else (100, 1)
    known = [one for one, _, _ in column.values() if one is not None]
    is_best = value == (min(known) if measure in LOWER_IS_BETTER else max(known))
    text = f"{scale * value:.{digits}f}"
    deviation = "" if spread is None else rf" \pm {scale * spread:.{digits}f}"
    number = rf"\mathbf{{{text}}}" if is_best or is_close else text
    return f"${number}{deviation}$"


def _caption(about: str, measure: str, meanings: str, where: str, close: Sequence[str]) -> str:
    unit = "" if measure == "loss" else r" in \%"
    said = f"{_title(measure)}{unit}, mean $\\pm$ standard deviation over seeds. {escaped(about)}"
    rules = "; ".join(dict.fromkeys(close)).replace("p ≥ ", "paired t-test, $p \\geq$ ")
    bold = "Bold: the best" + (f", {where}what cannot be told from it ({rules})." if rules else ".")
    return f"{said} {meanings.capitalize()}. {bold}" if meanings else f"{said} {bold}"


def _title(measure: str) -> str:
    """balanced_accuracy as Balanced accuracy; the name of a class stays as it is."""
    base, slash, label = measure.partition("/")
    return base.capitalize().replace("_", " ") + (f" of {escaped(label)}" if slash else "")


def escaped(text: str) -> str:
    """As LaTeX shows it."""
    return "".join(_SIGNS.get(sign, sign) for sign in text)
