"""A data set and a split become what engines run on."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from ..core.batches import Dataset, Federation
from .images import Images
from .partition.base import Partition
from .prepare import Prepare
from .split import Split


def federate(
    images: Images,
    partition: Partition,
    clients: int,
    seed: int,
    *,
    augment: Literal["none", "flip", "crop_flip"] = "none",
    dtype: torch.dtype = torch.float32,
) -> tuple[Federation, Split]:
    """Deal the data to clients; every method that is given the same arguments gets the same split."""
    split = partition.split(images, clients, seed)
    border = max(1, images.x.shape[3] // 8) if augment == "crop_flip" else 0  # 4 pixels at 32x32, as usual
    prepare = Prepare(images.mean, images.std, border, augment != "none", dtype)
    data = Dataset(images.x, images.y, prepare)
    train, test = (
        {client: torch.from_numpy(shard) for client, shard in enumerate(shards)} for shards in (split.train, split.test)
    )
    return Federation(data, train, test, pooled_test(images, split)), split


def pooled_test(images: Images, split: Split) -> torch.Tensor:
    """The canonical test part; where clients train on some of it, all clients' test shards instead."""
    trained_on = torch.zeros(len(images), dtype=torch.bool)
    trained_on[torch.from_numpy(np.concatenate(split.train))] = True
    if not trained_on[images.test].any():
        return images.test
    return torch.from_numpy(np.sort(np.concatenate(split.test)))
