"""Uplink transforms: what is done to an upload before it is sent, and undone at the server.

They act on the update of the parameters (delta.params); weights, statistics and control variates pass as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch

from .check import shape_mismatch
from .errors import BadInput
from .fields import NonNegative, Positive, Share
from .rng import fold, privacy_noise, uniform
from .tree import Tree, clipped


@dataclass(frozen=True)
class Transform:
    name: ClassVar[str] = ""
    packs: ClassVar[bool] = False  # what it sends is no longer shaped like the parameters: it must come last

    def initial_memory(self, client: Any) -> Tree:
        if "model" not in client.received:
            raise BadInput(f"uplink {self.name} needs a method that uploads its update as delta")
        return Tree()

    def encode(self, client: Any, upload: Tree) -> tuple[Tree, Tree]:
        """(what is sent, what changed in memory), at the client."""
        if "delta" not in upload:
            raise BadInput(f"uplink {self.name} needs a method that uploads its update as delta")
        return upload.replace(delta=upload.delta.replace(params=self.pack(client, upload.delta.params))), Tree()

    def decode(self, server: Any, upload: Tree) -> Tree:
        """The upload that aggregate sees, at the server."""
        params = self.unpack(server.state.model.params, upload.delta.params)
        return upload.replace(delta=upload.delta.replace(params=params))

    def validate_upload(self, server: Any, upload: Tree, expected: Tree) -> str:
        """What speaks against taking this upload apart, in words; usually nothing."""
        return ""

    def pack(self, client: Any, update: Tree) -> Tree:
        return update

    def unpack(self, like: Tree, packed: Tree) -> Tree:
        return packed

    def key(self, client: Any, name: str) -> torch.Tensor:
        return fold(torch.tensor(client.key), f"{type(self).__name__} {name}")


@dataclass(frozen=True)
class Clip(Transform):
    """Scale the whole update down to this Euclidean norm when it is longer."""

    name: ClassVar = "clip"
    norm: Positive = 1.0  # largest Euclidean norm of an update

    def pack(self, client, update):
        return clipped(update, self.norm)


@dataclass(frozen=True)
class GaussianNoise(Transform):
    """Independent normal noise on every entry. Alone it promises no privacy: clip first, and account for both."""

    name: ClassVar = "noise"
    std: NonNegative = 0.01  # standard deviation of the noise

    def pack(self, client, update):
        return Tree({n: t + self.std * privacy_noise(self.key(client, n), *t.shape).to(t) for n, t in update.items()})


@dataclass(frozen=True)
class TopK(Transform):
    """The largest entries of each tensor, the rest saved for the next upload (error feedback). memory: residual."""

    name: ClassVar = "topk"
    packs: ClassVar = True
    share: Share = 0.1  # of the entries that are sent

    def initial_memory(self, client):
        return super().initial_memory(client).replace(residual=client.received.model.params.zeros())

    def encode(self, client, upload):
        total = upload.delta.params + client.memory.residual
        index = total.map(self.largest)
        sparse = Tree({n: Tree(index=index[n].int(), kept=t.flatten()[index[n]]) for n, t in total.items()})
        rest = Tree({n: t.flatten().index_fill(0, index[n], 0).view_as(t) for n, t in total.items()})
        return upload.replace(delta=upload.delta.replace(params=sparse)), Tree(residual=rest)

    def largest(self, tensor):
        count = max(1, int(Fraction(str(self.share)) * tensor.numel()))  # 0.29 of 100 is 29, in floats 28
        order = tensor.flatten().abs().sort(descending=True, stable=True).indices  # ties keep the lower index
        return order[:count].sort().values

    def validate_upload(self, server, upload, expected):
        """Indices out of range would stop a GPU for good, and one that comes twice has no meaning."""
        if other := shape_mismatch(upload, expected):
            return other
        entries = [(packed.index, server.state.model.params[n]) for n, packed in upload.delta.params.items()]
        inside = [(at[0] >= 0) & (at[-1] < like.numel()) & (at[1:] > at[:-1]).all() for at, like in entries]
        return "" if all(torch.stack(inside).tolist()) else "its indices are out of range or come twice"

    def unpack(self, like, packed):
        return Tree({n: _scatter(like[n], s.index, s.kept) for n, s in packed.items()})


def _scatter(like: torch.Tensor, index: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like).flatten().index_copy(0, index.long(), kept).view_as(like)


@dataclass(frozen=True)
class Quantise(Transform):
    """Eight bits an entry between each tensor's extremes, rounded at random so that the mean is kept."""

    name: ClassVar = "quantise"
    packs: ClassVar = True

    def pack(self, client, update):
        return Tree({n: self.quantised(self.key(client, n), t) for n, t in update.items()})

    def quantised(self, seed, tensor):
        low, high = tensor.aminmax()
        scale = ((high - low) / 255).clamp(min=torch.finfo(tensor.dtype).tiny)
        code = ((tensor - low) / scale + uniform(seed, *tensor.shape).to(tensor)).floor().clamp(0, 255)
        return Tree(code=code.to(torch.uint8), low=low, scale=scale)

    def unpack(self, like, packed):
        return Tree({n: (q.code.to(q.scale) * q.scale + q.low).view_as(like[n]) for n, q in packed.items()})


TRANSFORMS = {transform.name: transform for transform in (Clip, GaussianNoise, TopK, Quantise)}
