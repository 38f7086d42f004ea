"""Which image is behind this release? A denoising network learns the way back on the adversary's own images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..core.batches import plan
from ..core.rng import generator, key, seeded
from ..runs.transcript import Transcript
from .attack import Gallery, LabelledImages, Prior, PrivacyAttack, Verdict
from .image_similarity import decisive, likeness
from .measures import merged
from .released_images import exchanged

_SHOWN = 8


class Denoiser(nn.Module):
    """Convolutional, two halvings deep, with a way past them for what needs no repair."""

    def __init__(self, channels: int, width: int = 16):
        super().__init__()
        self.fine = nn.Sequential(_block(channels, width), _block(width, width))
        self.coarse = nn.Sequential(nn.MaxPool2d(2), _block(width, 2 * width), _block(2 * width, 2 * width))
        self.coarser = nn.Sequential(nn.MaxPool2d(2), _block(2 * width, 2 * width), _block(2 * width, 2 * width))
        self.up = nn.Sequential(_block(4 * width, width), _block(width, width))
        self.out = nn.Sequential(_block(2 * width, width), nn.Conv2d(width, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = self.coarse(fine)
        deep = nn.functional.interpolate(self.coarser(coarse), size=coarse.shape[2:], mode="nearest")
        middle = self.up(torch.cat([coarse, deep], 1))
        middle = nn.functional.interpolate(middle, size=fine.shape[2:], mode="nearest")
        return self.out(torch.cat([fine, middle], 1))


def _block(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.ReLU())


def denoiser(
    released: Tensor, originals: Tensor, seed: int, *, steps: int, size: int = 32, width: int = 16
) -> nn.Module:
    """Trained to turn releases into their originals, by Adam under a cosine rate."""
    with seeded(key(seed, "autoencoder")):
        model = Denoiser(released.shape[1], width).to(released.device)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rows = plan(len(released), min(size, len(released)), key(seed, "pairs"), steps=steps).rows.to(released.device)
    for row in rows:
        loss = (model(released[row]) - originals[row]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    return model.requires_grad_(False)


def recovered(model: nn.Module, released: Tensor, size: int = 250) -> Tensor:
    return torch.cat([model(part) for part in released.split(size)])


@dataclass(frozen=True)
class FeatureInversion(PrivacyAttack):
    """FedXDS section 6.2: a denoising autoencoder, trained on auxiliary images and what the mechanism makes of them."""

    images: int = 200  # released ones that are turned back
    copies: int = 4  # releases of each auxiliary image: the mechanism's noise is the adversary's to draw
    steps: int = 200
    width: int = 16  # of the autoencoder's first layers
    threat: ClassVar = (
        "sees all released images and labels and the model that masked them; knows the mechanism, and other images of "
        "the same kind"
    )

    def check(self, transcript, knowledge):
        exchanged(transcript, knowledge.prior)

    def run(self, transcript: Transcript, knowledge, name):
        prior = knowledge.prior
        given = exchanged(transcript, prior)
        some = torch.randperm(len(given.images), generator=generator(key("turned back")))[: self.images]
        some = some.to(prior.auxiliary.y.device)
        released, originals = given.images[some], given.originals(knowledge.answers)[some]
        pairs = self.pairs(lambda images, seed: given.release(prior, images, seed), prior)
        return self.marked(released.x, pairs, originals, prior, knowledge.seeds, name)

    def pairs(self, mechanism, prior: Prior) -> tuple[Tensor, Tensor]:
        """(releases of auxiliary images, their originals)"""
        made = torch.cat([mechanism(prior.auxiliary, copy) for copy in range(self.copies)])
        return made, prior.auxiliary.x.repeat(self.copies, 1, 1, 1)

    def marked(
        self,
        released: Tensor,
        pairs: tuple[Tensor, Tensor],
        originals: LabelledImages,
        prior: Prior,
        seeds: int,
        name: str,
    ) -> Verdict:
        found, undefended, shown = [], [], released[:0]
        for seed in range(seeds):
            guess = self.guess(released, pairs, seed)
            shown = guess if seed == 0 else shown
            found.append(likeness(guess, originals, prior))
            identity = self.guess(originals.x, (pairs[1], pairs[1]), seed)
            undefended.append(likeness(identity, originals, prior))
        chance = likeness(prior.prototypes(originals.y), originals, prior)
        few = slice(_SHOWN)
        gallery = Gallery(*(prior.pixels(x[few]).cpu() for x in (originals.x, released, shown)))
        measures = merged(found), chance, merged(undefended)
        return Verdict(name, self.threat, decisive(chance), *measures, len(originals), seeds, gallery=gallery)

    def guess(self, released: Tensor, pairs: tuple[Tensor, Tensor], seed: int) -> Tensor:
        return recovered(denoiser(*pairs, seed, steps=self.steps, width=self.width), released)
