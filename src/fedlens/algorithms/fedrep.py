from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ..core.errors import BadInput
from ..core.fields import Count, Number
from .fedper import FedPer


@dataclass(frozen=True)
class FedRep(FedPer):
    """Collins et al., 2021: first the private head on a frozen body, then the shared body under a frozen head.

    down: model; up: delta, weight; memory: private

    What is frozen has no gradient, no momentum and no moving statistics. The training that closes a run, after which
    personal models are evaluated, is of the head alone.

    The paper's CIFAR-10 runs train the head for 10 epochs and the body for one, and close with 10 (fedrep/paper). By
    default head and body share local.epochs, so that rounds cost what those of other methods cost. Differs from the
    released code, in which biases have no weight decay and clients count alike on CIFAR, here by their examples.
    """

    head_epochs: Number | None = None  # the first of local.epochs; None: all but the last
    body_epochs: Count | None = None  # after those of the head, whatever local.epochs says; None: the rest of these
    closing: Literal["head", "round"] = "head"  # what the closing training is of; round: head, then body
    closing_head_epochs: Count | None = None  # None: local.epochs

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"head_epochs": 10, "body_epochs": 1, "closing_head_epochs": 10},
        "closing_round": {"closing": "round"},  # what the runs of results/pse_details.md had
    }

    def __post_init__(self):
        if self.body_epochs is not None and self.head_epochs is None:
            raise BadInput("fedrep: body_epochs needs head_epochs: say how many epochs the head has, too")

    def stages(self, plan):
        if self.body_epochs is not None and self.head_epochs is not None:
            plan = replace(plan, epochs=self.head_epochs + self.body_epochs)
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

    def closing_phase(self, epoch):
        is_whole = self.closing == "round" or self.private == "none"  # without a head of its own nothing would train
        return self.phase(epoch) if is_whole else "head"

    def closing_epochs(self, epochs):
        if self.closing == "head":
            return epochs if self.closing_head_epochs is None else self.closing_head_epochs
        return epochs if self.body_epochs is None else (self.head_epochs or 0) + self.body_epochs

    def trains(self, client, name):
        return self.is_private(client.net, name) == (client.phase == "head")
