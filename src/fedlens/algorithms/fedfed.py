from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.algorithm import Algorithm, Client, Recipe
from ..core.batches import Shard
from ..core.fields import Count, NonNegative, Positive
from ..core.objective import weighted
from ..core.optimizer import AdamW
from ..core.rng import fold, normal, privacy_noise, uniform
from ..core.tree import Tree, grad, mean
from ..models.generators import ResidualVae, Vae, first_weights, head_shape, structure
from ..privacy.statement import SEEDED, Statement
from ._sharing import Exchange, Form, WithSharedData, can_share, packed
from .fedavg import FedAvg
from .feddisco import label_counts

Unit = tuple[Tensor, Tensor]  # black, and what white has more
_BLOCK = 500  # images at a time, on every device: the draws of a block have one key


@dataclass(frozen=True)
class FedFed:
    """Yang et al., 2023: over a base, clients share what an autoencoder cannot say of their images, with noise.

    Together they train a variational autoencoder q and a classifier, which is to recognise x - q(x) under noise. Every
    client then gives x - q(x) with two noises to all, once. Training starts afresh, on shared images as well. Images
    are taken in [0, 1] for all of this; what a network is given, own or shared, is normalised in the same way.

    An epoch of the first stage is three passes: the classifier on mixtures of two images, the autoencoder on mosaics of
    four, and both on plain images. Clients with few images, or nearly all of one class, weigh the terms of the
    loss otherwise. AdamW goes on at each client where it was.

    It costs rounds with the autoencoder's bytes both ways. A client remembers twice the weights of both networks. The
    federation stores two images for each of its own.

    Differs from the released code: shared images are drawn with replacement, with the classes' own frequencies, and
    pass the network apart from a client's own. They are not augmented; own images are, as `augment` says. A cohort
    trains the autoencoder in each round, there all clients or ten. What counts as few images is known from the second
    round on. A pass over mosaics leaves the classifier alone; there it moves its statistics. Noise is 0.15 and 0.25,
    the default there; its yaml file has 0.2 and 0.25. Results published with noise on normalised images are those of
    `fedfed/earlier`. Not compared: how models are averaged there.
    """

    base: Recipe = FedAvg()  # the method that trains after the exchange
    distil_rounds: Count = 15  # rounds in which the autoencoder is trained
    distil_epochs: Count = 1  # epochs in each of them
    distil_lr: Positive = 1e-3  # of AdamW
    distil_decay: NonNegative = 1e-6  # weight decay of AdamW
    latent: Count = 2048  # dimensions of the autoencoder's code
    width: Count = 32  # channels of the autoencoder's code
    reconstruction: NonNegative = 5.0  # ten times as much in the first nine epochs of a round, five times in ten more
    residual: NonNegative = 2.0  # weight of recognising residuals
    divergence: NonNegative = 0.005  # of codes from the normal distribution
    recognition: NonNegative = 0.4  # weight of recognising images
    sigma1: NonNegative = 0.15  # of the first noise, on pixels in [0, 1]
    sigma2: NonNegative = 0.25  # of the second
    share_as: Form = "float32"  # type of the numbers that are sent
    passes: Literal["three", "one"] = "three"  # an epoch; one: without mixtures and mosaics
    mixup: Count = 2  # parts of mixtures are drawn from Beta(mixup, mixup)
    mosaics: Count = 64  # made of each batch
    adaptive: bool = True  # whether clients with few images, or nearly all of one class, weigh terms otherwise
    kept: bool = True  # whether AdamW goes on where it was when the client last took part
    network: Literal["residual", "plain"] = "residual"  # plain: no residual blocks, each image normalised by itself
    images: Literal["unit", "normalised"] = "unit"  # what is autoencoded and gets noise: pixels in [0, 1]
    pull_by: Literal["epochs", "rounds"] = "epochs"  # what reconstruction's factors of ten and five count

    sends: ClassVar[str] = "as its base; vae first; once x, y"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "earlier": {
            "distil_decay": 0.0,
            "passes": "one",
            "adaptive": False,
            "kept": False,
            "network": "plain",
            "images": "normalised",
            "pull_by": "rounds",
        }
    }

    def stages(self, plan):
        optimizer = AdamW(self.distil_lr, weight_decay=self.distil_decay)
        epochs = self.distil_epochs * len(self.kinds)
        how = dict(rounds=self.distil_rounds, epochs=epochs, steps=None, optimizer=optimizer)
        yield from Distil(by=self).stages(replace(plan, **how))
        yield plan.errand(ResidualExchange(by=self))
        # One mean over an image and its two companions: a third of the loss is on own images.
        objective = WithSharedData(2 / 3, 2 * plan.size, "convex", plan.objective)
        first, *rest = self.base.stages(replace(plan, objective=objective))
        for stage in (first, *rest):
            can_share(stage, "fedfed")
        yield replace(first, fresh=True)
        yield from rest

    @property
    def kinds(self) -> tuple[str, ...]:
        """The passes of an epoch."""
        return ("mixtures", "mosaics", "images") if self.passes == "three" else ("images",)

    # ---- the parts of an image ----
    def again(
        self, vae: Tree, x: Tensor, noise: Tensor | None = None, *, train: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q(x), mean and log-variance of its code); without noise nothing is random."""
        noise = x.new_zeros(len(x), self.latent) if noise is None else noise
        kind = self.coder
        return structure(kind, *self.sizes(x)).apply(vae, kind.forward, x, noise, train=train)

    @property
    def coder(self) -> Any:
        return ResidualVae if self.network == "residual" else Vae

    def sizes(self, x: Tensor) -> tuple[tuple[int, ...], int, int]:
        return tuple(x.shape[1:]), self.latent, self.width

    def unit(self, data: Shard) -> Unit:
        """(black, what white has more than black) of network input, colour by colour; pixels in [0, 1]: 0 and 1."""
        some = data.whole.x[data.index[:1]]
        ends = [some.new_full((1, *some.shape[1:]), value) for value in (0, 255)]
        black, white = (data.whole.prepare(end, None)[:, :, :1, :1] for end in ends)
        if self.images == "normalised" or some.dtype != torch.uint8:  # stored as the network takes them
            return torch.zeros_like(black), torch.ones_like(black)
        return black, white - black

    def released(self, vae: Tree, x: Tensor, y: Tensor, seed: Tensor, unit: Unit | None = None) -> Tree:
        """What leaves of these images: residuals under the first noise, then under the second; no residual is black."""
        black, span = unit or (x.new_zeros(()), x.new_ones(()))
        plain = (x - black) / span
        with torch.no_grad():
            rest = plain - self.again(vae, plain)[0]
        given = [black + span * (rest + noise) for noise in self.noises(seed, x, privacy_noise)]
        return packed(torch.cat(given), y.repeat(2), self.share_as)

    def noises(self, seed: Tensor, x: Tensor, draw: Callable[..., Tensor] = normal) -> list[Tensor]:
        """The two that residuals like x are sent under; in training they protect nobody."""
        return [
            sigma * draw(fold(seed, name), *x.shape).to(x)
            for name, sigma in (("first noise", self.sigma1), ("second noise", self.sigma2))
        ]

    @property
    def scale(self) -> str:
        return "in [0, 1]" if self.images == "unit" else "of normalised images"

    def statement(self) -> Statement:
        return Statement(
            release="two residuals of every image, each with noise of its own, and its label; once",
            mechanism=f"Gaussian: {self.sigma1:g} and {self.sigma2:g} on all pixels {self.scale}",
            unit="one image",
            adjacency="an image is replaced by any other of the same label",
            sensitivity="unbounded: residuals are not clipped",
            epsilon=None,
            delta=None,
            holds=False,
            because="residuals are not clipped, and the autoencoder that leaves beside them was trained on the images",
            randomness=SEEDED,
            not_covered=("labels, which are sent as they are", "updates of the autoencoder and of all classifiers"),
            details={"sigma1": self.sigma1, "sigma2": self.sigma2},
        )


@dataclass(frozen=True)
class Distil(Algorithm):
    """The first stage of FedFed: an autoencoder, and a classifier of what it leaves out.

    down: model, pull, typical, and the autoencoder or the seed of its first weights; up: delta, examples, vae, weight;
    memory: adam, the state of AdamW for both networks
    """

    by: FedFed = FedFed()

    full_rows: ClassVar = True  # the autoencoder's norms, partners in mixtures

    # ---- server ----
    def setup(self, server):
        counted = Tree(examples=torch.tensor(0), clients=torch.tensor(0))
        return super().setup(server).replace(seed=torch.tensor(server.key), turns=torch.tensor(0), counted=counted)

    def broadcast(self, server):
        state, turns = server.state, int(server.state.turns)
        pull = self.by.reconstruction * (ten_five_one(turns, 10) if self.by.pull_by == "rounds" else 1)
        typical = int(state.counted.examples) / max(int(state.counted.clients), 1)
        like = next(iter(state.model.params.values()))
        down = super().broadcast(server).replace(pull=like.new_tensor(pull), typical=like.new_tensor(typical))
        # The server never saw an image, so that clients begin the autoencoder, all from the same seed.
        return down.replace(vae=state.vae) if "vae" in state else down.replace(seed=state.seed)

    def aggregate(self, server, uploads):
        vae = mean([u.vae for u in uploads], [u.weight for u in uploads])
        told = torch.stack([u.examples for u in uploads]).clamp(min=0).sum().cpu()
        counted = server.state.counted
        counted = Tree(examples=counted.examples + told, clients=counted.clients + len(uploads))
        return super().aggregate(server, uploads).replace(vae=vae, turns=server.state.turns + 1, counted=counted)

    # ---- client ----
    def initial_memory(self, client):
        memory = super().initial_memory(client)
        if not self.by.kept:
            return memory
        params = Tree(optimizer=client.received.model.params, vae_optimizer=self.coder_of(client).params)
        return memory.replace(adam=_lasting(Tree({name: client.optimizer.init(params[name]) for name in params})))

    def coder_of(self, client: Client) -> Tree:
        """The autoencoder that a client begins with."""
        if "vae" in client.received:
            return client.received.vae
        like, x = next(iter(client.received.model.params.values())), client.data.whole.x[client.data.index[:1]]
        return first_weights(self.by.coder, *self.by.sizes(x), seed=int(client.received.seed), like=like)

    def begin(self, client):
        local, vae = super().begin(client), self.coder_of(client)
        like = next(iter(local.params.values()))
        states = Tree(optimizer=local.optimizer, vae_optimizer=client.optimizer.init(vae.params))
        black, span = self.by.unit(client.data)
        factors, mosaics = self.adapted(client)
        return local.replace(
            **(states | client.memory.adam if self.by.kept else states),
            vae=vae,
            black=black.to(like),
            span=span.to(like),
            factors=like.new_tensor(factors),
            mosaics=torch.tensor(mosaics, device=like.device),
        )

    def adapted(self, client: Client) -> tuple[tuple[float, ...], bool]:
        """(what reconstruction, residual, divergence and recognition are multiplied by, whether it makes mosaics)."""
        if not self.by.adaptive:
            return (1.0, 1.0, 1.0, 1.0), True
        few = 0.2 * float(client.received.typical)
        if client.examples < few:
            return (5.0, 1.0, 0.5, 1.0), True
        if client.examples > few and int(label_counts(client).max()) > 0.7 * client.examples:
            return (1.0, 5.0, 5.0, 5.0), False
        return (1.0, 1.0, 1.0, 1.0), True

    def phase(self, epoch):
        """The kind of pass, and how much stronger the pull is in this local epoch."""
        kinds = self.by.kinds
        kind, local = kinds[epoch % len(kinds)], epoch // len(kinds) + 1
        factor = ten_five_one(local, 100 if kind == "mosaics" else 10) if self.by.pull_by == "epochs" else 1
        return kind if kind == "mixtures" else f"{kind} {factor}"

    def step(self, client, local, batch):
        kind, _, factor = client.phase.partition(" ")
        if kind == "mixtures":
            return self.on_mixtures(client, local, batch)
        if kind == "mosaics":
            return self.on_mosaics(client, local, batch, int(factor))
        params, vae = (p.map(lambda leaf: leaf.detach().requires_grad_()) for p in (local.params, local.vae.params))
        with torch.enable_grad():
            loss = self.distillation(client, local | Tree(params=params, vae=Tree(params=vae)), batch, int(factor))
            grads = grad(loss, Tree(params=params, vae=vae))
        client.optimizer.update_(local.params, grads.params, local.optimizer)
        client.optimizer.update_(local.vae.params, grads.vae, local.vae_optimizer)
        return local

    def on_mixtures(self, client: Client, local: Tree, batch: Tree) -> Tree:
        """The classifier learns from mixtures of two images each (Zhang et al., 2018)."""
        # The median of 2a - 1 uniform numbers is distributed as Beta(a, a).
        part = uniform(fold(batch.key, "part"), 2 * self.by.mixup - 1).median().to(batch.x)
        other = uniform(fold(batch.key, "partners"), len(batch.x)).argsort()
        mixed = part * batch.x + (1 - part) * batch.x[other]
        params = local.params.map(lambda leaf: leaf.detach().requires_grad_())
        with torch.enable_grad():
            out = client.net.forward(local | Tree(params=params), mixed, train=True, key=fold(batch.key, "classifier"))
            one, two = (F.cross_entropy(out.logits, y, reduction="none") for y in (batch.y, batch.y[other]))
            grads = grad(weighted(part * one + (1 - part) * two, batch), params)
        client.optimizer.update_(local.params, grads, local.optimizer)
        return local

    def on_mosaics(self, client: Client, local: Tree, batch: Tree, factor: int) -> Tree:
        """The autoencoder learns from mosaics of four images each; where the client makes some."""
        by, before = self.by, Tree(vae=local.vae, vae_optimizer=local.vae_optimizer).clone()
        x = mosaics((batch.x - local.black) / local.span, batch.weight, by.mosaics, fold(batch.key, "mosaics"))
        noise = normal(fold(batch.key, "code"), len(x), by.latent).to(x)
        params = local.vae.params.map(lambda leaf: leaf.detach().requires_grad_())
        with torch.enable_grad():
            again, mu, log_variance = by.again(local.vae | Tree(params=params), x, noise, train=True)
            unlike = divergence(mu, log_variance).mean() / (x.shape[1] * by.latent)
            loss = client.received.pull * factor * (x - again).square().mean() + by.divergence * unlike
            grads = grad(loss, params)
        client.optimizer.update_(local.vae.params, grads, local.vae_optimizer)
        after = Tree(vae=local.vae, vae_optimizer=local.vae_optimizer)
        for now, was in zip(after.leaves(), before.leaves(after), strict=True):
            now.copy_(torch.where(local.mosaics, now, was))
        return local

    def distillation(self, client, local, batch, factor=1):
        """The loss on a batch; advances the statistics of both networks in place."""
        by, count = self.by, len(batch.x)
        x = (batch.x - local.black) / local.span
        noise = normal(fold(batch.key, "code"), count, by.latent).to(x)
        again, mu, log_variance = by.again(local.vae, x, noise, train=True)
        rest = x - again
        noisy = [local.black + local.span * (rest + noise) for noise in by.noises(batch.key, x)]
        out = client.net.forward(local, torch.cat([*noisy, batch.x]), train=True, key=fold(batch.key, "classifier"))
        share = batch.weight / batch.weight.sum()
        wrong = (F.cross_entropy(out.logits, batch.y.repeat(3), reduction="none").view(3, -1) * share).sum(1)
        apart = (rest.square().flatten(1).mean(1) * share).sum()
        unlike = (divergence(mu, log_variance) * share).sum()
        terms = (
            client.received.pull * factor * apart,
            by.residual * wrong[:2].mean(),
            by.divergence * unlike / (x.shape[1] * by.latent),
            by.recognition * wrong[2],
        )
        return (torch.stack(terms) * local.factors).sum()

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        upload = upload.replace(vae=local.vae, examples=torch.tensor(client.examples))
        if self.by.kept:
            states = Tree(optimizer=local.optimizer, vae_optimizer=local.vae_optimizer)
            memory = memory.replace(adam=_lasting(states))
        return upload, memory


def _lasting(states: Tree) -> Tree:
    """What AdamW knows beyond a round; the rate is each round's own."""
    return Tree({name: Tree({k: v for k, v in state.items() if k != "lr"}) for name, state in states.items()})


def ten_five_one(at: int, span: int) -> int:
    """The released curriculum of the pull."""
    return 10 if at < span else 5 if at < 2 * span else 1


def divergence(mu: Tensor, log_variance: Tensor) -> Tensor:
    """[images] of codes from the normal distribution."""
    return (mu.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2


def mosaics(x: Tensor, weight: Tensor, count: int, seed: Tensor) -> Tensor:
    """Images whose quarters are pieces of four, all from the same place, and which have a black hole; recordable."""
    images, _, high, wide = x.shape
    tops, lefts = high // 2, wide // 2
    # Examples of weight zero fill a row up: they come last.
    order = (uniform(fold(seed, "images"), count, images) + (weight == 0)).argsort(1)
    chosen = order[:, torch.arange(4, device=x.device) % images]
    drawn = uniform(fold(seed, "places"), count, 4)
    down, right = (drawn[:, :1] * (tops + 1)).long(), (drawn[:, 1:2] * (lefts + 1)).long()
    i, j = torch.arange(high, device=x.device), torch.arange(wide, device=x.device)
    rows, columns = down + i - tops * (i >= tops), right + j - lefts * (j >= lefts)  # [mosaics, high], [mosaics, wide]
    quarter = 2 * (i >= tops)[:, None] + (j >= lefts)[None]  # [high, wide]
    made = x[chosen[:, quarter], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    middle, centre = (drawn[:, 2:3] * high).long(), (drawn[:, 3:] * wide).long()
    hole = ((i >= middle - high // 4) & (i < middle + high // 4))[:, :, None]
    hole = hole & ((j >= centre - wide // 4) & (j < centre + wide // 4))[:, None, :]
    return made * ~hole[:, None]


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
        unit = self.by.unit(client.data)
        released = [
            self.by.released(client.received.vae, block.x, block.y, fold(seed, f"images {number}"), unit)
            for number, block in enumerate(blocks)
        ]
        forgotten = Tree(adam=Tree()) if self.by.kept else Tree()  # it has done its work, and is large
        return Tree({name: torch.cat([gift[name] for gift in released]) for name in released[0]}), forgotten

    def released(self, net, download, x, y, seed, unit):
        return self.by.released(download.vae, x, y, seed, unit if self.by.images == "unit" else None)

    def one_of_each(self, count):
        """A second one, with more noise, is behind each block of them."""
        blocks = torch.arange(count).split(2 * _BLOCK)
        return torch.cat([block[: len(block) // 2] for block in blocks])

    def classes(self, net):
        return head_shape(net, "fedfed")[1]

    def notes(self, replies):
        images = sum(len(reply.upload.y) for reply in replies)
        noises = f"{self.by.sigma1:g} and {self.by.sigma2:g} on pixels {self.by.scale}"
        return [f"{images} residuals shared with noise {noises}; no privacy is stated"]
