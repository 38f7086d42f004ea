"""Data on the device, or beside it where it does not fit; a batch is a row of indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .rng import generator, key
from .tree import Tree


def identity(x: Tensor, key: Tensor | None) -> Tensor:
    return x


@dataclass(frozen=True)
class OnHost:
    """Examples that stay in host memory, or in a mapped file; those asked for are gathered there and sent to `device`.

    The host waits for the copy, and so is never further ahead than one gather: page-locked memory stays small.
    """

    stored: Tensor
    device: torch.device

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def __getitem__(self, index: Tensor) -> Tensor:
        room = self.room(len(index), staged=True)
        return torch.index_select(self.stored, 0, index.cpu(), out=room).to(self.device)

    def room(self, count: int, *, staged: bool = False) -> Tensor:
        """Memory for so many examples on the device; staged: on the host, where the device can fetch them."""
        shape, dtype = (count, *self.stored.shape[1:]), self.stored.dtype
        if staged:
            return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        return torch.empty(shape, dtype=dtype, device=self.device)

    def to(self, device: torch.device | str) -> OnHost:
        return replace(self, device=torch.empty(0, device=device).device)  # with its number, as tensors say it


def gathered(stored: Tensor | OnHost, index: Tensor) -> Tensor:
    """stored[index]; on a CPU by whole rows, where indexing copies byte after byte."""
    if isinstance(stored, Tensor) and stored.device.type == "cpu" and index.dim() == 1:
        return torch.index_select(stored, 0, index)
    return stored[index]


@dataclass(frozen=True)
class Dataset:
    """`prepare(x, key)` turns stored examples into network input; `key` is None when nothing may be random.

    It folds the key for each of its purposes, as everyone does who draws in a step.
    """

    x: Tensor | OnHost
    y: Tensor | OnHost
    prepare: Callable[[Tensor, Tensor | None], Tensor] = identity

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor, weight: Tensor, seed: Tensor, augment: bool = True) -> Tree:
        """What a step sees of the data; all of its randomness is in `key`. Images that are not augmented stay still."""
        x = self.prepare(gathered(self.x, index), seed if augment else None)
        return Tree(x=x, y=gathered(self.y, index), weight=weight.to(x), key=seed)


@dataclass(frozen=True)
class Shard:
    """A part of a data set, gathered when it is looked at."""

    whole: Dataset
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    @property
    def x(self) -> Tensor:
        """Network input, nothing random about it."""
        return self.whole.prepare(gathered(self.whole.x, self.index), None)

    @property
    def y(self) -> Tensor:
        return gathered(self.whole.y, self.index)

    def chunks(self, size: int) -> list[Shard]:
        """The same examples in pieces that fit in memory."""
        return [Shard(self.whole, index) for index in self.index.split(size) if len(index)]


@dataclass(frozen=True)
class Federation:
    """One data set; for each client the indices it owns, and the pooled test set."""

    data: Dataset
    train: Mapping[int, Tensor]
    test: Mapping[int, Tensor]
    pool: Tensor = torch.empty(0, dtype=torch.long)
    validation: Mapping[int, Tensor] = field(default_factory=dict)  # for choosing a round; of no client: none are kept

    def on_host(self) -> Federation:
        """The same, whose examples stay on the host whatever device it is moved to."""
        x, y = (part if isinstance(part, OnHost) else OnHost(part, part.device) for part in (self.data.x, self.data.y))
        return replace(self, data=replace(self.data, x=x, y=y))

    def to(self, device: torch.device | str) -> Federation:
        names = "train", "test", "validation"
        moved = {name: {i: index.to(device) for i, index in getattr(self, name).items()} for name in names}
        data = replace(self.data, x=self.data.x.to(device), y=self.data.y.to(device))
        return replace(self, data=data, pool=self.pool.to(device), **moved)


def split_holdout(index: Tensor, count: int, client: int) -> tuple[Tensor, Tensor]:
    """A client's examples without `count` of them, and those: the same ones in every round and every run."""
    if not count:
        return index, index[:0]
    chosen = torch.zeros(len(index), dtype=torch.bool)
    chosen[torch.randperm(len(index), generator=generator(key("held", client)))[:count]] = True
    chosen = chosen.to(index.device)
    return index[~chosen], index[chosen]


class Plan(NamedTuple):
    rows: Tensor  # [steps, size] indices into the client's examples
    weights: Tensor  # [steps, size] one, or zero where a row wraps round
    epochs: list[int]  # which epoch each row belongs to

    def size(self, t: int) -> int:
        """How many of a row count; the others, at its end, wrap round."""
        return int(self.weights[t].sum())


def plan(examples: int, size: int, seed: int, *, epochs: int = 1, steps: int | None = None) -> Plan:
    """Batches of `epochs` epochs, or of as many as `steps` steps need.

    Every row is full: the last of an epoch wraps round to real examples of weight zero. Without batch statistics its
    loss is that of the short batch; BatchNorm sees real images, some of them twice.
    """
    per_epoch = math.ceil(examples / size)
    if steps is not None:
        epochs = math.ceil(steps / per_epoch) if per_epoch else 0
    draw, total = generator(seed), per_epoch * size
    wrapped = torch.arange(total) % max(examples, 1)
    order = [torch.randperm(examples, generator=draw)[wrapped] for _ in range(epochs)]
    rows = torch.stack(order).view(-1, size) if order else torch.empty(0, size, dtype=torch.long)
    weights = (torch.arange(total) < examples).double().repeat(epochs).view(-1, size)
    last = len(rows) if steps is None else min(steps, len(rows))
    return Plan(rows[:last], weights[:last], [row // per_epoch for row in range(last)])
