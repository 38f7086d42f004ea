"""Small federations that every engine can build, in its own process too."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from fedlens.core.algorithm import Stage
from fedlens.core.batches import Dataset, Federation
from fedlens.core.cohort import Uniform
from fedlens.core.network import Network
from fedlens.core.optimizer import Exponential, Sgd
from fedlens.core.rng import fold, generator, seeded, uniform

SIZES = (9, 4, 5, 1, 18, 3)


class Net(nn.Module):
    """A convolution with BatchNorm, in double precision."""

    def __init__(self, norm: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.relu = nn.ReLU()
        self.flat = nn.Flatten()
        self.head = nn.Linear(64, 3)

    def features(self, x):
        return self.flat(self.relu(self.norm(self.conv(x))))

    def forward(self, x):
        return self.head(self.features(x))


def jitter(x, key):
    """Augmentation drawn from the step's key alone."""
    return x if key is None else x + 0.1 * (uniform(fold(key, "jitter"), *x.shape).to(x) - 0.5)


def network(norm: bool = True, buffers: str = "average") -> Network:
    with seeded(7):
        return Network(Net(norm), "fp64", buffers)


@cache
def drawn(total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels; nobody writes them."""
    draw = generator(3)
    y = torch.randint(0, 3, (total,), generator=draw)
    return torch.randn(total, 1, 6, 6, generator=draw, dtype=torch.float64) + y[:, None, None, None] * 0.3, y


def federation(sizes=SIZES, prepare=jitter) -> Federation:
    total = sum(sizes) + 2 * len(sizes) + 600
    x, y = drawn(total)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    train = {i: torch.arange(end - size, end) for i, (end, size) in enumerate(zip(ends, sizes, strict=True))}
    test = {i: torch.arange(ends[-1] + 2 * i, ends[-1] + 2 * i + 2) for i in range(len(sizes))}
    return Federation(Dataset(x, y, prepare), train, test, torch.arange(total - 600, total))


def build():
    return network(), federation()


SGD = Sgd(0.1, momentum=0.9, weight_decay=1e-3, schedule=Exponential(0.9))
PLAN = Stage(None, 3, Uniform(3), SGD, epochs=2, size=4)


def same(a, b) -> bool:
    """Two trees, bit for bit."""
    theirs = dict(b.paths())
    mine = dict(a.paths())
    return mine.keys() == theirs.keys() and all(
        t.dtype == theirs[p].dtype and torch.equal(t.nan_to_num(), theirs[p].nan_to_num()) for p, t in mine.items()
    )
