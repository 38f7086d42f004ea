from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.errors import BadInput
from ..core.fields import Number
from .fedper import FedPer


@dataclass(frozen=True)
class FedRep(FedPer):
    """Collins et al., 2021: first the private head on a frozen body, then the shared body under a frozen head.

    down: model; up: delta, weight; memory: private

    What is frozen has no gradient, no momentum and no moving statistics. The paper's CIFAR-10 runs train the head for
    10 epochs and the body for one.
    """

    head_epochs: Number | None = None  # the first of local.epochs; None: all but the last

    def stages(self, plan):
        epochs, wanted = plan.epochs, self.head_epochs
        if wanted is not None and plan.steps is not None:
            raise BadInput("fedrep divides local.epochs between head and body: leave local.steps empty")
        if wanted is not None and 0 < epochs <= wanted:
            raise BadInput(
                f"fedrep: head_epochs={wanted} leaves none of local.epochs={epochs} for the body; raise local.epochs"
            )
        counts = wanted is None and plan.steps is None and epochs > 1
        yield from FedPer.stages(replace(self, head_epochs=epochs - 1) if counts else self, plan)

    def begin(self, client):
        if client.steps and self.head_epochs is None:  # a description without training needs no epochs
            raise BadInput(
                "fedrep trains the head first and then the body: give local.epochs=2 or more, no local.steps"
            )
        return super().begin(client)

    def phase(self, epoch):
        return "head" if epoch < (self.head_epochs or 0) else "body"

    def trains(self, client, name):
        return self.is_private(client.net, name) == (client.phase == "head")
