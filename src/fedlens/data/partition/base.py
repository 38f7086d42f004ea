"""Which client gets which examples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from ...core.errors import BadInput
from ...core.fields import Number, Positive, Share
from ...core.rng import key, numpy_generator
from ..groups import held_out_groups
from ..images import Images
from ..paths import own_path
from ..split import Split
from .counts import Generator, cut, equal_sizes, held_out, matched, proportions, top_up


@dataclass(frozen=True)
class Partition:
    """Deals the training part to clients. A subclass writes `assign`, and `check` for what cannot be.

    test: `matched` deals the canonical test part in each client's own class mix; `holdout` keeps back a share of the
    client's own examples; `pooled` does so, too, after the canonical test part has joined the training part.
    """

    # where the test images of clients come from
    test: Literal["matched", "holdout", "pooled"] = field(default="matched", kw_only=True)
    holdout: Share = field(default=0.2, kw_only=True)  # of a client's images, for test=holdout and pooled
    seed: int | None = field(default=None, kw_only=True)  # of the split; none: the experiment's
    name: ClassVar[str]

    def split(self, images: Images, clients: int, seed: int) -> Split:
        """The same for the same arguments, whatever else runs."""
        seed = seed if self.seed is None else self.seed
        if self.test == "pooled":
            images = replace(images, train=torch.cat([images.train, images.test]))
        self.check(images, clients)
        owned, notes = self.assign(images, clients, numpy_generator(key(seed, "partition")))
        owned = [np.sort(shard) for shard in owned]
        train, test, more = self.test_shards(images, owned, numpy_generator(key(seed, "test shards")))
        return Split(train, test, (*notes, *more))

    def check(self, images: Images, clients: int) -> None:
        """BadInput for what cannot be done, before any work."""
        if clients < 1:
            raise BadInput(f"clients is {clients}, but a federation needs at least one")
        if clients > len(images.train):
            have = f"{images.name} has only {len(images.train)} training images"
            raise BadInput(f"clients is {clients}, but {have}: lower clients or take more data")
        if self.test != "matched" and not 0 < self.holdout < 1:
            raise BadInput(f"partition.holdout is {self.holdout}, but it must lie between 0 and 1")

    def assign(self, images: Images, clients: int, draw: Generator) -> tuple[list[np.ndarray], tuple[str, ...]]:
        """Each client's examples as indices into images.x, and what there is to say about it."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it assigns examples")

    def test_shards(
        self, images: Images, owned: list[np.ndarray], draw: Generator
    ) -> tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...]]:
        """(training shards, test shards, notes) from what clients own."""
        y = images.y.numpy()
        if self.test != "matched" and images.groups is not None:
            return _held_groups(owned, y, images.groups.numpy(), self.holdout, draw)
        if self.test != "matched":
            return held_out(owned, y, self.holdout, draw)
        counts = np.stack([np.bincount(y[shard], minlength=len(images.classes)) for shard in owned])
        shards, notes = matched(counts, images.test.numpy(), y, draw)
        return owned, shards, notes


def _held_groups(
    owned: list[np.ndarray], y: np.ndarray, groups: np.ndarray, share: float, draw: Generator
) -> tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...]]:
    """As `held_out`, whole groups of everybody's: a patient may have been dealt to several clients."""
    index, whose = np.concatenate(owned), np.repeat(np.arange(len(owned)), [len(shard) for shard in owned])
    strata = whose * (int(y.max()) + 1) + y[index]
    rest, held = held_out_groups(strata, groups[index], share, int(draw.integers(2**62)))
    train, test = ([index[part[whose[part] == client]] for client in range(len(owned))] for part in (rest, held))
    empty = sum(not len(shard) for shard in test)
    return train, test, (f"{empty} of {len(owned)} clients have no patients or groups to test on",) if empty else ()


def check_min_size(images: Images, clients: int, min_size: int) -> None:
    if min_size * clients > len(images.train):
        needs = f"partition.min_size {min_size} for {clients} clients needs {min_size * clients} training images"
        raise BadInput(f"{needs}, but {images.name} has {len(images.train)}: lower partition.min_size or clients")


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffled and cut into equal parts."""

    name = "iid"

    def assign(self, images, clients, draw):
        return np.array_split(draw.permutation(images.train.numpy()), clients), ()


@dataclass(frozen=True)
class Quantity(Partition):
    """Sizes that differ, Dir(alpha) of them; the class mix is everyone's, to chance."""

    alpha: Positive = 0.5  # of Dir(alpha) over sizes; smaller is more unequal
    min_size: Number = 10  # images that every client has at least
    name = "quantity"

    def check(self, images, clients):
        super().check(images, clients)
        check_min_size(images, clients, self.min_size)

    def assign(self, images, clients, draw):
        least = np.full(clients, max(self.min_size, 1))
        sizes = cut(proportions(self.alpha, clients, draw), len(images.train))
        counts, moved, helped = top_up(sizes[:, None], least, draw)
        shards = np.split(draw.permutation(images.train.numpy()), np.cumsum(counts[:, 0])[:-1])
        return shards, (topped_up(helped, clients, least[0], moved),) if moved else ()


def topped_up(helped: int, clients: int, least: int, moved: int) -> str:
    them = f"{helped} of {clients} clients had fewer than {least} examples"
    return f"{them}; {moved} examples were moved to them from the largest clients"


@dataclass(frozen=True)
class ByUser(Partition):
    """A client is a person: a writer, a portrayed person, a folder. Tests are the same person's."""

    min_size: Number = 1  # users with fewer training examples are left out
    more: Literal["sample", "merge"] = "sample"  # users than clients: leave the others out, or several users a client
    name = "by_user"

    def check(self, images, clients):
        super().check(images, clients)
        if images.users is None:
            raise BadInput(f"{images.name} does not say who made an example: take another partition than by_user")
        if clients > (users := len(self._users(images))):
            large = f" with at least {self.min_size} training examples" if self.min_size > 1 else ""
            lower = ", or lower partition.min_size" if large else ""
            raise BadInput(
                f"clients is {clients}, but {images.name} has {users} users{large}: set clients={users}{lower}"
            )

    def _users(self, images: Images) -> np.ndarray:
        users, counts = np.unique(whose(images)[images.train.numpy()], return_counts=True)
        return users[counts >= self.min_size]

    def assign(self, images, clients, draw):
        users, train = self._users(images), images.train.numpy()
        chosen, notes = users, ()
        if len(users) > clients and self.more == "sample":
            chosen = np.sort(draw.choice(users, clients, replace=False))
            unused = int((~np.isin(whose(images)[train], chosen)).sum())
            notes = (f"{clients} of {len(users)} users were drawn; {unused} training examples are unused",)
        elif len(users) > clients:
            chosen = draw.permutation(users)
        order = train[np.argsort(whose(images)[train], kind="stable")]
        starts, ends = (np.searchsorted(whose(images)[order], chosen, side) for side in ("left", "right"))
        shards = [order[start:end] for start, end in zip(starts, ends, strict=True)]
        return [np.concatenate(shards[client::clients]) for client in range(clients)], notes

    def test_shards(self, images, owned, draw):
        """The users' own test examples; where the test part has none of theirs, a share of their training examples."""
        if self.test != "matched":
            return super().test_shards(images, owned, draw)
        users, test = whose(images), images.test.numpy()
        order = test[np.argsort(users[test], kind="stable")]
        train, tests, without = [], [], 0
        for shard in owned:
            starts, ends = (np.searchsorted(users[order], np.unique(users[shard]), side) for side in ("left", "right"))
            own = np.concatenate([order[start:end] for start, end in zip(starts, ends, strict=True)])
            if not len(own):
                without += 1
                (shard,), (own,), _ = held_out([shard], images.y.numpy(), self.holdout, draw)
            train.append(shard)
            tests.append(np.sort(own))
        them = f"{without} of {len(owned)} clients have no examples in the test part"
        return train, tests, (f"{them} and are tested on a share of their own",) if without else ()


def whose(images: Images) -> np.ndarray:
    assert images.users is not None
    return images.users.numpy()


def parted_users(images: Images, split: Split) -> tuple[str, ...]:
    """A note where the data says whose an example is, and the split gives a user's examples to several clients."""
    if images.users is None:
        return ()
    holders = np.unique(np.concatenate([np.unique(whose(images)[shard]) for shard in split.train]), return_counts=True)
    users, parted = len(holders[0]), int((holders[1] > 1).sum())
    them = f"the examples of {parted} of {users} users were dealt to several clients"
    return (f"{them}; partition=by_user keeps each user's together",) if parted else ()


@dataclass(frozen=True)
class Domains(Partition):
    """The same number of clients for each domain or modality, each dealt on its own by another partition."""

    base: Partition = Iid()  # how each domain is dealt
    name = "domains"

    def check(self, images, clients):
        super().check(images, clients)
        if images.domains is None:
            raise BadInput(f"{images.name} has no domains: take data=modalities, or data=folder with data.domains=true")
        if clients < (count := len(torch.unique(images.domains[images.train]))):
            raise BadInput(f"clients is {clients}, but {images.name} has {count} domains; each needs a client")

    def split(self, images, clients, seed):
        seed = seed if self.seed is None else self.seed
        self.check(images, clients)
        assert images.domains is not None
        domains = torch.unique(images.domains[images.train]).tolist()
        base = self.base if self.test == "matched" else replace(self.base, test=self.test, holdout=self.holdout)
        train, test, notes = [], [], []
        for domain, count in zip(domains, equal_sizes(clients, len(domains)).tolist(), strict=True):
            parts = {part: getattr(images, part) for part in ("train", "test")}
            parts = {part: index[images.domains[index] == domain] for part, index in parts.items()}
            of_domain = replace(images, name=f"domain {domain} of {images.name}", **parts)
            try:
                split = base.split(of_domain, count, key(seed, "domain", domain))
            except BadInput as error:
                raise BadInput(str(error).replace("partition.", "partition.base.")) from None
            train += split.train
            test += split.test
            notes += [f"domain {domain}: {note}" for note in split.notes]
        return Split(train, test, tuple(notes))


def check_no_other_test(partition: Partition) -> None:
    if partition.test != "matched":
        raise BadInput(
            f"partition={partition.name} brings its own test shards: leave out partition.test={partition.test}"
        )


@dataclass(frozen=True)
class File(Partition):
    """A split that was saved, with its test shards."""

    path: str = ""  # a split.json
    name = "file"

    def split(self, images, clients, seed):
        check_no_other_test(self)
        split = Split.load(own_path(self.path, "partition.path"), images)
        if len(split) != clients:
            raise BadInput(
                f"clients is {clients}, but the split file {self.path} has {len(split)}: set clients={len(split)}"
            )
        return split
