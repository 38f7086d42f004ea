"""A ranking from several worlds of the league: nearer ones count more, and what is not sure is said so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REFERENCE = "fedavg"
_CLOSEST = 0.05  # a distance below which worlds count alike


@dataclass(frozen=True)
class Advantage:
    """A method against FedAvg, over the worlds that have both."""

    method: str
    over: float  # accuracy less FedAvg's, weighted
    low: float | None  # of a 95 % interval; None where one world and one seed cannot tell
    high: float | None
    accuracy: float
    worlds: int
    cost: str  # beside FedAvg's, as the league measured it


def fitting(near: Sequence[Mapping[str, Any]], clients: int) -> list[Mapping[str, Any]]:
    """Of worlds that are near enough, those whose number of clients is nearest: others are left out."""
    away = [abs(math.log(result["clients"] / clients)) for result in near]
    return [result for result, ratio in zip(near, away, strict=True) if ratio <= min(away) + 1e-9]


def placed(worlds: Sequence[tuple[float, Mapping[str, Any]]], kind: str) -> list[Advantage]:
    """All methods, the best first. worlds: (distance from the user's split, what was measured there)."""
    names = dict.fromkeys(name for _, result in worlds for name in result[kind])
    usual = _usual(worlds, kind)
    found = [one for name in names if (one := _placed(name, worlds, kind, usual)) is not None]
    return sorted(found, key=lambda one: -one.over)


def _placed(
    method: str, worlds: Sequence[tuple[float, Mapping[str, Any]]], kind: str, usual: float
) -> Advantage | None:
    both, over, weights = _beside(method, worlds, kind)
    if not both:
        return None
    middle = _mean(over, weights)
    spread = _uncertain([result for _, result in both], method, kind, over, weights, usual)
    low, high = (None, None) if spread is None else (middle - 1.96 * spread, middle + 1.96 * spread)
    accuracy = _mean([result[kind][method] for _, result in both], weights)
    return Advantage(method, middle, low, high, accuracy, len(both), _cost([result for _, result in both], method))


def _beside(
    method: str, worlds: Sequence[tuple[float, Mapping[str, Any]]], kind: str
) -> tuple[list[tuple[float, Mapping[str, Any]]], list[float], list[float]]:
    """(Worlds that have it and FedAvg, its differences there, and how much each counts.)"""
    both = [(far, result) for far, result in worlds if {method, REFERENCE} <= result[kind].keys()]
    over = [result[kind][method] - result[kind][REFERENCE] for _, result in both]
    return both, over, [1 / (far + _CLOSEST) for far, _ in both]


def _between(over: Sequence[float], weights: Sequence[float]) -> float | None:
    """The variance of a difference from world to world; None where one world cannot tell."""
    shares = [weight / sum(weights) for weight in weights]
    effective = 1 / sum(share**2 for share in shares) if shares else 0.0
    if len(over) < 2 or effective <= 1:
        return None
    middle = _mean(over, weights)
    return sum(s * (d - middle) ** 2 for s, d in zip(shares, over, strict=True)) * effective / (effective - 1)


def _usual(worlds: Sequence[tuple[float, Mapping[str, Any]]], kind: str) -> float:
    """That variance, a mean over the methods that have several of these worlds: one that has one borrows it."""
    names = {name for _, result in worlds for name in result[kind]} - {REFERENCE}
    found = [one for name in names if (one := _between(*_beside(name, worlds, kind)[1:])) is not None]
    return math.fsum(found) / len(found) if found else 0.0


def _uncertain(
    results: Sequence[Mapping[str, Any]],
    method: str,
    kind: str,
    over: Sequence[float],
    weights: Sequence[float],
    usual: float,
) -> float | None:
    """The standard error of the weighted mean: worlds differ among themselves, and seeds within each."""
    shares = [weight / sum(weights) for weight in weights]
    between = _between(over, weights)
    between = usual if between is None else between
    within = []
    for result in results:
        stds = [result.get("deviation", {}).get(kind, {}).get(name) for name in (method, REFERENCE)]
        known = [std for std in stds if std is not None]
        within.append(
            sum(std**2 for std in known) / result["seeds"] if len(known) == 2 and method != REFERENCE else None
        )
    if method == REFERENCE:
        return 0.0
    if len(over) == 1 and within[0] is None and not between:
        return None
    variances = [between + (one or 0.0) for one in within]
    return math.sqrt(sum(share**2 * variance for share, variance in zip(shares, variances, strict=True)))


def failed(one: Advantage, worlds: Sequence[Mapping[str, Any]], kind: str, margin: float) -> str:
    """Why a method is not proposed, however wide its interval: it is behind FedAvg, or a run of it broke down."""
    for result in worlds:
        least = result.get("least", {}).get(kind, {}).get(one.method, result[kind].get(one.method))
        usual = result[kind].get(REFERENCE)
        if least is not None and usual is not None and least < usual / 2:
            return f"a run on {result['data']} ended at {100 * least:.1f} %, {REFERENCE} there at {100 * usual:.1f}"
    return f"{-100 * one.over:.1f} points behind {REFERENCE} there" if one.over < -margin else ""


def overlaps(one: Advantage, top: Advantage, margin: float) -> bool:
    """Whether a method cannot be told from the best; FedAvg cannot where it may be the best's equal."""
    if one.method == REFERENCE and top.low is not None and top.low <= 0:
        return True
    reach, least = one.high if one.high is not None else one.over, top.over - margin
    if top.low is not None and top.worlds < one.worlds:  # a best that fewer worlds know rules out less
        least = min(top.low, least)
    return reach >= least


def settings_of(worlds: Sequence[Mapping[str, Any]], method: str) -> list[str]:
    """What a method ran with in the first of these worlds that has it, as words; none where that is its default."""
    first = next((one for one in worlds if method in {**one["global"], **one["personal"]}), {})
    return list(first.get("settings", {}).get(method, ()))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _cost(results: Sequence[Mapping[str, Any]], method: str) -> str:
    """Bytes and seconds of a run as multiples of FedAvg's."""
    told = []
    for name, words in (("bytes", "bytes"), ("seconds", "seconds")):
        pairs = [(r.get(name, {}).get(method), r.get(name, {}).get(REFERENCE)) for r in results]
        ratios = [mine / theirs for mine, theirs in pairs if mine is not None and theirs]
        if ratios:
            told.append(f"{sum(ratios) / len(ratios):.1f}x {words}")
    return ", ".join(told)
