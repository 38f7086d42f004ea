"""How good models are: counts on test shards, and what is said about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from .algorithm import Errand
from .batches import Shard
from .check import shape_mismatch
from .network import Network
from .tree import Tree

# Examples a pass: a core's caches like few, a GPU wants many.
CHUNK = {"cpu": 250, "cuda": 2000}


def pieces(shard: Shard) -> list[Shard]:
    return shard.chunks(CHUNK.get(shard.index.device.type, 250))


def score(net: Network, weights: Tree, shard: Shard) -> Tree:
    """correct, loss (summed) and examples of one piece of test data."""
    with torch.no_grad():
        logits, y = net(weights, shard.x), shard.y
        loss = F.cross_entropy(logits.double(), y, reduction="sum")
    return Tree(correct=(logits.argmax(1) == y).sum(), loss=loss, examples=torch.tensor(len(shard), device=y.device))


def total(scores: Sequence[Tree]) -> Tree:
    """Sums in the given order, so that the bits do not depend on who counted which piece."""
    return Tree({name: torch.stack([s[name] for s in scores]).sum() for name in ("correct", "loss", "examples")})


@dataclass(frozen=True)
class Evaluate(Errand):
    """up: correct, loss, examples on the client's test shard; before (epochs=0) or after local training."""

    may_be_nan: ClassVar = ("loss",)  # of a model that diverged

    def phase(self, epoch):
        return self.base.closing_phase(epoch)

    def validate_upload(self, server, upload, expected):
        if other := shape_mismatch(upload, expected):
            return other
        return "" if 0 <= int(upload.correct) <= int(upload.examples) else "it has more correct answers than examples"

    def finish(self, client, local):
        weights = self.base.personal(client, local if client.steps else None)
        scores = [score(client.net, weights, piece) for piece in pieces(client.test)]
        none = Tree(correct=torch.tensor(0), loss=torch.tensor(0.0).double(), examples=torch.tensor(0))
        return total(scores) if scores else none, Tree()
