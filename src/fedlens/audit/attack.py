"""What every attack is: a threat model as a signature, and a verdict with its two references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.algorithm import Stage
from ..core.batches import Federation, Shard, plan
from ..core.network import Network
from ..core.optimizer import Adam
from ..core.rng import fold, key
from ..core.tree import Tree, grad
from ..runs.transcript import Transcript
from .measures import Measure

# What the columns of an audit are, for whoever reads its table.
LEGEND = {
    "found": "what the attack makes of this run, with a 95 % interval in brackets",
    "by chance": "the same attack where there is nothing to find: a model that was never trained, noise, random draws, "
    "or the mean image of a class as the guess",
    "without defence": "the same attack where nothing protects: a model that learnt these very images by heart, or "
    "images and updates as they are",
}


class Inapplicable(Exception):
    """This attack finds nothing to work on in this transcript; one half-sentence that says why."""


@dataclass(frozen=True)
class LabelledImages:
    x: Tensor  # network input
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Any) -> LabelledImages:
        return LabelledImages(self.x[index], self.y[index])

    @staticmethod
    def joined(parts: Iterable[LabelledImages]) -> LabelledImages:
        return LabelledImages(*(torch.cat(each) for each in zip(*((part.x, part.y) for part in parts), strict=True)))


@dataclass(frozen=True)
class Prior:
    """What an adversary at the server knows besides the transcript; each attack states which of it it uses."""

    net: Network  # the architecture and the first weights
    candidates: Mapping[int, LabelledImages]  # client -> images that it may or may not have trained on
    auxiliary: LabelledImages  # others of the same kind, that nobody trained on
    mean: tuple[float, ...]  # what turns pixels in [0, 1] into network input
    std: tuple[float, ...]
    personal: Mapping[int, Tree] = field(default_factory=dict)  # personal models, which answer questions

    def scale(self, x: Tensor) -> list[Tensor]:
        """Deviation and mean of every colour."""
        return [x.new_tensor(values).view(-1, 1, 1) for values in (self.std, self.mean)]

    def pixels(self, x: Tensor) -> Tensor:
        """Network input as pixels in [0, 1]; what lies beyond is cut off."""
        scale, shift = self.scale(x)
        return (x * scale + shift).clamp(0, 1)

    def unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Black as network input, and what white has more, colour by colour."""
        scale, shift = self.scale(x)
        return -shift / scale, 1 / scale

    def prototypes(self, y: Tensor) -> Tensor:
        """The mean auxiliary image of each of these classes: what anybody can say about an image of that label."""
        whole = self.auxiliary.x.mean(0)
        means = {int(c): self.auxiliary.x[self.auxiliary.y == c].mean(0) for c in self.auxiliary.y.unique()}
        return torch.stack([means.get(int(label), whole) for label in y])


@dataclass(frozen=True)
class Answers:
    """The truth that guesses are marked by. No attack sees it: `guess` has no such argument."""

    federation: Federation
    stages: Sequence[Stage]  # of every round
    seed: int
    members: Mapping[int, Tensor]  # client -> which of its candidates it trained on

    def data(self, client: int) -> LabelledImages:
        """All images of a client."""
        return _images(Shard(self.federation.data, self.federation.train[client]))

    def batch(self, round: int, client: int) -> LabelledImages:
        """The images of a client's first step, without augmentation."""
        mine, stage = self.federation.train[client], self.stages[round]
        drawn = plan(len(mine), stage.size, key(self.seed, "batches", round, client), epochs=1, steps=1)
        row = drawn.rows[0, : drawn.size(0)]
        return _images(Shard(self.federation.data, mine[row.to(mine.device)]))

    def gift(self, errand: Any, round: int, client: int) -> LabelledImages:
        """The originals of what a client released in this round."""
        mine = Shard(self.federation.data, self.federation.train[client])
        return _images(errand.given(_Giver(key(self.seed, "client", round, client), mine)))

    def trained(self, prior: Prior) -> LabelledImages:
        """The candidates that are members."""
        return LabelledImages.joined(prior.candidates[client][member] for client, member in self.members.items())


@dataclass(frozen=True)
class _Giver:
    """All of a client that the choice of its released depends on."""

    key: int
    data: Shard


def _images(shard: Shard) -> LabelledImages:
    return LabelledImages(shard.x, shard.y)


@dataclass(frozen=True)
class Knowledge:
    prior: Prior
    answers: Answers
    fprs: tuple[float, ...] = (0.01,)  # rates of false alarms that membership is reported at
    seeds: int = 2  # of attacks that train or draw something

    @cached_property
    def overfitted(self) -> Tree:
        """No defence at all: a model that trained on the members alone until it knew them by heart."""
        members = self.answers.trained(self.prior)
        return trained(self.prior.net, members, key("no defence"), epochs=150, size=16, until=0.005)


@dataclass(frozen=True)
class Gallery:
    """Pixels of originals, of what was released of them (if pictures were), and of what the attack made of it."""

    original: Tensor
    released: Tensor | None
    recovered: Tensor


@dataclass(frozen=True)
class Verdict:
    attack: str
    threat: str  # what the adversary sees and knows
    first: str  # the measure that the sentence is about, unless only another one is above chance
    found: dict[str, Measure]
    chance: dict[str, Measure]  # the same attack where there is nothing to find
    undefended: dict[str, Measure]  # and where nothing is defended
    samples: int
    seeds: int
    notes: tuple[str, ...] = ()
    gallery: Gallery | None = None

    def beside(self, measure: str) -> tuple[Measure, Measure, Measure]:
        """The columns of LEGEND."""
        return self.found[measure], self.chance[measure], self.undefended[measure]

    def exceeds(self, measure: str) -> bool:
        """Intervals that do not meet."""
        return self.found[measure].low > self.chance[measure].high

    @property
    def decisive(self) -> str:
        """A leak is one whichever measure shows it; recall shows none, which calling everybody a member raises."""
        able = (self.first, *(name for name in self.found if name != "recall"))
        return next(filter(self.exceeds, able), self.first)

    @property
    def is_above_chance(self) -> bool:
        return self.exceeds(self.decisive)

    @property
    def sentence(self) -> str:
        found, chance, open_ = self.beside(self.decisive)
        numbers = f"{self.decisive} {found}, by chance {chance}, without defence {open_}"
        if not self.is_above_chance:
            return f"At chance: {numbers}."
        span = open_.value - chance.value
        part = 1.0 if span <= 0 else (found.value - chance.value) / span
        words = "Leaks" if part >= 0.5 else "Leaks in part"
        return f"{words}: {numbers}; {100 * min(part, 1):.0f} % of the way from chance to no defence."

    def plain(self) -> dict[str, Any]:
        """For JSON, without pictures."""
        of = {
            name: {k: asdict(m) for k, m in getattr(self, name).items()} for name in ("found", "chance", "undefended")
        }
        return {
            "attack": self.attack,
            "threat": self.threat,
            "verdict": self.sentence,
            "above_chance": self.is_above_chance,
            "decisive": self.decisive,
            **of,
            "samples": self.samples,
            "seeds": self.seeds,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class PrivacyAttack:
    """Settings as fields. A subclass's `guess` sees a transcript and prior knowledge; `run` marks what it says."""

    threat: ClassVar[str] = ""

    def check(self, transcript: Transcript, knowledge: Knowledge) -> None:
        """Raises Inapplicable where there is nothing to work on, before anything is computed."""

    def run(self, transcript: Transcript, knowledge: Knowledge, name: str) -> Verdict:
        raise NotImplementedError(f"{type(self).__name__} does not say how it attacks")


def trained(
    net: Network, images: LabelledImages, seed: int, *, epochs: int, size: int = 32, until: float = 0.0
) -> Tree:
    """The network's first weights after so many epochs of Adam on these images, fewer where an epoch's mean loss is
    below `until`: shadows and references."""
    weights, optimizer = net.initial_weights(), Adam(1e-3)
    state, device = optimizer.init(weights.params), images.x.device
    rows, counted, epoch_of = plan(len(images), min(size, len(images)), seed, epochs=epochs)
    root, losses = torch.tensor(seed, device=device), []
    for t, (row, weight) in enumerate(zip(rows.to(device), counted.to(device), strict=True)):
        if until and t and epoch_of[t] != epoch_of[t - 1]:
            if float(torch.stack(losses).mean()) < until:
                break
            losses = []
        params = weights.params.map(lambda p: p.detach().requires_grad_())
        with torch.enable_grad():
            out = net.forward(weights | Tree(params=params), images.x[row], train=True, key=fold(root, f"step {t}"))
            loss = torch.nn.functional.cross_entropy(out.logits, images.y[row], reduction="none")
            loss = (loss * weight.to(loss)).sum() / weight.to(loss).sum()
            slope = grad(loss, params)
        losses.append(loss.detach())
        optimizer.update_(weights.params, slope, state)
    return weights


@torch.no_grad()
def logits(net: Network, weights: Tree, x: Tensor, size: int = 250) -> Tensor:
    return torch.cat([net(weights, part) for part in x.split(size)]).double()
