from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.algorithm import Algorithm, Server
from ..core.fields import Count, NonNegative, Number, Positive, Several, Share
from ..core.network import Network
from ..core.objective import weighted
from ..core.optimizer import Adam
from ..core.phases import counted
from ..core.rng import fold, key, normal, uniform
from ..core.tree import Tree, grad
from ..models.generators import LatentGenerator, diversity, first_weights, head_shape, passed, structure
from .feddf import check_whole
from .feddisco import label_counts


@dataclass(frozen=True)
class FedGen(Algorithm):
    """Zhu, Hong & Zhou, 2021: the server learns to make up features of each class, which clients learn from, too.

    down: model, generator, strength; up: delta, counts, weight; memory: nothing

    A client's loss is its own, plus beta KL(its head on features made for its labels || its predictions), plus alpha
    cross-entropy of its head on features for any labels. The two terms begin in the second round and get weaker.

    Needs what others do not: label counts of the clients of each round, `steps` small steps at the server, and the
    generator's bytes on the way down.

    The released alpha and beta are 10, for plain SGD of 0.01: `fedgen/released` with local.lr=0.01 local.momentum=0. At
    higher rates or with momentum 10 is too much: soon everything is one class. So the default is 1.

    Differs from the released code: its mean of loss times weight goes over all pairs of examples, by mistake, ours over
    examples. A client's share of a label counts all its examples, there those of this round's batches and one. Adam
    starts anew each round. The generator is used in all local epochs, there in the first twenty. Alpha is not
    multiplied by batch / local.batch_size, which is 1 there. Results published before absent labels were skipped and
    noise was uniform are those of `fedgen/earlier`.
    """

    alpha: NonNegative = 1.0  # weight of what the generator teaches, at clients
    beta: NonNegative = 1.0  # weight of agreeing with the generator, at clients
    decay: Share = 0.98  # of alpha, beta and the generator's rate, per round
    least: NonNegative = 1e-5  # that alpha and beta are multiplied by
    noise: Count | None = None  # dimensions; none: 64 for colour images, else 32
    hidden: Count | None = None  # none: 512 for colour images, else 256; 128 for two classes
    steps: Number = 50  # of the generator, after each round
    batch: Several = 32  # features that are made at a time; the generator normalises over them
    lr: Positive = 3e-4  # of the generator, by Adam
    weight_decay: NonNegative = 1e-2  # of the generator
    labels: Literal["present", "all"] = "present"  # that the generator learns from: those that the cohort has
    noise_is: Literal["uniform", "normal"] = "uniform"  # how the generator's noise is drawn

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "released": {"alpha": 10.0, "beta": 10.0},
        "emnist": {"alpha": 10.0, "lr": 1e-4},
        "earlier": {"noise": 32, "hidden": 256, "labels": "all", "noise_is": "normal"},
    }

    # ---- server ----
    def setup(self, server):
        check_whole(server.net, "fedgen")
        state = super().setup(server)
        like = next(iter(state.model.params.values()))
        generator = first_weights(
            LatentGenerator, *self.sizes(server.net), seed=key(server.key, "generator"), like=like
        )
        return state.replace(generator=generator, turns=torch.tensor(0))

    def sizes(self, net: Network) -> tuple[int, int, int, int]:
        """Of the generator: classes, width, noise, hidden."""
        width, classes = head_shape(net, "fedgen")
        first = next((p for p in net.module.parameters() if p.dim() == 4), None)
        coloured = first is not None and first.shape[1] == 3
        noise = self.noise or (32 if classes == 2 or not coloured else 64)
        hidden = self.hidden or (128 if classes == 2 else 512 if coloured else 256)
        return classes, width, noise, hidden

    def drawn(self, seed: Tensor, count: int, net: Network) -> Tensor:
        """[count, dimensions] noise that features are made from."""
        return (uniform if self.noise_is == "uniform" else normal)(seed, count, self.sizes(net)[2])

    def broadcast(self, server):
        turns = int(server.state.turns)
        strength = max(self.decay**turns, self.least) if turns else 0.0  # at first the generator knows nothing
        like = next(iter(server.state.model.params.values()))
        return super().broadcast(server).replace(generator=server.state.generator, strength=like.new_tensor(strength))

    def aggregate(self, server, uploads):
        state = super().aggregate(server, uploads)
        return state.replace(generator=self.taught(server, uploads), turns=server.state.turns + 1)

    def taught(self, server: Server, uploads: Sequence[Tree]) -> Tree:
        """The generator after this round's steps."""
        net, generator = server.net, server.state.generator.clone()
        shares = class_shares(uploads).to(next(iter(generator.params.values())))
        # The rest of a client's model has no say in it, so that one model and the heads are all there is in memory.
        mine = server.state.model.select(lambda name: name in net.head)
        heads = [mine + upload.delta.select(lambda name: name in net.head) for upload in uploads]
        descent = Adam(self.lr * self.decay ** int(server.state.turns), weight_decay=self.weight_decay)
        descending = descent.init(generator.params)
        there = shares.sum(0).nonzero().squeeze(1) if self.labels == "present" else None
        for step in counted(range(self.steps), "training the generator at the server"):
            seed = torch.tensor(key(server.key, "features", step), device=shares.device)
            y = any_labels(fold(seed, "labels"), self.batch, shares.shape[1], there)
            params = generator.params.map(lambda leaf: leaf.detach().requires_grad_())
            with torch.enable_grad():
                noise = self.drawn(fold(seed, "noise"), self.batch, net).to(shares)
                made = self.made(net, generator.replace(params=params), noise, y, train=True)
                loss = diversity(noise, made)
                for head, share in zip(heads, shares, strict=True):
                    said = net.apply(server.state.model | head, _head, made).to(made)
                    loss = loss + (share[y] * F.cross_entropy(said, y, reduction="none")).mean()
                grads = grad(loss, params)
            descent.update_(generator.params, grads, descending)
        return generator

    def made(self, net: Network, generator: Tree, noise: Tensor, y: Tensor, *, train: bool = False) -> Tensor:
        """Features for these labels."""
        return structure(LatentGenerator, *self.sizes(net)).apply(generator, passed, noise, y, train=train)

    # ---- client ----
    def loss(self, client, weights, batch, out):
        loss, received = super().loss(client, weights, batch, out), client.received

        def head(purpose: str, y: Tensor) -> Tensor:
            noise = self.drawn(fold(batch.key, f"noise for {purpose}"), len(y), client.net).to(out.logits)
            made = self.made(client.net, received.generator, noise, y)
            key = fold(batch.key, f"head on {purpose}")
            return client.net.apply(weights, _head, made, train=True, key=key).to(out.logits)

        if self.beta:
            with torch.no_grad():
                target = head("own labels", batch.y).softmax(1)
            apart = F.kl_div(out.logits.log_softmax(1), target, reduction="none").sum(1)
            loss = loss + self.beta * received.strength * weighted(apart, batch)
        if self.alpha:
            y = any_labels(fold(batch.key, "labels"), self.batch, out.logits.shape[1])
            loss = loss + self.alpha * received.strength * F.cross_entropy(head("any labels", y), y)
        return loss

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload.replace(counts=label_counts(client)), memory


def _head(module, features: Tensor) -> Tensor:
    return module.head(features)


def any_labels(seed: Tensor, count: int, classes: int, among: Tensor | None = None) -> Tensor:
    """All classes alike, or all of these."""
    if among is None or not len(among):
        return (uniform(seed, count) * classes).long().clamp(max=classes - 1)
    return among[(uniform(seed, count) * len(among)).long().clamp(max=len(among) - 1)]


def class_shares(uploads: Sequence[Tree]) -> Tensor:
    """[clients, classes] what part of a class's examples each client of the cohort has."""
    counts = torch.stack([upload.counts for upload in uploads]).double()
    return counts / counts.sum(0).clamp(min=1)
