from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..attribution import layer_names, layer_saliency
from ..attribution.channels import Norm, Place
from ..attribution.inputs import Score, Target
from ..core.algorithm import Algorithm, Client, Errand, Recipe, Stage
from ..core.batches import Shard
from ..core.engine import Reply
from ..core.errors import BadInput
from ..core.evaluate import pieces
from ..core.fields import Number, Share
from ..core.tree import Tree
from ._weighted import Weighted, reweighed, with_weights
from .fedavg import FedAvg

Normalize = Literal["sum", "mean"]
Blend = Literal["samples", "uniform"]

_TARGETS: dict[str, Target] = {"true": "true", "pred": "predicted", "sum": "all"}
_PAPER = {
    "saliency": "guided_grad_x_act",
    "norm": "l2",
    "target": "true",
    "score": "logit",
    "tap": "conv",
    "tau": 0.5,
    "recompute_every": 0,
    "normalize": "sum",
    "blend": 0.0,
}
_SHORTCUTS = {"downsample", "shortcut"}  # what modules beside a residual block are called


@dataclass(frozen=True)
class FedSLS:
    """ACM MM 2024, doi 10.1145/3664647.3681278: over any base, a client counts by the saliency of its data.

    Before the first round every client trains a copy of the model, which it throws away, and keeps one number. That is
    the norm of guided gradient times activation, summed over its images and over layers.

    Differs from the paper where that contradicts itself. Its equation 4 has the derivative upside down. The trained
    copy is measured, as in algorithm 2, not the first weights of equation 11. Weights are divided by their sum over the
    cohort, not over all clients. The server goes towards the clients, by a step of one. The norm has one square root;
    fedsls/literal has the two of equation 6.
    """

    base: Recipe = FedAvg()  # the method whose weights change
    # what of a layer counts
    saliency: Literal["guided_grad_x_act", "guided_grad", "plain_grad_x_act"] = "guided_grad_x_act"
    norm: Norm = "l2"  # of a layer's map; sqrt_l2 is equation 6 as printed
    target: Literal["true", "pred", "sum"] = "true"  # the class whose score is explained; sum: all of them
    score: Score = "logit"  # what is explained of it
    tap: Place = "conv"  # where layers are looked at: at convolutions, or at every ReLU
    tau: Share = 0.5  # a layer counts so much less than the one before it
    include_downsample: bool = True  # whether convolutions of shortcuts are layers, too
    pretrain_epochs: Number = 5  # of the copy that is thrown away
    recompute_every: Number = 0  # rounds, from then on with the current global model; 0: never
    normalize: Normalize = "sum"  # mean: a client's number of images does not matter
    blend: Share = 0.0  # how much of a client's share is that of `blend_with`
    blend_with: Blend = "samples"  # the other way to count clients

    sends: ClassVar[str] = "as its base, examples; once saliency"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # Equations 4 to 9; `literal` has equation 6 with its second square root. Epochs of the copy are not given.
        "paper": _PAPER,
        "literal": {**_PAPER, "norm": "sqrt_l2"},
        # Weights that are nearly uniform: what helps most where clients differ much, results/fedsls_table1.md
        "even": {"normalize": "mean", "blend": 0.5, "blend_with": "uniform"},
    }

    def __post_init__(self):
        if self.target == "sum" and self.score == "prob":
            raise BadInput("target=sum with score=prob is always one and has no gradient; use score=logit or logprob")

    reweighs: ClassVar[bool] = True  # there can be one such method

    def stages(self, plan):
        training = SaliencyWeighted(blend=self.blend, blend_with=self.blend_with)
        counted = replace(plan, weighting=weighting("fedsls", plan, self.normalize))
        how = dict(epochs=self.pretrain_epochs, every=self.recompute_every)
        yield from reweighed(self.base, counted, MeasureSaliency(by=self), training, **how)

    def of_images(self, client: Client, weights: Tree, piece: Shard) -> Tensor:
        """[images] R_i: the norms of all layers, tau^l each. Not a number where the network answers none."""
        x = finite_images(piece, piece.x)
        try:
            norms = layer_saliency(
                client.net,
                weights,
                x,
                piece.y,
                guided=self.saliency != "plain_grad_x_act",
                times_activation=self.saliency != "guided_grad",
                norm=self.norm,
                target=_TARGETS[self.target],
                score=self.score,
                tap=self.tap,
            )
        except BadInput:
            with torch.no_grad():
                if client.net(weights, x).isfinite().all():
                    raise
            return x.new_full((len(x),), torch.nan)  # its training diverged: the server falls back and says so
        if not self.include_downsample:
            names = layer_names(client.net, weights, x, tap=self.tap)
            norms = norms[:, [at for at, name in enumerate(names) if _SHORTCUTS.isdisjoint(name.split("."))]]
        depth = torch.arange(norms.shape[1], dtype=torch.float64, device=norms.device)
        return (norms.double() * self.tau**depth).sum(1)


# ---- what a client's number is made of -------------------------------------------------------------------------------
@dataclass(frozen=True)
class MeasureSaliency(Errand):
    """Every client trains a copy that it throws away, plainly, and looks at its images with it.

    down: as its base; up: saliency; memory: saliency, with what its base remembers
    """

    by: Any = None  # of_images(client, weights, piece) -> [images]

    evaluated_as: ClassVar = ()  # no model moves
    discloses: ClassVar = "one number about the saliency of each client's images leaves unprotected"
    may_be_nan: ClassVar = ("saliency",)
    begin, phase, step = Algorithm.begin, Algorithm.phase, Algorithm.step  # no proximal term, no control variates

    def start(self, client):
        return self.base.start(client)

    def trains(self, client, name):
        return True

    def finish(self, client, local):
        weights = Tree(params=local.params, buffers=local.buffers)
        saliency = summed(client, lambda piece: self.by.of_images(client, weights, piece))
        return Tree(saliency=saliency), Tree(saliency=saliency)

    def notes(self, replies: Sequence[Reply]) -> list[str]:
        return unusable(replies)


def summed(client: Client, of_images: Callable[[Shard], Tensor]) -> Tree:
    """R_k and n_k, piece by piece: the memory it takes does not grow with the client."""
    total = torch.zeros((), dtype=torch.float64, device=client.data.index.device)
    for piece in pieces(client.data):
        total = total + of_images(piece).double().sum()
    return Tree(total=total, examples=torch.full_like(total, client.examples))


def finite_images(piece: Shard, x: Tensor) -> Tensor:
    """The same images; refuses those that no number can come of."""
    bad = ~x.flatten(1).isfinite().all(1)
    if bad.any():
        image = int(piece.index[int(bad.int().argmax())])
        raise BadInput(f"image {image} of the data has values that are not finite; repair it or leave it out")
    return x


def unusable(replies: Sequence[Reply]) -> list[str]:
    """A sentence for the log where some client's data have no saliency."""
    totals = {reply.client: float(reply.upload.saliency.total) for reply in replies}
    wrong = {client: total for client, total in totals.items() if not 0 < total < torch.inf}
    listed = ", ".join(f"{client} ({total:g})" for client, total in wrong.items())
    return [f"no usable saliency of clients {listed}"] if wrong else []


# ---- what is done with it --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class BySaliency:
    """A client's weight, from what it remembers. memory: saliency, as the sum over its images and their number"""

    normalize: Normalize = "sum"

    def initial_memory(self, client: Client) -> Tree:
        unknown = torch.tensor(torch.nan, dtype=torch.float64)
        return Tree(saliency=Tree(total=unknown, examples=unknown))

    def __call__(self, client: Client) -> Tensor:
        kept = client.memory.saliency
        return kept.total if self.normalize == "sum" else kept.total / kept.examples.clamp(min=1)


def weighting(name: str, plan: Stage, normalize: Normalize) -> BySaliency:
    if plan.weighting is not None:
        raise BadInput(f"{name} itself says how much a client counts: leave weighting at auto")
    return BySaliency(normalize)


@dataclass(frozen=True)
class SaliencyWeighted(Weighted):
    """Training whose weights come from saliency: all else is the base's.

    down: as its base; up: as its base, examples; memory: saliency, with what its base remembers

    Where the cohort's weights sum to zero or to no finite number, examples count instead; state.fallbacks counts these
    rounds, and notes(replies) says so.
    """

    blend: Share = 0.0
    blend_with: Blend = "samples"  # the other way to count clients

    may_be_nan: ClassVar = ("weight",)
    say: ClassVar = "saliency has"

    def setup(self, server):
        return super().setup(server).replace(fallbacks=torch.tensor(0))

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload.replace(examples=torch.tensor(client.examples, dtype=torch.float64)), memory

    def aggregate(self, server, uploads):
        weights, examples = ([float(u[name]) for u in uploads] for name in ("weight", "examples"))
        fell_back = not is_usable(weights)
        if fell_back:
            weights = examples
        if self.blend:
            others = examples if self.blend_with == "samples" else [1.0] * len(uploads)
            weights = [
                (1 - self.blend) * mine + self.blend * theirs
                for mine, theirs in zip(shares(weights), shares(others), strict=True)
            ]
        state = self.base.aggregate(server, with_weights(uploads, weights))
        return state.replace(fallbacks=server.state.fallbacks + fell_back)

    def notes(self, replies: Sequence[Reply]) -> list[str]:
        weights = {reply.client: float(reply.upload.weight) for reply in replies}
        if not weights or is_usable(list(weights.values())):
            return []
        listed = ", ".join(f"{client} ({weight:g})" for client, weight in weights.items())
        return [f"saliency weights of clients {listed} cannot be divided by their sum: examples count in this round"]


def is_usable(weights: Sequence[float]) -> bool:
    return 0 < sum(weights) < torch.inf and min(weights) >= 0


def shares(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]
