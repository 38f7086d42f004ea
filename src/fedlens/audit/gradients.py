"""Which images, and which labels, made this update? Gradient inversion of single steps, and labels of any upload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.network import Network
from ..core.rng import generator, key
from ..core.tree import Tree, grad
from ..runs.transcript import Transcript
from .attack import Gallery, Inapplicable, Knowledge, LabelledImages, Prior, PrivacyAttack, Verdict, logits
from .image_similarity import decisive, likeness, matched
from .measures import Measure, membership, merged, share
from .uploads import GradientStep, decoded, last_layer, single_step


@dataclass(frozen=True)
class GradientInversion(PrivacyAttack):
    """Images whose gradient is the one that was sent.

    dlg: Zhu et al., 2019, L-BFGS on squared distance, labels sought too; idlg: Zhao et al., 2020, labels read off the
    last layer; cosine: Geiping et al., 2020, signed Adam on the angle and total variation, labels read off as well.
    Where the last layer stays at the client, idlg and cosine seek labels too.
    """

    by: Literal["dlg", "idlg", "cosine"] = "cosine"
    victims: int = 4  # uploads that are turned back, fewer when batches are large
    steps: int = 300
    smoothness: float = 1e-3  # weight of total variation
    threat: ClassVar = (
        "sees an upload after one local step; knows the architecture, the weights that were sent down and the number "
        "of images in a batch"
    )

    def check(self, transcript, knowledge):
        self._victims(transcript, knowledge.prior)

    def run(self, transcript, knowledge, name):
        prior, answers = knowledge.prior, knowledge.answers
        victims = self._victims(transcript, prior)
        batches = [answers.batch(*where) for where in victims]
        originals = LabelledImages.joined(batches)
        seen = [single_step(transcript, *where, prior.net) for where in victims]
        plain = [_undefended(step, batch, prior.net) for step, batch in zip(seen, batches, strict=True)]
        same = all(_is_plain(step, open_) for step, open_ in zip(seen, plain, strict=True))
        results: dict[str, list[dict[str, Measure]]] = {"found": [], "undefended": []}
        first = originals.x
        for seed in range(knowledge.seeds):
            for kind, steps in {"found": seen, "undefended": plain}.items():
                if kind == "undefended" and same:  # nothing was done to the upload: it is its own reference
                    results[kind].append(results["found"][-1])
                    continue
                pictures = self._pictures(steps, batches, prior, seed)
                first = pictures if kind == "found" and seed == 0 else first
                results[kind].append(likeness(pictures, originals, prior))
        chance = likeness(prior.prototypes(originals.y), originals, prior)
        gallery = Gallery(prior.pixels(originals.x).cpu(), None, prior.pixels(first).cpu())
        source = "the control variate is the gradient itself" if seen[0].source == "control" else ""
        crosses = sum(float(leaf.sum()) for leaf in seen[0].seen.leaves())
        crosses /= sum(leaf.numel() for leaf in seen[0].weights.params.leaves())
        part = f"{100 * crosses:.1f} % of the gradient crosses" if crosses < 1 else ""
        alone = "one image alone has no interval" if len(originals) == 1 else ""
        return Verdict(
            name,
            self.threat,
            decisive(chance),
            merged(results["found"]),
            chance,
            merged(results["undefended"]),
            len(originals),
            knowledge.seeds,
            notes=tuple(note for note in (source, part, alone) if note),
            gallery=gallery,
        )

    def _victims(self, transcript: Transcript, prior: Prior) -> list[tuple[int, int]]:
        """(round, client) of the first uploads of single steps."""
        why = Inapplicable("no update crosses")
        for round in range(len(transcript)):
            crossing = transcript[round]
            try:
                for client in crossing.replies:
                    single_step(transcript, round, client, prior.net)
                    count = max(1, min(self.victims, 2 * self.victims // crossing.stage.size))
                    return [(round, each) for each in crossing.replies][:count]
            except Inapplicable as reason:
                why = reason
        raise why

    def _pictures(self, steps: list[GradientStep], batches: list[LabelledImages], prior: Prior, seed: int) -> Tensor:
        made = []
        for number, (step, batch) in enumerate(zip(steps, batches, strict=True)):
            guess = self.guess(step, len(batch), prior, key(seed, "victim", number))
            made.append(matched(guess, batch.x))
        return torch.cat(made)

    def guess(self, step: GradientStep, count: int, prior: Prior, seed: int) -> Tensor:
        """As many images as the batch had, in no order."""
        like = prior.auxiliary.x[:1]
        x = torch.randn(count, *like.shape[1:], generator=generator(key(seed, "start"))).to(like)
        classes = logits(prior.net, step.weights, like).shape[1]
        soft = 0.1 * torch.randn(count, classes, generator=generator(key(seed, "labels"))).to(like)
        labels = None if self.by == "dlg" else read_labels(step, count, prior)
        if labels is not None:
            soft = 50.0 * F.one_hot(labels, classes).to(like)
        free = [x] if labels is not None else [x, soft]
        for leaf in free:
            leaf.requires_grad_()

        def distance() -> Tensor:
            made = _gradient(step, x, soft, prior.net)
            return self._distance(made, step)

        if self.by == "cosine":
            self._descend(distance, x, free, prior)
        else:
            self._second_order(distance, free)
        return x.detach().nan_to_num()

    def _distance(self, made: Tree, step: GradientStep) -> Tensor:
        pairs = [(made[n] * step.seen[n], step.gradient[n]) for n in step.gradient]
        if self.by != "cosine":
            return torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
        kinds = (lambda a, b: (a * b).sum(), lambda a, b: a.square().sum(), lambda a, b: b.square().sum())
        inner, one, two = (torch.stack([kind(a, b) for a, b in pairs]).sum() for kind in kinds)
        return 1 - inner / (one * two).sqrt().clamp(min=1e-20)

    def _descend(self, distance: Callable[[], Tensor], x: Tensor, free: list[Tensor], prior: Prior) -> None:
        optimizer = torch.optim.Adam(free, 0.1)
        marks = [self.steps * 3 // 8, self.steps * 5 // 8, self.steps * 7 // 8]
        rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, 0.1)
        scale, shift = prior.scale(x)
        low, high = -shift / scale, (1 - shift) / scale
        for _ in range(self.steps):
            slopes = torch.autograd.grad(distance() + self.smoothness * total_variation(x), free)
            for leaf, slope in zip(free, slopes, strict=True):
                leaf.grad = slope.sign()
            optimizer.step()
            rate.step()
            with torch.no_grad():
                x.copy_(torch.minimum(torch.maximum(x, low), high))

    def _second_order(self, distance: Callable[[], Tensor], free: list[Tensor]) -> None:
        optimizer = torch.optim.LBFGS(free, 1.0, max_iter=self.steps, history_size=20, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = distance()
            for leaf, slope in zip(free, torch.autograd.grad(loss, free), strict=True):
                leaf.grad = slope
            return loss.detach()

        optimizer.step(closure)  # pyright: ignore[reportArgumentType]


def total_variation(x: Tensor) -> Tensor:
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def _gradient(step: GradientStep, x: Tensor, soft: Tensor, net: Network) -> Tree:
    """Of the loss of these images under these soft labels, for what crosses; itself differentiable."""
    with torch.enable_grad():
        params, found = _passed(step, x, net)
        loss = -(soft.softmax(1) * found.log_softmax(1)).sum(1).mean()
        wanted = list(step.gradient)
        slopes = torch.autograd.grad(
            loss, [params[n] for n in wanted], create_graph=x.requires_grad, materialize_grads=True
        )
    return Tree(dict(zip(wanted, slopes, strict=True)))


def _passed(step: GradientStep, x: Tensor, net: Network) -> tuple[Tree, Tensor]:
    """(the weights that it was taken at, logits of these images with them), to be differentiated."""
    params = step.weights.params.map(lambda p: p.detach().requires_grad_())
    weights = step.weights.replace(params=params, buffers=step.weights.buffers.clone())
    return params, net.forward(weights, x, train=True, key=torch.tensor(key("attack"), device=x.device)).logits


def _undefended(step: GradientStep, batch: LabelledImages, net: Network) -> GradientStep:
    """The whole gradient of the batch, as FedAvg would send it."""
    with torch.enable_grad():
        params, found = _passed(step, batch.x, net)
        slope = grad(F.cross_entropy(found, batch.y), params)
    return GradientStep(step.weights, slope, slope.map(torch.ones_like), "delta")


def _is_plain(step: GradientStep, plain: GradientStep) -> bool:
    """Whether all of the gradient crosses as it is, but for rounding."""
    if step.gradient.keys() != plain.gradient.keys():
        return False
    rest = step.gradient - plain.gradient
    far, size = (sum(float(leaf.square().sum()) for leaf in tree.leaves()) for tree in (rest, plain.gradient))
    return far <= 1e-4 * size


# ---- labels ---------------------------------------------------------------------------------------------------------
def read_labels(step: GradientStep, count: int, prior: Prior) -> Tensor | None:
    """Labels of a batch from the last layer's gradient, which is the mean of (probability - label) for each class.

    Probabilities are taken to be those of auxiliary images. None where the last layer does not cross.
    """
    _, bias = last_layer(prior.net)
    if bias is None or bias not in step.gradient:
        return None
    expected = logits(prior.net, step.weights, prior.auxiliary.x[:250]).softmax(1).mean(0)
    wanted = (count * (expected - step.gradient[bias].double())).clamp(min=0)
    wanted = wanted * (count / wanted.sum().clamp(min=1e-12))
    whole = wanted.floor().long()
    left = count - int(whole.sum())
    whole[(wanted - whole).topk(max(left, 0)).indices] += 1
    return torch.arange(len(whole), device=whole.device).repeat_interleave(whole)[:count]


def _trained_on(where: tuple[int, int], transcript: Transcript, knowledge: Knowledge) -> LabelledImages:
    """The images behind the upload of a client in a round."""
    round, client = where
    single = transcript.stages[round].steps == 1
    return knowledge.answers.batch(round, client) if single else knowledge.answers.data(client)


@dataclass(frozen=True)
class LabelLeakage(PrivacyAttack):
    """Which classes does a client have? The last layer's bias rises for classes that it trained on.

    Zhao et al., 2020, for one step; the sign outlives several steps and even epochs.
    """

    uploads: int = 50
    threat: ClassVar = "sees uploads; knows the protocol and which layer is the last"

    def check(self, transcript: Transcript, knowledge: Knowledge) -> None:
        for where, found, _ in self.guess(transcript, knowledge.prior):
            if len(_trained_on(where, transcript, knowledge).y.unique()) < len(found):
                return
        raise Inapplicable("every client has every class, so that there is nothing to tell")

    def run(self, transcript: Transcript, knowledge: Knowledge, name: str) -> Verdict:
        self.check(transcript, knowledge)
        prior = knowledge.prior
        scores, truth, reference = [], [], []
        for where, found, before in self.guess(transcript, prior):
            images = _trained_on(where, transcript, knowledge)
            share_of = torch.bincount(images.y, minlength=len(found)).double() / len(images)
            scores.append(_scaled(found))
            # Nothing was done to the upload: it is its own reference. Otherwise the first step's, by its formula.
            plain = share_of - logits(prior.net, before, images.x).softmax(1).mean(0)
            reference.append(_scaled(plain) if transcript.stages[where[0]].uplink else scores[-1])
            truth.append(share_of.cpu())
        draw = torch.randn(torch.stack(truth).shape, generator=generator(key("no upload")), dtype=torch.float64)
        rows = {"found": torch.stack(scores), "chance": draw, "undefended": torch.stack(reference)}
        found, chance, undefended = (self._marked(each, torch.stack(truth)) for each in rows.values())
        return Verdict(name, self.threat, "AUC", found, chance, undefended, len(truth), 1)

    def guess(self, transcript: Transcript, prior: Prior) -> list[tuple[tuple[int, int], Tensor, Tree]]:
        """((round, client), a score for each class, the weights before training) of the first uploads."""
        weight, bias = last_layer(prior.net)
        name, found = bias or weight, []
        for crossing in transcript:
            for client, sent in crossing.replies.items():
                if "delta" not in sent or name not in sent.delta.params:
                    continue
                moved = decoded(crossing, sent, prior.net).delta.params[name].double()
                before = prior.net.initial_weights() | crossing.download.model
                found.append(((crossing.round, client), moved if moved.dim() == 1 else moved.sum(1), before))
                if len(found) == self.uploads:
                    return found
        if not found:
            raise Inapplicable("the last layer never crosses")
        return found

    def _marked(self, scores: Tensor, truth: Tensor) -> dict[str, Measure]:
        present = (truth > 0).flatten()
        top = int((scores.argmax(1) == truth.argmax(1)).sum())
        ranked = membership(scores.flatten(), present, ())
        return {**ranked, "most frequent class": share(top, len(truth))}


def _scaled(scores: Tensor) -> Tensor:
    return (scores / scores.abs().max().clamp(min=1e-20)).cpu()
