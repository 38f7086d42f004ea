"""What a power cut can leave of a run: its writes, syncs, renames and removals, recorded and then lost in part.

The rules are those of POSIX, which promise least. Content is on the disk once its file was synced; before that all,
none or a torn piece of it may be there. A name is there, or gone, once its folder was synced; before that every rename,
removal and new folder may be lost, each by itself. A rename is never half done.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

from fedlens.core import files

BLOCK = 512
FOLDER = None


@dataclass(frozen=True)
class Step:
    kind: str  # write, append, rename, remove, mkdir, sync; promise: a checkpoint was saved
    path: str = ""
    data: bytes = b""
    to: str = ""
    round: int = 0


class RecordedDisk(files.Disk):
    """Does everything below a folder as usual, and notes it."""

    def __init__(self, root: Path):
        self.root, self.steps = root, []

    def _note(self, kind: str, path: Path, **more: Any) -> None:
        if path == self.root:
            self.steps.append(Step(kind))
        elif path.is_relative_to(self.root):
            self.steps.append(Step(kind, path.relative_to(self.root).as_posix(), **more))

    def write(self, path, *parts):
        super().write(path, *parts)
        self._note("write", path, data=b"".join(parts))

    def append(self, path, data):
        super().append(path, data)
        self._note("append", path, data=data)

    def rename(self, old, new):
        super().rename(old, new)
        self._note("rename", old, to=new.relative_to(self.root).as_posix())

    def remove(self, path):
        super().remove(path)
        self._note("remove", path)

    def mkdir(self, path):
        super().mkdir(path)
        self._note("mkdir", path)

    def sync(self, path):
        super().sync(path)
        self._note("sync", path)

    def promise(self, round: int) -> None:
        self.steps.append(Step("promise", round=round))


@dataclass(eq=False)
class Content:
    """A file apart from its name."""

    number: int
    data: bytes = b""
    synced: bytes = b""

    @property
    def outcomes(self) -> list[bytes]:
        """Whole, lost, torn (its last blocks are zeros), short."""
        if self.data == self.synced:
            return [self.data]
        new = len(self.data) - len(self.synced)
        kept = len(self.synced) + (new - 1) // 2 // BLOCK * BLOCK if new > BLOCK else len(self.synced) + new // 2
        torn = self.data[:kept] + bytes(len(self.data) - kept)
        return list(dict.fromkeys([self.data, self.synced, torn, self.data[:kept]]))


@dataclass
class Change:
    """Of the names in a folder, not yet durable."""

    folder: str
    apply: Callable[[dict[str, Content | None]], None]


@dataclass
class Model:
    """What the disk has for certain, and what it may have."""

    durable: dict[str, Content | None] = field(default_factory=dict)  # names; None: a folder
    live: dict[str, Content | None] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    promised: int = 0
    _count: int = 0

    def do(self, step: Step) -> None:
        getattr(self, f"_{step.kind}")(step)

    def _promise(self, step: Step) -> None:
        self.promised = step.round

    def _change(self, path: str, apply: Callable[[dict[str, Content | None]], None]) -> None:
        apply(self.live)
        self.pending.append(Change(path.rpartition("/")[0], apply))

    def _write(self, step: Step) -> None:
        self._count += 1
        content = Content(self._count, step.data)
        self._change(step.path, lambda names: names.__setitem__(step.path, content))

    def _append(self, step: Step) -> None:
        if step.path not in self.live:
            self._write(Step("write", step.path))
        content = self.live[step.path]
        assert content
        content.data += step.data

    def _rename(self, step: Step) -> None:
        content = self.live[step.path]

        def moved(names):
            names.pop(step.path, None)
            names[step.to] = content

        self._change(step.path, moved)

    def _remove(self, step: Step) -> None:
        if step.path in self.live:
            self._change(step.path, lambda names: names.pop(step.path, None))

    def _mkdir(self, step: Step) -> None:
        self._change(step.path, lambda names: names.__setitem__(step.path, FOLDER))

    def _sync(self, step: Step) -> None:
        content = self.live.get(step.path)
        if content is not None:
            content.synced = content.data
            return
        for change in [each for each in self.pending if each.folder == step.path]:
            change.apply(self.durable)
            self.pending.remove(change)

    # ---- after a power cut ----
    def states(self, most: int, draw: random.Random) -> Iterator[dict[str, bytes | None]]:
        """All of them where there are no more than `most`; else the extremes, what is one or two steps from them, each
        beginning of what happened, and some at random, `most` in all."""
        unsynced = [c for c in dict.fromkeys(self.live.values()) if c is not None and c.data != c.synced]
        sizes = [2] * len(self.pending) + [len(content.outcomes) for content in unsynced]
        if prod(sizes) <= most:
            chosen: Iterable[tuple[int, ...]] = product(*map(range, sizes))
        else:
            chosen = self._some(sizes, most, draw)
        for each in chosen:
            kept, forms = each[: len(self.pending)], each[len(self.pending) :]
            yield self._state(kept, {content.number: form for content, form in zip(unsynced, forms, strict=True)})

    def _some(self, sizes: list[int], most: int, draw: random.Random) -> Iterator[tuple[int, ...]]:
        """0 is kept or whole."""
        all_kept, all_lost = (0,) * len(sizes), (1,) * len(sizes)
        found = {all_kept: None, all_lost: None}

        def changed(base: tuple[int, ...], places: Iterable[int], to: int) -> tuple[int, ...]:
            new = list(base)
            for place in places:
                new[place] = min(to, sizes[place] - 1)
            return tuple(new)

        for place, size in enumerate(sizes):
            found |= {changed(all_kept, [place], form): None for form in range(1, size)}
            found[changed(all_lost, [place], 0)] = None
            found[changed(all_kept, range(place, len(sizes)), 1)] = None
        pairs = [*combinations(range(len(sizes)), 2)]
        draw.shuffle(pairs)
        for pair in pairs[: max(0, most - len(found)) // 3]:
            found |= {changed(all_kept, pair, 1): None, changed(all_lost, pair, 0): None}
        for _ in range(most - len(found)):
            found[tuple(draw.randrange(size) for size in sizes)] = None
        yield from [*found][:most]

    def _state(self, kept: tuple[int, ...], forms: dict[int, int]) -> dict[str, bytes | None]:
        names = dict(self.durable)
        for change, lost in zip(self.pending, kept, strict=True):
            if not lost:
                change.apply(names)
        there = {
            path: content if content is None else content.outcomes[forms.get(content.number, 0)]
            for path, content in names.items()
        }
        return {path: data for path, data in sorted(there.items()) if all(up in there for up in _above(path))}


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def lay_out(state: dict[str, bytes | None], place: Path) -> None:
    """A state as files, in place of what was there."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for path, data in state.items():  # folders sort before what is in them
        (place / path).mkdir() if data is FOLDER else (place / path).write_bytes(data)


def power_cuts(steps: list[Step], most: int, every: int = 1, since: int = 0) -> Iterator[tuple[int, int, dict]]:
    """(step, promised round, state) for a power cut after each step since one; `every`: after some of them alone."""
    model, draw, seen = Model(), random.Random(0), set()
    for number, step in enumerate(steps):
        model.do(step)
        if number < since or number % every:
            continue
        for state in model.states(most, draw):
            name = hash(frozenset(state.items())), model.promised
            if name not in seen:
                seen.add(name)
                yield number, model.promised, state
