"""What crosses between server and nodes: notes (plain data) and named trees, as raw values. Never a pickle.

Nothing here needs torch: the process that Flower starts for every task passes payloads on without opening them.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import RunFailed

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, RecordDict

    from ..core.tree import Tree

_RAW, _PACKED = "fedlens.raw", "fedlens.packed"  # how values are written
_BRANCH = "branch"  # a branch without leaves is a part of a tree, too
_SMALL = 1 << 18  # bytes; Flower asks for every Array by itself, so that smaller leaves go together
_TYPES = frozenset(["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"])


# Far beyond any model, and small enough for every recursion over a tree.
_LEAVES, _DEEP, _LONG = 100_000, 16, 500  # leaves of a payload; names in a path; characters in one


class Forged(RunFailed):
    """An answer that is not signed by the key of the client in whose name it came."""


class DamagedMessage(RunFailed):
    """What another party sent is none of ours; a sentence that says why, and nothing of what the reader holds."""


class Leaf(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


Leaves = dict[str, Leaf]  # by path, such as delta/params/conv1.weight: the same names as in checkpoints


class Payload(NamedTuple):
    notes: dict[str, Any]
    trees: dict[str, Leaves]


# ---- trees -----------------------------------------------------------------------------------------------------------
def leaves_of(tree: Tree) -> Leaves:
    from ..core.wire import empty_branches, raw

    found = {path: Leaf(str(leaf.dtype)[6:], tuple(leaf.shape), raw(leaf).tobytes()) for path, leaf in tree.paths()}
    return found | {path: Leaf(_BRANCH, (), b"") for path in empty_branches(tree)}


def tree_of(leaves: Leaves) -> Tree:
    """Refuses what no tree was written as: payloads come from other parties."""
    import torch

    from ..core.tree import Tree
    from ..core.wire import nested, tensor

    found = {}
    for path, (dtype, shape, data) in sorted(leaves.items()):
        if dtype == _BRANCH:
            found[path] = Tree()
            continue
        kind = getattr(torch, dtype) if dtype in _TYPES else None
        if kind is None or min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != len(data):
            raise DamagedMessage(f"a message is damaged: {path} has {len(data)} bytes for {list(shape)} of {dtype}")
        try:
            found[path] = tensor(data, kind, shape)
        except (RuntimeError, TypeError):  # nothing, by far too wide
            raise DamagedMessage(f"a message is damaged: {path} has an impossible shape") from None
    try:
        return nested(found)
    except (KeyError, AttributeError, TypeError):
        raise DamagedMessage("a message is damaged: its names do not make a tree") from None


# ---- Flower's records ------------------------------------------------------------------------------------------------
def to_records(payload: Payload) -> RecordDict:
    """An ArrayRecord for each tree: an Array for each large leaf, under its name, and one for all small ones."""
    from flwr.app import Array, ArrayRecord, RecordDict

    def record(leaves: Leaves) -> ArrayRecord:
        arrays = {p: Array(leaf.dtype, leaf.shape, _RAW, leaf.data) for p, leaf in leaves.items() if is_large(leaf)}
        small = to_bytes(Payload({}, {"": {path: leaf for path, leaf in leaves.items() if not is_large(leaf)}}))
        return ArrayRecord({**arrays, "small leaves": Array("uint8", (len(small),), _PACKED, small)})

    trees = {f"tree/{name}": record(leaves) for name, leaves in payload.trees.items()}
    return with_notes(RecordDict({**trees}), payload.notes)


def with_notes(content: RecordDict, notes: dict[str, Any]) -> RecordDict:
    """The same trees under other notes; nothing is copied."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({**content, "notes": ConfigRecord({"json": json.dumps(notes)})})


def from_records(content: RecordDict, most: float = math.inf) -> Payload:
    """Refuses what is no payload, or has more than so many bytes, before anything is built of it."""
    records = content.array_records
    if (size := sum(len(array.data) for record in records.values() for array in record.values())) > most:
        raise DamagedMessage(f"a message is too large: it has {size} bytes, and {most:.0f} are allowed")

    def leaves(record: ArrayRecord) -> Leaves:
        found = {path: Leaf(a.dtype, tuple(a.shape), a.data) for path, a in record.items() if a.stype == _RAW}
        return _plausible(found | from_bytes(record["small leaves"].data).trees[""])

    try:
        notes = json.loads(str(content.config_records["notes"]["json"]))
        found = {name.removeprefix("tree/"): leaves(record) for name, record in records.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedMessage(f"a message is damaged: it is no payload ({type(error).__name__})") from None
    if not isinstance(notes, dict):
        raise DamagedMessage("a message is damaged: its notes are none")
    return Payload(notes, found)


def _plausible(leaves: Leaves) -> Leaves:
    if len(leaves) > _LEAVES:
        raise DamagedMessage(f"a message is damaged: it has {len(leaves)} leaves")
    for path, (dtype, shape, _) in leaves.items():
        if len(path) > _LONG or path.count("/") >= _DEEP or not all(path.split("/")):
            raise DamagedMessage(f"a message is damaged: {path[:40]!r} is no name of a leaf")
        if not isinstance(dtype, str) or len(shape) > _DEEP or not all(type(side) is int for side in shape):
            raise DamagedMessage(f"a message is damaged: {path} has no shape or type")
    return leaves


def tree_digest(leaves: Leaves) -> bytes:
    """What a tree says, in 32 bytes, whatever the order of its leaves."""
    found = hashlib.sha256()
    for path, (dtype, shape, data) in sorted(leaves.items()):
        found.update(json.dumps([path, dtype, list(shape), len(data)]).encode())
        found.update(data)
    return found.digest()


def is_large(leaf: Leaf) -> bool:
    return len(leaf.data) >= _SMALL


# ---- bytes, as they are stored ---------------------------------------------------------------------------------------
def to_bytes(payload: Payload) -> bytes:
    trees = {
        name: {path: (leaf.dtype, leaf.shape, len(leaf.data)) for path, leaf in leaves.items()}
        for name, leaves in payload.trees.items()
    }
    text = json.dumps([payload.notes, trees]).encode()
    values = (leaf.data for leaves in payload.trees.values() for leaf in leaves.values())
    return b"".join([len(text).to_bytes(8, "little"), text, *values])


def from_bytes(data: bytes) -> Payload:
    """Refuses with DamagedMessage what `to_bytes` cannot have written."""
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        notes, layout = json.loads(data[8:start])
        trees: dict[str, Leaves] = {}
        for name, leaves in layout.items():
            trees[name] = {}
            for path, (dtype, shape, size) in leaves.items():
                if type(size) is not int or not 0 <= size <= len(data) - start:
                    raise ValueError
                trees[name][path] = Leaf(dtype, tuple(shape), data[start : start + size])
                start += size
            _plausible(trees[name])
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise DamagedMessage("a message is damaged: its values are not where it says") from None
    return Payload(notes, trees)
