"""What a client minimises on a batch: functions of (client, weights, batch, out), out = features and logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .tree import Tree


def weighted(losses: Tensor, batch: Tree) -> Tensor:
    return (losses * batch.weight).sum() / batch.weight.sum()


def cross_entropy(client, weights: Tree, batch: Tree, out: Tree) -> Tensor:
    return weighted(F.cross_entropy(out.logits, batch.y, reduction="none"), batch)
