from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.algorithm import Algorithm, Recipe
from ..core.fields import Count, NonNegative, Positive
from ..core.optimizer import Adam
from ..core.rng import fold, normal
from ..core.tree import Tree, grad, mean
from ..models.generators import Vae, first_weights, head_shape, structure
from ..privacy.statement import SEEDED_AT_NODES, Statement
from ._sharing import Exchange, Form, WithSharedData, can_share, packed
from .fedavg import FedAvg

_BLOCK = 500  # images at a time, on every device: the draws of a block have one key


@dataclass(frozen=True)
class FedFed:
    """Yang et al., 2023: over a base, clients share what an autoencoder cannot say of their images, with noise.

    Together they train a variational autoencoder q and a classifier, which is to recognise x - q(x) under noise. Every
    client then gives x - q(x) with two noises to all, once. Training starts afresh, on shared images as well.

    Needs what others do not: rounds with the autoencoder's bytes both ways, and room at every client for two images for
    each one of the federation.

    Differs from the paper: shared images are drawn with replacement, of all classes as frequent as they are, and pass
    the network apart from a client's own; they are not augmented. The autoencoder normalises each image by itself, and
    is trained by a cohort a round, as all else is (the paper: by all clients, or ten).
    """

    base: Recipe = FedAvg()
    distil_rounds: Count = 15
    distil_epochs: Count = 1
    distil_lr: Positive = 1e-3  # of Adam
    latent: Count = 2048
    width: Count = 32  # channels of the autoencoder's code
    reconstruction: NonNegative = 5.0  # ten times as much in the first ten rounds, five times in the next ten
    residual: NonNegative = 2.0  # weight of recognising residuals
    divergence: NonNegative = 0.005  # of codes from the normal distribution
    recognition: NonNegative = 0.4  # weight of recognising images
    sigma1: NonNegative = 0.15
    sigma2: NonNegative = 0.25
    share_as: Form = "float32"

    def stages(self, plan):
        optimizer = Adam(self.distil_lr)
        how = dict(rounds=self.distil_rounds, epochs=self.distil_epochs, steps=None, optimizer=optimizer)
        yield from Distil(by=self).stages(replace(plan, **how))
        yield plan.errand(ResidualExchange(by=self))
        # One mean over an image and its two companions: a third of the loss is on own images.
        objective = WithSharedData(2 / 3, 2 * plan.size, "convex", plan.objective)
        first, *rest = self.base.stages(replace(plan, objective=objective))
        for stage in (first, *rest):
            can_share(stage, "fedfed")
        yield replace(first, fresh=True)
        yield from rest

    # ---- the parts of an image ----
    def again(self, vae: Tree, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(q(x), mean and log-variance of its code); without noise nothing is random."""
        noise = x.new_zeros(len(x), self.latent) if noise is None else noise
        return structure(Vae, *self.sizes(x)).apply(vae, Vae.forward, x, noise)

    def sizes(self, x: Tensor) -> tuple[tuple[int, ...], int, int]:
        return tuple(x.shape[1:]), self.latent, self.width

    def released(self, vae: Tree, x: Tensor, y: Tensor, seed: Tensor) -> Tree:
        """What leaves of these images: residuals under the first noise, then under the second."""
        with torch.no_grad():
            rest = x - self.again(vae, x)[0]
        noises = [
            sigma * normal(fold(seed, name), *x.shape).to(x)
            for name, sigma in (("first noise", self.sigma1), ("second noise", self.sigma2))
        ]
        return packed(torch.cat([rest + noise for noise in noises]), y.repeat(2), self.share_as)

    def statement(self) -> Statement:
        return Statement(
            release="two residuals of every image, each with noise of its own, and its label; once",
            mechanism=f"Gaussian: {self.sigma1:g} and {self.sigma2:g} on all pixels of normalised images",
            unit="one image",
            adjacency="an image is replaced by any other of the same label",
            sensitivity="unbounded: residuals are not clipped",
            epsilon=None,
            delta=None,
            holds=False,
            because="residuals are not clipped, and the autoencoder that leaves beside them was trained on the images",
            randomness=SEEDED_AT_NODES,
            not_covered=("labels, which are sent as they are", "updates of the autoencoder and of all classifiers"),
            details={"sigma1": self.sigma1, "sigma2": self.sigma2},
        )


@dataclass(frozen=True)
class Distil(Algorithm):
    """The first stage of FedFed: an autoencoder, and a classifier of what it leaves out.

    down: model, pull, and the autoencoder or the seed of its first weights; up: delta, vae, weight; memory: nothing
    """

    by: FedFed = FedFed()

    def setup(self, server):
        return super().setup(server).replace(seed=torch.tensor(server.key), turns=torch.tensor(0))

    def broadcast(self, server):
        state, turns = server.state, int(server.state.turns)
        pull = self.by.reconstruction * (10 if turns < 10 else 5 if turns < 20 else 1)
        down = super().broadcast(server).replace(pull=next(iter(state.model.params.values())).new_tensor(pull))
        # The server never saw an image, so that clients begin the autoencoder, all from the same seed.
        return down.replace(vae=state.vae) if "vae" in state else down.replace(seed=state.seed)

    def begin(self, client):
        local = super().begin(client)
        if "vae" in client.received:
            vae = client.received.vae
        else:
            like, x = next(iter(local.params.values())), client.data.whole.x[client.data.index[:1]]
            vae = first_weights(Vae, *self.by.sizes(x), seed=int(client.received.seed), like=like)
        return local.replace(vae=vae, vae_optimizer=client.optimizer.init(vae.params))

    def step(self, client, local, batch):
        params, vae = (p.map(lambda leaf: leaf.detach().requires_grad_()) for p in (local.params, local.vae.params))
        with torch.enable_grad():
            loss = self.distillation(client, local | Tree(params=params, vae=Tree(params=vae)), batch)
            grads = grad(loss, Tree(params=params, vae=vae))
        client.optimizer.update_(local.params, grads.params, local.optimizer)
        client.optimizer.update_(local.vae.params, grads.vae, local.vae_optimizer)
        return local

    def distillation(self, client, local, batch):
        """The loss on a batch; advances the classifier's statistics in place."""
        by, x, count = self.by, batch.x, len(batch.x)
        noise = normal(fold(batch.key, "code"), count, by.latent).to(x)
        again, mu, log_variance = by.again(local.vae, x, noise)
        rest = x - again
        noisy = [
            rest + sigma * normal(fold(batch.key, name), *x.shape).to(x)
            for name, sigma in (("first noise", by.sigma1), ("second noise", by.sigma2))
        ]
        out = client.net.forward(local, torch.cat([*noisy, x]), train=True, key=fold(batch.key, "classifier"))
        share = batch.weight / batch.weight.sum()
        wrong = (F.cross_entropy(out.logits, batch.y.repeat(3), reduction="none").view(3, -1) * share).sum(1)
        apart = (rest.square().flatten(1).mean(1) * share).sum()
        unlike = ((mu.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2 * share).sum()
        return (
            client.received.pull * apart
            + by.residual * wrong[:2].mean()
            + by.divergence * unlike / (x.shape[1] * by.latent)
            + by.recognition * wrong[2]
        )

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload.replace(vae=local.vae), memory

    def aggregate(self, server, uploads):
        vae = mean([u.vae for u in uploads], [u.weight for u in uploads])
        return super().aggregate(server, uploads).replace(vae=vae, turns=server.state.turns + 1)


@dataclass(frozen=True)
class ResidualExchange(Exchange):
    """Every client gives what the autoencoder leaves out. down: vae; up: x, y, and how they are packed"""

    by: FedFed = FedFed()

    def broadcast(self, server):
        return Tree(vae=server.state.get("vae", Tree()))

    def initial_memory(self, client):
        return Tree()

    def begin(self, client):
        return Tree()

    def step(self, client, local, batch):
        return local

    def finish(self, client, local):
        seed = torch.tensor(client.key, device=client.data.index.device)
        blocks = client.data.chunks(_BLOCK) or [client.data]
        released = [
            self.by.released(client.received.vae, block.x, block.y, fold(seed, f"images {number}"))
            for number, block in enumerate(blocks)
        ]
        return Tree({name: torch.cat([gift[name] for gift in released]) for name in released[0]}), Tree()

    def released(self, net, download, x, y, seed):
        return self.by.released(download.vae, x, y, seed)

    def one_of_each(self, count):
        """A second one, with more noise, is behind each block of them."""
        blocks = torch.arange(count).split(2 * _BLOCK)
        return torch.cat([block[: len(block) // 2] for block in blocks])

    def classes(self, net):
        return head_shape(net, "fedfed")[1]

    def notes(self, replies):
        images = sum(len(reply.upload.y) for reply in replies)
        return [f"{images} residuals shared with noise {self.by.sigma1:g} and {self.by.sigma2:g}; no privacy is stated"]
