"""A league as a file: worlds, methods, rates and seeds, read from YAML and checked before anything is run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from .. import config
from ..algorithms import FAMILIES
from ..core.errors import BadInput, nearest
from ..core.yaml_dialect import read_yaml
from ..experiment import Experiment
from ..runs.grid import merged_words

Measure = Literal["global", "personal", "both"]


@dataclass(frozen=True)
class World:
    """A federation: data, split, clients, network and length."""

    name: str
    kind: str  # worlds of a kind are ranked together, beside all of them
    words: tuple[str, ...]


@dataclass(frozen=True)
class Player:
    """A method under the name that it has in the table."""

    name: str
    words: tuple[str, ...]
    key: str = ""  # its main parameter, of which values are tried at the best rate
    values: tuple[str, ...] = ()
    everywhere: bool = True  # False: in some worlds alone, and beside the ranking

    @property
    def measure(self) -> Measure:
        """What it is about, and tuned for."""
        return measure_of(self.words[0].partition("=")[2])


@dataclass(frozen=True)
class League:
    title: str
    words: tuple[str, ...]  # of every run
    worlds: Mapping[str, World]
    entries: Mapping[str, Player]
    some: tuple[str, ...]  # the worlds of methods that are not everywhere
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    search_seed: int
    search_share: float  # of the rounds
    barred: Mapping[tuple[str, str], str] = field(default_factory=dict)  # (world, method) that cannot be played: why

    def words_of(self, world: str, entry: str, *more: str) -> tuple[str, ...]:
        """Those of one run: the league's, the world's, the method's, and these."""
        whole = (*self.words, *self.worlds[world].words, *self.entries[entry].words, *more)
        return tuple(merged_words(whole).values())

    def experiment(self, world: str, entry: str, *more: str) -> Experiment:
        return config.read(None, [*self.words_of(world, entry, *more)])

    def pairs(self) -> list[tuple[str, str]]:
        """(world, method) that are played, world by world, so that whole ones are there when it is cut off."""
        full = [(world, name) for world in self.worlds for name, entry in self.entries.items() if entry.everywhere]
        rest = [(world, name) for world in self.some for name, entry in self.entries.items() if not entry.everywhere]
        return [pair for pair in (*full, *rest) if pair not in self.barred]

    @cached_property
    def defaults(self) -> dict[tuple[str, str], str]:
        """What is known of main parameters, by (world, method)."""
        return {}

    def rounds(self, world: str) -> int:
        return self.experiment(world, next(iter(self.entries))).rounds


def measure_of(method: str) -> Measure:
    """What a method is about; one of the user's own about both."""
    plain = method.partition("/")[0]
    found = next((about[plain] for about in FAMILIES.values() if plain in about), None)
    return "personal" if plain.endswith("+ft") else found or "both"  # pyright: ignore[reportReturnType]


# ---- reading ---------------------------------------------------------------------------------------------------------
_KEYS = ("title", "words", "worlds", "methods", "others", "rates", "seeds", "search")


def read(path: Path, own: Sequence[str] = ()) -> League:
    """The league in a file, with methods of the user's own beside it; refuses what would fail later."""
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise BadInput(f"there is no league {path}; name one with --league") from None
    except (yaml.YAMLError, ValueError):
        raise BadInput(f"{path} is damaged: it is not YAML") from None
    return parsed(content, str(path), own)


def parsed(content: Any, name: str, own: Sequence[str] = ()) -> League:
    _only(content, _KEYS, name)
    worlds = {
        key: _world(key, value, name) for key, value in _mapping(content.get("worlds"), f"{name}: worlds").items()
    }
    others = _mapping(content.get("others") or {}, f"{name}: others")
    _only(others, ("worlds", "methods"), f"{name}: others")
    entries = {
        key: _entry(key, value, name) for key, value in _mapping(content.get("methods"), f"{name}: methods").items()
    }
    for key, value in _mapping(others.get("methods") or {}, f"{name}: others.methods").items():
        entries[key] = _entry(key, value, name, everywhere=False)
    for method in own:
        label = name_of(method)
        if label in entries:
            raise BadInput(f"{label} is in {name} already; give your method another name")
        entries[label] = Player(label, (f"algorithm={method}",))
    some = tuple(others.get("worlds") or ())
    for world in some:
        if world not in worlds:
            raise BadInput(f"{name}: others.worlds {world!r} is unknown; {nearest(world, worlds)}")
    search = _mapping(content.get("search") or {}, f"{name}: search")
    _only(search, ("seed", "share"), f"{name}: search")
    rates = tuple(sorted(float(rate) for rate in content.get("rates") or ()))
    if not rates or min(rates) <= 0:
        raise BadInput(f"{name}: rates must be a list of numbers above 0, such as [0.01, 0.03, 0.1]")
    found = League(
        str(content.get("title", name)),
        tuple(map(str, content.get("words") or ())),
        worlds,
        entries,
        some,
        rates,
        tuple(map(int, content.get("seeds") or (0,))),
        int(search.get("seed", 100)),
        float(search.get("share", 1 / 3)),
    )
    if found.search_seed in found.seeds:
        raise BadInput(f"{name}: search.seed {found.search_seed} is one of seeds: rates would be chosen on what counts")
    if not 0 < found.search_share <= 1:
        raise BadInput(f"{name}: search.share is {found.search_share:g}, but it should be above 0 and 1 at most")
    return replace(found, barred=_barred(found, name))


def _barred(league: League, name: str) -> dict[tuple[str, str], str]:
    """Why methods cannot be played in worlds; refuses one that can be played in none, which is a slip."""
    why: dict[tuple[str, str], str] = {}
    pairs = league.pairs()
    for world, entry in pairs:
        player = league.entries[entry]
        value = [f"{player.key}={player.values[0]}"] if player.values else []
        try:
            league.experiment(world, entry, *value).timetable()
        except BadInput as error:
            why[world, entry] = str(error)
    able = {entry for world, entry in pairs if (world, entry) not in why}
    for (world, entry), error in why.items():
        if entry not in able:
            raise BadInput(f"{name}: {entry} in {world}: {error}")
    return why


def name_of(method: str) -> str:
    """In the table: my.module:Method is Method."""
    return method.rpartition(":")[2]


def listed(text: str, names: Collection[str] = ()) -> list[str]:
    """What stands between commas; a name that has one itself may be given whole."""
    return [text] if text in names else [part.strip() for part in text.split(",") if part.strip()]


def chosen(league: League, worlds: Sequence[str], methods: Sequence[str]) -> League:
    """Only these worlds, or those with one of these in their names, and only these methods; all where none is named."""
    for method in methods:
        if method not in league.entries:
            raise BadInput(f"--methods {method!r} is not in this league; {nearest(method, league.entries)}")

    def is_meant(name: str) -> bool:
        return not worlds or any(part == name or (part in name and part not in league.worlds) for part in worlds)

    some = {name: world for name, world in league.worlds.items() if is_meant(name)}
    if not some:
        raise BadInput(f"--worlds {worlds[0]!r} is in no world's name; {nearest(worlds[0], league.worlds)}")
    entries = {name: entry for name, entry in league.entries.items() if not methods or name in methods}
    return replace(league, worlds=some, entries=entries, some=tuple(name for name in league.some if name in some))


def _world(name: str, value: Any, file: str) -> World:
    _only(value, ("kind", "words"), f"{file}: worlds.{name}")
    return World(name, str(value.get("kind", "all")), tuple(map(str, value.get("words") or ())))


def _entry(name: str, value: Any, file: str, everywhere: bool = True) -> Player:
    _only(value or {}, ("method", "words", "main"), f"{file}: methods.{name}")
    value = value or {}
    main = _mapping(value.get("main") or {}, f"{file}: methods.{name}.main")
    if len(main) > 1:
        raise BadInput(f"{file}: methods.{name}.main must be one key with its values")
    key, values = next(iter(main.items()), ("", ()))
    words = (f"algorithm={value.get('method', name)}", *map(str, value.get("words") or ()))
    return Player(
        name, words, str(key), tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in values), everywhere
    )


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(f"{name} must be names with settings below them")
    return {str(key): inner for key, inner in value.items()}


def _only(value: Any, keys: Sequence[str], name: str) -> None:
    for key in _mapping(value, name):
        if key not in keys:
            raise BadInput(f"{name} has no {key!r}; {nearest(key, keys)}")


def extended(rates: Sequence[float], best: float, first: Sequence[float], most: int = 2) -> float | None:
    """The next rate where the best lies at an edge: a step of the grid further, at most so many beyond it."""
    known, grid = sorted(rates), sorted(first)
    if len(grid) < 2:
        return None
    if best == known[0] and sum(rate < grid[0] for rate in known) < most:
        return _rounded(known[0] * grid[0] / grid[1])
    if best == known[-1] and sum(rate > grid[-1] for rate in known) < most:
        return _rounded(known[-1] * grid[-1] / grid[-2])
    return None


def _rounded(rate: float) -> float:
    """To two digits: rates are typed."""
    return round(rate, 1 - math.floor(math.log10(rate)))
