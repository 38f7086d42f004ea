"""How well guesses separate members from others, with intervals; refuses what so few samples cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import BadInput
from ..core.rng import generator, key

_DRAWS = 300  # of the bootstrap
_LEVEL = 0.95


@dataclass(frozen=True)
class Measure:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.2f}, {self.high:.2f}]"


def over_seeds(measures: Sequence[Measure]) -> Measure:
    """The mean, in the mean interval stretched by how far seeds lie apart."""
    count = len(measures)
    value, low, high = (math.fsum(getattr(m, end) for m in measures) / count for end in ("value", "low", "high"))
    return Measure(value, min(low, *(m.value for m in measures), value), max(high, *(m.value for m in measures), value))


def merged(by_seed: Sequence[Mapping[str, Measure]]) -> dict[str, Measure]:
    """Every measure over all seeds."""
    return {name: over_seeds([one[name] for one in by_seed]) for name in by_seed[0]}


# ---- members against others -----------------------------------------------------------------------------------------
def auc(scores: Tensor, member: Tensor) -> float:
    """The chance that a member scores above another image, ties counted half (Mann and Whitney)."""
    inside, outside = scores[member].double(), scores[~member].double().sort().values
    below, up_to = (torch.searchsorted(outside, inside, right=right).double() for right in (False, True))
    return float((below + up_to).mean() / (2 * len(outside)))


def true_rate(scores: Tensor, member: Tensor, fpr: float) -> Measure:
    """Members found while at most this share of others is: Clopper and Pearson's interval, the threshold as given."""
    outside = scores[~member]
    check_rate(fpr, len(outside))
    allowed = int(fpr * len(outside) + 1e-9)
    threshold = outside.sort(descending=True).values[allowed]  # the first that must not be taken for a member
    found, count = int((scores[member] > threshold).sum()), int(member.sum())
    return Measure(found / count, *clopper_pearson(found, count))


def check_rate(fpr: float, others: int) -> None:
    """One false alarm must be rarer than the rate allows, or the rate cannot be seen."""
    if not 0 < fpr < 1:
        raise BadInput(f"--fpr is {fpr:g}, but it should lie between 0 and 1")
    if fpr * others < 1 - 1e-9:
        raise BadInput(
            f"--fpr {fpr:g} needs at least {math.ceil(1 / fpr - 1e-9)} images that nobody trained on, and there are "
            f"{others}; ask for a higher rate, or for more --candidates"
        )


def balanced_accuracy(scores: Tensor, member: Tensor, seed: int = 0) -> Measure:
    """Of the best threshold on one half of the images, asked about the other half, both ways: no threshold is marked
    by the images it was fitted to."""
    half = torch.zeros(len(scores), dtype=torch.bool)
    for kind in (member, ~member):
        places = kind.nonzero()[:, 0]
        half[places[torch.randperm(len(places), generator=generator(key(seed, "halves")))[::2]]] = True
    guessed = torch.empty(len(scores), dtype=torch.bool)
    for part in (half, ~half):
        guessed[~part] = scores[~part] > _best_threshold(scores[part], member[part])
    return bootstrap(_mean_of_both, (guessed == member).double(), member)


def _mean_of_both(right: Tensor, member: Tensor) -> float:
    return float(right[member].mean() + right[~member].mean()) / 2


def _best_threshold(scores: Tensor, member: Tensor) -> Tensor:
    order = scores.unique()
    inside, outside = scores[member].sort().values, scores[~member].sort().values
    hits = 1 - torch.searchsorted(inside, order, right=True) / len(inside)
    alarms = 1 - torch.searchsorted(outside, order, right=True) / len(outside)
    return order[(hits - alarms).argmax()]


def bootstrap(f: Callable[[Tensor, Tensor], float], scores: Tensor, member: Tensor, seed: int = 0) -> Measure:
    """f(scores, member) and the interval of its value over samples drawn again, members and others apart."""
    draw, kinds = generator(key(seed, "bootstrap")), [member.nonzero()[:, 0], (~member).nonzero()[:, 0]]
    values = []
    for _ in range(_DRAWS):
        index = torch.cat([places[torch.randint(len(places), (len(places),), generator=draw)] for places in kinds])
        values.append(f(scores[index], member[index]))
    low, high = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)
    )
    value = f(scores, member)
    return Measure(value, min(float(low), value), max(float(high), value))


def membership(scores: Tensor, member: Tensor, fprs: Sequence[float]) -> dict[str, Measure]:
    """AUC, balanced accuracy, and the share of members found at each of these rates of false alarms."""
    scores, member = scores.detach().double().cpu(), member.cpu()
    rates = {f"TPR at {100 * fpr:g} % FPR": true_rate(scores, member, fpr) for fpr in fprs}
    return {
        "AUC": bootstrap(auc, scores, member),
        "balanced accuracy": balanced_accuracy(scores, member),
        **rates,
    }


# ---- shares and means -----------------------------------------------------------------------------------------------
def clopper_pearson(found: int, count: int) -> tuple[float, float]:
    """The exact interval of a share (Clopper & Pearson, 1934), by bisection on the binomial tail."""
    tail = (1 - _LEVEL) / 2
    low = 0.0 if found == 0 else _bisect(lambda p: _at_least(found, count, p) < tail)
    high = 1.0 if found == count else _bisect(lambda p: 1 - _at_least(found + 1, count, p) > tail)
    return low, high


def share(found: int, count: int) -> Measure:
    return Measure(found / count, *clopper_pearson(found, count))


def mean(values: Tensor, seed: int = 0) -> Measure:
    """Of one number for each image, with the bootstrap's interval."""
    values, draw = values.detach().double().cpu(), generator(key(seed, "bootstrap"))
    index = torch.randint(len(values), (_DRAWS, len(values)), generator=draw)
    ends = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)
    low, high = values[index].mean(1).quantile(ends)
    return Measure(float(values.mean()), float(low), float(high))


def _at_least(found: int, count: int, p: float) -> float:
    """P(X >= found) of a binomial variable."""
    if p <= 0 or p >= 1:
        return float(p >= 1)
    k = torch.arange(found, count + 1, dtype=torch.float64)
    n = torch.tensor(float(count), dtype=torch.float64)
    chosen = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return float((chosen + k * math.log(p) + (n - k) * math.log1p(-p)).exp().sum())


def _bisect(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2
