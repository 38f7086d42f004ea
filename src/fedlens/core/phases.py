"""Long work outside of clients' steps says what it is and how far it is; whoever watches hears it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
OnPhase = Callable[[str, int, int], None]  # its name, how much of it is done, of how much; 0: nobody knows

_heard: ContextVar[OnPhase | None] = ContextVar("heard", default=None)


def phase(name: str, done: int = 0, total: int = 0) -> bool:
    """Tell whoever watches; False where nobody does."""
    listener = _heard.get()
    if listener is not None:
        listener(name, done, total)
    return listener is not None


def counted(items: Collection[T], name: str) -> Iterator[T]:
    """The same items, told of one by one."""
    for done, item in enumerate(items):
        phase(name, done, len(items))
        yield item


@contextmanager
def heard_by(listener: OnPhase | None) -> Iterator[None]:
    """Within, this one hears of all phases, and nobody else; or nobody at all."""
    token = _heard.set(listener)
    try:
        yield
    finally:
        _heard.reset(token)
