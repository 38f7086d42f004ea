"""results/scaffold_sizes.md has the numbers of its raw data, and no others."""

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"
PAGE = (RESULTS / "scaffold_sizes.md").read_text("utf-8")
CELLS = {
    "FedAvg": "fedavg",
    "SCAFFOLD as printed": "scaffold",
    "SCAFFOLD, `algorithm.by=samples`": "scaffold, by samples",
    "SCAFFOLD, `local.steps=80`": "scaffold, steps",
    "SCAFFOLD, shorter corrections for long paths": "scaffold, even",
    "both: by samples, shorter corrections": "scaffold, by samples, even",
}
FACTORS = {  # change -> cells of FedAvg and of SCAFFOLD
    "none": ("fedavg", "scaffold"),
    "everyone in every round": ("fedavg, everyone", "scaffold, everyone"),
    "no momentum, ten times the rate": ("fedavg, no momentum", "scaffold, no momentum"),
    "models and controls by size": (None, "scaffold, by samples"),
}
ON_CIFAR = FACTORS | {
    "80 steps for everyone": ("fedavg, steps", "scaffold, steps"),
    "models by size, controls uniform": (None, "scaffold, models weighed"),
    "updates per step, as in FedNova": (None, "scaffold, normalise"),
    "correction capped at the gradient's norm": (None, "scaffold, cap"),
}
ON_DIGITS = FACTORS | {
    "50 steps for everyone": ("fedavg, steps", "scaffold, steps"),
    "uniform weights (FedAvg), models by size (SCAFFOLD)": ("fedavg, uniform", "scaffold, models weighed"),
    "updates per step, as in FedNova": ("fednova", None),
    "`algorithm.clip=10`": (None, "scaffold, clip"),
}
DIALECTS = re.compile(r"`(\w+)`")


def measured(name):
    cells = json.loads((RESULTS / "data" / f"{name}.json").read_text("utf-8"))["cells"]
    return {(one["dialect"], one["cell"], one["seed"]): 100 * one["last_ten"] for one in cells}


def rows(heading):
    """Of the first table after these words: first cell -> the others."""
    lines = PAGE.partition(heading)[2].splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("| "))
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin : lines.index("", begin)]]
    return {name: others for name, *others in table[2:]}


def agree(text, expected):
    """A number of the page, or one for each seed, to the digit that is shown."""
    shown = [float(part.strip(" *")) for part in text.split("/")] if text else []
    assert len(shown) == len(expected), (text, expected)
    return all(abs(a - b) <= 0.0501 for a, b in zip(shown, expected, strict=True))


def test_cifar10_by_seed():
    runs = measured("scaffold_sizes")
    table = rows("## Unequal sizes")
    assert table.keys() == CELLS.keys()
    for name, shown in table.items():
        values = [runs["class", CELLS[name], seed] for seed in (0, 1, 2)]
        assert all(agree(text, [value]) for text, value in zip(shown, [*values, sum(values) / 3], strict=True)), name


@pytest.mark.parametrize(
    ("heading", "data", "cells", "seeds"),
    [
        ("## One factor at a time, seed 0", "scaffold_sizes", ON_CIFAR, (0,)),
        ("One factor at a time, unequal sizes", "scaffold_sizes_digits", ON_DIGITS, (0, 1)),
    ],
)
def test_one_factor_at_a_time(heading, data, cells, seeds):
    runs, table = measured(data), rows(heading)
    assert table.keys() == cells.keys()
    for change, shown in table.items():
        for text, cell in zip(shown, cells[change], strict=True):
            assert agree(text, [runs["class", cell, seed] for seed in seeds] if cell else []), (change, cell)


@pytest.mark.parametrize(
    ("heading", "data", "seeds", "beside"),
    [("## Other dialects", "scaffold_sizes", (0,), 0), ("## Digits, two seeds", "scaffold_sizes_digits", (0, 1), 1)],
)
def test_dialects(heading, data, seeds, beside):
    runs, table = measured(data), rows(heading)
    for name, shown in table.items():
        dialect = DIALECTS.search(name)[1]
        for text, cell in zip(
            shown[beside:], ("fedavg", "scaffold", "scaffold, by samples", "scaffold, steps"), strict=True
        ):
            known = [runs[dialect, cell, seed] for seed in seeds if (dialect, cell, seed) in runs]
            assert agree(text, known), (name, cell)


def test_verdicts():
    cifar, digits = measured("scaffold_sizes"), measured("scaffold_sizes_digits")
    ahead = {
        cell: [cifar["class", cell, seed] > cifar["class", "fedavg", seed] for seed in (0, 1, 2)]
        for cell in ("scaffold", "scaffold, by samples", "scaffold, steps")
    }
    unequal = {
        cell: [digits[d, cell, seed] > digits[d, "fedavg", seed] for d in ("class", "balanced") for seed in (0, 1)]
        for cell in ahead
    }
    assert [sum(of) for of in ahead.values()] == [2, 3, 3]
    assert [sum(of) for of in unequal.values()] == [2, 2, 4]
    verdict = {name: (said, how) for name, (said, how) in rows("# SCAFFOLD where").items()}
    other = cifar["balanced", "scaffold", 0] > cifar["balanced", "fedavg", 0]
    assert sum([*ahead["scaffold"], *unequal["scaffold"], other]) == 4 and len(unequal["scaffold"]) == 4
    said, how = verdict["SCAFFOLD beats FedAvg at unequal sizes"]
    assert how == "not confirmed" and "four of eight pairs" in said
    assert "two of four" in verdict["Weights by size in model and control mend it"][0]
    assert "all four" in verdict["Equal local steps mend it"][0]
