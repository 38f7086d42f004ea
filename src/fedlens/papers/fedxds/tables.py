"""FedXDS (Hoefler, Mueller & Samek, 2025): tables 1 to 6, figures 2c and 2d, and what it is that helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...runs.grid import Column, Grid, Reported, Row

# Local training as in the released code, since the paper's main text gives none of it; but images are only cropped and
# flipped. There RandAugment and a cutout follow: the columns of RELEASED. The text says Dirichlet and no more; the code
# draws by the self-balancing rule.
WORDS = (
    "partition=dirichlet",
    "partition.dialect=balanced",
    "model=resnet8",
    "rounds=200",
    "local.epochs=5",
    "local.batch_size=64",
    "local.lr=0.01",
    "local.momentum=0.9",
    "local.weight_decay=0.0001",
    "augment=crop_flip",
    "evaluate.last=10",
    "evaluate.personal=none",
    "checkpoint=20",
)
CLIENTS = {"K10": ("clients=10", "cohort=5"), "K100": ("clients=100", "cohort=10")}
TARGETS = {"cifar10": ("0.7", "0.6"), "cifar100": ("0.4", "0.3"), "tiny_imagenet": ("0.35", "0.3")}  # K10, K100
TO_TARGETS = "rounds to 70 and 60 % on CIFAR-10, 40 and 30 % on CIFAR-100, 35 and 30 % on Tiny-ImageNet (K = 10, 100)"
ALPHAS = ("0.05", "0.1")
PAPER = "algorithm=fedxds/paper"
ATTRIBUTIONS = ("inputxgrad", "smoothgrad", "ig", "lrp")
BASES = ("fedavg", "fedprox", "feddyn", "scaffold")
METHODS = {
    **{name: (f"algorithm={name}",) for name in (*BASES, "fedsam", "feddisco", "fedfed", "fedftg", "fedgen")},
    "fedavg_uniform": ("algorithm=fedavg", "weighting=uniform"),  # as section 2.1 prints it
    **{f"fedx_{name}": (PAPER, f"algorithm.attribution={name}") for name in reversed(ATTRIBUTIONS)},
    # Equation 6 keeps the pixels of input x gradient, which table 1 has 9.5 points below LRP: the code has other rules.
    "fedx_lrp_code": (PAPER, "algorithm.lrp=epsilon_plus_flat"),
}
# The paper names no public data: CIFAR-100 for CIFAR-10 as in FedDF; photographs for the others.
PUBLIC = {
    "cifar10": ("auxiliary=cifar100",),
    "cifar100": ("auxiliary=tiny_imagenet", "auxiliary.size=32"),
    "tiny_imagenet": ("auxiliary=cifar100",),
}
PHOTOGRAPHS = "auxiliary=tiny_imagenet"
WITH_PUBLIC_DATA = {name: Row((f"algorithm={name}",)) for name in ("fedaux", "feddf")}

# Table 1, by data set, K and alpha.
_TABLE1 = {
    "fedavg": "64.16±.71 72.90±.55 55.53±.82 60.94±.68 43.82±.45 44.57±.51 "
    "32.99±.73 35.59±.62 30.30±.59 34.41±.48 26.20±.81 28.79±.75",
    "fedprox": "71.56±.65 74.31±.49 51.89±.91 65.01±.53 44.33±.38 48.67±.47 "
    "37.79±.55 38.43±.49 33.27±.42 34.54±.51 24.15±.88 30.23±.67",
    "feddyn": "70.62±.58 78.25±.34 63.09±.61 69.41±.45 48.53±.41 49.42±.39 "
    "37.14±.68 41.60±.54 33.03±.48 35.69±.41 29.52±.63 32.37±.59",
    "scaffold": "71.35±.61 75.62±.42 58.51±.79 63.82±.62 46.61±.33 47.27±.44 "
    "35.28±.24 38.87±.58 31.53±.53 35.76±.39 28.35±.59 30.49±.61",
    "fedsam": "70.15±.88 77.53±.51 62.45±.72 68.78±.59 47.95±.35 48.81±.41 "
    "36.88±.51 40.92±.47 32.21±.55 35.03±.44 28.98±.66 31.84±.52",
    "feddisco": "69.73±.44 76.98±.63 61.82±.68 68.11±.65 47.31±.52 48.15±.58 "
    "36.17±.67 40.25±.61 31.78±.61 34.68±.52 28.51±.71 31.33±.64",
    "fedfed": "79.12±.48 82.58±.31 75.35±.57 78.87±.43 52.27±.49 56.45±.38 "
    "45.41±.76 49.28±.52 34.99±.45 36.49±.37 33.28±.58 34.89±.47",
    "fedftg": "75.21±.53 78.44±.39 70.84±.31 74.85±.41 44.91±.62 54.15±.45 "
    "40.43±.39 46.47±.48 32.40±.57 33.79±.49 30.53±.51 32.26±.55",
    "fedgen": "68.34±.68 74.65±.47 58.90±.75 63.20±.66 44.29±.55 50.12±.51 "
    "36.70±.62 39.82±.57 34.17±.44 36.33±.42 29.45±.68 31.60±.61",
    "fedaux": "59.72±.85 73.70±.51 53.13±.88 65.11±.59 44.05±.48 44.85±.53 "
    "36.54±.65 38.39±.61 27.83±.72 34.31±.49 24.75±.82 30.38±.69",
    "feddf": "60.56±.77 72.40±.58 59.20±.72 63.47±.64 30.13±.81 45.47±.50 "
    "34.46±.69 36.77±.64 29.07±.65 34.75±.46 28.42±.62 30.51±.63",
    "fedx_lrp": "81.72±.35 83.46±.28 77.02±.63 80.27±.39 52.07±.45 58.09±.33 "
    "46.25±.82 52.63±.41 36.85±.39 38.64±.32 34.64±.52 33.18±.51",
    "fedx_ig": "72.22±.59 75.89±.44 64.02±.69 68.61±.55 49.21±.48 55.46±.41 "
    "42.34±.58 47.89±.50 33.59±.51 35.30±.45 29.77±.64 31.93±.58",
    "fedx_inputxgrad": "71.38±.62 73.99±.52 64.52±.65 66.49±.61 50.13±.43 54.21±.46 "
    "42.11±.60 46.98±.53 33.18±.54 34.40±.48 30.00±.61 30.93±.60",
    "fedx_smoothgrad": "71.89±.60 74.63±.49 63.75±.71 67.80±.58 51.57±.39 55.22±.42 "
    "40.91±.63 47.61±.51 33.43±.52 34.74±.47 29.64±.65 31.53±.59",
}
_TABLE1 |= {"fedavg_uniform": _TABLE1["fedavg"], "fedx_lrp_code": _TABLE1["fedx_lrp"]}
# Table 2: rounds to TARGETS at alpha 0.1, by data set and K.
_TABLE2 = {
    "fedavg": "49±5 79±7 24±4 34±5 60±6 90±8",
    "fedprox": "32±3 55±4 28±4 32±4 45±4 65±5",
    "feddyn": "29±3 51±4 24±3 32±3 48±5 60±4",
    "scaffold": "33±4 52±5 25±3 38±4 46±4 69±6",
    "fedsam": "34±4 58±5 27±4 35±4 50±5 64±5",
    "feddisco": "36±3 61±6 28±4 37±5 52±5 67±6",
    "fedfed": "15±2 22±4 13±4 12±3 12±2 15±2",
    "fedftg": "28±3 57±4 22±3 28±3 30±3 40±4",
    "fedgen": "51±5 66±6 21±4 39±5 55±5 70±6",
    "fedaux": "38±4 45±4 19±3 36±4 42±4 50±5",
    "feddf": "84±7 90±8 28±4 45±5 100±8 110±9",
    "fedx_lrp": "14±2 23±3 11±3 13±2 10±4 12±2",
    "fedx_ig": "35±4 39±4 16±2 21±3 38±4 45±4",
    "fedx_inputxgrad": "41±4 46±5 13±2 26±3 44±4 50±5",
    "fedx_smoothgrad": "41±5 51±4 21±3 33±4 42±4 48±5",
}
_TABLE2 |= {"fedavg_uniform": _TABLE2["fedavg"], "fedx_lrp_code": _TABLE2["fedx_lrp"]}
_TABLE3 = {
    "fedavg": "87.23±.71 84.71±.68",
    "fedprox": "87.79±.65 85.66±.61",
    "scaffold": "86.36±.56 84.24±.59",
    "feddyn": "88.13±.52 86.45±.34",
    "fedsam": "90.03±.15 87.56±.44",
    "feddisco": "89.78±.61 87.29±.62",
    "fedftg": "90.31±.43 87.88±.67",
    "fedgen": "89.65±.59 86.37±.55",
    "feddf": "88.56±.63 85.28±.66",
    "fedaux": "89.27±.60 85.94±.62",
    "fedfed": "90.76±.83 88.28±.71",
    "fedx_lrp": "91.55±.48 89.03±.35",
}
_TABLE3 |= {"fedavg_uniform": _TABLE3["fedavg"], "fedx_lrp_code": _TABLE3["fedx_lrp"]}
_TABLE4 = {
    "fedavg": "72.90±.55 60.94±.68",
    "fedavg+fedxds": "83.46±.31 80.29±.42",
    "fedprox": "74.31±.49 65.01±.53",
    "fedprox+fedxds": "84.05±.35 80.73±.45",
    "feddyn": "70.62±.58 69.41±.45",
    "feddyn+fedxds": "84.20±.33 79.56±.48",
    "scaffold": "71.35±.61 63.82±.62",
    "scaffold+fedxds": "83.89±.38 79.72±.44",
}
_TABLE4["fedavg_uniform"] = _TABLE4["fedavg"]
_TABLE5 = {  # by attribution, in the order of ATTRIBUTIONS
    "60": "75.99±.52 75.63±.55 77.10±.48 84.74±.31",
    "65": "74.19±.56 73.15±.61 76.31±.51 84.01±.35",
    "70": "73.99±.59 74.63±.54 75.89±.49 83.46±.28",
    "75": "70.54±.65 70.67±.63 71.68±.58 83.01±.33",
    "80": "68.31±.71 70.45±.66 70.98±.62 82.67±.36",
    "85": "68.80±.68 68.13±.73 69.73±.67 81.88±.41",
}
_TABLE6 = {
    "5": "70.55±.62 71.23±.59 72.45±.52 80.06±.33",
    "7": "71.45±.58 72.15±.55 73.35±.47 80.89±.31",
    "10": "72.25±.51 72.95±.48 74.15±.41 81.65±.29",
    "15": "73.12±.45 73.85±.43 75.02±.38 82.11±.25",
    "20": "73.99±.42 74.63±.39 75.89±.35 83.46±.28",
}
SHARED = {  # which part of the method helps
    "fedavg": ("algorithm=fedavg",),
    "raw images": (PAPER, "algorithm.sparsity=0", "algorithm.sigma=0"),
    "noise, no mask": (PAPER, "algorithm.sparsity=0"),
    "random masks": (PAPER, "algorithm.attribution=random"),
    "lrp masks, no noise": (PAPER, "algorithm.sigma=0"),
    "lrp masks (paper)": (PAPER,),
    "lrp masks, the code's rules": (PAPER, "algorithm.lrp=epsilon_plus_flat"),
    "lrp masks, clipped (our default)": ("algorithm=fedxds",),
    "lrp masks (released code)": ("algorithm=fedxds/official",),
    "class masks, paper's noise": (PAPER, "algorithm.mask_source=class"),
    "class masks, metric (holds)": ("algorithm=fedxds/metric",),
    "lrp masks, bounded (holds)": ("algorithm=fedxds/bounded",),
}
_WARM_UP = "Rounds are those of training: FedXDS spends 11 before them, on its warm-up and on sharing."
_PRIVACY = "The privacy that accounting=paper states does not hold: docs/privacy-fedxds.md, each run's privacy.json."
_SKEWED = (
    "Dirichlet label skew; 10 clients of whom half take part, or 100 of whom a tenth do; 200 rounds; 5 runs "
    "(`--seeds 5`).",
)
_BY_USER = ("CelebA as in FedGen, 10 clients; FEMNIST as in pFL-Bench, 100 clients; 5 runs (`--seeds 5`).",)
_EVERYWHERE = (
    "Epsilon 20, sparsity 70 %, lambda 0.5. LRP by the epsilon rule, binary masks, no clipping. Warm-up by FedAvg.",
    "By that rule, equation 6, LRP keeps the pixels of input x gradient on a ReLU network, though its numbers differ: "
    "fedx_lrp is as printed, fedx_lrp_code has the released code's rules.",
    "FedAvg and FedXDS take the uniform mean of the cohort. FedAvg as its own paper has it counts clients by their "
    "images (row fedavg); fedavg_uniform is as printed here.",
)
SAYS = (*_SKEWED, *_EVERYWHERE)
_SPLIT = ("Which Dirichlet split: the released code's (dialect balanced: clients that have their share get no more).",)
_OTHERS = (
    "As in the released code: ResNet-8; 5 local epochs, batch 64, rate 0.01, momentum 0.9, decay 1e-4. Warm-up of 10 "
    "rounds of everyone, 10 epochs each.",
    "The rounds of warm-up: figure 2d levels off at 10, and the tables do not say theirs. Whether training goes on "
    "from its model: it starts afresh, as in the code.",
    "What sparsity counts: pixels that are dropped, as in the code, and as accuracy falls in table 5. By equation 8, "
    "which keeps what reaches the s-th largest score, it would be those that stay.",
    "Which pixels masks and noise fall on: those of images brought to mean 0 and deviation 1, as in the code. An "
    "attribution keeps its sign there and here, and colours are summed.",
    "Delta: 1e-5. The class that is explained ('the model's prediction'): the label's; the code starts from all "
    "classes of a batch.",
    "Augmentation: crop and flip for all. The code adds RandAugment and cutout (columns -randaugment), and warms up "
    "without any (`fedxds/official`).",
    "Which accuracy counts: the mean of the last ten rounds. Baselines' own settings: our defaults.",
)
LEAVES_OPEN = (*_SPLIT, *_OTHERS)
_PUBLIC = "Which public data: CIFAR-100 for CIFAR-10, as in FedDF; photographs for the others, at their size."
_OPEN = {  # of single tables
    "fedxds/public": (_PUBLIC,),
    "fedxds/public_rounds": (_PUBLIC,),
    "fedxds/table2": ("Whether the warm-up counts: it seems not to, there.",),
    "fedxds/table3": (
        "How users are dealt, and rounds: the details are in a supplement that is not at hand. Here users go to 10 "
        "and 100 clients, of whom half and a tenth take part in 200 rounds; characters are not augmented.",
    ),
    "fedxds/table4": ("Alpha: 0.1, as FedAvg's and FedProx's numbers are those of table 1 there.",),
    "fedxds/figure2c": (
        "Values other than 0, 0.5 and 1 are read off no line of the text. Clients and alpha: 10 and 0.1, by the same "
        "numbers in table 1.",
    ),
    "fedxds/figure2d": ("The data set, and the numbers: 83.46 is that of table 1, if its warm-up has 10 rounds.",),
}


def column(data: str, clients: str, alpha: str) -> Column:
    target = TARGETS[data][list(CLIENTS).index(clients)]
    return Column((f"data={data}", f"partition.alpha={alpha}", *CLIENTS[clients], f"evaluate.targets={target}"))


EVERY = {f"{data}/{k}/{a}": column(data, k, a) for data in TARGETS for k in CLIENTS for a in ALPHAS}
# As the released code augments; it is for CIFAR-10 alone.
RELEASED = {
    f"{name}-randaugment": Column((*one.words, "augment=randaugment"))
    for name, one in EVERY.items()
    if name.startswith("cifar10/")
}
QUICK = {name: one for name, one in EVERY.items() if name.endswith("/0.1")}
SAME_RUNS = {name: Row(words, home="fedxds/table1") for name, words in METHODS.items()}
FEDXDS = (PAPER,)


def with_public_data(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The same columns, each with what its server has besides."""
    return {name: Column((*one.words, *PUBLIC[name.partition("/")[0]])) for name, one in columns.items()}


REAL = {
    "celeba": Column(("data=celeba", "partition=by_user", *CLIENTS["K10"])),
    # Characters are not flipped: a mirrored one is another, or none.
    "femnist": Column(("data=femnist", "partition=by_user", "augment=none", *CLIENTS["K100"])),
}


def reported(rows: Mapping[str, str], columns: Mapping[str, Column]) -> dict[tuple[str, str], Reported]:
    """The paper's numbers by (row, column)."""
    return {
        (row, name): Reported(*map(float, number.split("±")))
        for row, numbers in rows.items()
        for name, number in zip(columns, numbers.split(), strict=True)
    }


def _as_released(numbers: dict[tuple[str, str], Reported]) -> dict[tuple[str, str], Reported]:
    """The paper's numbers beside both augmentations."""
    others = {(row, f"{name}-randaugment"): number for (row, name), number in numbers.items()}
    return numbers | {where: number for where, number in others.items() if where[1] in RELEASED}


def rounds_to_target(result: Mapping[str, Any]) -> float | None:
    reached = next(iter(result["targets"].values()), None)
    return None if reached is None else reached["round"]


def tables() -> list[Grid]:
    every = [*_by_method(), *_elsewhere(), *_by_setting()]
    return [_with_protocol(grid) for grid in every]


def _with_protocol(grid: Grid) -> Grid:
    """By what the paper says of these data, and leaves open."""
    by_user = grid.name == "fedxds/table3"
    says = (*_BY_USER, *_EVERYWHERE) if by_user else SAYS
    left = _OTHERS if by_user else LEAVES_OPEN
    return replace(grid, says=says, leaves_open=(*left, *_OPEN.get(grid.name, ())))


def _by_method() -> list[Grid]:
    """Tables 1 and 2: accuracy and rounds to an accuracy under label skew."""
    methods = {name: Row(words) for name, words in METHODS.items()}
    return [
        Grid(
            "fedxds/table1",
            "label skew",
            methods,
            {**EVERY, **RELEASED},
            WORDS,
            _as_released(reported(_TABLE1, EVERY)),
            notes=(_WARM_UP, _PRIVACY),
        ),
        Grid(
            "fedxds/public",
            "table 1: the methods whose server has public data",
            WITH_PUBLIC_DATA,
            with_public_data(EVERY),
            WORDS,
            reported(_TABLE1, EVERY),
        ),
        Grid(
            "fedxds/public_rounds",
            "table 2: the methods whose server has public data",
            {name: Row(row.words, home="fedxds/public") for name, row in WITH_PUBLIC_DATA.items()},
            with_public_data(QUICK),
            WORDS,
            reported(_TABLE2, QUICK),
            rounds_to_target,
            TO_TARGETS,
        ),
        Grid(
            "fedxds/table2",
            "rounds until an accuracy is reached",
            SAME_RUNS,
            QUICK,
            WORDS,
            reported(_TABLE2, QUICK),
            rounds_to_target,
            TO_TARGETS,
            (_WARM_UP,),
        ),
    ]


def _elsewhere() -> list[Grid]:
    """Tables 3 and 4: other data, and other methods below."""
    methods = {name: Row(words) for name, words in METHODS.items()}
    small = {name: one for name, one in QUICK.items() if name.startswith("cifar10/")}
    return [
        Grid(
            "fedxds/table3",
            "CelebA and FEMNIST by user",
            {name: methods.get(name) or Row((f"algorithm={name}", PHOTOGRAPHS)) for name in _TABLE3},
            REAL,
            WORDS,
            reported(_TABLE3, REAL),
            notes=("The paper does not say which public data FedDF and FedAux have: Tiny-ImageNet is ours.",),
        ),
        Grid(
            "fedxds/table4",
            "base methods alone and under FedXDS",
            {
                **{name: SAME_RUNS[name] for name in ("fedavg_uniform", *BASES)},
                **{f"{name}+fedxds": Row((*FEDXDS, f"algorithm.base={name}")) for name in BASES},
            },
            small,
            WORDS,
            reported(_TABLE4, small),
            notes=(
                "The paper's K = 10 cells of FedDyn and SCAFFOLD are those of alpha 0.05 in its table 1 (78.25, 75.62 "
                "at 0.1): its gains there are overstated.",
            ),
        ),
    ]


def _weights() -> Grid:
    """Figure 2c, by both readings of lambda."""
    return Grid(
        "fedxds/figure2c",
        "the weight of shared data",
        {
            **{
                lam: Row((*FEDXDS, "algorithm.mix=convex", f"algorithm.lam={lam}"))
                for lam in ("0", "0.25", "0.5", "0.75", "1")
            },
            **{f"{lam} (printed sum)": Row((*FEDXDS, f"algorithm.lam={lam}")) for lam in ("0.5", "1")},
        },
        {f"{data}/K10/0.1": EVERY[f"{data}/K10/0.1"] for data in TARGETS},
        WORDS,
        {
            (f"{lam}{reading}", "cifar10/K10/0.1"): Reported(said)
            for lam, said in {"0": 72.9, "0.5": 83.46, "1": 61.18}.items()
            for reading in ("", " (printed sum)")
            if lam != "0" or not reading  # both are FedAvg there
        },
        notes=(
            "Section 7.3 takes lambda from equation 11, a sum, and calls 1 equal weight (the rows so named). The "
            "other rows are convex: under the sum a weight of 1 could hardly fall below FedAvg.",
        ),
    )


def _by_setting() -> list[Grid]:
    """Tables 5 and 6, figures 2c and 2d, and which part of the method helps."""
    main = {"cifar10/K10/0.1": EVERY["cifar10/K10/0.1"]}
    by_attribution = {
        name: Column((*column("cifar10", "K10", "0.1").words, *FEDXDS, f"algorithm.attribution={name}"))
        for name in ATTRIBUTIONS
    }
    return [
        Grid(
            "fedxds/table5",
            "sparsity by attribution",
            {s: Row((f"algorithm.sparsity={s}",)) for s in _TABLE5},
            by_attribution,
            WORDS,
            reported(_TABLE5, by_attribution),
        ),
        Grid(
            "fedxds/table6",
            "epsilon by attribution",
            {epsilon: Row((f"algorithm.epsilon={epsilon}",)) for epsilon in _TABLE6},
            by_attribution,
            WORDS,
            reported(_TABLE6, by_attribution),
            notes=(_PRIVACY,),
        ),
        _weights(),
        Grid(
            "fedxds/figure2d",
            "warm-up rounds",
            {rounds: Row((*FEDXDS, f"algorithm.warmup_rounds={rounds}")) for rounds in ("1", "5", "10", "15", "20")},
            main,
            WORDS,
            {("10", "cifar10/K10/0.1"): Reported(83.46)},
        ),
        Grid(
            "fedxds/sharing",
            "is it the mask, the noise, or sharing data at all",
            {name: SAME_RUNS["fedavg"] if name == "fedavg" else Row(words) for name, words in SHARED.items()},
            {**main, "cifar10/K10/0.1-randaugment": RELEASED["cifar10/K10/0.1-randaugment"]},
            WORDS,
            notes=(_PRIVACY,),
        ),
    ]
