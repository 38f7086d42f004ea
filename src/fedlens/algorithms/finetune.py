from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ..core.algorithm import Algorithm, Errand, Recipe
from ..core.fields import Count
from ..core.tree import Tree
from .fedavg import FedAvg


@dataclass(frozen=True)
class FineTuned:
    """X+FT: after the last round of any method, every client trains the final model on its own data and keeps it.

    Plain local training: no proximal term, no control variates.
    """

    base: Recipe = FedAvg()  # the method that comes before
    epochs: Count = 5  # epochs of each client, after the last round
    part: Literal["all", "head"] = "all"  # what is trained of the model

    def stages(self, plan):
        *before, last = self.base.stages(plan)
        yield from (*before, last)
        tune = FineTune(base=last.algorithm, part=self.part)
        yield last.errand(tune, epochs=self.epochs, fresh=False, objective=in_tuning(last.objective))


def in_tuning(objective: Any) -> Any:
    """An objective without those around it that are for training alone (FedLC's margins)."""
    if (base := getattr(objective, "base", None)) is None:
        return objective
    alone = getattr(objective, "for_training_alone", False)
    return in_tuning(base) if alone else replace(objective, base=in_tuning(base))


@dataclass(frozen=True)
class FineTune(Errand):
    """The last stage of FineTuned. down: as its base; up: nothing; memory: tuned, with what its base remembers"""

    part: Literal["all", "head"] = "all"  # what is trained of the model

    evaluated_as: ClassVar = ("fine-tuned",)

    begin, phase, step = Algorithm.begin, Algorithm.phase, Algorithm.step  # training of its own, not the base's
    closing_phase, closing_epochs = Algorithm.closing_phase, Algorithm.closing_epochs
    predictions = Algorithm.predictions

    def initial_memory(self, client):
        return super().initial_memory(client).replace(tuned=Tree())

    def start(self, client):
        known = self.base.personal(client)
        return Tree(params=known.params, buffers=known.buffers)

    def trains(self, client, name):
        return self.part == "all" or name in client.net.head

    def finish(self, client, local):
        return Tree(), Tree(tuned=Tree(params=local.params, buffers=local.buffers))

    def personal(self, client, local=None):
        """One that never replied in the last stage has nothing tuned, and predicts as before."""
        if local is not None:
            return local
        return client.memory.tuned or self.base.personal(client)
