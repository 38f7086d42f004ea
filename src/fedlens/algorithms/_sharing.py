"""Examples that clients give to all: how they are packed, put together and trained on (FedXDS, FedFed)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.algorithm import Client, Errand, Stage, chain
from ..core.batches import Shard
from ..core.errors import BadInput, RunFailed
from ..core.network import Network
from ..core.objective import cross_entropy
from ..core.rng import fold, uniform
from ..core.tree import Tree
from ..privacy.statement import Statement
from .fedaux import ScorePublicImages
from .pse import PSE

Form = Literal["float32", "float16", "uint8"]
Mix = Literal["additive", "convex"]


def can_share(stage: Stage, name: str) -> None:
    """Refuses what the method of this name cannot go over: there is one common payload, and one network to train."""
    for part in chain(stage.algorithm):
        if getattr(part, "fills_shared", False):
            raise BadInput(f"algorithm.base of {name} shares data itself; name fedxds or fedfed, and once")
        if isinstance(part, PSE):
            raise BadInput(
                f"algorithm.base of {name} cannot be pse, which asks two networks about the same images; "
                "fedper or fedrep keep a private head and can share"
            )
        if isinstance(part, ScorePublicImages):
            raise BadInput(
                f"algorithm.base of {name} cannot be fedaux, whose features of public images would take the place of "
                "what clients share; feddf can share"
            )


@dataclass(frozen=True)
class Exchange(Errand):
    """Every client gives examples to all, once. A subclass says in `finish` what leaves of them."""

    by: Any = None  # the method whose exchange this is

    evaluated_as: ClassVar = ()  # no model moves
    fills_shared: ClassVar = True  # another that does would take its place

    def classes(self, net: Network) -> int | None:
        """How many labels there are; None where the network does not say."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many classes there are")

    def given(self, client: Client) -> Shard:
        """The examples that a client gives."""
        return client.data

    def released(
        self, net: Network, download: Tree, x: Tensor, y: Tensor, seed: Tensor, unit: tuple[Tensor, Tensor]
    ) -> Tree:
        """What would leave of other images: anybody who knows the method and its download can tell.

        `unit`: black as network input, and what white has more.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what leaves of images")

    def one_of_each(self, count: int) -> Tensor:
        """Places of one release for each image among so many releases of a client."""
        return torch.arange(count)

    def validate_upload(self, server, upload, expected):
        return fault(upload, expected, self.classes(server.net))

    def aggregate(self, server, uploads):
        return server.state.replace(shared=assembled(uploads, self.classes(server.net)))

    def statement(self) -> Statement:
        return self.by.statement()


# ---- on the way ------------------------------------------------------------------------------------------------------
def packed(x: Tensor, y: Tensor, form: Form = "float32", kept: Tensor | None = None) -> Tree:
    """Examples as they are sent. `kept` [examples, 1, h, w], as many in each: these pixels alone, with their places.

    uint8 has 256 steps between the extremes of each example. Packing sees nothing but what is released anyway.
    """
    tree = Tree(y=y.to(torch.int16))
    if kept is not None:
        place = kept.flatten(1).nonzero()[:, 1].view(len(x), -1)
        x = x.flatten(2).gather(2, place[:, None].expand(-1, x.shape[1], -1))
        tree = tree.replace(place=place.int())
    if form != "uint8":
        return tree.replace(x=x.to(getattr(torch, form)))
    flat = x.float().flatten(1)
    low, high = (flat.amin(1), flat.amax(1)) if flat.numel() else (flat.sum(1), flat.sum(1))
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    code = ((flat - low[:, None]) / scale[:, None]).round().clamp(0, 255).to(torch.uint8)
    return tree.replace(x=code.view(x.shape), low=low, scale=scale)


def unpacked(shared: Tree, index: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The examples at these places, as images like `like` [B, c, h, w], and their labels; recordable."""
    x = shared.x[index].to(like)
    if "scale" in shared:
        scale, low = (shared[name][index].to(like).view(-1, *[1] * (x.dim() - 1)) for name in ("scale", "low"))
        x = x * scale + low
    if "place" in shared:
        pixels = like.shape[2] * like.shape[3]
        place = shared.place[index].long().clamp(max=pixels - 1)  # the server cannot tell what some client made up
        place = place[:, None].expand(-1, x.shape[1], -1)
        x = x.new_zeros(len(index), x.shape[1], pixels).scatter(2, place, x)
    return x.view(len(index), *like.shape[1:]), shared.y[index].long()


def assembled(uploads: Sequence[Tree], classes: int | None) -> Tree:
    """All that clients gave, in client order; stops the run where an upload cannot be what a client packed."""
    for number, upload in enumerate(uploads, 1):
        if wrong := fault(upload, uploads[0], classes):
            raise RunFailed(f"shared data of client {number} of {len(uploads)} are damaged: {wrong}")
    return Tree({name: torch.cat([upload[name] for upload in uploads]) for name in sorted(uploads[0])})


def fault(upload: Tree, first: Tree, classes: int | None) -> str:
    """What is wrong with an upload, in words; nothing is the usual answer."""
    if not {"x", "y"} <= upload.keys() or upload.keys() != first.keys():
        return f"it holds {', '.join(upload) or 'nothing'}, where others hold {', '.join(first)}"
    for name, leaf in upload.items():
        if leaf.dtype != first[name].dtype or leaf.shape[1:] != first[name].shape[1:] or len(leaf) != len(upload.y):
            return f"{name} is {list(leaf.shape)} of {leaf.dtype}"
        if leaf.is_floating_point() and not leaf.isfinite().all():
            return f"{name} has values that are not finite"
    if not len(upload.y):
        return ""
    low, high = int(upload.y.min()), int(upload.y.max())
    if low < 0 or (classes is not None and high >= classes):
        return f"labels go from {low} to {high}, but there are {classes} classes"
    if "place" in upload and upload.place.numel() and int(upload.place.min()) < 0:
        return "places of pixels are negative"
    return ""


# ---- in training -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WithSharedData:
    """Another objective, and cross-entropy on a batch of the shared data, drawn with replacement from the step's key.

    additive: own + weight shared; convex: (1 - weight) own + weight shared. With weight 0 there is no second pass: it
    would move running statistics.
    """

    weight: float
    size: int  # of a batch of shared data
    mix: Mix = "additive"
    base: Callable = cross_entropy

    def __call__(self, client, weights, batch, out):
        loss = self.base(client, weights, batch, out)
        count = len(client.shared.get("y", ()))
        if not self.weight or not count:  # nobody had anything to give
            return loss
        index = (uniform(fold(batch.key, "shared"), self.size) * count).long().clamp(max=count - 1)
        x, y = unpacked(client.shared, index, batch.x)
        trained = Tree({name: p for name, p in weights.params.items() if p.requires_grad})
        only = trained if len(trained) < len(weights.params) else None  # a frozen norm stays frozen here, too
        logits = client.net.forward(weights, x, train=True, key=fold(batch.key, "second pass"), only=only).logits
        own = loss * (1 - self.weight) if self.mix == "convex" else loss
        return own + self.weight * F.cross_entropy(logits, y)
