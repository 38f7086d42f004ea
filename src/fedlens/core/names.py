"""Settings that somebody else wrote: which names they may use, and which settings could hide more than a name."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ALLOWED: ContextVar[Collection[str] | None] = ContextVar("names that strangers may use", default=None)


@contextmanager
def written_by_a_stranger(allowed: Collection[str] = ()) -> Iterator[None]:
    """Within it settings are names of the registries and numbers alone.

    Nothing is imported but the module:Class names in `allowed`. Whatever could be a path, an address or code is refused
    by the type of its setting, before anybody looks at it.
    """
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def strangers_may_name() -> Collection[str] | None:
    """Module:Class names that settings may use here; None: all, as they are one's own."""
    return _ALLOWED.get()


def is_text(kind: Any) -> bool:
    """Whether a setting of this type can hold what its writer likes."""
    if typing.get_origin(kind) is typing.Literal:
        return False
    inner = [each for each in typing.get_args(kind) if each is not ...]
    if typing.get_origin(kind) is typing.Annotated:
        inner = inner[:1]
    return any(map(is_text, inner)) if inner else kind not in (int, float, bool, types.NoneType)
