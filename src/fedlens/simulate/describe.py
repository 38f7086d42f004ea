"""What a method sends, keeps and costs, found out by running its own hooks once."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..algorithms import ALGORITHMS, family_of, name_of
from ..core.batches import Dataset
from ..core.dry_run import blank_clients, dry_run
from ..core.errors import BadInput, RunFailed
from ..core.network import Network
from ..core.rng import key, seeded
from ..core.run import timetable
from ..core.tree import Tree
from ..core.wire import header
from ..engines.sequential import Sequential
from ..experiment import Experiment

SERVER_HOOKS = ("setup", "broadcast", "aggregate", "advance")  # a client's hooks are named by its engine


@dataclass(frozen=True)
class MessageLeaf:
    stage: str  # which algorithm of the recipe
    where: str  # down, shared (once for each client), up, memory, state
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    rows: int = 0  # one for each client of the last round; in the first round there are none


def usual_model(algorithm: str) -> str:
    """What a method's messages are about where no model is named: the default CNN, unless the method needs another."""
    return getattr(_class_of(algorithm), "usual_model", "cnn")


def described_with(algorithm: str) -> tuple[str, ...]:
    """Settings that a method cannot do without, as words; those of the user come after them."""
    return getattr(_class_of(algorithm), "described_with", ())


def _class_of(method: str) -> type | None:
    """With or without fine-tuning and presets; None where it is a user's own."""
    return ALGORITHMS.get(method.partition("+")[0].partition("/")[0])


def privacy_class(method: str, discloses: Sequence[str]) -> str:
    """In a few words: whom a method shows what, from its family and from what it says it discloses."""
    if family_of(method) == "sharing":
        return "shares data"
    if any("reach all clients" in said or "reaches all clients" in said for said in discloses):
        return "shows clients' models to other clients"
    return "more than updates" if discloses else "updates only"


def keeps_models(method: str) -> bool:
    """Whether no model leaves its clients, by what a method of ours says of its traffic."""
    return "up: nothing" in (getattr(_class_of(method), "__doc__", None) or "")


def describe(
    experiment: Experiment, classes: int, channels: int, size: int, *, to_the_end: bool = False
) -> list[MessageLeaf]:
    """Every leaf that is sent or kept, stage by stage, found out by a dry run with one image a client.

    What has a row for each client of the last round is empty in the first one: it is shown as in later rounds.
    """
    with seeded(key(experiment.seed, "init")):
        net = Network(experiment.model.build(classes, channels, size), "fp32", experiment.buffers)
    shape, leaves = (channels, size, size), []
    engine = Sequential(net, blank_clients(Dataset(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))))
    turns = timetable(experiment.algorithm, replace(experiment.plan, rounds=1))
    for turn, server, job, replies in dry_run(turns, net, shape, engine, to_the_end=to_the_end):
        name, before = type(job.stage.algorithm).__name__, {leaf.stage for leaf in leaves}
        name = next(n for n in (name, *(f"{name} ({i})" for i in range(2, 99))) if n not in before)
        memory = Tree({k: v for k, v in engine.memories.get(0).items() if k != "seen"})
        trees = {"down": job.download, "shared": job.shared, "up": replies[0].upload, "memory": memory}
        for where, first in (trees | {"state": server.state}).items():
            tree = with_rows(first, turn.stage.cohort.size(experiment.clients))
            for (path, leaf), t in zip(tree.paths(), first.leaves(tree), strict=True):
                rows = len(leaf) if leaf.shape != t.shape else 0
                leaves.append(MessageLeaf(name, where, path, tuple(leaf.shape), str(leaf.dtype)[6:], leaf.nbytes, rows))
            if where in ("down", "up") or (where == "shared" and tree):
                leaves.append(MessageLeaf(name, where, "(header)", (), "", len(header(tree))))
    return leaves


def with_rows(tree: Tree, count: int) -> Tree:
    """So many rows in place of none; without values, which may be many."""

    def filled(leaf: torch.Tensor) -> torch.Tensor:
        none = leaf.dim() and not leaf.shape[0]
        return torch.empty(count, *leaf.shape[1:], dtype=leaf.dtype, device="meta") if none else leaf

    return tree.map(filled)


@contextmanager
def own_hooks(name: str) -> Iterator[None]:
    """One sentence for what goes wrong in a method of the user's own: its hook, and where in it."""
    try:
        yield
    except (BadInput, RunFailed):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        hooks = [frame for frame in frames if frame.name in SERVER_HOOKS]
        own = [frame for frame in hooks if not Path(frame.filename).is_relative_to(Path(__file__).parents[1])]
        at = (own or hooks or frames)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise BadInput(f"{name}: {at.name} failed with {said} ({Path(at.filename).name}, line {at.lineno})") from None


def about_rows(leaves: list[MessageLeaf]) -> str:
    """What numbers of bytes assume where a message has a row for each client of the last round."""
    most = max((leaf.rows for leaf in leaves), default=0)
    return f"In rounds of {most} clients, after the first, in which others have sent nothing yet." if most else ""


def traffic(leaves: list[MessageLeaf]) -> dict[str, dict[str, int]]:
    """Bytes by stage and direction."""
    found: dict[str, dict[str, int]] = {}
    for leaf in leaves:
        row = found.setdefault(leaf.stage, {"down": 0, "up": 0, "memory": 0, "state": 0})
        row[leaf.where] = row.get(leaf.where, 0) + leaf.bytes
    return found


def preset_table(recipe: Any) -> tuple[list[str], list[list[str]]]:
    """(head, rows): settings that the defaults and the presets do not all share, a row each; no presets: no rows."""
    known = getattr(recipe, "presets", {})
    if ":" in name_of(recipe) or not known:  # a user's own class inherits them without a short name
        return [], []
    usual = type(recipe)()
    given = [dict(settings(usual)), *({**dict(settings(usual)), **to} for to in known.values())]
    rows = [[name, *(shown(one[name]) for one in given)] for name in given[0]]
    return ["setting", "default", *known], [row for row in rows if len(set(row[1:])) > 1]


def shown(value: Any) -> str:
    """As it is typed."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def settings(recipe: Any) -> Iterator[tuple[str, Any]]:
    """The recipe's hyper-parameters and their values."""
    for f in fields(recipe):
        yield f.name, getattr(recipe, f.name)
