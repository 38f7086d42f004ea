"""Named tensors with arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Tree(dict):
    """Named tensors and sub-trees, with attribute access and elementwise arithmetic.

    Weights, messages, memories and local variables are all Trees. Two trees agree by name, whatever their order;
    arithmetic between trees of different names is an error. Values never change through a Tree but by `copy_`.
    """

    __slots__ = ()  # `tree.x = 1` is an error, not an attribute that nobody sends

    def __init__(self, *entries: Any, **named: Any):
        super().__init__(*entries, **named)
        if not _METHODS.isdisjoint(self):  # tree.values would be the method, not the entry
            raise KeyError(f"names of methods cannot be entries: {', '.join(_METHODS & self.keys())}")

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} among {', '.join(self) or 'nothing'}") from None

    # ---- arithmetic: one kernel launch for the whole tree ----
    def __add__(self, other: Tree) -> Tree:
        return self._each(torch._foreach_add, other)

    def __sub__(self, other: Tree) -> Tree:
        return self._each(torch._foreach_sub, other)

    def __mul__(self, other: Tree | Tensor | float) -> Tree:
        return self._each(torch._foreach_mul, other)

    def __truediv__(self, other: Tree | Tensor | float) -> Tree:
        return self._each(torch._foreach_div, other)

    __rmul__ = __mul__

    # ---- shape ----
    def __or__(self, other: Tree) -> Tree:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Lay `other` over this tree, name by name down to the leaves: weights over weights."""
        both = {k: v | other[k] for k, v in self.items() if isinstance(v, Tree) and isinstance(other.get(k), Tree)}
        return Tree({**self, **other, **both})

    __ior__ = __or__  # pyright: ignore[reportAssignmentType]  dict's own would write into this very tree, and shallowly

    def replace(self, **entries: Any) -> Tree:
        """The same tree with these entries whole in place of its own: states, memories, messages."""
        return Tree({**self, **entries})

    def select(self, wanted: Callable[[str], bool]) -> Tree:
        """The leaves whose own name is wanted."""
        return Tree(
            {
                k: v.select(wanted) if isinstance(v, Tree) else v
                for k, v in self.items()
                if isinstance(v, Tree) or wanted(k)
            }
        )

    def plus(self, other: Tree) -> Tree:
        """This tree, with `other` added where both have a leaf: a gradient and a pull on some of its parameters."""
        return self | (self.within(other) + other.within(self))

    def within(self, other: Tree) -> Tree:
        """The leaves whose names `other` has too."""
        return Tree({k: v.within(other[k]) if isinstance(v, Tree) else v for k, v in self.items() if k in other})

    def map(self, f: Callable[[Tensor], Tensor]) -> Tree:
        return self.rebuild(map(f, self.leaves()))

    def clone(self) -> Tree:
        leaves = self.leaves()
        return self.rebuild(iter(_copies(leaves) if leaves and leaves[0].is_cuda else map(torch.clone, leaves)))

    def zeros(self) -> Tree:
        leaves = [torch.empty_like(leaf) for leaf in self.leaves()]
        if leaves:
            torch._foreach_zero_(leaves)
        return self.rebuild(iter(leaves))

    def copy_(self, other: Tree) -> Tree:
        """Write the values of `other` into this tree's tensors."""
        pairs = [(x, y) for x, y in zip(self.leaves(), other.leaves(self), strict=True) if x is not y]
        if pairs:
            torch._foreach_copy_([x for x, _ in pairs], [y for _, y in pairs])
        return self

    def rebuild(self, leaves: Iterator[Tensor]) -> Tree:
        """This tree's names over other leaves, given in this tree's order."""
        return Tree({k: v.rebuild(leaves) if isinstance(v, Tree) else next(leaves) for k, v in self.items()})

    # ---- leaves ----
    def paths(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        for name, value in self.items():
            yield from value.paths(f"{prefix}{name}/") if isinstance(value, Tree) else [(prefix + name, value)]

    def leaves(self, like: Tree | None = None) -> list[Tensor]:
        """All tensors, in the order of `like`, which must have the same names."""
        found: list[Tensor] = []
        if like is None or like is self:
            for value in self.values():
                found.extend(value.leaves()) if isinstance(value, Tree) else found.append(value)
            return found
        if self.keys() != like.keys():
            raise KeyError(f"trees differ in {', '.join(sorted(self.keys() ^ like.keys()))}")
        for name in like:
            value = self[name]
            found += value.leaves(like[name]) if isinstance(value, Tree) else [value]
        return found

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.leaves())

    def _each(self, f: Callable, other: Tree | Tensor | float) -> Tree:
        mine = self.leaves()
        if isinstance(other, Tree):
            other = other.leaves(self)  # pyright: ignore[reportAssignmentType]
        elif isinstance(other, Tensor) and mine:
            other = other.to(mine[0])  # foreach wants a scalar of the same device
        return self.rebuild(iter(f(mine, other) if mine else []))


_METHODS = frozenset(name for name in dir(Tree) if not name.startswith("_"))


def _copies(leaves: list[Tensor]) -> list[Tensor]:
    """On a GPU one call for all of a type: a hundred small ones cost more than the copying. Times one is exact."""
    new: dict[int, Tensor] = {}  # by place: a leaf that a tree has twice gets two copies, as a step may write to one
    for dtype in {leaf.dtype for leaf in leaves} - {torch.bool}:
        alike = [at for at, leaf in enumerate(leaves) if leaf.dtype == dtype and leaf.numel()]
        if alike:
            new.update(zip(alike, torch._foreach_mul([leaves[at] for at in alike], 1), strict=True))
    return [new[at] if at in new else leaf.clone() for at, leaf in enumerate(leaves)]


def mean(trees: Iterable[Tree], weights: Sequence[Tensor | float]) -> Tree:
    """Weighted mean, accumulated one tree at a time; weights are divided in double precision."""
    shares = [float(w) for w in weights]
    total, result = sum(shares), None
    if not 0 < total < float("inf") or min(shares) < 0:
        raise ValueError(f"weights must be finite, not negative and sum to more than zero, got {shares}")
    for tree, share in zip(trees, shares, strict=True):
        if result is None:
            result = tree * (share / total)
        elif result.leaves():
            torch._foreach_add_(result.leaves(), tree.leaves(result), alpha=share / total)
    assert result is not None  # a positive sum has at least one term
    return result


def dot(a: Tree, b: Tree) -> Tensor:
    """Summed in the order of names, so that a tree that travelled gives the same bits."""
    pairs = zip((path for path, _ in a.paths()), a.leaves(), b.leaves(a), strict=True)
    ordered = [(x, y) for _, x, y in sorted(pairs, key=lambda pair: pair[0])]
    if a is b and ordered and ordered[0][0].is_cuda:  # in one launch, not two for each leaf
        return torch.stack(torch._foreach_norm([x for x, _ in ordered])).square().sum()  # pyright: ignore
    parts = [(x * y).sum() for x, y in ordered]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def clipped(tree: Tree, norm: float) -> Tree:
    """No longer than this."""
    return tree * (norm / dot(tree, tree).sqrt().clamp(min=norm))


def grad(value: Tensor, tree: Tree, by: Tensor | None = None) -> Tree:
    """d value / d tree, of several values d (by . value) / d tree; zero where they do not depend on a leaf."""
    leaves = tree.leaves()
    grads = torch.autograd.grad(value, leaves, by, materialize_grads=True) if leaves else ()
    # Fused kernels want gradients laid out like the parameters, which autograd does not promise.
    return tree.rebuild(map(_laid_out_like, grads, leaves))


def _laid_out_like(g: Tensor, p: Tensor) -> Tensor:
    if g.stride() == p.stride():
        return g
    if all(n == 1 or a == b for n, a, b in zip(p.shape, g.stride(), p.stride(), strict=True)):
        return g.as_strided(p.shape, p.stride())  # sides of length one have any stride
    return torch.empty_like(p).copy_(g)
