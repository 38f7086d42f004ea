"""The picture that every run leaves: what clients own, how accuracy grew, what each client gets out of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.client_names import NUMBERS, Names, short
from ..plots.style import COLOURS, name_ticks, pyplot, save
from .folder import RunFolder
from .read import client_accuracies, curve, label_counts

_MODELS = (
    ("personal before", "before local training", COLOURS[0]),
    ("personal after", "after local training", COLOURS[1]),
    ("fine-tuned", "fine-tuned", COLOURS[2]),
)
_NUMBERED = 20  # clients at most whose names or numbers fit below a panel


def draw_run(folder: RunFolder, path: Path) -> Path:
    """A run in one picture, as PNG alone: whoever trains waits for it, and vectors take twice as long again."""
    figure, (split, growth, clients) = pyplot().subplots(1, 3, figsize=(12, 3.5), width_ratios=(1.15, 1, 1))
    names = folder.names()
    label_mix(split, label_counts(folder) or [[0]], names)
    rounds, accuracies = curve(folder)
    growth.plot(rounds, [100 * value for value in accuracies], color=COLOURS[0], linewidth=1.8)
    growth.set(xlabel="rounds", title="accuracy of the global model, %", ylim=(0, 100))
    growth.xaxis.get_major_locator().set_params(integer=True)
    if not rounds:
        growth.set_xticks([])
        growth.text(0.5, 0.5, "nothing was measured", transform=growth.transAxes, ha="center", color="#666666")
    personal = client_accuracies(folder.metrics())
    if shown := [(personal[model], label, colour) for model, label, colour in _MODELS if model in personal]:
        first = shown[0][0]
        order = sorted(first, key=lambda client: first[client])
        for values, label, colour in shown:
            ys = [100 * values.get(client, math.nan) for client in order]
            clients.plot(range(len(order)), ys, "o", color=colour, markersize=4, label=label)
        name_ticks(clients, [names.tick(client) for client in order] if len(order) <= _NUMBERED else [], 10)
        clients.legend()
    clients.set(xlabel="clients, worst first", title="accuracy on each client's own test data, %", ylim=(0, 102))
    for axis, name in ((split, "split"), (growth, "accuracy"), (clients, "clients")):
        axis.set_label(name)
    figure.tight_layout()
    return save(figure, path, metadata={".png": None})


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
    else:
        axis.yaxis.get_major_locator().set_params(integer=True)
