from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.algorithm import Algorithm, Server
from ..core.fields import Count, NonNegative, Number, Positive, Several, Share
from ..core.network import Network
from ..core.optimizer import Adam, Sgd
from ..core.phases import counted
from ..core.rng import fold, key, normal, uniform
from ..core.tree import Tree, grad
from ..models.generators import ImageGenerator, diversity, first_weights, passed, structure
from .feddf import check_whole, teachers
from .feddisco import label_counts
from .fedgen import class_shares


@dataclass(frozen=True)
class FedFTG(Algorithm):
    """Zhang et al., 2022: the average is fine-tuned on images that the server makes up where it and clients disagree.

    down: model; up: delta, counts, shape, weight; memory: nothing

    The generator never leaves the server. For one client after another it learns to make images that the client's model
    takes for their labels and the average does not. The average then learns from all clients' models; each counts by
    its part of the label's examples.

    Needs what others do not: label counts of the clients of each round, and heavy training at the server.

    Differs from the released code: a client's part weighs its cross-entropy example by example; there it weighs the
    mean over the batch, by mistake. Labels are drawn as often as clients have them; there they are dealt. Clients do
    not clip their gradients at norm 10. Running statistics of the average stay the clients' mean. Results published
    before noise and label were projected apart are those of `fedftg/joint`. Not compared: its mode of features in place
    of images.
    """

    noise: Count = 100  # dimensions; 256 for 100 classes
    width: Count = 64  # channels of the generator's last hidden layer
    iterations: Number = 10  # after each round; 0: FedAvg
    student_steps: Count = 5  # in each
    batch: Several = 50  # images that are made at a time; the generator normalises over them
    student_lr: Positive = 0.1  # of the average, when it is fine-tuned
    generator_lr: Positive = 0.01  # of Adam
    decay: Share = 0.998  # of both rates, per round
    weight_decay: NonNegative = 1e-3  # of the average, when it is fine-tuned
    projection: Literal["apart", "joint"] = "apart"  # of the generator's noise and label

    # The generator of the numbers published before noise and label had projections of their own.
    presets: ClassVar[dict[str, dict[str, Any]]] = {"joint": {"projection": "joint"}}

    def setup(self, server):
        check_whole(server.net, "fedftg")
        return super().setup(server).replace(turns=torch.tensor(0))

    def finish(self, client, local):
        """The server knows neither labels nor the size of an image."""
        upload, memory = super().finish(client, local)
        shape = torch.tensor(client.data.whole.x[client.data.index[:1]].shape[1:], dtype=torch.int32)
        return upload.replace(counts=label_counts(client), shape=shape), memory

    def validate_upload(self, server, upload, expected):
        """Images of the size that a client says are made here."""
        other = super().validate_upload(server, upload, expected)
        size = upload.shape.tolist()
        return other or ("" if size == expected.shape.tolist() else f"it says that images have the shape {size}")

    def aggregate(self, server, uploads):
        state = super().aggregate(server, uploads).replace(turns=server.state.turns + 1)
        return self.tuned(server, state, uploads) if self.iterations else state

    def brief(self):
        return replace(self, iterations=min(self.iterations, 1), student_steps=1, batch=2)

    def tuned(self, server: Server, state: Tree, uploads: Sequence[Tree]) -> Tree:
        """The state with its model and its generator after this round's iterations."""
        student, shares = state.model.clone(), class_shares(uploads).to(next(iter(state.model.params.values())))
        shape = tuple(map(int, uploads[0].shape))
        sizes = shares.shape[1], shape, self.noise, self.width, self.projection == "apart"
        maker = structure(ImageGenerator, *sizes)
        if "generator" in state:
            generator = state.generator.clone()
        else:
            generator = first_weights(ImageGenerator, *sizes, seed=key(server.key, "generator"), like=shares)
        pace = self.decay ** int(server.state.turns)
        climb, descent = Adam(self.generator_lr * pace), Sgd(self.student_lr * pace, weight_decay=self.weight_decay)
        climbing, descending = climb.init(generator.params), descent.init(student.params)
        pooled = torch.stack([upload.counts for upload in uploads]).sum(0)
        for iteration in counted(range(self.iterations), "tuning the model at the server"):
            seed = torch.tensor(key(server.key, "images", iteration), device=shares.device)
            y = labels_like(pooled, fold(seed, "labels"), self.batch)
            noise = normal(fold(seed, "noise"), self.batch, self.noise).to(shares)
            for teacher, share in zip(teachers(server, uploads), shares, strict=True):
                loss = partial(disagreement, server.net, maker, student, teacher, share[y], noise, y, len(uploads))
                climb.update_(generator.params, gradient(loss, generator), climbing)
            images, said = self.lesson(server, uploads, maker, generator, shares, noise, y)
            for _ in range(self.student_steps):
                loss = partial(ignorance, server.net, images, said)
                descent.update_(student.params, gradient(loss, student), descending)
        return state.replace(model=student, generator=generator)

    def lesson(
        self,
        server: Server,
        uploads: Sequence[Tree],
        maker: Network,
        generator: Tree,
        shares: Tensor,
        noise: Tensor,
        y: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Images, and what the clients' models together say of them."""
        with torch.no_grad():
            images = maker.apply(generator, passed, noise, y)
            said = torch.zeros_like(shares[:1])
            for teacher, share in zip(teachers(server, uploads), shares, strict=True):
                said = said + share[y, None] * server.net(teacher, images).softmax(1)
        return images, said


def labels_like(counts: Tensor, seed: Tensor, count: int) -> Tensor:
    """Labels as frequent as in these counts."""
    ends = (counts.double().cumsum(0) / counts.sum().clamp(min=1)).to(seed.device)
    drawn = torch.searchsorted(ends, uniform(seed, count).double(), right=True)
    return drawn.clamp(max=int(counts.nonzero().max()) if counts.any() else 0)


def gradient(loss: Callable[[Tree], Tensor], weights: Tree) -> Tree:
    """Of a function of weights, by their parameters; statistics that it advances are those of `weights`."""
    params = weights.params.map(lambda leaf: leaf.detach().requires_grad_())
    with torch.enable_grad():
        return grad(loss(weights.replace(params=params)), params)


def disagreement(
    net: Network,
    maker: Network,
    student: Tree,
    teacher: Tree,
    share: Tensor,
    noise: Tensor,
    y: Tensor,
    clients: int,
    generator: Tree,
) -> Tensor:
    """What the generator minimises for one client: images of which its model is sure, and the average far from it."""
    images = maker.apply(generator, passed, noise, y, train=True)
    theirs, ours = net(teacher, images), net(student, images)
    far = (share * (ours - theirs.detach()).abs().mean(1)).mean()
    sure = (share * F.cross_entropy(theirs, y, reduction="none")).mean()
    return sure - far + diversity(noise, images) / clients


def ignorance(net: Network, images: Tensor, said: Tensor, student: Tree) -> Tensor:
    """Cross-entropy to what the clients' models say; the mean over classes too, which the rate is meant for."""
    return -(said * net(student, images).log_softmax(1)).mean()
