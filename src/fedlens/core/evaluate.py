"""How good models are: counts on test shards, and what is said about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .algorithm import Errand
from .batches import Shard
from .check import shape_mismatch
from .measures import detail
from .tree import Tree

# Examples a pass: a core's caches like few, a GPU wants many.
CHUNK = {"cpu": 250, "cuda": 2000}


def pieces(shard: Shard) -> list[Shard]:
    return shard.chunks(CHUNK.get(shard.index.device.type, 250))


def score(net: Callable[[Tree, Tensor], Tensor], weights: Tree, shard: Shard, detailed: bool = False) -> Tree:
    """correct, loss (summed) and examples of one piece of test data; detailed: what was predicted for each, too."""
    with torch.no_grad():
        logits, y = net(weights, shard.x), shard.y
        loss = F.cross_entropy(logits.double(), y, reduction="sum")
    found = Tree(correct=(logits.argmax(1) == y).sum(), loss=loss, examples=torch.tensor(len(shard), device=y.device))
    return found.replace(probabilities=logits.double().softmax(1), y=y) if detailed else found


def total(scores: Sequence[Tree]) -> Tree:
    """Sums in the given order, so that the bits do not depend on who counted which piece; of detailed scores the
    detail that measures are made of."""
    found = Tree({name: torch.stack([s[name] for s in scores]).sum() for name in ("correct", "loss", "examples")})
    if "y" not in scores[0]:
        return found
    return found.replace(**detail(*(torch.cat([s[name] for s in scores]) for name in ("probabilities", "y"))))


def personal_evaluations(
    algorithm: Any, wanted: str, epochs: int, steps: int | None
) -> Iterator[tuple[str, dict[str, int | None]]]:
    """(name, how long clients train before it) of every evaluation of personal models. `wanted`: evaluate.personal."""
    for name in algorithm.evaluated_as:
        if name.startswith("personal") and wanted != "both" and not name.endswith(wanted):
            continue
        trained = name == "personal after"
        yield name, dict(epochs=algorithm.closing_epochs(epochs) if trained else 0, steps=steps if trained else None)


@dataclass(frozen=True)
class Evaluate(Errand):
    """up: correct, loss, examples on the client's test shard; before (epochs=0) or after local training."""

    detailed: bool = False  # the detail of all measures, too
    validation: bool = False  # on the images that the client keeps for choosing a round; of the model it starts from

    may_be_nan: ClassVar = ("loss", "calibration", "auroc")  # of a model that diverged; a class that is absent

    def phase(self, epoch):
        return self.base.closing_phase(epoch)

    def validate_upload(self, server, upload, expected):
        if other := shape_mismatch(upload, expected):
            return other
        return "" if 0 <= int(upload.correct) <= int(upload.examples) else "it has more correct answers than examples"

    def finish(self, client, local):
        if self.validation:
            predictions, weights, shard = client.net, self.base.start(client), client.validation
        else:
            weights, shard = self.base.personal(client, local if client.steps else None), client.test
            predictions = partial(self.base.predictions, client)
        scores = [score(predictions, weights, piece, self.detailed) for piece in pieces(shard)]
        return total(scores) if scores else self._nothing(client, weights), Tree()

    def _nothing(self, client, weights):
        """Of a client without such images."""
        none = Tree(correct=torch.tensor(0), loss=torch.tensor(0.0).double(), examples=torch.tensor(0))
        if not self.detailed:
            return none
        classes = client.net(weights, client.data.chunks(1)[0].x).shape[1]
        empty = torch.zeros(0, classes, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
        return none.replace(**detail(*empty))
