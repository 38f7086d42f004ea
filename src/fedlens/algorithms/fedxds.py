from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor, nn

from ..attribution import attribute, normalised, top_share
from ..attribution.masks import kept
from ..core.algorithm import Client, Recipe
from ..core.batches import Shard
from ..core.cohort import Everyone, Fraction
from ..core.errors import BadInput
from ..core.fields import Count, NonNegative, Open, Percent, Positive
from ..core.network import Network
from ..core.objective import WEIGHTINGS
from ..core.rng import fold, generator, key, normal, privacy_noise, uniform
from ..core.tree import Tree
from ..privacy.gaussian import analytic_sigma, classic_sigma, gaussian_epsilon, metric_delta, metric_sigma
from ..privacy.randomised_response import randomised_response, whole_mask_epsilon
from ..privacy.statement import SEEDED, Statement
from ._sharing import Exchange, Form, Mix, WithSharedData, can_share, packed
from .fedavg import FedAvg

_METHODS = {"ig": "integrated_gradients", "smoothgrad": "smoothgrad", "inputxgrad": "input_x_gradient"}
_BLOCK = 500  # images at a time, on every device: the draws of a block have one key
_TOGETHER = {"cuda": 4}  # blocks that are attributed at once: there many images take little longer than few
_HELD = 1 << 30  # bytes of images that lie ready there: the network is looked at once for these, and nobody waits
_ONE_PASS = ("lrp", "input_x_gradient")  # of an image
_REFERENCES = 16  # images of noise that a class's own mask is found with
_DISTANCES = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
_SIDES = (28, 32, 64, 224)  # of images for which it is stated what a mask tells
_REACH = 12  # standard deviations from one end of our noise to the other: uint8 packs the difference

# The paper as printed: equations 2, 6, 8, 10 and 11, line 15 of algorithm 2, and section 5.1's numbers.
_PAPER = {
    "warmup_rounds": 10,
    "warmup_epochs": 10,
    "warmup_fraction": 1.0,
    "warmup_by": "fedavg",
    "continue_from_warmup": False,
    "attribution": "lrp",
    "lrp": "epsilon",
    "target": "true",
    "attribution_model": "global",
    "mask_source": "image",
    "mask": "binary",
    "sparsity": 70,
    "clip_norm": None,
    "accounting": "paper",
    "epsilon": 20.0,
    "delta": 1e-5,
    "mix": "additive",
    "lam": 0.5,
    "weighed": "uniform",
}

Accounting = Literal["ordinary", "paper", "metric", "bounded"]
Weighed = Literal["base", "samples", "uniform", "batches"]


@dataclass(frozen=True)
class FedXDS:
    """Hoefler, Mueller & Samek, 2025: over a base, clients share what attributions keep of their images, with noise.

    Warm-up rounds give a model; with it every client masks its images, clips them, adds noise and gives them to all,
    once. Then training starts afresh with a term on the shared images.

    Three settings have names. By default images are clipped, the first convolution's LRP rule is flat and the others'
    z-plus. Only the privacy that follows from clip and noise is stated. The preset paper (fedxds/paper) is as printed:
    no clipping, the epsilon rule, a uniform mean, FedAvg for the warm-up of every base. What it promises is unproven
    (docs/privacy-fedxds.md says why). It does not give delta, here 1e-5, nor the class that is explained ("the model's
    prediction"), here the label's. The rounds, epochs and clients of the warm-up are the released code's, and so are
    the points of integrated gradients and SmoothGrad. It leaves open whether training goes on from the warm-up's model:
    it starts afresh, as in the code. Sparsity counts the pixels that are dropped, as in the code; by equation 8, "the
    s-th largest value", it would be those that stay. Shared batches are drawn with replacement.

    The released code is fedxds/official, but for these. There the other attributions start from all logits, "Gradient"
    lacks the factor of the input, and SmoothGrad does not run. A mask keeps one pixel more, and a constant map gives no
    number; here such a map keeps the first pixels. There a client shuffles the shared images each time it trains, and
    takes none twice before it has had all. There a client's own images pass RandAugment with cutout, which is
    augment=randaugment here: `augment` belongs to all methods, so that no preset sets it.
    """

    base: Recipe = FedAvg()  # the method that trains after the exchange
    warmup_rounds: Count = 10  # rounds before images are shared
    warmup_epochs: Count | None = 10  # None: as in all rounds
    warmup_fraction: Annotated[float, Gt(0), Le(1)] = 1.0  # of clients in a warm-up round
    warmup_by: Literal["base", "fedavg"] = "base"  # the method of the warm-up; fedavg: line 1 of algorithm 2
    warmup_augment: bool = True  # whether images of the warm-up are augmented, as `augment` says; released code: not
    continue_from_warmup: bool = False  # train on from the warm-up's model instead of the first weights
    attribution: Literal["lrp", "ig", "smoothgrad", "inputxgrad", "random"] = "lrp"  # how pixels are scored
    lrp: Literal["epsilon_plus_flat", "epsilon"] = "epsilon_plus_flat"  # rules of LRP; epsilon: as input x gradient
    ig: Literal["midpoint", "right", "legendre"] = "midpoint"  # where integrated gradients look; right: released code
    target: Literal["true", "pred", "batch_labels"] = "true"  # batch_labels: every class of a batch, as released code
    attribution_model: Literal["global", "local"] = "global"  # local: after the last warm-up round's local training
    mask_source: Literal["image", "class"] = "image"  # class: from the model and the label alone, not from the image
    mask: Literal["binary", "soft"] = "binary"  # soft: kept pixels times the attribution, from 0 to 1
    absolute: bool = False  # large negative attributions are kept, too
    sparsity: Percent = 70  # s, per cent of pixels that are dropped
    mask_epsilon: Positive | None = None  # randomised response on each bit of a mask
    clip_norm: Positive | None = 10.0  # length that images are clipped to; none: not clipped
    accounting: Accounting = "ordinary"  # what epsilon means: see docs/privacy-fedxds.md
    epsilon: Positive = 20.0  # of the shared images; smaller is more private
    delta: Open = 1e-5  # the paper gives none
    sigma: NonNegative | None = None  # of the noise; None: from accounting, epsilon and delta
    mix: Mix = "additive"  # how shared images enter training
    lam: NonNegative = 0.5  # weight of the shared images' loss
    share_fraction: Annotated[float, Gt(0), Le(1)] = 1.0  # of a client's images
    share_as: Form = "float32"  # type of the numbers that are sent
    sparse: bool = False  # send kept pixels with their places, and noise on these alone
    weighed: Weighed = "base"  # how clients count where the experiment's weighting is not set; base: as the base says

    sends: ClassVar[str] = "as its base; once images: x, y"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": _PAPER,
        # What the released code does; augment=randaugment is the rest of it.
        "official": {
            "warmup_rounds": 10,
            "warmup_epochs": 10,
            "warmup_fraction": 1.0,
            "warmup_by": "fedavg",
            "warmup_augment": False,
            "continue_from_warmup": False,
            "attribution": "lrp",
            "lrp": "epsilon_plus_flat",
            "ig": "right",
            "target": "batch_labels",
            "attribution_model": "local",
            "mask": "soft",
            "sparsity": 80,
            "clip_norm": 10.0,
            "sigma": 0.15,
            "mix": "additive",
            "lam": 1.0,
            "weighed": "batches",
        },
        # The reading of lambda under which figure 2c is plausible.
        "fig2c": {**_PAPER, "mix": "convex"},
        # The promises that hold: metric privacy under masks of classes, and ordinary privacy under any mask.
        "metric": {"mask_source": "class", "accounting": "metric"},
        "bounded": {"accounting": "bounded"},
    }

    def __post_init__(self):
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise BadInput(f"algorithm.clip_norm is {self.clip_norm:g}, but it should be above 0; none: no clipping")
        if self.accounting in ("metric", "bounded") and self.clip_norm is None:
            raise BadInput(f"accounting={self.accounting} needs clip_norm: without it images can be any distance apart")
        if self.mix == "convex" and self.lam > 1:
            raise BadInput(f"lam is {self.lam}, but with mix=convex it should be 1 at most")
        if self.mask_source == "class" and self.attribution_model == "local":
            raise BadInput("mask_source=class needs attribution_model=global: a local model knows the client's images")
        if self.mask_epsilon is not None and (self.mask == "soft" or self.sparse):
            raise BadInput("mask_epsilon turns bits over, so that it needs mask=binary and sparse=false")
        most = torch.finfo(torch.float16 if self.share_as == "float16" else torch.float32).max
        if not _REACH * self.noise < most:
            calibrated = "epsilon and delta" if self._is_classic else "epsilon, delta and clip_norm"
            asked = "sigma asks" if self.sigma is not None else f"{calibrated} ask"
            ends = f"share_as={self.share_as} ends at {most:g}"
            raise BadInput(f"algorithm.{asked} for noise of {self.noise:g}, but {ends}")

    def stages(self, plan):
        if self.weighed != "base":
            plan = replace(plan, weighting=plan.weighting or WEIGHTINGS[self.weighed])
        warm = replace(plan, rounds=self.warmup_rounds, augment=plan.augment and self.warmup_augment)
        warm = replace(warm, cohort=Everyone() if self.warmup_fraction == 1 else Fraction(self.warmup_fraction))
        if self.warmup_epochs is not None:
            warm = replace(warm, epochs=self.warmup_epochs, steps=None)
        warming = [*(self.base if self.warmup_by == "base" else FedAvg()).stages(warm)]
        last = warming[-1]
        local = self.attribution_model == "local"
        if local:  # the last round's local training is in the exchange: nobody needs its mean
            warming[-1] = replace(last, rounds=last.rounds - 1)
        how = dict(epochs=last.epochs, steps=last.steps, fresh=last.fresh and last.rounds == 1) if local else {}
        exchange = last.errand(MaskedExchange(base=last.algorithm, by=self, batch=plan.size), **{"fresh": False} | how)
        objective = WithSharedData(self.lam, plan.size, self.mix, plan.objective)
        training = [*self.base.stages(replace(plan, objective=objective))]
        for stage in (*warming, *training):
            can_share(stage, "fedxds")
        yield from (stage for stage in warming if stage.rounds)
        yield exchange
        first, *rest = training
        yield replace(first, fresh=first.fresh or not self.continue_from_warmup)
        yield from rest

    # ---- the mechanism ----
    @property
    def noise(self) -> float:
        """Standard deviation on every released number."""
        if self.sigma is not None:
            return self.sigma
        if self._is_classic:
            return classic_sigma(self.epsilon, self.delta)
        assert self.clip_norm is not None
        calibrate = metric_sigma if self.accounting == "metric" else analytic_sigma
        return calibrate(self.epsilon, self.delta, 2 * self.clip_norm)

    @property
    def _is_classic(self) -> bool:
        """Whether epsilon and delta give the noise by the paper's equation 2, of sensitivity one."""
        return self.accounting in ("paper", "ordinary")

    @property
    def _is_ordinary(self) -> bool:
        """Whether what is stated is of any two images."""
        return self.accounting in ("ordinary", "bounded")

    def pixel_scores(self, net: Network, weights: Tree, x: Tensor, y: Tensor, batch: int, seed: Tensor) -> Tensor:
        """[images, 1, h, w]: what each pixel is worth, its colours added up."""
        if self.attribution == "random":
            return uniform(fold(seed, "mask"), len(x), 1, *x.shape[2:]).to(x)
        if self.mask_source == "class":
            return self.of_classes(net, weights, x)[y]
        return self._summed(net, weights, x, y, batch)

    def of_classes(self, net: Network, weights: Tree, like: Tensor) -> Tensor:
        """[classes, 1, h, w]: the mean over images of noise, the same for all; nobody's data but through the model."""
        seed = torch.tensor(key("reference images"), device=like.device)
        noise = normal(seed, _REFERENCES, *like.shape[1:]).to(like)
        with torch.no_grad():
            classes = net(weights, noise[:1]).shape[1]
        y = torch.arange(classes, device=like.device).repeat_interleave(_REFERENCES)
        found = replace(self, target="true")._summed(net, weights, noise.repeat(classes, 1, 1, 1), y, 1)
        return found.view(classes, _REFERENCES, *found.shape[1:]).mean(1)

    def _summed(self, net: Network, weights: Tree, x: Tensor, y: Tensor, batch: int) -> Tensor:
        method = _METHODS.get(self.attribution, self.attribution)
        options: dict[str, Any] = {"lrp": {"composite": self.lrp}, "integrated_gradients": {"rule": self.ig}}
        options = options.get(method, {})
        if self.target == "batch_labels":
            with torch.no_grad():
                classes = net(weights, x[:1]).shape[1]
            present = [F.one_hot(some, classes).amax(0).expand(len(some), -1) for some in y.split(batch)]
            wanted, target = torch.cat(present), "given"
        else:
            wanted, target = y, "predicted" if self.target == "pred" else "true"
        most = _TOGETHER.get(x.device.type, 0) * _BLOCK if method in _ONE_PASS else None
        relevance = attribute(method, net, weights, x, wanted, target=target, most=most, **options)
        summed = relevance.sum(1, keepdim=True)
        return summed.abs() if self.absolute else summed

    def masked(self, x: Tensor, worth: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        """(clipped images under their masks, the pixels that were kept)."""
        keep = top_share(worth, drop=self.sparsity)
        if self.mask_epsilon is not None:
            keep = randomised_response(keep, self.mask_epsilon, fold(seed, "response"))
        factor = keep * _softened(worth) if self.mask == "soft" else keep
        x = x * factor
        if self.clip_norm is not None:
            norm = x.flatten(1).norm(dim=1).clamp(min=self.clip_norm)
            x = x * (self.clip_norm / norm).view(-1, 1, 1, 1)
        return x, keep

    def released(self, net: Network, weights: Tree, x: Tensor, y: Tensor, seed: Tensor, batch: int = 64) -> Tree:
        """What leaves of these images, and how it is packed."""
        return self.release(x, y, self.pixel_scores(net, weights, x, y, batch, seed), seed)

    def release(self, x: Tensor, y: Tensor, worth: Tensor, seed: Tensor) -> Tree:
        """The same where it is known what each pixel is worth."""
        x, keep = self.masked(x, worth, seed)
        x = x + self.noise * privacy_noise(fold(seed, "noise"), *x.shape).to(x)
        return packed(x, y, self.share_as, keep if self.sparse else None)

    # ---- what it promises ----
    @property
    def is_mask_fixed(self) -> bool:
        """Whether it is the same for every image of a class. A soft one that keeps all pixels still weighs each."""
        keeps_all = self.sparsity == 0 and self.mask == "binary"
        return not self._sees_image or keeps_all or self.sparsity == 100

    @property
    def _sees_image(self) -> bool:
        return self.mask_source == "image" and self.attribution != "random"

    def statement(self) -> Statement:
        """Of one image's release; the model that attributes is taken as given."""
        adjacency, sensitivity, epsilon, because = self._bounded() if self._is_ordinary else self._metric()
        not_covered = ["labels, which are sent as they are", "model updates, of the warm-up and of training"]
        not_covered.append("what the model that attributes knows: it was trained on the same images")
        if because and not self.is_mask_fixed:
            not_covered.append("the mask, which depends on the image")
        sigma = self.noise
        return Statement(
            release="one image, masked, clipped and with noise, and its label; once",
            mechanism=f"Gaussian: {sigma:.4g} on {'kept' if self.sparse else 'all'} pixels of normalised images",
            unit="one image; for a person in several see several_images",
            adjacency=adjacency,
            sensitivity=sensitivity,
            epsilon=epsilon,
            delta=self.delta,
            holds=not because,
            because=because,
            randomness=SEEDED,
            not_covered=tuple(not_covered),
            details={
                "accounting": self.accounting,
                "sigma": sigma,
                "clip_norm": self.clip_norm,
                "sparsity": self.sparsity,
                "mask_epsilon_of_each_bit": self.mask_epsilon,
                "mask_beyond_epsilon": {
                    f"{n} x {n}": self.mask_beyond_epsilon(n * n) for n in _SIDES if self.mask_tells
                },
                "metric_delta": {d: metric_delta(sigma, self.epsilon, d) for d in _DISTANCES},
                "any_two_images": self._ordinary(1),
                "several_images": {count: self._ordinary(count) for count in (10, 100)},
            },
        )

    def _bounded(self) -> tuple[str, str, float | None, str]:
        """(adjacency, sensitivity, epsilon, why it does not hold)"""
        adjacency = "an image is replaced by any other of the same label"
        if self.clip_norm is None:
            return (
                adjacency,
                "none",
                None,
                "there is no noise" if not self.noise else "nothing bounds images: no clip_norm",
            )
        sensitivity = f"2 C = {2 * self.clip_norm:g}: under whatever mask, a clipped image lies in a ball of radius C"
        because = "places of kept pixels depend on the image and are sent as they are" if self._shows_places else ""
        return adjacency, sensitivity, self._ordinary(1), because or ("" if self.noise else "there is no noise")

    def _metric(self) -> tuple[str, str, float | None, str]:
        adjacency = "an image is replaced by one of the same label at Euclidean distance d: the budget is epsilon d"
        sensitivity = "d: neither a mask that is fixed beforehand nor clipping moves two images apart"
        if not self.noise:
            return adjacency, sensitivity, None, "there is no noise"
        because = []
        if self.mask_tells:
            each = 2 * min(self.sparsity, 100 - self.sparsity) / 100 * (self.mask_epsilon or 0)
            because.append(f"epsilon leaves out the mask's bits: {each:g} more for each pixel, see mask_beyond_epsilon")
        elif not self.is_mask_fixed:
            sensitivity += "; the paper claims it of every mask"
            because.append("the mask depends on the image: two images a hair apart can have other masks")
        farthest = 1e6 if self.clip_norm is None else 2 * self.clip_norm
        if metric_delta(self.noise, self.epsilon, farthest) > self.delta * (1 + 1e-9):
            because.append(f"delta(d) exceeds {self.delta:g} for distant pairs, see metric_delta")
        if self.accounting == "paper" and self.sigma is None and self.epsilon >= 1:
            because.append("the classic formula for the noise is proven for epsilon < 1 alone")
        return adjacency, sensitivity, self.epsilon, "; ".join(because)

    @property
    def mask_tells(self) -> bool:
        """Whether bits by randomised response tell of the image what the stated epsilon leaves out."""
        return self.mask_epsilon is not None and not self.is_mask_fixed and not self._is_ordinary

    def mask_beyond_epsilon(self, pixels: int) -> float:
        """How much these bits tell of an image of so many pixels."""
        return whole_mask_epsilon(self.mask_epsilon or 0.0, kept(pixels, drop=self.sparsity), pixels)

    @property
    def _shows_places(self) -> bool:
        return self.sparse and self._sees_image and 0 < self.sparsity < 100

    def _ordinary(self, images: int) -> float | None:
        """Ordinary epsilon when so many images are replaced by any others: a fact of noise and clip, not a setting."""
        if self.clip_norm is None or self._shows_places or not self.noise:
            return None
        return gaussian_epsilon(self.noise, self.delta, 2 * self.clip_norm * images**0.5)


@dataclass(frozen=True)
class MaskedExchange(Exchange):
    """Every client gives its images, as FedXDS masks them. down: as its base; up: x, y, and how they are packed"""

    by: FedXDS = FedXDS()
    batch: int = 64

    def finish(self, client, local):
        by = self.by
        if by.mask_source == "class" and "private" in client.memory:
            raise BadInput("mask_source=class needs a model that is all global; this base keeps a part at each client")
        weights = local if by.attribution_model == "local" else self.base.start(client)
        weights = Tree(params=weights.params, buffers=weights.buffers)
        seed = torch.tensor(client.key, device=client.data.index.device)
        blocks = self.given(client).chunks(_BLOCK) or [client.data]
        seeds = [fold(seed, f"images {number}") for number in range(len(blocks))]
        worths = self.block_scores(client.net, weights, blocks, seeds)
        released = [by.release(block.x, block.y, *its) for block, *its in zip(blocks, worths, seeds, strict=True)]
        return Tree({name: torch.cat([gift[name] for gift in released]) for name in released[0]}), Tree()

    def block_scores(self, net: Network, weights: Tree, blocks: list[Shard], seeds: list[Tensor]) -> Iterator[Tensor]:
        """What the pixels of each block are worth."""
        by = self.by
        if by.mask_source == "class" and by.attribution != "random":
            of_class = by.of_classes(net, weights, blocks[0].x)
            yield from (of_class[block.y] for block in blocks)
            return
        # With these a pixel's worth depends on the block: by its draws, and by which images are beside each other.
        alone = by.attribution in ("random", "smoothgrad") or by.target == "batch_labels"
        together = 1 if alone else _TOGETHER.get(blocks[0].index.device.type, 1)
        if together > 1 and _METHODS.get(by.attribution, by.attribution) in _ONE_PASS:  # `most` parts them again
            together *= max(1, _HELD // (together * max(1, blocks[0].x.nbytes)))
        for first in range(0, len(blocks), together):
            some = blocks[first : first + together]
            x, y = (torch.cat([getattr(block, part) for block in some]) for part in ("x", "y"))
            yield from by.pixel_scores(net, weights, x, y, self.batch, seeds[first]).split([*map(len, some)])

    def given(self, client: Client) -> Shard:
        """The images that the client gives; a share of them, at least one, drawn by its own key."""
        if self.by.share_fraction == 1:
            return client.data
        count = math.ceil(self.by.share_fraction * len(client.data))
        order = torch.randperm(len(client.data), generator=generator(key(client.key, "share")))[:count].sort().values
        return Shard(client.data.whole, client.data.index[order.to(client.data.index.device)])

    def released(self, net, download, x, y, seed, unit):
        return self.by.released(net, net.initial_weights() | download.get("model", Tree()), x, y, seed)

    def classes(self, net):
        """Outputs of the head's last linear layer."""
        named = net.module.named_modules()
        last = [part for name, part in named if isinstance(part, nn.Linear) and f"{name}.weight" in net.head]
        return last[-1].out_features if last else None

    def start_notes(self, steps):
        said = self.by.statement()
        if self.by.accounting != "paper" or said.holds:
            return []
        return [f"the privacy of the shared images is unproven as the paper states it: {said.because}"]

    def notes(self, replies):
        by, said = self.by, self.by.statement()
        images = sum(len(reply.upload.y) for reply in replies)
        verdict = "which holds" if said.holds else f"which does not hold, since {said.because}"
        if said.epsilon is None:
            promise = f"no privacy is stated, since {said.because}"
        else:
            promise = f"stated: epsilon {said.epsilon:g}, delta {said.delta:g}, {verdict}"
        notes = [f"{images} images shared with noise {by.noise:.4g}; {promise} (privacy.json)"]
        if by.mask_tells:
            masks = by.mask_beyond_epsilon(math.prod(replies[0].upload.x.shape[2:]))
            notes.append(f"masks by randomised response tell another epsilon of {masks:g} about each image")
        return notes


def _softened(worth: Tensor) -> Tensor:
    """From 0 to 1. A constant map tells no pixels apart: all weigh one, or the image would leave as noise alone."""
    flat = worth.flatten(1)
    constant = (flat.amax(1) == flat.amin(1)).view(-1, *[1] * (worth.dim() - 1))
    return torch.where(constant, 1.0, normalised(worth))
