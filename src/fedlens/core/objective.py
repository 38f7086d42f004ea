"""What a client minimises on a batch, and how much it counts in the average."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .tree import Tree


# ---- objectives: functions of (client, weights, batch, out), out = features and logits ----
def weighted(losses: Tensor, batch: Tree) -> Tensor:
    return (losses * batch.weight).sum() / batch.weight.sum()


def cross_entropy(client, weights: Tree, batch: Tree, out: Tree) -> Tensor:
    return weighted(F.cross_entropy(out.logits, batch.y, reduction="none"), batch)


# ---- weightings: functions of the client ----
def by_examples(client) -> float:
    return client.examples


def by_batches(client) -> float:
    return client.steps


def uniformly(client) -> float:
    return 1.0


WEIGHTINGS = {"samples": by_examples, "uniform": uniformly, "batches": by_batches}
