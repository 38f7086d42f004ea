"""What clients and classes are called where people look; in tables, messages and settings they are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.errors import BadInput, nearest
from .images import Images
from .split import Split

_TITLE = 18  # letters of a name at most that fit over a picture or below an axis
_TOLD = 40  # names at most in a sentence
_JOINED = 3  # owners at most that a client who stands for several is called after


@dataclass(frozen=True)
class Names:
    """By number; no clients' names: they are called by their numbers alone."""

    clients: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, images: Images, split: Split) -> Names:
        return cls(client_names(images, split), images.classes)

    def client(self, number: int) -> str:
        """In a sentence: with the number that commands and tables know it by."""
        return f"{self.clients[number]} (client {number})" if number < len(self.clients) else f"client {number}"

    def tick(self, number: int) -> str:
        """Where an axis says already that these are clients."""
        if number >= len(self.clients):
            return str(number)
        name, half = self.clients[number], _TITLE // 2
        # Hospitals of a city differ in their last word.
        return name if len(name) <= _TITLE else f"{name[:half]}…{name[1 - half :]}"

    def title(self, number: int) -> str:
        """Over a picture; no two are the same."""
        return f"{self.tick(number)} ({number})" if number < len(self.clients) else f"client {number}"

    def label(self, number: int) -> str:
        """A class."""
        return self.classes[number] if number < len(self.classes) else str(number)

    def number(self, word: str) -> int:
        """Of a client that was named by its number or its name."""
        if word.isdecimal():
            return int(word)
        if word not in self.clients:
            few = 0 < len(self.clients) <= _TOLD
            hint = nearest(word, self.clients) if few else "name clients by their numbers, counted from 0"
            raise BadInput(f"there is no client {word!r}; {hint}")
        return self.clients.index(word)


NUMBERS = Names()  # nothing has a name


def client_names(images: Images, split: Split) -> tuple[str, ...]:
    """Of clients that hold all that their users, or else their domains, made; none where somebody's is parted."""
    kind, owners = ("user", images.users) if images.users is not None else ("domain", images.domains)
    if owners is None or not images.owner_names:
        return ()
    held = [np.unique(owners.numpy()[shard]) for shard in split.train]
    if len(np.unique(np.concatenate(held))) < sum(map(len, held)):
        return ()
    # A name that is a number would be taken for the client's own.
    named = [f"{kind} {name}" if name.isdecimal() else name for name in images.owner_names]
    found = tuple(_joined([named[owner] for owner in some]) for some in held)
    return found if len(set(found)) == len(found) else ()  # two views may be called the same


def short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _joined(names: Sequence[str]) -> str:
    return " + ".join(names) if len(names) <= _JOINED else f"{names[0]} + {len(names) - 1} more"
