"""A comparison as a table: mean and deviation over seeds, rank, tests against the best, fairness, costs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.errors import BadInput
from ..core.files import write_atomic, write_json
from ..core.format import duration, size
from ..core.measures import LOWER_IS_BETTER
from ..runs.grid import deviation, mean
from ..runs.measures import window
from ..runs.read import fairness
from .latex import latex
from .measured import Compared
from .significance import FEWEST, holm, paired_t, wilcoxon
from .verdict import close_because, mark_close, p_words, sentence

By = Literal["global", "personal"]
_NOTABLE = 0.1  # of its seconds that a run spends at the server, from which on that is shown
_DIGITS = 12  # of a mean: what is beyond them is the order of its sum
_MODELS = {
    "global": "the global model on the pooled test set",
    "personal": "each client's personal model on its own test images (fine-tuned, or after local training), their mean",
}
_ENDS = {"global": "the global model on the pooled test set", "personal": "personal models, mean over clients"}


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods under one or more settings, all over the same splits."""

    runs: Sequence[Compared]
    by: By
    notes: Sequence[str] = ()
    measure: str = "accuracy"

    def __post_init__(self) -> None:
        done = [run for run in self.runs if run.state == "complete"]
        if done and all(score(run, self.by, self.measure) is None for run in done) and self.measure != "accuracy":
            raise BadInput(f"no run has {self.measure}: run them with evaluate.measures=all")

    # ---- numbers -----------------------------------------------------------------------------------------------------
    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(run.setting for run in self.runs))

    def rows(self, setting: str) -> list[dict[str, Any]]:
        """One for each method, the best first; those without a number last."""
        runs = [run for run in self.runs if run.setting == setting]
        sign = -1 if self.measure in LOWER_IS_BETTER else 1
        how = self.by, self.measure
        rows = [_row([run for run in runs if run.method == method], *how) for method in _methods(runs)]
        rows.sort(key=lambda row: -math.inf if row["mean"] is None else sign * row["mean"], reverse=True)
        means = [round(sign * row["mean"], _DIGITS) for row in rows if row["mean"] is not None]
        for row in rows:  # equal results share a rank
            good = None if row["mean"] is None else round(sign * row["mean"], _DIGITS)
            row["rank"] = None if good is None else 1 + sum(m > good for m in means)
        self._test(runs, rows)
        mark_close(rows)
        return rows

    def _test(self, runs: Sequence[Compared], rows: list[dict[str, Any]]) -> None:
        """Each method against the best of them: p over seeds and over clients, corrected for so many tests."""
        done = {(run.method, run.seed): run for run in runs if run.state == "complete"}
        best, others = rows[0]["method"], [row for row in rows[1:] if row["mean"] is not None]
        for name, differences, test in (("p_seeds", _over_seeds, paired_t), ("p_clients", _over_clients, wilcoxon)):
            how = self.by, self.measure
            found = {row["method"]: test(differences(done, best, row["method"], *how)) for row in others}
            known = {method: p for method, p in found.items() if p is not None}
            adjusted = dict(zip(known, holm(list(known.values())), strict=True))
            for row in rows:
                row[name] = adjusted.get(row["method"])

    def mean_ranks(self) -> dict[str, float]:
        """Over the settings in which all methods have a rank."""
        ranks: dict[str, list[int]] = {}
        for setting in self.settings:
            rows = self.rows(setting)
            for row in rows if all(row["rank"] for row in rows) else ():
                ranks.setdefault(row["method"], []).append(row["rank"])
        return {method: sum(found) / len(found) for method, found in ranks.items()}

    @property
    def complete(self) -> bool:
        return all(run.state == "complete" for run in self.runs)

    # ---- words -------------------------------------------------------------------------------------------------------
    def tables(self) -> list[tuple[str, list[dict[str, str]], list[dict[str, str]]]]:
        """(setting, accuracies, clients and costs) as text."""
        found = []
        for setting in self.settings:
            rows = self.rows(setting)
            found.append((setting, [_accuracies(row, rows) for row in rows], [_costs(row, rows) for row in rows]))
        return found

    def verdict(self) -> list[str]:
        """Who is best, a sentence a setting."""
        return [sentence(setting, self.rows(setting), self.by, self.measure) for setting in self.settings]

    def latex(self) -> str:
        about = f"Ranked by the {self.by} model." if self.measure == "accuracy" else f"Of {_ENDS[self.by]}."
        return latex({setting: self.rows(setting) for setting in self.settings}, self.measure, about)

    def said(self) -> list[str]:
        """What must be known to read the columns that are shown."""
        shown = {title for _, *tables in self.tables() for table in tables for row in table for title in row}
        what = _MODELS[self.by] if self.measure == "accuracy" else f"{self.measure} of {_ENDS[self.by]}"
        if self.by == "global" and self.measure == "accuracy":
            what += f", {_window([row for setting in self.settings for row in self.rows(setting)])}"
        lines = [f"Ranked by {what}; accuracies in %, ± standard deviation over seeds (n - 1)."]
        if any(title.startswith("global") for title in shown):
            lines.append("global: one model for all, on the pooled test set.")
        if shown & {"personal before", "personal after", "fine-tuned"}:
            lines.append(
                "personal: what each client uses, on its own test images, before or after one more local training, or "
                "fine-tuned; the same test images for every method."
            )
        lines += [" ".join(self._about_tests(shown)), " ".join(self._about_costs(shown))]
        places = sorted({run.place for run in self.runs if run.place})
        if len(places) > 1:
            lines.append(f"Times cannot be compared: runs ran on {'; '.join(places)}.")
        if ranks := self.mean_ranks() if len(self.settings) > 1 else {}:
            order = sorted(ranks, key=lambda method: ranks[method])
            lines.append("Mean rank over settings: " + ", ".join(f"{name} {ranks[name]:.2f}" for name in order) + ".")
        return [*lines, *self.notes, *self.troubles("failed", "unfinished", "missing", "corrupt")]

    def troubles(self, *states: str) -> list[str]:
        """A line for each thing that is wrong with runs of a method, however many seeds and settings it is about."""
        found: dict[tuple[str, str, str], list[Compared]] = {}
        for run in self.runs:
            if run.state in states:
                found.setdefault((run.method, run.state, run.trouble), []).append(run)
        lines = []
        for (method, state, trouble), runs in found.items():
            of_all = len(runs) == sum(run.method == method for run in self.runs)
            where = "" if of_all else f" ({'; '.join(map(_place, runs))})"
            verb = state if state == "failed" else f"is {state}"
            lines.append(f"{method}{where} {verb}" + (f": {trouble}." if trouble else "."))
        return lines

    def _about_tests(self, shown: Set[str]) -> Iterator[str]:
        most = max((len(row["seeds"]) for setting in self.settings for row in self.rows(setting)), default=0)
        if "p seeds" in shown:
            yield f"p seeds: paired t-test over seeds, from {FEWEST} of them on."
        elif most < FEWEST:
            yield f"No p over seeds: that needs {FEWEST} of them, and a difference of so few runs may be luck."
        if "p clients" in shown:
            model = "personal before" if self.by == "global" else "the models that are ranked"
            yield f"p clients: Wilcoxon's signed-rank test over pairs of (seed, client), {model}: it speaks of these"
            yield "trained models and these clients, not of other seeds."
        if shown & {"p seeds", "p clients"}:
            yield "p is against the best, after Holm."
        tables = [self.rows(setting) for setting in self.settings]
        if why := [close_because(rows) for rows in tables if any(row["is_close"] for row in rows)]:
            yield f"*: the best, and what cannot be told from it ({'; '.join(dict.fromkeys(why))})."

    def _about_costs(self, shown: Set[str]) -> Iterator[str]:
        if models := self._personal_models():
            yield f"std and worst tenth: over clients, {models}."
        yield "up, down: sent by the method in a whole run, all clients together."
        yield "time: of a whole run, with its evaluations, on this machine."
        if "at the server" in shown:
            yield "at the server: of these, after clients had answered."
        if "on devices" in shown:
            yield "on devices: simulated time of a whole run."

    def _personal_models(self) -> str:
        """Which models clients are evaluated on: those of most methods, and whose are others."""
        models: dict[str, list[str]] = {}
        for method, model in {run.method: run.personal_model for run in self.runs if run.personal_model}.items():
            models.setdefault(model, []).append(method)
        usual = max(models, key=lambda model: len(models[model]), default="")
        others = [f"{model} of {', '.join(methods)}" for model, methods in models.items() if model != usual]
        return ", but ".join([usual, *others])

    def markdown(self) -> str:
        lines = ["# Comparison", "", *self.verdict(), ""]
        for setting, *tables in self.tables():
            lines += [f"## {setting}", ""] if setting else []
            for table in tables:
                lines += ["| " + " | ".join(table[0]) + " |", "| --- |" + " ---: |" * (len(table[0]) - 1)]
                lines += ["| " + " | ".join(row.values()) + " |" for row in table]
                lines.append("")
        return "\n".join([*lines, *(f"- {line}" for line in self.said())]) + "\n"

    def plain(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict(),
            "ranked_by": self.by,
            "measure": self.measure,
            "settings": {setting: self.rows(setting) for setting in self.settings},
            "mean_ranks": self.mean_ranks(),
            "complete": self.complete,
            "runs": [_plain(run) for run in self.runs],
            "notes": self.said(),
        }

    def write(self, out: Path) -> None:
        """compare.json, compare.md, compare.csv and compare.tex."""
        rows = [
            {"setting": setting, **{k: v for k, v in row.items() if not isinstance(v, list | dict)}}
            for setting in self.settings
            for row in self.rows(setting)
        ]
        lines = io.StringIO()
        table = csv.DictWriter(lines, list(dict.fromkeys(key for row in rows for key in row)))
        table.writeheader()
        table.writerows(rows)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "compare.json", self.plain())
        for ending, text in (("md", self.markdown()), ("csv", lines.getvalue()), ("tex", self.latex())):
            write_atomic(out / f"compare.{ending}", text.encode())


def ranked_by(runs: Sequence[Compared]) -> By:
    """Global where all methods are evaluated on their global model; where some are not, what each client gets."""
    done = [run for run in runs if run.state == "complete"]
    everyone_global = all(run.evaluated_on == "global" for run in done)
    return "global" if everyone_global or not any(run.clients for run in done) else "personal"


def score(run: Compared, by: By, measure: str = "accuracy") -> float | None:
    """What a run is ranked by."""
    if measure != "accuracy":
        return run.measures.get(f"{'global' if by == 'global' else run.personal_model} {measure}")
    if by == "global":
        return run.global_last
    return _client_mean(run, run.personal_model)


def _client_mean(run: Compared, model: str | None) -> float | None:
    accuracies = run.clients.get(model or "", {})
    return mean(list(accuracies.values()))


def _place(run: Compared) -> str:
    return ", ".join(part for part in (run.setting, f"seed {run.seed}") if part)


def _methods(runs: Sequence[Compared]) -> list[str]:
    return list(dict.fromkeys(run.method for run in runs))


def _over_seeds(done: Mapping[tuple[str, int], Compared], a: str, b: str, by: By, measure: str) -> list[float]:
    seeds = [seed for method, seed in done if method == a and (b, seed) in done]
    pairs = ((score(done[a, seed], by, measure), score(done[b, seed], by, measure)) for seed in seeds)
    return [x - y for x, y in pairs if x is not None and y is not None]


def _over_clients(done: Mapping[tuple[str, int], Compared], a: str, b: str, by: By, measure: str) -> list[float]:
    """Of each client under each seed. Ranked by the global model: that model on the client's images. Accuracies
    alone: of other measures a client with few images says little."""
    found = []
    if measure != "accuracy":
        return found
    for seed in [seed for method, seed in done if method == a and (b, seed) in done]:
        pair = done[a, seed], done[b, seed]
        left, right = (
            run.clients.get("personal before" if by == "global" else run.personal_model or "", {}) for run in pair
        )
        found += [left[client] - right[client] for client in sorted(left.keys() & right.keys())]
    return found


def _row(runs: Sequence[Compared], by: By, measure: str) -> dict[str, Any]:
    """A method under a setting, over its complete runs."""
    done = [run for run in runs if run.state == "complete"]
    row: dict[str, Any] = {"method": runs[0].method, "algorithm": runs[0].algorithm, "rank": None}
    row["seeds"] = [run.seed for run in done]
    scores = [value for run in done if (value := score(run, by, measure)) is not None]
    row |= {"mean": mean(scores), "std": deviation(scores), "measure": measure}
    row["last"] = max((run.last for run in done), default=0)
    row["last_rounds"] = list(done[0].last_rounds) if len({tuple(run.last_rounds) for run in done}) == 1 else []
    for name in ("global_last", "global_end"):
        values = [value for run in done if (value := getattr(run, name)) is not None]
        row |= {name: mean(values), f"{name}_std": deviation(values)}
    for model in ("personal before", "personal after", "fine-tuned"):
        values = [value for run in done if (value := _client_mean(run, model)) is not None]
        row |= {model.replace(" ", "_"): mean(values), f"{model.replace(' ', '_')}_std": deviation(values)}
    fair = [fairness(list(run.clients[run.personal_model].values())) for run in done if run.personal_model]
    row["clients_by"] = next((run.personal_model for run in done if run.personal_model), None)
    row |= {f"clients_{name}": mean([one[name] for one in fair]) for name in ("std", "worst_decile", "jain")}
    for name in ("rounds", "bytes_up", "bytes_down", "seconds"):
        row[name] = mean([getattr(run, name) for run in done])
    for name in ("server_seconds", "simulated_seconds"):
        row[name] = mean([value for run in done if (value := getattr(run, name)) is not None])
    row["states"] = {str(run.seed): run.state for run in runs}
    return row


def _plain(run: Compared) -> dict[str, Any]:
    kept = {k: v for k, v in vars(run).items() if k not in ("curves", "clients")}
    return {**kept, "run": str(run.run), "clients": {model: dict(by) for model, by in run.clients.items()}}


def _accuracies(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    is_top = row["is_close"] or (row is rows[0] and any(one["is_close"] for one in rows))
    text = {"rank": f"{row['rank'] or '–'}{'*' * is_top}", "method": row["method"]}
    if (measure := row["measure"]) != "accuracy":
        text[measure] = _number(row["mean"], row["std"]) if measure == "loss" else _percent(row["mean"], row["std"])
    names = {
        "global_last": f"global ({_window(rows)})",
        "global_end": "global (last round)",
        "personal_before": "personal before",
        "personal_after": "personal after",
        "fine-tuned": "fine-tuned",
    }
    if max(one["last"] for one in rows) < 2:
        del names["global_last"]  # which is that of the last round
    for name, title in names.items():
        if any(one[name] is not None for one in rows):
            text[title] = _percent(row[name], row[f"{name}_std"])
    for name, title in {"p_seeds": "p seeds", "p_clients": "p clients"}.items():
        if any(one[name] is not None for one in rows):
            text[title] = "best" if row["rank"] == 1 else p_words(row[name])
    return text


def _window(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the closing means of these rows are over; without rounds where these differ."""
    having = [row for row in rows if row["last"]]
    alike = len({tuple(row["last_rounds"]) for row in having}) == 1
    return window(max((row["last"] for row in having), default=0), having[0]["last_rounds"] if alike else [])


def _costs(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    text = {"method": row["method"], "seeds": str(len(row["seeds"]))}
    for name, title in {"clients_std": "std", "clients_worst_decile": "worst tenth"}.items():
        text[title] = _percent(row[name], None)
    text |= {"rounds": "–" if row["rounds"] is None else f"{row['rounds']:g}"}
    for name, title in {"bytes_up": "up", "bytes_down": "down"}.items():
        text[title] = "–" if row[name] is None else size(row[name])
    text["time"] = _time(row["seconds"])
    if any((one["server_seconds"] or 0) > _NOTABLE * (one["seconds"] or 1) for one in rows):
        text["at the server"] = _time(row["server_seconds"])
    if any(one["simulated_seconds"] is not None for one in rows):
        text["on devices"] = _time(row["simulated_seconds"])
    return text


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def _percent(value: float | None, spread: float | None) -> str:
    return _number(value and 100 * value, spread and 100 * spread, 2)


def _number(value: float | None, spread: float | None, digits: int = 4) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
