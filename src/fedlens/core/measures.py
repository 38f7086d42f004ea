"""Measures beside accuracy: balanced accuracy, AUROC, sensitivity, specificity, calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .errors import BadInput, nearest
from .tree import Tree

BINS = 15  # of confidence, for the calibration error
MEASURES = ("accuracy", "loss", "balanced_accuracy", "auroc", "ece")
LOWER_IS_BETTER = ("loss", "ece")
BY_CLASS = ("sensitivity", "specificity", "auroc")  # with a class behind a slash: sensitivity/ill, sensitivity/0


def check_measure(key: str, name: str) -> None:
    """Refuses what no evaluation measures; whether there is such a class, the data know."""
    base, slash, label = name.partition("/")
    if name not in MEASURES and not (base in BY_CLASS and slash and label):
        known = (*MEASURES, *(f"{each}/CLASS" for each in BY_CLASS))
        raise BadInput(f"{key} {name} is no measure; {nearest(name, known)}")


def numbered(key: str, name: str, classes: Sequence[str]) -> str:
    """A measure as tables have it, its class by number: sensitivity/1 for sensitivity/ill."""
    check_measure(key, name)
    base, slash, label = name.partition("/")
    if not slash:
        return name
    if label in classes:
        return f"{base}/{classes.index(label)}"
    if label.isascii() and label.isdigit() and int(label) < len(classes):
        return f"{base}/{int(label)}"
    raise BadInput(f"{key} {name}: there is no class {label!r}; {nearest(label, classes)}")


def detail(probabilities: Tensor, y: Tensor) -> Tree:
    """What the measures are made of. Confusion [truth, prediction] and calibration [bin, (examples, confidence,
    correct)] add up over parts of a test set; auroc [class], one against the rest, does not: NaN where a class is
    absent or alone."""
    classes = probabilities.shape[1]
    confidence, predicted = probabilities.max(1)
    confusion = torch.zeros(classes, classes, dtype=torch.long, device=y.device)
    confusion.view(-1).index_add_(0, y * classes + predicted, torch.ones_like(y))
    at = (confidence * BINS).long().clamp(0, BINS - 1)
    rows = torch.stack([torch.ones_like(confidence), confidence, (predicted == y).double()], 1)
    calibration = torch.zeros(BINS, 3, dtype=torch.float64, device=y.device).index_add_(0, at, rows)
    each = [_auroc(probabilities[:, k], y == k) for k in range(classes)]
    return Tree(confusion=confusion, calibration=calibration, auroc=torch.tensor(each, dtype=torch.float64))


def _auroc(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs of a positive and a negative that are in order; ties count half."""
    positives = int(positive.sum())
    negatives = len(scores) - positives
    if not positives or not negatives:
        return float("nan")
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    rank = count.cumsum(0).double() - (count - 1).double() / 2  # the mean rank of equal scores, from one
    return (float(rank[place][positive].sum()) - positives * (positives + 1) / 2) / (positives * negatives)


def pooled_scores(scores: Sequence[Tree]) -> Tree:
    """Of several clients as one, with the mean of the AUROCs that each has: scores of different models do not
    compare."""
    sums = {name: torch.stack([each[name] for each in scores]).sum(0) for name in scores[0].keys() - {"auroc"}}
    if "auroc" not in scores[0]:
        return Tree(sums)
    return Tree(**sums, auroc=torch.stack([each.auroc for each in scores]).nanmean(0))


def measured(scores: Sequence[Tree]) -> dict[str, float]:
    """accuracy and loss; of detailed scores balanced_accuracy, auroc (means over the classes that there are) and ece,
    too. Those without a value are left out."""
    score = pooled_scores(scores)
    found = {name: float(score[key]) / int(score.examples) for name, key in (("accuracy", "correct"), ("loss", "loss"))}
    if "confusion" not in score:
        return found
    parts = by_class(score)
    more = {"balanced_accuracy": _mean(parts["sensitivity"]), "auroc": _mean(parts["auroc"]), "ece": _ece(score)}
    return found | {name: value for name, value in more.items() if value == value}


def measure_value(scores: Sequence[Tree], name: str) -> float | None:
    """Of one measure, with its class by number; None where the images leave it open."""
    found = measured(scores)
    if "/" in name:
        found |= each_class(pooled_scores(scores), confusion=False)
    return found.get(name)


def each_class(score: Tree, confusion: bool = True) -> dict[str, float]:
    """The measures of each class by name and class, such as sensitivity/3; and counts such as confusion/3/5 (truth,
    then prediction). What the test images leave open is left out."""
    found = {f"{name}/{k}": value for name, values in by_class(score).items() for k, value in enumerate(values)}
    if confusion:
        rows = score.confusion.tolist()
        found |= {
            f"confusion/{a}/{b}": float(count) for a, row in enumerate(rows) for b, count in enumerate(row) if count
        }
    return {name: value for name, value in found.items() if value == value}


def by_class(detail: Tree) -> dict[str, list[float]]:
    """Sensitivity, specificity and auroc of each class; NaN where the test images leave it open."""
    confusion = detail.confusion.double()
    hits, truth, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    negatives = confusion.sum() - truth
    specificity = (negatives - (predicted - hits)) / negatives
    return {
        "sensitivity": (hits / truth).tolist(),
        "specificity": specificity.tolist(),
        "auroc": detail.auroc.tolist(),
    }


def _ece(detail: Tree) -> float:
    examples, confidence, correct = detail.calibration.unbind(1)
    return float((confidence - correct).abs().sum() / examples.sum())


def _mean(values: Sequence[float]) -> float:
    there = [value for value in values if value == value]
    return sum(there) / len(there) if there else float("nan")


def better(measure: str, new: float, old: float) -> bool:
    return new < old if measure in LOWER_IS_BETTER else new > old


def best_round(measure: str, values: Mapping[int, float]) -> int | None:
    """The first round that none surpasses."""
    best: int | None = None
    for round, value in sorted(values.items()):
        if value == value and (best is None or better(measure, value, values[best])):
            best = round
    return best
