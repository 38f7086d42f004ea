"""Released images as an adversary reads them, and the mechanism that it can apply to images of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..algorithms import fedfed, fedxds
from ..algorithms._sharing import unpacked
from ..core.algorithm import Algorithm, chain
from ..core.rng import fold, key
from ..core.tree import Tree
from ..runs.transcript import Transcript
from .attack import Answers, Images, Inapplicable, Prior


@dataclass(frozen=True)
class Exchanged:
    errand: fedxds.Exchange | fedfed.Exchange
    round: int
    download: Tree  # with it the model that masks, or the autoencoder
    released: dict[int, Images]  # by client, in the order of release

    @property
    def images(self) -> Images:
        parts = self.released.values()
        return Images(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def originals(self, answers: Answers) -> Images:
        parts = [answers.gift(self.errand, self.round, client) for client in self.released]
        return Images(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def release(self, prior: Prior, images: Images, seed: int, size: int = 250) -> Tensor:
        """What the mechanism would release of these images: it is public, and so is the model that it uses."""
        found, root = [], torch.tensor(key(seed, "own release"), device=images.x.device)
        weights = prior.net.initial_weights() | self.download.get("model", Tree())
        for number, part in enumerate(torch.arange(len(images), device=images.x.device).split(size)):
            some, draw = images[part], fold(root, f"images {number}")
            if isinstance(self.errand, fedxds.Exchange):
                sent = self.errand.by.released(prior.net, weights, some.x, some.y, draw)
            else:
                sent = self.errand.by.released(self.download.vae, some.x, some.y, draw)
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
            index = _one_of_each(errand, len(upload.y)).to(upload.y.device)
            released[client] = Images(*unpacked(upload, index, like))
        return Exchanged(errand, round, crossing.download, released)
    raise Inapplicable("no images are shared")


def _one_of_each(errand: fedxds.Exchange | fedfed.Exchange, count: int) -> Tensor:
    """Places of one release for each image: FedFed sends a second one, with more noise, behind each block of them."""
    if isinstance(errand, fedxds.Exchange):
        return torch.arange(count)
    blocks = torch.arange(count).split(2 * fedfed._BLOCK)
    return torch.cat([block[: len(block) // 2] for block in blocks])


def exchange_of(algorithm: Algorithm | None) -> fedxds.Exchange | fedfed.Exchange | None:
    """The exchange, also inside another recipe's view of it."""
    return next((part for part in chain(algorithm) if isinstance(part, fedxds.Exchange | fedfed.Exchange)), None)
