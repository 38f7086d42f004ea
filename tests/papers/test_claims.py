"""docs/claims.yaml: numbers that follow from a paper's own tables, computed from them again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fedlens.papers.registry import reproducible
from fedlens.privacy.gaussian import gaussian_delta

CLAIMS = yaml.safe_load((Path(__file__).parents[2] / "docs" / "claims.yaml").read_text("utf-8"))
BASELINES = ("fedavg", "fedprox", "moon", "feddecorr", "fedau")
DATA, ALPHAS = ("cifar10", "cifar100", "cinic10", "tiny_imagenet"), ("0.5", "0.1", "0.05")
GRADIENTS = ("inputxgrad", "smoothgrad", "ig")
FEDXDS_BASELINES = ("fedavg", "fedprox", "feddyn", "scaffold", "fedsam", "feddisco", "fedfed", "fedftg", "fedgen")
K10 = "cifar10/K10/0.1"
EVERY = [f"K{k}/{alpha}" for k in (10, 100) for alpha in ("0.05", "0.1")]


def said(paper: str, begins: str) -> dict[str, str]:
    """The one claim that begins so."""
    found = [one for one in CLAIMS[paper]["claims"] if one["claim"].startswith(begins)]
    assert len(found) == 1, begins
    return found[0]


def numbers(paper: str, table: str) -> Callable[[str, str], float]:
    of = reproducible()[f"{paper}/{table}"].paper
    return lambda row, column: of[row, column].mean


def fedsls(row: str, data: str, alpha: str) -> float:
    return numbers("fedsls", "table1")(row, f"{data}/{alpha}")


def leads(over: str, data: str) -> list[float]:
    return [fedsls("fedsls", data, alpha) - fedsls(over, data, alpha) for alpha in ALPHAS]


def nearest(data: str) -> list[float]:
    return [min(lead) for lead in zip(*(leads(over, data) for over in BASELINES), strict=True)]


def listed(values: list[float], digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def is_growing(values: list[float]) -> bool:
    return values == sorted(values) and len(set(values)) == len(values)


# ---- FedSLS ----------------------------------------------------------------------------------------------------------
def test_fedsls_over_the_nearest_baseline():
    names = ("CIFAR-10", "CIFAR-100", "CINIC-10", "Tiny-ImageNet")
    found = {name: nearest(data) for name, data in zip(names, DATA, strict=True)}
    told = said("fedsls", "It improves significantly")
    assert "; ".join(f"{name} {listed(values)}" for name, values in found.items()) in told["paper"]
    more = [values[2] - values[0] for values in found.values()]
    assert min(map(min, found.values())) > 0 and sum(one > 0 for one in more) == 3 and round(max(more), 1) == 0.6
    deviations = reproducible()["fedsls/table1"].paper
    places = [(data, alpha, lead) for data in DATA for alpha, lead in zip(ALPHAS, nearest(data), strict=True)]
    assert sum(lead < (deviations["fedsls", f"{data}/{alpha}"].std or 0) for data, alpha, lead in places) == 3


def test_fedsls_figure_1():
    found = {(over, data): leads(over, data) for over in ("fedavg", "fedau") for data in ("cifar10", "cinic10")}
    told = said("fedsls", "Its gain over FedAvg and FedAU")["paper"]
    assert all(listed(values) in told for values in found.values())
    assert sum(map(is_growing, found.values())) == 3 and not is_growing(found["fedavg", "cinic10"])


def test_fedsls_gains_of_other_baselines():
    gains = {
        (row, data): [fedsls(row, data, alpha) - fedsls("fedavg", data, alpha) for alpha in ALPHAS]
        for row in BASELINES[1:]
        for data in DATA
    }
    assert (len(gains), sum(one[0] < one[2] for one in gains.values())) == (16, 10)
    assert sum(one[0] < min(one[1:]) for one in gains.values()) == 5
    assert all(one[0] > one[2] for (_, data), one in gains.items() if data == "cifar100")


def test_fedsls_on_tiny_imagenet():
    every = [lead for over in BASELINES for lead in leads(over, "tiny_imagenet")]
    told = said("fedsls", "On Tiny-ImageNet")["paper"]
    over = leads("moon", "tiny_imagenet")
    assert told == f"{sum(every) / len(every):.1f} on average; {over[0]:.2f}, {over[1]:.2f} and {over[2]:.2f} over MOON"
    order = "tiny_imagenet", "cifar10", "cinic10", "cifar100"
    lost = [fedsls("fedavg", data, "0.5") - fedsls("fedavg", data, "0.05") for data in order]
    assert f"Single leads are {min(every):.1f} to {max(every):.1f}." in said("fedsls", "On Tiny-ImageNet")["why"]
    words = f"FedAvg loses {lost[0]:.1f} from 0.5 to 0.05 there, {lost[1]:.1f} on CIFAR-10, {lost[2]:.1f} on CINIC-10"
    assert said("fedsls", "Alpha matters little")["paper"] == f"{words}, {lost[3]:.1f} on CIFAR-100"


def test_fedsls_without_saliency():
    shares = []
    for data in DATA:
        best = max(fedsls(f"fedsl{factor}", data, "0.5") for factor in (2, 4, 8))
        shares.append(round(100 * (best - fedsls("fedavg", data, "0.5")) / leads("fedavg", data)[0]))
    assert "{}, {}, {} and {} %".format(*shares) in said("fedsls", "That FedSL beats")["paper"]


def test_fedsls_megabytes():
    each = 89.38e6 / 4 / 1000  # of float32
    assert round(50 * 89.38) == 4469 and round(each) == 22345 > 7 * 3 * 32**2
    assert "22,345 numbers an image over all layers" in said("fedsls", "The latents have fewer")["paper"]


# ---- FedXDS ----------------------------------------------------------------------------------------------------------
def test_fedxds_other_attributions():
    own, public = numbers("fedxds", "table1"), numbers("fedxds", "public")

    def ahead(attribution: str, column: str) -> list[str]:
        values = {row: own(row, column) for row in FEDXDS_BASELINES} | {
            row: public(row, column) for row in ("fedaux", "feddf")
        }
        return [row for row, value in values.items() if value > own(f"fedx_{attribution}", column)]

    found = [len(ahead(name, K10)) for name in GRADIENTS]
    assert (min(found), max(found)) == (5, 8) and "five to eight of eleven" in said("fedxds", "Other attr")["why"]
    columns = [f"cifar100/{column}" for column in EVERY]
    assert {row for column in columns for name in GRADIENTS for row in ahead(name, column)} == {"fedfed"}


def test_fedxds_sparsity():
    of, last = numbers("fedxds", "table5"), numbers("fedxds", "table1")("fedavg", K10)
    lost = {name: of("60", name) - of("85", name) for name in (*GRADIENTS, "lrp")}
    others = [lost[name] for name in GRADIENTS]
    words = f"LRP loses {lost['lrp']:.1f}, the three gradients {min(others):.1f} to {max(others):.1f}"
    assert words in said("fedxds", "FedXDS is stable as more pixels go")["paper"]
    below = [step for step in ("60", "65", "70", "75", "80", "85") if all(of(step, g) < last for g in GRADIENTS)]
    assert below == ["75", "80", "85"] and min(of("85", name) for name in lost) > 68


def test_fedxds_with_more_clients():
    of, own = numbers("fedxds", "table4"), numbers("fedxds", "table1")
    told = said("fedxds", "Base methods gain most")["paper"]
    few, many = "cifar10/K10/0.1", "cifar10/K100/0.1"
    for name, row in {"FedAvg": "fedavg", "FedProx": "fedprox", "SCAFFOLD": "scaffold", "FedDyn": "feddyn"}.items():
        gains = [of(f"{row}+fedxds", column) - of(row, column) for column in (few, many)]
        assert f"{name} {gains[0]:+.2f} to {gains[1]:+.2f}" in told
        assert (gains[0] < gains[1]) is (row != "feddyn") and of(f"{row}+fedxds", few) - own(row, few) < gains[1]


def test_fedxds_on_cifar100():
    of, public = numbers("fedxds", "table1"), numbers("fedxds", "public")

    def lead(over: str, data: str, column: str) -> float:
        theirs = of if over in FEDXDS_BASELINES else public
        return of("fedx_lrp", f"{data}/{column}") - theirs(over, f"{data}/{column}")

    narrow = {
        (over, column): lead(over, "cifar100", column) < lead(over, "cifar10", column)
        for over in (*FEDXDS_BASELINES, "fedaux", "feddf")
        for column in EVERY
    }
    strong = [value for (_, column), value in narrow.items() if column.endswith(".05")]
    assert (len(narrow), sum(narrow.values()), len(strong), sum(strong)) == (44, 28, 22, 20)
    assert lead("fedfed", "cifar100", "K10/0.05") == pytest.approx(-0.2)


@pytest.mark.parametrize(("epsilon", "distance"), [(20, 0.42), (5, 1.7), (1, 8.4)])
def test_fedxds_theorem_1(epsilon, distance):
    """Of the identity, whose sensitivity is one: beyond this distance delta is more than stated, and goes to one."""
    delta = 1e-5
    sigma = math.sqrt(2 * math.log(1.25 / delta)) / epsilon

    def true(d: float) -> float:
        return gaussian_delta(sigma, epsilon * d, d)

    assert true(0.98 * distance) < delta < true(1.02 * distance) and true(30 * distance) > 0.99
    assert f"{distance} " in said("fedxds", "Noise of equation 2")["ours"]


# ---- SPATL and PSE ---------------------------------------------------------------------------------------------------
def test_spatl_bytes():
    """A round by algorithm 2: model and control down, kept filters and the control's change up."""
    kept = {"ResNet-20": 0.84, "ResNet-32": 0.82, "VGG-11": 0.70}
    shares = {name: 100 * share / (3 + share) for name, share in kept.items()}
    told = said("spatl", "Clients communicate only")["ours"]
    assert [f"{share:.0f}" for share in shares.values()] == ["22", "21", "19"] and "22 %" in told
    table = {"ResNet-20": (2.1, 2.1), "ResNet-32": (3.6, 3.2), "VGG-11": (61.3, 42)}
    ratios = [ours / theirs for ours, theirs in table.values()]
    assert (min(ratios), round(max(ratios), 1)) == (1.0, 1.5)


def test_spatl_saves_by_its_own_formula():
    cost = {"fednova": 159 * 84, "spatl": 46 * 61.3}  # rounds times megabytes of a client's round
    saved = 10 * (cost["fednova"] - cost["spatl"]) / 1000
    assert round(saved) == 105 and "it is 105" in said("spatl", "It saves up to 108 GB")["why"]


def equation_8(weights: Any, theirs: Any, above: Any, above_theirs: Any, xi: float = 0.01) -> float:
    """Its pull where a filter's evidence is the weight above it."""
    gap = (above_theirs.sigmoid() - above.sigmoid()).clamp(min=0)
    excited = (gap >= gap.mean()) & (gap > 0)
    return float(xi / 2 * (excited * (weights - theirs) ** 2).sum())


def test_pse_s_objective_jumps():
    weights, theirs, above = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]), torch.ones(2)
    sides = [
        equation_8(weights, theirs, torch.tensor([at, 0.6], dtype=torch.float64), above.double())
        for at in (0.6 - 1e-6, 0.6 + 1e-6)
    ]
    assert sides == pytest.approx([0.00125, 0.01125])
    assert "from 0.001 to 0.011" in said("pse", "The theorems are about")["ours"]
