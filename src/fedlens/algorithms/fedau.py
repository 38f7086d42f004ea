from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..core.algorithm import Algorithm
from ..core.errors import BadInput
from ..core.fields import Count
from ..core.objective import uniformly
from ..core.tree import mean


@dataclass(frozen=True)
class FedAU(Algorithm):
    """Wang & Ji, 2024: an update counts as much as its client is rare, by the rounds between its participations.

    down: model; up: delta, weight; memory: last, intervals, waited

    Intervals that the cutoff closed before a client's first participation count, as in the paper's algorithm 2 and the
    released code. Differs from that code, whose cutoff is out of reach by default (here 50, as in its example).
    Statistics of norms stay a mean over the cohort: with weights that do not sum to one a variance could be negative.
    Results published before those intervals counted are those of `fedau/earlier`.
    """

    cutoff: Count = (
        50  # K: a silence of so many rounds is an interval of its own; the released code has none by default
    )

    first: Literal["intervals", "one"] = "intervals"  # weight of a first participation; one: whatever was closed before

    presets: ClassVar[dict[str, dict[str, Any]]] = {"earlier": {"first": "one"}}

    default_weighting = uniformly
    reweighs = True  # no other method may decide on weights over it

    def stages(self, plan):
        if plan.weighting not in (None, uniformly):
            raise BadInput("fedau itself says how much a client counts: leave weighting at auto")
        yield from super().stages(plan)

    def initial_memory(self, client):
        return (
            super()
            .initial_memory(client)
            .replace(
                last=torch.tensor(-1),  # round of its last participation
                intervals=torch.tensor(0),  # closed so far
                waited=torch.tensor(0),  # rounds, their sum
            )
        )

    def finish(self, client, local):
        """The interval that ends now is closed afterwards: it counts from the next participation on."""
        upload, memory = super().finish(client, local)
        last, intervals, waited = (int(client.memory[name]) for name in ("last", "intervals", "waited"))
        silences = (client.round - last - 1) // self.cutoff
        closed = intervals + silences
        is_one = not closed or (last < 0 and self.first == "one")
        omega = 1.0 if is_one else (waited + silences * self.cutoff) / closed
        memory = memory.replace(
            last=torch.tensor(client.round),
            intervals=torch.tensor(closed + 1),
            waited=torch.tensor(waited + client.round - last),
        )
        return upload.replace(weight=torch.tensor(omega, dtype=torch.float64)), memory

    def aggregate(self, server, uploads):
        """The sum of omega delta over the population; statistics stay a mean, weights of which sum to one."""
        weights = [float(u.weight) for u in uploads]
        delta = mean([u.delta for u in uploads], weights)
        return self.advance(server, delta.replace(params=delta.params * (sum(weights) / server.population)))
