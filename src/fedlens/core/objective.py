"""What a client minimises on a batch, and how much it counts in the average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .tree import Tree


# ---- objectives: functions of (client, weights, batch, out), out = features and logits ----
def weighted(losses: Tensor, batch: Tree) -> Tensor:
    return (losses * batch.weight).sum() / batch.weight.sum()


def cross_entropy(client, weights: Tree, batch: Tree, out: Tree) -> Tensor:
    return weighted(F.cross_entropy(out.logits, batch.y, reduction="none"), batch)


@dataclass(frozen=True)
class ClassWeighted:
    """Cross-entropy in which an image counts by how rare its class is among its client's: n / (classes n_class)."""

    def initial_memory(self, client) -> Tree:
        y = client.data.y
        found, counts = y.unique(return_counts=True)
        classes = client.net(client.net.initial_weights(), client.data.chunks(1)[0].x).shape[1]
        rarity = torch.zeros(classes, dtype=torch.float64, device=y.device)
        return Tree(rarity=rarity.index_copy(0, found, len(y) / (len(found) * counts.double())))

    def __call__(self, client, weights: Tree, batch: Tree, out: Tree) -> Tensor:
        rarity = client.memory.rarity.to(out.logits)[batch.y]
        return cross_entropy(client, weights, batch.replace(weight=batch.weight * rarity), out)


# ---- weightings: functions of the client ----
def by_examples(client) -> float:
    return client.examples


def by_batches(client) -> float:
    return client.steps


def uniformly(client) -> float:
    return 1.0


WEIGHTINGS = {"samples": by_examples, "uniform": uniformly, "batches": by_batches}
