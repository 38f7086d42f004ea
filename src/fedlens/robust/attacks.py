"""Hostile clients of a simulation: what they train on, or what they send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..core.batches import Dataset, Federation, OnHost, Shard
from ..core.engine import Engine, EngineWrapper, Job, Reply
from ..core.errors import BadInput
from ..core.evaluate import pieces, score, total
from ..core.fields import Count, Number, Positive, Share
from ..core.network import Network
from ..core.rng import fold, generator, key, normal
from ..core.tree import Tree
from .defence import UPDATES


@dataclass(frozen=True)
class Attack:
    """Some clients are hostile, the same ones in every round; they train and remember as all others do."""

    name: ClassVar[str] = ""
    forges: ClassVar[bool] = False  # whether it changes uploads
    share: Share = 0.2  # of all clients, rounded

    def attackers(self, population: int, seed: int) -> list[int]:
        order = torch.randperm(population, generator=generator(key(seed, "attackers")))
        return sorted(order[: round(self.share * population)].tolist())

    def forged(self, update: Tree, key: int) -> Tree:
        """What is sent in place of an update, packed or not."""
        return update

    def poisoned(self, federation: Federation, classes: int, seed: int) -> Federation:
        """The federation as attackers see it; honest clients, tests and the pool are as they were."""
        return federation


@dataclass(frozen=True)
class SignFlip(Attack):
    """The update, turned round and made longer."""

    name: ClassVar = "signflip"
    forges: ClassVar = True
    strength: Positive = 4.0  # times its length; at 4 a fifth of the clients undoes what all others do

    def forged(self, update, key):
        return update.map(lambda leaf: leaf * -self.strength if leaf.is_floating_point() else leaf)


@dataclass(frozen=True)
class Noise(Attack):
    """The update under normal noise."""

    name: ClassVar = "noise"
    forges: ClassVar = True
    strength: Positive = 10.0  # its standard deviation, in root mean squares of the tensor it is added to

    def forged(self, update, key):
        def noisy(path: str, leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            drawn = normal(fold(torch.tensor(key, device=leaf.device), path), *leaf.shape).to(leaf)
            return leaf + drawn * (self.strength * leaf.square().mean().sqrt())

        return update.rebuild(noisy(path, leaf) for path, leaf in update.paths())


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Attackers learn that class c of C is class C - 1 - c."""

    name: ClassVar = "labelflip"

    def poisoned(self, federation, classes, seed):
        y = _own(federation.data.y)
        for client in self.attackers(len(federation.train), seed):
            index = federation.train[client]
            y[index] = classes - 1 - y[index]
        return replace(federation, data=replace(federation.data, y=y))


@dataclass(frozen=True)
class Backdoor(Attack):
    """Gu et al., 2017: attackers learn that a white patch in a corner means the target class.

    With a strength above one their updates are made longer, to outweigh the others (Bagdasaryan et al., 2020).
    """

    name: ClassVar = "backdoor"
    target: Number = 0  # class
    patch: Count = 3  # pixels, each side
    patched: Share = 0.5  # of an attacker's images
    strength: Positive = 1.0  # times the update

    @property
    def forges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.strength != 1

    def forged(self, update, key):
        return update.map(lambda leaf: leaf * self.strength if leaf.is_floating_point() else leaf)

    def poisoned(self, federation, classes, seed):
        """Beside the images there is then a second copy of them, as bytes."""
        if self.target >= classes:
            raise BadInput(f"attack.target is {self.target}, but classes are numbered from 0 to {classes - 1}")
        x, y = _own(federation.data.x), _own(federation.data.y)
        for client in self.attackers(len(federation.train), seed):
            index = federation.train[client]
            drawn = torch.randperm(len(index), generator=generator(key(seed, "patched", client)))
            index = index[drawn[: round(self.patched * len(index))]]
            x[index], y[index] = self.marked(x[index]), self.target
        return replace(federation, data=replace(federation.data, x=x, y=y))

    def marked(self, x: Tensor) -> Tensor:
        """Images as they are stored, with the patch at the lower right."""
        x = x.clone()
        x[..., -self.patch :, -self.patch :] = 255
        return x

    def success(self, net: Network, federation: Federation) -> Callable[[Tree], float]:
        """Of a model: the share of test images of other classes that are taken for the target once they are patched."""
        data, pool = federation.data, federation.pool
        others = pool[data.y[pool] != self.target]
        bytes, labels = self.marked(data.x[others]), torch.full_like(others, self.target)
        shard = Shard(Dataset(bytes, labels, data.prepare), torch.arange(len(others), device=others.device))

        def measured(weights: Tree) -> float:
            found = total([score(net, weights, piece) for piece in pieces(shard)])
            return int(found.correct) / int(found.examples)

        return measured


def _own(stored: Tensor | OnHost) -> Tensor:
    """A copy to write to."""
    return (stored.stored if isinstance(stored, OnHost) else stored).clone()


class Hostile(EngineWrapper):
    """An engine some of whose clients forge what they send."""

    def __init__(self, engine: Engine, attack: Attack, seed: int):
        super().__init__(engine)
        self.attack = attack
        self.attackers = frozenset(attack.attackers(engine.population, seed))

    def run(self, job: Job, cohort: Sequence[int]) -> list[Reply]:
        return [
            replace(reply, upload=self._forged(job, reply)) if reply.client in self.attackers else reply
            for reply in self.engine.run(job, cohort)
        ]

    def _forged(self, job: Job, reply: Reply) -> Tree:
        """Updates alone: an evaluation is asked by those who want to know, and answered."""
        changed = {
            name: self.attack.forged(reply.upload[name], key(job.seed, "forged", job.round, reply.client, name))
            for name in UPDATES
            if name in reply.upload
        }
        return reply.upload.replace(**changed)


ATTACKS = {attack.name: attack for attack in (Backdoor, LabelFlip, Noise, SignFlip)}
