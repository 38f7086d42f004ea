"""Dirichlet splits against those of flwr-datasets, in distribution."""

import numpy as np
import pytest

from fedlens.core.rng import numpy_generator
from fedlens.data.partition.label_skew import Dirichlet

CLASSES, EXAMPLES, CLIENTS, DRAWS = 10, 300, 10, 200


def summaries(counts):
    """One client each, as the clients of one draw are not independent of each other."""
    return counts[0, 0] / EXAMPLES, counts[1].sum(), counts[2].max() / max(counts[2].sum(), 1)


def theirs(alpha, balanced):
    partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")
    from datasets import Dataset

    labels = np.repeat(np.arange(CLASSES), EXAMPLES)
    data = Dataset.from_dict({"label": labels})
    for seed in range(DRAWS):
        split = partitioners.DirichletPartitioner(
            CLIENTS, "label", alpha, min_partition_size=1, self_balancing=balanced, seed=seed
        )
        split.dataset = data
        first = np.asarray(split.load_partition(0)["label"], dtype=int)
        owned = [labels[split._partition_id_to_indices[client]] for client in range(CLIENTS)]  # a hundred times faster
        assert (np.sort(first) == np.sort(owned[0])).all()
        yield np.stack([np.bincount(some, minlength=CLASSES) for some in owned])


def ours(alpha, dialect):
    draw, of_class = numpy_generator(11), np.full(CLASSES, EXAMPLES)
    return (Dirichlet(alpha, 1, dialect).counts(of_class, CLIENTS, draw)[0] for _ in range(DRAWS))


def p_values(some, others):
    from scipy.stats import ks_2samp

    pairs = zip(zip(*map(summaries, some), strict=True), zip(*map(summaries, others), strict=True), strict=True)
    return [ks_2samp(mine, their).pvalue for mine, their in pairs]


@pytest.mark.parametrize(("dialect", "alpha"), [("class", 0.3), ("class", 1.0), ("balanced", 0.5), ("balanced", 5.0)])
def test_same_distribution_as_flwr(dialect, alpha):
    """Twelve comparisons; and another alpha is told apart, so that they can fail."""
    flwr = list(theirs(alpha, dialect == "balanced"))
    assert min(p_values(ours(alpha, dialect), flwr)) > 0.001
    assert min(p_values(ours(alpha * 3, dialect), flwr)) < 0.001
