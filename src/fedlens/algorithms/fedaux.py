from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.algorithm import Errand, Server
from ..core.batches import Dataset, Shard, plan
from ..core.check import shape_mismatch
from ..core.errors import BadInput
from ..core.evaluate import pieces
from ..core.fields import Count, Number, Open, Positive, Several
from ..core.network import Network
from ..core.optimizer import Adam
from ..core.phases import counted
from ..core.rng import fold, generator, key, privacy_noise, uniform
from ..core.tree import Tree, grad
from ..models.generators import first_weights, head_shape, passed, structure
from ..privacy.client_level import ClientPrivacy
from ..privacy.gaussian import analytic_sigma, classic_sigma
from ..privacy.statement import SEEDED, Statement
from .feddf import FedDF, Schedule, logits, public, teachers


@dataclass(frozen=True)
class FedAux:
    """Sattler et al., 2021: FedDF in which a client's model counts more on public images that are like its own.

    The server trains the first model on public images without labels (SimCLR). With it every client tells its images
    from some of the public ones by logistic regression, adds noise to that, and sends its score of the others, once.

    Needs what others do not: public data (auxiliary=...), which reach clients as the first model's features, and much
    training at the server, before the first round and after each.

    Differs from the paper: features have norm one each and there is no intercept, so that the bound behind the noise
    holds. (The released regression breaks its own bound: 0.996 where 0.5 is claimed.) Epsilon of one or more takes the
    noise that is proven for it. Differs from the released code: statistics of norms stay the clients' mean, and models
    are evaluated with them; there all passes are in train mode. Clients train by local.optimizer, there by Adam of
    1e-3. Results published with a cosine from 1e-3 and Adam anew in each round are those of `fedaux/earlier`. Not
    compared: SimCLR, of which only the weights were released.
    """

    pretrain_steps: Number = 2000  # of SimCLR
    pretrain_batch: Several = 256  # views of one image alone could be told from nothing
    pretrain_lr: Positive = 1e-3  # of Adam
    negatives: Open = 0.2  # part of the public images that clients tell theirs from; the rest are distilled on
    regularisation: Positive = 0.01  # lambda
    epsilon: Positive = 0.1  # of the scores that clients send; smaller is more private
    delta: Open = 1e-5  # of the same promise
    steps: Number = 300  # of distillation after each round: about one epoch of 40,000 images
    batch: Count = 128  # public images of a step
    lr: Positive = 5e-5  # of Adam, in distillation
    schedule: Schedule = "constant"  # of that rate, within a round
    kept: bool = True  # whether Adam goes on where it was in the round before
    train_mode: bool = False  # whether the student's norms learn from public images

    sends: ClassVar[str] = "delta, ticket, weight; once scores"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"earlier": {"lr": 1e-3, "schedule": "to_zero", "kept": False}}

    def stages(self, plan):
        # The uplink would refuse the first update, after scores have left.
        if any(isinstance(transform, ClientPrivacy) for transform in plan.uplink):
            raise BadInput("uplink dp protects delta alone, but fedaux also uploads scores and a ticket")
        same = {name: getattr(self, name) for name in ("steps", "batch", "lr", "schedule", "kept", "train_mode")}
        training = WeightedDistillation(**same, clip=None, augment=False, validation=0)
        for stage in training.stages(plan):
            yield replace(stage.errand(ScorePublicImages(base=stage.algorithm, by=self)), fresh=stage.fresh)
            yield replace(stage, fresh=False)

    def sigma(self, examples: int) -> float:
        """Of the noise on each coefficient, when so many examples, own and public, were fitted."""
        calibrate = classic_sigma if self.epsilon < 1 else analytic_sigma
        return calibrate(self.epsilon, self.delta, 2 / (examples * self.regularisation))

    def scores(self, own: Tensor, negatives: Tensor, others: Tensor, seed: Tensor) -> Tensor:
        """[others] how sure the noisy regression is that these features are of the client's kind."""
        x = torch.cat([own, negatives]).double()
        sign = torch.cat([x.new_ones(len(own)), -x.new_ones(len(negatives))])
        fitted = logistic(x, sign, self.regularisation)
        noisy = fitted + self.sigma(len(x)) * privacy_noise(seed, len(fitted)).to(fitted)
        return (others.double() @ noisy).sigmoid().float()


@dataclass(frozen=True)
class ScorePublicImages(Errand):
    """Every client scores the public images. down: as its base, features of public images once; up: scores, ticket

    memory: ticket, a number by which the server finds a client's scores again
    """

    by: FedAux = FedAux()

    evaluated_as: ClassVar = ()  # no model moves
    needs_public_data: ClassVar = True

    def setup(self, server):
        data, by = public(server, "fedaux"), self.by
        cut = round(by.negatives * len(data))
        if len(data) and not 0 < cut < len(data):  # a check before the run has none at all
            raise BadInput(
                f"algorithm.negatives={by.negatives:g} makes {cut} of {len(data)} public images negatives: some must "
                "be, and some be left to distil on"
            )
        state = self.base.setup(server)
        model = pretrained(server, state.model, data, by)
        order = torch.randperm(len(data), generator=generator(key(server.key, "public"))).to(data.x.device)
        shared = {
            name: features(server.net, model, Shard(data, index))
            for name, index in (("negatives", order[:cut]), ("others", order[cut:]))
        }
        return state.replace(model=model, shared=Tree(shared), distil=order[cut:])

    def finish(self, client, local):
        own = features(client.net, client.received.model, client.data)
        seed = fold(torch.tensor(client.key, device=own.device), "noise")
        scores = self.by.scores(own, client.shared.negatives, client.shared.others, seed)
        # A hash: with the key itself, or a fold of it, which can be undone, anybody could draw the noise again.
        ticket = torch.tensor(key(client.key, "ticket"))
        return Tree(scores=scores, ticket=ticket), Tree(ticket=ticket)

    def validate_upload(self, server, upload, expected):
        return shape_mismatch(upload, expected)

    def aggregate(self, server, uploads):
        found = {name: torch.stack([upload[name] for upload in uploads]) for name in ("scores", "ticket")}
        kept = Tree(
            {name: entry for name, entry in server.state.items() if name != "shared"}
        )  # they have done their work
        return kept.replace(scores=found["scores"], tickets=found["ticket"])

    def brief(self):
        negatives = min(max(self.by.negatives, 0.1), 0.9)  # of few images, too, there are both kinds
        return replace(super().brief(), by=replace(self.by, pretrain_steps=0, negatives=negatives))

    def statement(self) -> Statement:
        by = self.by
        return Statement(
            release="a client's scores of public images, by a logistic regression of its images against others; once",
            mechanism="Gaussian: noise on the coefficients of a regularised regression, proportional to 1/(n lambda)",
            unit="one image",
            adjacency="an image of the client is replaced by any other",
            sensitivity=f"2/(n lambda) for n images, own and public, of norm one; lambda is {by.regularisation:g}",
            epsilon=by.epsilon,
            delta=by.delta,
            holds=True,
            because="the regression is solved to rounding; labels are not used",
            randomness=SEEDED,
            not_covered=(
                "model updates, which leave as they are",
                "n, the number of a client's images",
                "which messages are of one client: its ticket, a hash that says nothing of its data, is in all of them",
            ),
            details={"sigma_of_10000_images": by.sigma(10_000)},
        )


@dataclass(frozen=True)
class WeightedDistillation(FedDF):
    """FedAux's training. down: model; up: delta, ticket, weight; memory: ticket"""

    def initial_memory(self, client):
        return super().initial_memory(client).replace(ticket=torch.tensor(-1))

    def finish(self, client, local):
        upload, memory = super().finish(client, local)
        return upload.replace(ticket=client.memory.ticket), memory

    def validate_upload(self, server, upload, expected):
        other = super().validate_upload(server, upload, expected)
        known = server.state.tickets.tolist() if "tickets" in server.state else []
        return other or ("" if int(upload.ticket) in known else "no scores were given under its ticket")

    def chosen(self, server, data):
        return server.state.distil

    def ensemble(self, server, uploads, data, chosen, looks):
        """[images, classes] logits of the clients' models, each weighed by its own score of the image."""
        total = counted = 0.0
        tickets, place = server.state.tickets.tolist(), torch.cat([look.place for look in looks])
        for upload, teacher in zip(uploads, teachers(server, uploads), strict=True):
            score = server.state.scores[tickets.index(int(upload.ticket))][place.to(server.state.scores.device), None]
            said = logits(server.net, teacher, data, chosen, looks)
            total, counted = total + score.to(said) * said, counted + score.to(said)
        assert isinstance(total, Tensor) and isinstance(counted, Tensor)
        return total / counted.clamp(min=torch.finfo(total.dtype).tiny)


# ---- telling images apart --------------------------------------------------------------------------------------------
def features(net: Network, weights: Tree, shard: Shard) -> Tensor:
    """[images, width] each of norm one, in pieces."""
    width, _ = head_shape(net, "fedaux")
    with torch.no_grad():
        found = [F.normalize(net.forward(weights, piece.x).features.flatten(1)) for piece in pieces(shard)]
    return torch.cat(found) if found else next(iter(weights.params.values())).new_zeros(0, width)


def logistic(x: Tensor, sign: Tensor, regularisation: float) -> Tensor:
    """The minimiser of mean log(1 + exp(-sign <w, x>)) + regularisation/2 |w|^2, by Newton's method."""

    def value(w: Tensor) -> Tensor:
        return F.softplus(-sign * (x @ w)).mean() + regularisation / 2 * w.square().sum()

    w = x.new_zeros(x.shape[1])
    for _ in range(100):
        wrong = torch.sigmoid(-sign * (x @ w))
        slope = regularisation * w - (wrong * sign) @ x / len(x)
        if slope.norm() < 1e-12:
            break
        curve = (x * (wrong * (1 - wrong) / len(x))[:, None]).T @ x
        curve.diagonal().add_(regularisation)
        way, length = torch.linalg.solve(curve, slope), 1.0
        while length > 1e-9 and value(w - length * way) > value(w) - 1e-4 * length * (slope @ way):
            length /= 2
        w = w - length * way
    return w


# ---- the first model -------------------------------------------------------------------------------------------------
class ContrastiveHead(nn.Sequential):
    """From features to where SimCLR compares them; thrown away afterwards."""

    def __init__(self, width: int):
        super().__init__(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))


def pretrained(server: Server, model: Tree, data: Dataset, by: FedAux) -> Tree:
    """Chen et al., 2020: two views of one image are told from all others. The head stays as it was."""
    net, (width, _) = server.net, head_shape(server.net, "fedaux")
    like = next(iter(model.params.values()))
    model = model.clone()
    projection = first_weights(ContrastiveHead, width, seed=key(server.key, "projection"), like=like)
    both, descent = Tree(body=model.params, projection=projection.params), Adam(by.pretrain_lr)
    state = descent.init(both)
    size = min(by.pretrain_batch, max(len(data), 1))
    rows = plan(len(data), size, key(server.key, "pretrain"), steps=by.pretrain_steps).rows
    for t, row in enumerate(counted(rows, "training the first model at the server")):
        seed = torch.tensor(key(server.key, "views", t), device=like.device)
        x = Shard(data, row).x
        params = both.map(lambda leaf: leaf.detach().requires_grad_())
        with torch.enable_grad():
            pair = torch.cat([view(x, fold(seed, name)) for name in ("one", "other")])
            out = net.forward(model.replace(params=params.body), pair, train=True, key=fold(seed, "network"))
            seen = structure(ContrastiveHead, width).apply(
                projection.replace(params=params.projection), passed, out.features.flatten(1)
            )
            grads = grad(contrast(seen), params)
        descent.update_(both, grads, state)
    return model


def contrast(seen: Tensor, temperature: float = 0.5) -> Tensor:
    """Cross-entropy of finding an image's other view; the first half are the ones, the second the others."""
    seen, half = F.normalize(seen), len(seen) // 2
    alike = (seen @ seen.T / temperature).masked_fill(torch.eye(len(seen), dtype=torch.bool, device=seen.device), -1e9)
    other = torch.arange(len(seen), device=seen.device).roll(half)
    return F.cross_entropy(alike, other)


def view(x: Tensor, seed: Tensor) -> Tensor:
    """A random piece of each image at full size, perhaps mirrored, brighter, of more contrast, or grey."""
    count = len(x)
    drawn = uniform(seed, 7, count).to(x)
    side = (0.2 + 0.8 * drawn[0]).sqrt()
    mirrored = torch.where(drawn[1] < 0.5, -side, side)
    away = (2 * drawn[2:4] - 1) * (1 - side)
    zero = torch.zeros_like(side)
    where = torch.stack([mirrored, zero, away[0], zero, side, away[1]], 1).view(count, 2, 3)
    x = F.grid_sample(x, F.affine_grid(where, list(x.shape), align_corners=False), align_corners=False)
    bright, strong, grey = ((0.8 * drawn[4] - 0.4), 0.6 + 0.8 * drawn[5], drawn[6] < 0.2)
    x = x * strong.view(-1, 1, 1, 1) + bright.view(-1, 1, 1, 1)
    return torch.where(grey.view(-1, 1, 1, 1), x.mean(1, keepdim=True).expand_as(x), x)
