"""The measures of evaluate.measures=all as a report shows them: pooled, by class, by client, and confusions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..core.measures import BY_CLASS, LOWER_IS_BETTER, MEASURES
from ..data import Names
from ..runs.measures import closing, confusion
from ..runs.read import StoredRun, columns, summary_statistics, thinned

_BESIDE = tuple(name for name in MEASURES if name not in ("accuracy", "loss"))
_DRAWN = 60  # clients at most whose classes are drawn
_CLASSES = 100  # at most in a confusion: more cannot be read


def by_client(metrics: pa.Table, model: str, clients: Sequence[int]) -> dict[str, list[float | None]]:
    """Measure -> its value for each of these clients at the last evaluation; nothing where accuracy is all there is."""
    here = pc.field("client").is_valid() & (pc.field("model") == model)
    rows = metrics.filter(here & pc.field("metric").isin([*_BESIDE]))
    found: dict[str, dict[int, float]] = {}
    for client, metric, value in columns(rows, "client", "metric", "value"):
        found.setdefault(metric, {})[client] = value
    return {name: [found[name].get(client) for client in clients] for name in _BESIDE if name in found}


def detailed(run: StoredRun, names: Names) -> dict[str, dict[str, Any]]:
    """Model -> what is known of it after the last round; nothing of a run that measured accuracy alone."""
    rows = run.metrics.filter(pc.field("round") == run.all_rounds).to_pylist()
    pooled = closing(rows, run.all_rounds)
    return {model: _of_model(run, model, values, rows, names) for model, values in pooled.items()}


def _of_model(
    run: StoredRun, model: str, pooled: Mapping[str, float], rows: Sequence[Mapping[str, Any]], names: Names
) -> dict[str, Any]:
    count = 1 + max((int(name.partition("/")[2]) for name in pooled if "/" in name), default=0)
    own = {
        (row["client"], row["metric"]): row["value"]
        for row in rows
        if row["client"] is not None and row["model"] == model
    }
    clients = thinned(sorted({client for client, _ in own}), _DRAWN)
    values = {name: [v for (_, metric), v in own.items() if metric == name] for name in MEASURES}
    counts = confusion(run.metrics, model, count) if count <= _CLASSES else None
    return {
        "pooled": {name: pooled[name] for name in MEASURES if name in pooled},
        "clients": {
            name: summary_statistics(known, lowest=name in LOWER_IS_BETTER) for name, known in values.items() if known
        },
        "names": [names.label(label) for label in range(count)],
        "classes": {name: [pooled.get(f"{name}/{label}") for label in range(count)] for name in BY_CLASS},
        "confusion": counts,
        "drawn": [names.client(client) for client in clients],
        "sensitivity": [[own.get((client, f"sensitivity/{label}")) for label in range(count)] for client in clients]
        if count <= _CLASSES
        else [],
    }


# ---- over seeds ------------------------------------------------------------------------------------------------------
def together(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of runs that differ in their seed: means, and confusions added up. What one run alone has is left out."""
    found = [run["detailed"] for run in runs if run.get("detailed")]
    models = [model for model in found[0] if all(model in each for each in found)] if found else []
    return {model: _mean([each[model] for each in found]) for model in models}


def _mean(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, counts = parts[0], [part["confusion"] for part in parts]
    summed = None
    if all(each is not None and len(each) == len(counts[0]) for each in counts):
        summed = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*counts, strict=True)]
    return {
        "names": max((part["names"] for part in parts), key=len),
        "pooled": {name: _spread([part["pooled"].get(name) for part in parts]) for name in first["pooled"]},
        "clients": {
            name: {key: _spread([part["clients"].get(name, {}).get(key) for part in parts]) for key in values}
            for name, values in first["clients"].items()
        },
        "classes": {name: _each([part["classes"][name] for part in parts]) for name in first["classes"]},
        "confusion": summed,
    }


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "count": len(known),
    }


def _each(rows: Sequence[Sequence[float | None]]) -> list[dict[str, Any]]:
    """Class by class; a run that has never seen the last ones has no number for them."""
    longest = max(map(len, rows))
    return [_spread([row[at] if at < len(row) else None for row in rows]) for at in range(longest)]
