"""One function per figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.client_names import NUMBERS, Names, short
from ..plots.style import COLOURS, name_ticks, pyplot, save
from ..runs.folder import RunFolder

_LOOKS = (
    ("personal before", "before local training", COLOURS[0]),
    ("personal after", "after local training", COLOURS[1]),
    ("fine-tuned", "fine-tuned", COLOURS[2]),
)
_NUMBERED = 20  # clients at most whose names or numbers fit below a panel


def learning_curves(runs: Mapping[str, RunFolder], path: Path) -> Path:
    """Accuracy of the global model over rounds and over bytes, one line for each run."""
    plt = pyplot()
    figure, (over_rounds, over_bytes) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for (name, folder), colour in zip(runs.items(), _cycle(len(runs)), strict=True):
        rounds, accuracies = curve(folder)
        spent = bytes_until(folder, rounds)
        over_rounds.plot(rounds, accuracies, color=colour, label=name, linewidth=1.8)
        over_bytes.plot([count / 1e6 for count in spent], accuracies, color=colour, label=name, linewidth=1.8)
    over_rounds.set(xlabel="rounds", ylabel="accuracy, global model, pooled test set", ylim=(0, 1))
    over_bytes.set(xlabel="megabytes sent, up and down")
    if len(runs) > 1:
        over_bytes.legend(loc="lower right")
    return save(figure, path)


def first_look(folder: RunFolder, path: Path) -> Path:
    """A run in one picture: what clients own, how accuracy grew, what each client gets out of it."""
    import json

    plt = pyplot()
    figure, (split, growth, clients) = plt.subplots(1, 3, figsize=(12, 3.5), width_ratios=(1.15, 1, 1))
    names = folder.names()
    label_mix(split, json.loads((folder.path / "label_counts.json").read_text()), names)
    rounds, accuracies = curve(folder)
    growth.plot(rounds, accuracies, color=COLOURS[0], linewidth=1.8)
    growth.set(xlabel="rounds", title="accuracy of the global model", ylim=(0, 1))
    growth.xaxis.get_major_locator().set_params(integer=True)
    if not rounds:
        growth.set_xticks([])
        growth.text(0.5, 0.5, "nothing was measured", transform=growth.transAxes, ha="center", color="#666666")
    personal = personal_accuracies(folder)
    if shown := [(personal[look], label, colour) for look, label, colour in _LOOKS if look in personal]:
        first = shown[0][0]
        order = sorted(first, key=lambda client: first[client])
        for values, label, colour in shown:
            ys = [values.get(client, math.nan) for client in order]
            clients.plot(range(len(order)), ys, "o", color=colour, markersize=4, label=label)
        name_ticks(clients, [names.tick(client) for client in order] if len(order) <= _NUMBERED else [], 10)
        clients.legend()
    clients.set(xlabel="clients, worst first", title="accuracy on each client's own test data", ylim=(0, 1.02))
    figure.tight_layout()
    return save(figure, path)


def label_mix(axis: Any, counts: Sequence[Sequence[int]], names: Names = NUMBERS) -> None:
    """Client on x, class on y, area by count."""
    xs, ys, sizes = [], [], []
    largest = max(max(row) for row in counts)
    for client, row in enumerate(counts):
        for label, count in enumerate(row):
            if count:
                xs.append(client)
                ys.append(label)
                sizes.append(160 * count / largest)
    axis.scatter(xs, ys, s=sizes, color=COLOURS[2], alpha=0.75, linewidth=0)
    axis.set(xlabel="clients", ylabel="class", title="who owns which images")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if names.clients and len(counts) <= _NUMBERED:
        name_ticks(axis, [names.tick(client) for client in range(len(counts))], 10)
    if (count := len(counts[0])) <= 12:
        axis.set_yticks(range(count), [short(names.label(label), 18) for label in range(count)])


def curve(folder: RunFolder) -> tuple[list[int], list[float]]:
    rows = [r for r in folder.metrics().to_pylist() if r["model"] == "global" and r["metric"] == "accuracy"]
    return [row["round"] for row in rows], [row["value"] for row in rows]


def bytes_until(folder: RunFolder, rounds: Sequence[int]) -> list[int]:
    """Bytes of the method itself until each of these rounds."""
    spent: dict[int, int] = {}
    for row in folder.bytes().to_pylist():
        if not row["kind"].startswith("evaluation"):
            spent[row["round"]] = spent.get(row["round"], 0) + row["payload"] + row["header"]
    return [sum(count for done, count in spent.items() if done <= round) for round in rounds]


def personal_accuracies(folder: RunFolder) -> dict[str, dict[int, float]]:
    """Model -> client -> accuracy, at the last look."""
    found: dict[str, dict[int, float]] = {}
    for row in folder.metrics().to_pylist():
        if row["client"] is not None and row["metric"] == "accuracy":
            found.setdefault(row["model"], {})[row["client"]] = row["value"]
    return found


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
