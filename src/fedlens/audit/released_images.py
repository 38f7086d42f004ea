"""Released images as an adversary reads them, and the mechanism that it can apply to images of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..algorithms._sharing import Exchange, unpacked
from ..core.algorithm import Algorithm, chain
from ..core.rng import fold, key
from ..core.tree import Tree
from ..runs.transcript import Transcript
from .attack import Answers, Inapplicable, LabelledImages, Prior


@dataclass(frozen=True)
class Exchanged:
    errand: Exchange
    round: int
    download: Tree  # with it the model that masks, or the autoencoder
    released: dict[int, LabelledImages]  # by client, in the order of release

    @property
    def images(self) -> LabelledImages:
        return LabelledImages.joined(self.released.values())

    def originals(self, answers: Answers) -> LabelledImages:
        return LabelledImages.joined(answers.gift(self.errand, self.round, client) for client in self.released)

    def release(self, prior: Prior, images: LabelledImages, seed: int, size: int = 250) -> Tensor:
        """What the mechanism would release of these images: it is public, and so is the model that it uses."""
        found, root = [], torch.tensor(key(seed, "own release"), device=images.x.device)
        for number, part in enumerate(torch.arange(len(images), device=images.x.device).split(size)):
            some, draw = images[part], fold(root, f"images {number}")
            sent = self.errand.released(prior.net, self.download, some.x, some.y, draw, prior.unit(some.x))
            found.append(unpacked(sent, torch.arange(len(some), device=some.x.device), some.x)[0])
        return torch.cat(found)


def exchanged(transcript: Transcript, prior: Prior) -> Exchanged:
    """The exchange of images in this transcript."""
    for round in range(len(transcript)):
        errand = exchange_of(transcript.stages[round].algorithm)
        if errand is None:
            continue
        crossing, like = transcript[round], prior.auxiliary.x[:1]
        released = {}
        for client, upload in crossing.replies.items():
            index = errand.one_of_each(len(upload.y)).to(upload.y.device)
            released[client] = LabelledImages(*unpacked(upload, index, like))
        return Exchanged(errand, round, crossing.download, released)
    raise Inapplicable("no images are shared")


def exchange_of(algorithm: Algorithm | None) -> Exchange | None:
    """The exchange, also inside another recipe's view of it."""
    return next((part for part in chain(algorithm) if isinstance(part, Exchange)), None)
