"""A data set and a split become what engines run on."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from ..core.batches import Dataset, Federation, split_holdout
from ..core.errors import BadInput
from ..core.rng import key
from .groups import held_out_groups
from .images import Images
from .partition.base import Partition
from .prepare import Prepare
from .split import Split

Augment = Literal["none", "flip", "crop_flip", "randaugment"]


def federate(
    images: Images,
    partition: Partition,
    clients: int,
    seed: int,
    *,
    augment: Augment = "none",
    dtype: torch.dtype = torch.float32,
    validation: float = 0.0,
) -> tuple[Federation, Split]:
    """Deal the data to clients; every method that is given the same arguments gets the same split.

    `validation`: the share of its training images that each client keeps for choosing a round.
    """
    if augment == "randaugment" and images.x.shape[1] not in (1, 3):
        raise BadInput(f"augment=randaugment needs images of 1 or 3 channels, but these have {images.x.shape[1]}")
    split = partition.split(images, clients, seed)
    cropped = augment in ("crop_flip", "randaugment")
    border = max(1, images.x.shape[3] // 8) if cropped else 0  # 4 pixels at 32x32, as usual
    prepare = Prepare(images.mean, images.std, border, augment != "none", dtype, augment == "randaugment")
    data = Dataset(images.x, images.y, prepare)
    train, test = (
        {client: torch.from_numpy(shard) for client, shard in enumerate(shards)} for shards in (split.train, split.test)
    )
    whole = Federation(data, train, test, pooled_test(images, split))
    if not validation:
        return whole, split
    kept = {i: _validation_aside(images, index, validation, i) for i, index in train.items()}
    if not any(len(part) for _, part in kept.values()):
        raise BadInput(f"evaluate.validation={validation:g} leaves no client an image to validate on: raise it")
    if not any(len(part) for part, _ in kept.values()):
        raise BadInput(f"evaluate.validation={validation:g} leaves no client an image to train on: lower it")
    left, aside = ({i: pair[at] for i, pair in kept.items()} for at in (0, 1))
    return replace(whole, train=left, validation=aside), split


def _validation_aside(
    images: Images, index: torch.Tensor, share: float, client: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's images to train on and to validate on; where patients are known, those of one stay together."""
    if images.groups is None:
        return split_holdout(index, round(share * len(index)), client)
    labels, groups = images.y[index].numpy(), images.groups[index].numpy()
    rest, held = held_out_groups(labels, groups, share, key("held", client))
    return index[torch.from_numpy(rest)], index[torch.from_numpy(held)]


def pooled_test(images: Images, split: Split) -> torch.Tensor:
    """The canonical test part; where clients train on some of it, all clients' test shards instead."""
    trained_on = torch.zeros(len(images), dtype=torch.bool)
    trained_on[torch.from_numpy(np.concatenate(split.train))] = True
    if not trained_on[images.test].any():
        return images.test
    return torch.from_numpy(np.sort(np.concatenate(split.test)))
