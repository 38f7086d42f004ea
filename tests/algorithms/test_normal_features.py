"""Normal distributions of features from what clients say: moments, roots, what is drawn, and a head trained on it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedlens.algorithms._normal_features import drawn, moments, refitted, root
from fedlens.core.rng import generator
from fedlens.core.tree import Tree


def told(values: list[float]) -> Tree:
    z = torch.tensor(values, dtype=torch.float64)
    count = torch.tensor([len(values), 0], dtype=torch.int32)
    both = torch.stack([z.mean(), z.mean() * 0])[:, None]
    scatter = torch.stack([((z - z.mean()) ** 2).sum(), z.sum() * 0])[:, None, None]
    return Tree(counts=count, means=both, scatter=scatter)


def test_by_hand():
    """Features 0 and 2 at one client, 4 at another: mean 2, variance 4. One image makes no distribution."""
    counts, means, covariances = moments([told([0, 2]), told([4])], "full")
    assert counts.tolist() == [3, 0] and float(means[0]) == 2 and float(covariances[0]) == 4
    z, y = drawn(counts, means, covariances, 5000, 3)
    assert y.tolist() == [0] * 5000
    assert float(z.mean()) == pytest.approx(2, abs=0.1) and float(z.var()) == pytest.approx(4, abs=0.2)
    assert len(drawn(*moments([told([4])], "full"), 10, 3)[0]) == 0


def test_pooled_and_diagonal():
    """Classes with features (0, 2) and (1, 1, 4): variances 2 and 3; together (2 + 6) over 5 - 2."""
    first, second = torch.tensor([0.0, 2.0]).double(), torch.tensor([1.0, 1.0, 4.0]).double()
    scatter = [((z - z.mean()) ** 2).sum() for z in (first, second)]
    means = torch.stack([first.mean(), second.mean()])[:, None]
    counts = torch.tensor([2, 3], dtype=torch.int32)
    one = Tree(counts=counts, means=means, scatter=torch.stack(scatter)[:, None])
    assert moments([one], "diagonal")[2].flatten().tolist() == [2.0, 3.0]
    one = one.replace(scatter=sum(scatter)[None, None, None])
    assert float(moments([one], "pooled")[2]) == pytest.approx(8 / 3, abs=1e-15)


def test_a_root_of_few_images():
    """Three images in five dimensions: what rounding alone fills of the others counts as nothing."""
    z = torch.randn(3, 5, generator=generator(1), dtype=torch.float64)
    covariance = torch.cov(z.T)
    found = root(covariance)
    assert (found @ found - covariance).abs().max() < 1e-14 and (found - found.T).abs().max() < 1e-15
    assert torch.linalg.matrix_rank(found) == 2


def test_a_head_after_one_step():
    head = Tree({"head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)})
    z, y = torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 1])
    found = refitted(head, z, y, epochs=1, batch=3, lr=0.6, seed=1)
    slope = (F.one_hot(y, 2).double() - 0.5).T / 3  # at equal logits
    assert (found["head.weight"] - (0.6 * slope @ z).float()).abs().max() < 1e-7
    assert (found["head.bias"] - 0.6 * slope.sum(1).float()).abs().max() < 1e-7
    assert found["head.weight"].dtype == torch.float32 and head["head.weight"].abs().max() == 0
