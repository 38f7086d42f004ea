"""Measures against scikit-learn, or against their definitions where it is missing."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from fedlens.core.measures import BINS, best_round, by_class, detail, each_class, measured, pooled_scores
from fedlens.core.tree import Tree


def predictions(examples=60, classes=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(examples, classes, generator=draw, dtype=torch.float64).mul(2).round(decimals=1)  # with ties
    return logits.softmax(1), torch.randint(0, classes, (examples,), generator=draw)


def pairs_in_order(scores, positive):
    """AUROC by its definition."""
    good = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(scores[positive], scores[~positive])]
    return sum(good) / len(good)


def test_auroc_counts_pairs_in_order():
    p, y = predictions()
    found = detail(p, y).auroc
    for k in range(4):
        assert found[k].item() == pytest.approx(pairs_in_order(p[:, k], y == k), abs=1e-12)


def test_against_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    p, y = predictions(seed=3)
    score = Tree(correct=(p.argmax(1) == y).sum(), loss=torch.tensor(0.0), examples=torch.tensor(len(y)))
    found = measured([score.replace(**detail(p, y))])
    assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(y, p, multi_class="ovr"), abs=1e-12)
    assert found["balanced_accuracy"] == pytest.approx(sklearn.balanced_accuracy_score(y, p.argmax(1)), abs=1e-12)
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(y, p.argmax(1)), abs=1e-12)
    assert detail(p, y).confusion.tolist() == sklearn.confusion_matrix(y, p.argmax(1)).tolist()


def test_sensitivity_and_specificity_by_hand():
    p = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 2, 2, 2]]
    found = by_class(detail(p, torch.tensor([0, 1, 1, 2, 2, 0])))
    assert found["sensitivity"] == pytest.approx([1 / 2, 1 / 2, 1])
    assert found["specificity"] == pytest.approx([3 / 4, 1, 3 / 4])


def test_calibration_error_by_hand():
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0])
    gap = abs(0.9 * 2 - 1) + abs(0.6 - 1)  # summed over two bins
    score = Tree(correct=torch.tensor(2), loss=torch.tensor(0.0), examples=torch.tensor(3), **detail(p, y))
    assert measured([score])["ece"] == pytest.approx(gap / 3)
    assert int(0.9 * BINS) != int(0.6 * BINS)


def test_absent_classes_are_left_out():
    p, y = predictions(classes=3)
    y = y.clamp(max=1)  # nobody is of class 2
    score = Tree(correct=torch.tensor(1), loss=torch.tensor(0.0), examples=torch.tensor(len(y)), **detail(p, y))
    assert math.isnan(by_class(score)["sensitivity"][2]) and "sensitivity/2" not in each_class(score)
    assert "auroc/0" in each_class(score) and "auroc/2" not in each_class(score)
    assert measured([score])["balanced_accuracy"] == pytest.approx(sum(by_class(score)["sensitivity"][:2]) / 2)


def test_pooled_over_clients_counts_images():
    parts = [(p, y) for p, y in (predictions(20, seed=s) for s in (1, 2))]
    scores = [
        Tree(correct=(p.argmax(1) == y).sum(), loss=torch.tensor(1.0), examples=torch.tensor(len(y)), **detail(p, y))
        for p, y in parts
    ]
    whole = detail(torch.cat([p for p, _ in parts]), torch.cat([y for _, y in parts]))
    pooled = pooled_scores(scores)
    assert torch.equal(pooled.confusion, whole.confusion)
    assert torch.allclose(pooled.calibration, whole.calibration)
    assert torch.allclose(pooled.auroc, (scores[0].auroc + scores[1].auroc) / 2)


def test_the_best_round_is_the_first_that_none_surpasses():
    assert best_round("loss", {1: 0.5, 2: 0.3, 3: 0.3, 4: float("nan")}) == 2
    assert best_round("auroc", {1: 0.5, 2: 0.8, 3: 0.7}) == 2
    assert best_round("ece", {}) is None
