"""Input from clients is hostile until checked: names, types, shapes, sizes and values against what a round expects.

What is expected the server finds out itself: `expects(job)` runs a client's own hooks here, on a blank image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .tree import Tree

MIB = 1 << 20
_LARGEST = 1e12  # no honest number and no leaf's norm is larger, and sums of such stay finite
_COUNTS = ("weight", "examples", "counts", "reach")  # entries that are never negative
_SHOWN = 60  # characters of a name that a client made up


class Check:
    """Says what speaks against replies, in words; nothing is the usual answer."""

    def __init__(self, expects: Callable[[Any], Tree], largest: float):
        """`largest`: MiB of a reply."""
        self.expects, self.largest = expects, largest * MIB
        self._usual: dict[Any, tuple[int, Tree]] = {}  # stage -> as of which round, what its replies look like

    def check_structure(self, server: Any, job: Any, upload: Any) -> str:
        """Names, types, shapes and indices: all that taking it apart relies on. Reads no values but indices."""
        if job.stage not in self._usual:
            self._usual[job.stage] = job.round, self.expects(job)
        round, expected = self._usual[job.stage]
        objection = self._objection(server, job, upload, expected)
        if objection and round != job.round:  # what a method sends may depend on what it was sent (L2GD)
            self._usual[job.stage] = job.round, self.expects(job)
            objection = self._objection(server, job, upload, self._usual[job.stage][1])
        return objection

    def _objection(self, server: Any, job: Any, upload: Any, expected: Tree) -> str:
        if other := name_mismatch(upload, expected):
            return other
        if upload.nbytes > self.largest:
            return (
                f"it has {upload.nbytes / MIB:.0f} MiB, and {self.largest / MIB:g} are allowed (policy.max_reply_mib)"
            )
        parts = (part for part in (*job.stage.uplink, job.stage.algorithm) if hasattr(part, "validate_upload"))
        return next(filter(None, (part.validate_upload(server, upload, expected) for part in parts)), "")

    def check_values(self, job: Any, uploads: Sequence[Tree]) -> tuple[list[str], bool]:
        """An objection to each decoded upload or nothing, and whether any of the others counts for something.

        On a GPU all is one launch for each upload and kind of leaf, and is read back once a round.
        """
        may_be_nan = getattr(job.stage.algorithm, "may_be_nan", ())
        found = [_verdicts(upload, may_be_nan) for upload in uploads]
        answers = iter(to_host([flag for flags in found for flag in chain(*flags)]))
        objections, counts = [], False
        for sizes, signs, weight in found:
            sound, positive = ([next(answers) for _ in part] for part in (sizes, signs))
            weighs = [next(answers) for _ in weight]
            says = "" if all(sound) else f"it has values that are not finite, or above {_LARGEST:g}"
            objections.append(says or ("" if all(positive) else "it has negative weights or counts"))
            counts |= not objections[-1] and all(weighs)
        return objections, counts


def _verdicts(upload: Tree, may_be_nan: Sequence[str]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Flags, not yet read: sizes are sound; counts are not negative; it counts for something."""
    looked = Tree({name: value for name, value in upload.items() if name not in may_be_nan})
    kinds: dict[Any, list[Tensor]] = {}
    for leaf in looked.leaves():
        if leaf.is_floating_point() and leaf.numel():
            wide = leaf if leaf.element_size() >= 4 else leaf.float()  # in which no honest norm overflows
            kinds.setdefault((leaf.device, wide.dtype), []).append(wide)
    # Of all ways to find what is not finite, the Euclidean norm is the fastest on a CPU, by far.
    norms = [torch.stack(torch._foreach_norm(leaves)) for leaves in kinds.values()]  # pyright: ignore
    counts = [leaf for name in _COUNTS if isinstance(leaf := looked.get(name), Tensor) and leaf.numel()]
    weight = upload.get("examples", upload.get("weight"))
    return (
        [(norm <= _LARGEST).all() for norm in norms],  # false for what is no number
        [((leaf >= 0) & (leaf <= _LARGEST)).all() for leaf in counts],
        [(weight != 0).any()] if isinstance(weight, Tensor) else [],
    )


def to_host(flags: Sequence[Tensor]) -> list[bool]:
    """Their values, fetched once for each device."""
    found: dict[int, bool] = {}
    for device in {flag.device for flag in flags}:
        here = [at for at, flag in enumerate(flags) if flag.device == device]
        found.update(zip(here, torch.stack([flags[at] for at in here]).tolist(), strict=True))
    return [found[at] for at in range(len(flags))]


# ---- form ------------------------------------------------------------------------------------------------------------
def name_mismatch(upload: Any, expected: Tree, where: str = "") -> str:
    """Whether names and types are other than expected; never looks deeper than what is expected goes."""
    if not isinstance(upload, Tree):
        return f"{where or 'it'} is no tree"
    if missing := sorted(expected.keys() - upload.keys()):
        return f"{where}{missing[0]} is missing"
    if more := [name for name in upload if name not in expected]:
        return f"it has {_said(where + str(more[0]))}, which nobody asked for"
    for name, like in expected.items():
        value, path = upload[name], f"{where}{name}"
        if isinstance(like, Tree):
            if other := name_mismatch(value, like, f"{path}/"):
                return other
        elif not isinstance(value, Tensor) or value.layout != torch.strided:
            return f"{path} is no tensor"
        elif value.dtype != like.dtype:
            return f"{path} is {_kind(value)}, and should be {_kind(like)}"
    return ""


def shape_mismatch(upload: Tree, expected: Tree) -> str:
    """Whether a leaf of one of two trees of the same names has another shape."""
    for path, value, like in _pairs(upload, expected):
        if value.shape != like.shape:
            return f"{path} is {_kind(value)} {_shape(value)}, and should be {_shape(like)}"
    return ""


def _pairs(upload: Tree, expected: Tree) -> Iterator[tuple[str, Tensor, Tensor]]:
    leaves = upload.leaves(expected)
    for (path, like), value in zip(expected.paths(), leaves, strict=True):
        yield path, value, like


def _kind(leaf: Tensor) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def _shape(leaf: Tensor) -> str:
    return str(list(leaf.shape)) if leaf.dim() <= 8 else f"of {leaf.dim()} dimensions"


def _said(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
