"""All measures of a run, read back from its tables: at its end, by class, by client, and of the best round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ..core.format import percent
from ..core.measures import BY_CLASS, MEASURES, best_round
from .rounds import Rounds
from .tables import where

MOST = 10  # evaluations at most that a closing mean is over, where nobody asked for a number
PERSONAL = ("fine-tuned", "personal after", "personal before")  # models of single clients, the best trained first
POOLED = "examples"  # the weighting of a number over all test images, whoever owns them


def validated(metrics: pa.Table, watch: str) -> dict[int, float]:
    """Round -> what decides which round is best, on validation images."""
    rows = where(metrics, split="validation", metric=watch)
    return dict(zip(rows["round"].to_pylist(), rows["value"].to_pylist(), strict=True))


def best_of(metrics: pa.Table, watch: str, counts: Rounds) -> dict[str, float] | None:
    """The round of the best validation with its value there, and the accuracy of its global model on test images."""
    values = validated(metrics, watch)
    if (best := best_round(watch, values)) is None:
        return None
    found = {"round": best, "training_round": counts.trained(best), f"validation_{watch}": values[best]}
    test = where(metrics, round=best, model="global", split="pooled test")
    at = dict(zip(test["metric"].to_pylist(), test["value"].to_pylist(), strict=True))
    return found | {name: at[name] for name in MEASURES if name in at}


def closing_mean(evaluated: Mapping[int, tuple[int, float]], asked: int) -> tuple[float | None, list[int]]:
    """The mean over the last of `evaluations`, and the rounds of training that it is over.

    As many as were asked for; zero: a quarter of them, ten at most, so that the mean is where a curve ends.
    """
    rounds = [*evaluated][-(asked or max(1, min(MOST, len(evaluated) // 4))) :]
    return sum(evaluated[round][1] for round in rounds) / len(rounds) if rounds else None, rounds


def window(last: int, rounds: Sequence[int]) -> str:
    """What a closing mean is over, in words; without rounds by their number alone."""
    if last < 2:
        return "after the last round"
    if not rounds:
        return f"mean of the last {last} evaluations"
    first, end = rounds[0], rounds[-1]
    if end - first + 1 > len(rounds):
        return f"mean of {last} evaluations, rounds {first} to {end}"
    return f"mean of rounds {first} {'and' if last == 2 else 'to'} {end}"


def closing(rows: Iterable[Mapping[str, Any]], end: int) -> dict[str, dict[str, float]]:
    """Model -> measure -> value over all test images, after the last round; by class as sensitivity/3."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if (
            row["round"] == end
            and row["client"] is None
            and row["weighting"] == POOLED
            and row["split"] != "validation"
        ):
            name = row["metric"]
            if not name.startswith("confusion/") and name.partition("/")[0] in (*MEASURES, *BY_CLASS):
                found.setdefault(row["model"], {})[name] = row["value"]
    return {model: values for model, values in found.items() if "balanced_accuracy" in values}


_TITLES = {"balanced_accuracy": "balanced accuracy", "auroc": "AUROC", "ece": "calibration error"}


def measure_line(measures: Mapping[str, Mapping[str, float]]) -> str:
    """The pooled ones for people, of the global model, or where there is none of the best trained; empty: none."""
    for model in ("global", *PERSONAL):
        values = measures.get(model, {})
        if found := [f"{said} {percent(values[name], 2)}" for name, said in _TITLES.items() if name in values]:
            return f"{', '.join(found)} ({'global model' if model == 'global' else f'{model}, pooled'})"
    return ""


def best_line(best: Mapping[str, float]) -> str:
    """The round that validation images chose, for people."""
    ((name, value),) = ((key.removeprefix("validation_"), best[key]) for key in best if key.startswith("validation_"))
    shown = f"{value:.4f}" if name == "loss" else percent(value, 2)
    test = f", accuracy {percent(best['accuracy'], 2)} on the test set" if best.get("accuracy") is not None else ""
    return f"best on validation images: round {best['training_round']:.0f} ({name} {shown}){test}"


def confusion(metrics: pa.Table, model: str, classes: int, client: int | None = None) -> list[list[int]] | None:
    """[truth][prediction] counts over all test images, or a client's, at the last evaluation; None: there was none."""
    whose = where(metrics, of_clients=False) if client is None else where(metrics, client=client)
    table = where(whose, model=model)
    rows = [row for row in table.to_pylist() if row["metric"].startswith("confusion/")]
    if not rows:
        return None
    last = max(row["round"] for row in rows)
    counts = [[0] * classes for _ in range(classes)]
    for row in rows:
        if row["round"] == last:
            truth, predicted = map(int, row["metric"].split("/")[1:])
            counts[truth][predicted] = int(row["value"])
    return counts
