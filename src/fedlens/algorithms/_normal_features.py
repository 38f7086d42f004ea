"""Normal distributions of features, one for each class, from what clients say of their own; features drawn of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.rng import generator, key
from ..core.tree import Tree

Covariance = Literal["full", "diagonal", "pooled"]


def spread(counts: Tensor, means: Tensor) -> Tensor:
    """[C, d, d] counts times means times means."""
    return counts[:, None, None] * means[:, :, None] * means[:, None]


def reduced(products: Tensor, covariance: Covariance) -> Tensor:
    """[C, d, d], or what of it is asked for: [C, d] or [1, d, d]."""
    if covariance == "diagonal":
        return products.diagonal(dim1=1, dim2=2)
    return products.sum(0, keepdim=True) if covariance == "pooled" else products


def moments(uploads: Sequence[Tree], covariance: Covariance) -> tuple[Tensor, Tensor, Tensor]:
    """counts [C], means [C, d] and covariances of all clients' features, as if they lay in one place."""
    counts, means, scatter = (
        torch.stack([u[n].cpu().double() for u in uploads]) for n in ("counts", "means", "scatter")
    )
    total = counts.sum(0)
    middle = (counts[..., None] * means).sum(0) / total.clamp(min=1)[:, None]
    apart = sum(reduced(spread(n, m - middle), covariance) for n, m in zip(counts, means, strict=True))
    freedom = total - 1 if covariance != "pooled" else (total.sum() - (total > 0).sum())[None]
    whole = scatter.sum(0) + apart
    return total, middle, whole / freedom.clamp(min=1).view(-1, *[1] * (whole.dim() - 1))


def drawn(counts: Tensor, means: Tensor, covariances: Tensor, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """(features, classes) from a normal distribution for each class; of a class with one image there is none."""
    z, y = [], []
    for c in (counts >= 2).nonzero().flatten().tolist():
        noise = torch.randn(samples, means.shape[1], generator=generator(key(seed, c)), dtype=torch.float64)
        own = covariances[c if len(covariances) > 1 else 0]
        noise = noise * own.clamp(min=0).sqrt() if own.dim() == 1 else noise @ root(own)
        z.append(means[c] + noise)
        y.append(torch.full((samples,), c))
    return torch.cat(z or [means[:0]]), torch.cat(y or [torch.empty(0, dtype=torch.long)])


def root(covariance: Tensor) -> Tensor:
    """The symmetric one: of all roots, that which rounding hardly changes. What is rounding alone counts as zero."""
    values, vectors = torch.linalg.eigh(covariance)
    least = values.max() * len(values) * torch.finfo(values.dtype).eps
    return vectors * torch.where(values > least, values, 0).sqrt() @ vectors.T


def refitted(head: Tree, z: Tensor, y: Tensor, epochs: int, batch: int, lr: float, seed: int) -> Tree:
    """A linear head (weight, then bias) after so many epochs of plain steps on these features."""
    leaves = [leaf.detach().cpu().double().clone().requires_grad_() for leaf in head.leaves()]
    descent = torch.optim.SGD(leaves, lr=lr)
    for epoch in range(epochs):
        order = torch.randperm(len(y), generator=generator(key(seed, epoch)))
        for rows in order.split(batch):
            descent.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(F.linear(z[rows], *leaves), y[rows]).backward()
            descent.step()
    return head.rebuild(new.detach().to(old) for new, old in zip(leaves, head.leaves(), strict=True))
