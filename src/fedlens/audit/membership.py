"""Was this image trained on? Asked of models, by their loss and by likelihood ratios; and of released images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import BadInput
from ..core.rng import generator, key, numpy_generator
from ..core.tree import Tree
from ..runs.transcript import Transcript
from .attack import Inapplicable, Knowledge, LabelledImages, Prior, PrivacyAttack, Verdict, logits, trained
from .measures import Measure, membership, merged, share
from .released_images import exchanged
from .uploads import after_training

Target = Literal["global", "uploads", "personal"]


def models(transcript: Transcript, prior: Prior, target: Target) -> Mapping[int, Tree]:
    """The model that each client's candidates are asked of."""
    whole = {path for path, _ in prior.net.initial_weights().paths()}
    if target == "personal":
        if not prior.personal:
            raise Inapplicable("clients have no models of their own to ask")
        return prior.personal
    if target == "uploads":
        sent = {client: _last_upload(transcript, prior, client) for client in prior.candidates}
        found = {client: model for client, model in sent.items() if model is not None}
        if not found:
            raise Inapplicable("no client's whole model crosses")
        return found
    stage = transcript.stages[len(transcript.stages) - 1]
    try:
        model = stage.algorithm.global_model(transcript.state)
    except AttributeError:
        raise Inapplicable("there is no global model") from None
    if {path for path, _ in model.paths()} != whole:
        raise Inapplicable("there is no whole global model: clients keep a part of it")
    return {client: model for client in prior.candidates}


def _last_upload(transcript: Transcript, prior: Prior, client: int) -> Tree | None:
    """The model that the client sent, the last time."""
    for round in reversed(range(len(transcript))):
        crossing = transcript[round]
        if client in crossing.replies and (model := after_training(crossing, client, prior.net)):
            return model
    return None


@dataclass(frozen=True)
class LossAttack(PrivacyAttack):
    """Yeom et al., 2018: members have a lower loss."""

    target: Target = "global"
    threat: ClassVar = "sees the target model's weights; knows candidates and their labels"

    def check(self, transcript, knowledge):
        models(transcript, knowledge.prior, self.target)

    def run(self, transcript, knowledge, name):
        asked = models(transcript, knowledge.prior, self.target)
        return _verdict(self, name, knowledge, asked, [lambda each: self.guess(each, knowledge.prior)])

    def guess(self, asked: Mapping[int, Tree], prior: Prior) -> dict[int, Tensor]:
        return {client: -_loss(prior, weights, prior.candidates[client]) for client, weights in asked.items()}


@dataclass(frozen=True)
class LikelihoodRatio(PrivacyAttack):
    """Carlini et al., 2022 (LiRA): how likely the target's confidence is among shadows that saw the image or did not.

    Few shadows: one variance for all images, as the authors advise.
    """

    target: Target = "global"
    shadows: int = 4  # an even number: each image is in half of them
    epochs: int = 6
    threat: ClassVar = (
        "asks the target model for its confidence; knows the architecture, candidates with their labels, and other "
        "images of the same kind"
    )

    def check(self, transcript, knowledge):
        models(transcript, knowledge.prior, self.target)

    def run(self, transcript, knowledge, name):
        prior = knowledge.prior
        asked = models(transcript, prior, self.target)
        ratios = [self.ratios(prior, seed) for seed in range(knowledge.seeds)]
        guesses = [lambda each, ratio=ratio: self.guess(each, prior, ratio) for ratio in ratios]
        return _verdict(self, name, knowledge, asked, guesses)

    def guess(
        self, asked: Mapping[int, Tree], prior: Prior, ratios: dict[int, tuple[Tensor, Tensor, Tensor]]
    ) -> dict[int, Tensor]:
        found = {}
        for client, weights in asked.items():
            inside, outside, spread = ratios[client]
            seen = _confidence(prior, weights, prior.candidates[client])
            found[client] = ((seen - outside) ** 2 - (seen - inside) ** 2) / (2 * spread**2)
        return found

    def ratios(self, prior: Prior, seed: int) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """client -> (mean confidence of shadows that saw each candidate, of those that did not, deviation)"""
        clients = list(prior.candidates)
        everything = LabelledImages.joined([*prior.candidates.values(), prior.auxiliary])
        halves = torch.rand(self.shadows // 2, len(everything), generator=generator(key(seed, "shadows"))) < 0.5
        halves = torch.cat([halves, ~halves]).to(everything.x.device)  # as many shadows with an image as without
        shadows = (
            trained(prior.net, everything[half], key(seed, "shadow", n), epochs=self.epochs)
            for n, half in enumerate(halves)
        )
        seen = torch.stack([_confidence(prior, shadow, everything) for shadow in shadows])
        inside, outside = (_mean_where(seen, which) for which in (halves, ~halves))
        rest = torch.where(halves, seen - inside, seen - outside)
        spread = (rest.square().sum() / (rest.numel() - 2 * rest.shape[1])).sqrt().clamp(min=1e-6)
        ends = torch.tensor([len(prior.candidates[c]) for c in clients]).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        return {c: (inside[a:b], outside[a:b], spread) for c, a, b in zip(clients, starts, ends, strict=True)}


def _mean_where(values: Tensor, which: Tensor) -> Tensor:
    return (values * which).sum(0) / which.sum(0)


def _loss(prior: Prior, weights: Tree, images: LabelledImages) -> Tensor:
    return F.cross_entropy(logits(prior.net, weights, images.x), images.y, reduction="none")


def _confidence(prior: Prior, weights: Tree, images: LabelledImages) -> Tensor:
    """log(p / (1 - p)) of the true class, which is nearly normal over models; computed without cancellation."""
    scores = logits(prior.net, weights, images.x)
    right = scores.gather(1, images.y[:, None])[:, 0]
    others = scores.scatter(1, images.y[:, None], -torch.inf).logsumexp(1)
    return right - others


def _verdict(
    attack: LossAttack | LikelihoodRatio, name: str, knowledge: Knowledge, asked: Mapping[int, Tree], guesses
) -> Verdict:
    """The same guesses about the target, about a model that saw nobody's data, and about one that knows them all."""
    prior, answers = knowledge.prior, knowledge.answers
    clients = list(asked)
    references = {
        "found": asked,
        "chance": dict.fromkeys(clients, prior.net.initial_weights()),
        "undefended": dict.fromkeys(clients, knowledge.overfitted),
    }
    member = torch.cat([answers.members[client] for client in clients])
    results = {}
    for kind, each in references.items():
        by_seed = []
        for guess in guesses:
            scores = guess(each)
            by_seed.append(membership(torch.cat([scores[c].cpu() for c in clients]), member, knowledge.fprs))
        results[kind] = merged(by_seed)
    found, chance, undefended = results.values()
    return Verdict(name, attack.threat, "AUC", found, chance, undefended, len(member), len(guesses))


# ---- of released images ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SharedMembership(PrivacyAttack):
    """The protocol of FedXDS section 6.1: a shadow model learns from the released images, and a random forest learns
    from its answers about images whose membership is known which others were among their originals."""

    images: int = 1000  # released ones that the shadow learns from
    epochs: int = 10  # of the shadow
    size: int = 32  # of its batches
    trees: int = 200
    threat: ClassVar = (
        "sees all released images and labels; knows the architecture, and of half of the candidates whether they were "
        "released"
    )

    def check(self, transcript, knowledge):
        exchanged(transcript, knowledge.prior)
        random_forest()

    def run(self, transcript, knowledge, name):
        prior, answers = knowledge.prior, knowledge.answers
        given = exchanged(transcript, prior)
        released, originals = given.images, given.originals(answers)
        some = torch.randperm(len(released), generator=generator(key("released")))[: self.images].to(released.y.device)
        others = torch.cat([~answers.members[client] for client in prior.candidates])
        everything = LabelledImages.joined(prior.candidates.values())
        return self.marked(released[some], originals[some], everything[others], knowledge, name)

    def marked(
        self,
        released: LabelledImages,
        originals: LabelledImages,
        others: LabelledImages,
        knowledge: Knowledge,
        name: str,
    ) -> Verdict:
        """As many originals as others are candidates; the adversary is told about every second of either kind."""
        equal = min(len(originals), len(others))
        candidates = LabelledImages.joined([originals[:equal], others[:equal]])
        member = torch.arange(2 * equal) < equal
        told = torch.where(torch.arange(2 * equal) % 2 == 0, member.long(), -1)
        results: dict[str, list[dict[str, Measure]]] = {"found": [], "chance": [], "undefended": []}
        for seed in range(knowledge.seeds):
            nothing = torch.randn(released.x.shape, generator=generator(key(seed, "nothing"))).to(released.x)
            for kind, seen in {"found": released.x, "chance": nothing, "undefended": originals.x}.items():
                scores = self.guess(LabelledImages(seen, released.y), candidates, told, knowledge.prior, seed)
                results[kind].append(forest_measures(scores, member[told < 0], knowledge.fprs))
        found, chance, undefended = (merged(each) for each in results.values())
        return Verdict(name, self.threat, "AUC", found, chance, undefended, int((told < 0).sum()), knowledge.seeds)

    def guess(
        self, released: LabelledImages, candidates: LabelledImages, told: Tensor, prior: Prior, seed: int
    ) -> Tensor:
        """How likely each candidate is a member of which it is not told: 1 member, 0 other, -1 unknown."""
        shadow = trained(prior.net, released, key(seed, "shadow"), epochs=self.epochs, size=self.size)
        seen = logits(prior.net, shadow, candidates.x)
        loss = F.cross_entropy(seen, candidates.y, reduction="none")
        chances = seen.softmax(1)
        features = torch.cat([chances, loss[:, None], chances.amax(1, keepdim=True)], 1).cpu()
        known, asked = (told >= 0).nonzero()[:, 0], (told < 0).nonzero()[:, 0]
        return forest(features[known], told[known] == 1, features[asked], self.trees, seed)


def random_forest() -> Any:
    """The class; refused where its package is not installed."""
    try:
        from sklearn.ensemble import RandomForestClassifier
    except ImportError:
        raise BadInput("the attack on shared images needs scikit-learn: pip install 'fedlens[audit]'") from None
    return RandomForestClassifier


def forest(features: Tensor, member: Tensor, asked: Tensor, trees: int, seed: int) -> Tensor:
    """Chance of membership by scikit-learn's random forest."""
    state = int(numpy_generator(key(seed, "forest")).integers(2**31))
    model = random_forest()(trees, min_samples_leaf=3, random_state=state)
    model.fit(features.numpy(), member.numpy())
    chances: Any = model.predict_proba(asked.numpy())
    return torch.from_numpy(chances[:, 1])


def forest_measures(scores: Tensor, member: Tensor, fprs: tuple[float, ...]) -> dict[str, Measure]:
    """The paper reports recall, which a forest that calls everybody a member has in full; AUC is beside it."""
    found = int((scores[member] > 0.5).sum())
    rates = tuple(fpr for fpr in fprs if fpr * int((~member).sum()) >= 1)
    return {"recall": share(found, int(member.sum())), **membership(scores, member, rates)}
