from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.algorithm import Algorithm
from ..core.fields import NonNegative, Positive
from ..core.objective import weighted


@dataclass(frozen=True)
class FedNTD(Algorithm):
    """Lee et al., 2022: local training keeps what the received model says of all classes but the true one.

    The received model teaches as it would predict: its norms read their running statistics.

    down: model; up: delta, weight; memory: nothing
    """

    beta: NonNegative = 1.0  # how much this counts beside the objective
    tau: Positive = 1.0  # temperature; the term is multiplied by its square

    presets: ClassVar[dict[str, dict[str, Any]]] = {"soft": {"tau": 3.0}}

    def loss(self, client, weights, batch, out):
        loss = super().loss(client, weights, batch, out)
        if not self.beta:
            return loss
        with torch.no_grad():
            teacher = client.net(self.start(client), batch.x)
        return loss + self.beta * weighted(not_true(out.logits, teacher, batch.y, self.tau), batch)


def not_true(student: Tensor, teacher: Tensor, y: Tensor, tau: float) -> Tensor:
    """tau^2 KL(teacher || student) of every example, over the classes that are not its own."""
    truth = y[:, None] == torch.arange(student.shape[1], device=y.device)
    # After the logarithm the true class has 0 in both, and counts nothing: minus infinity would give no number.
    mine, theirs = (
        (logits.masked_fill(truth, -torch.inf) / tau).log_softmax(1).masked_fill(truth, 0)
        for logits in (student, teacher)
    )
    return tau**2 * (theirs.exp() * (theirs - mine)).sum(1)
