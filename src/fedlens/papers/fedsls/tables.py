"""FedSLS (ACM MM 2024, doi 10.1145/3664647.3681278): table 1, and the search over the method's switches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data.paths import data_folders
from ...models.weights import STAND_IN
from ...runs.grid import Column, Grid, Reported, Row

# 10 steps of batch 64 and no momentum are the defaults of the code base whose terms the paper uses: it names neither.
WORDS = (
    "partition=dirichlet",
    "clients=100",
    "cohort=10",
    "local.steps=10",
    "local.batch_size=64",
    "local.lr=0.01",
    "local.momentum=0",
    "augment=crop_flip",
    "evaluate.every=20",
    "evaluate.closing=20",
    "evaluate.last=20",
    "evaluate.personal=none",
    "checkpoint=100",
)
METHODS = {
    "fedavg": ("algorithm=fedavg",),
    "uniform": ("algorithm=fedavg", "weighting=uniform"),
    "fedprox": ("algorithm=fedprox",),
    "moon": ("algorithm=moon",),
    "feddecorr": ("algorithm=feddecorr",),
    "fedau": ("algorithm=fedau",),
    "fedsls": ("algorithm=fedsls/paper",),
    **{f"fedsl{f}": ("algorithm=fedsl", f"algorithm.f={f}") for f in (2, 4, 8)},
}
DATA = {"cifar10": 2000, "cifar100": 2000, "cinic10": 2000, "tiny_imagenet": 1000}  # rounds
ALPHAS = ("0.5", "0.1", "0.05")

# Table 1: mean ± deviation, by data set and alpha in the order of DATA and ALPHAS.
_REPORTED = {
    "fedavg": "70.77±0.1 58.04±1.0 40.99±2.0 50.48±0.5 48.1±0.5 46.92±0.5 "
    "59.62±1.5 40.04±1.0 32.48±1.0 59.78±0.5 57.66±0.5 56.19±0.5",
    "fedprox": "73.64±2.7 61.22±0.3 41.64±1.5 50.17±1.3 48.73±0.4 46.41±0.3 "
    "59.81±0.9 40.64±2.7 33.97±1.2 60.20±0.1 59.66±0.4 57.16±0.3",
    "moon": "77.02±0.8 62.79±1.7 55.64±2.4 50.63±1.4 48.62±0.2 45.48±0.3 "
    "62.91±1.3 41.86±1.1 40.54±1.3 61.31±0.90 60.75±0.6 59.21±0.4",
    "feddecorr": "75.79±0.4 65.89±2.5 57.18±2.1 51.88±1.2 48.19±0.6 46.12±0.1 "
    "61.49±2.0 39.23±1.4 38.06±0.9 60.86±0.27 60.01±0.5 58.29±0.18",
    "fedau": "74.91±0.6 60.04±1.8 49.24±3.8 51.49±1.5 46.5±1.5 47.08±1.5 "
    "59.96±1.0 38.96±1.0 33.04±1.0 61.09±0.4 59.81±0.4 57.43±0.6",
    "fedsls": "82.67±0.2 70.51±3.6 63.43±3.6 52.44±1.5 49.6±0.5 47.79±1.5 "
    "65.43±2.5 44.79±2.6 43.22±2.6 62.73±0.5 61.47±0.5 59.49±0.5",
    "fedsl2": "79.86±0.3 64.97±0.5 38.59±0.7 51.64±0.3 49.4±0.3 46.25±0.3 "
    "69.48±0.2 40.15±1.4 30.87±2.5 61.68±0.2 59.33±0.3 57.34±0.8",
    "fedsl4": "81.65±0.3 48.91±0.8 38.44±0.4 52.19±0.5 48.52±0.5 42.98±0.5 "
    "69.54±0.8 42.27±1.4 31.35±1.9 61.65±0.2 59.28±0.6 58.00±0.3",
    "fedsl8": "82.31±0.2 56.98±0.4 50.65±0.4 51.28±0.2 48.94±0.3 45.13±0.4 "
    "64.96±0.2 42.52±1.6 37.84±1.1 61.37±0.2 59.06±0.3 56.85±0.4",
}
REPORTED = {
    (method, f"{data}{reading}/{alpha}"): Reported(*map(float, number.split("±")))
    for reading in ("", "-client")
    for method, numbers in _REPORTED.items()
    for (data, alpha), number in zip(((d, a) for d in DATA for a in ALPHAS), numbers.split(), strict=True)
}

# Every switch of the method by itself, then what may be worth having together.
SWITCHES = {
    "norm_l1": ("algorithm.norm=l1",),
    "norm_l2sq": ("algorithm.norm=l2sq",),
    "norm_sqrt_l2": ("algorithm.norm=sqrt_l2",),
    "target_pred": ("algorithm.target=pred",),
    "target_sum": ("algorithm.target=sum",),
    "score_prob": ("algorithm.score=prob",),
    "tau_0": ("algorithm.tau=0",),
    "tau_1": ("algorithm.tau=1",),
    "tap_relu": ("algorithm.tap=relu",),
    "no_activation": ("algorithm.saliency=guided_grad",),
    "not_guided": ("algorithm.saliency=plain_grad_x_act",),
    "no_pretraining": ("algorithm.pretrain_epochs=0",),
    "dynamic": ("algorithm.recompute_every=200",),
    "mean": ("algorithm.normalize=mean",),
    "blend_samples": ("algorithm.blend=0.5", "algorithm.blend_with=samples"),
    "blend_uniform": ("algorithm.blend=0.5", "algorithm.blend_with=uniform"),
    "mean_blend_uniform": ("algorithm.normalize=mean", "algorithm.blend=0.5", "algorithm.blend_with=uniform"),
    "prob_blend_uniform": ("algorithm.score=prob", "algorithm.blend=0.5", "algorithm.blend_with=uniform"),
    "mean_blend_samples": ("algorithm.normalize=mean", "algorithm.blend=0.5", "algorithm.blend_with=samples"),
}
_SHARED = {name: Row(METHODS[name], home="fedsls/table1") for name in ("fedavg", "uniform", "fedsls")}
_SWITCHED = {name: Row((*METHODS["fedsls"], *words)) for name, words in SWITCHES.items()}


SPLIT = (
    "Dirichlet label skew, as in Hsu et al., 2020, where all clients have as many images: columns with -client, and "
    "figures 1 and 4. The other columns cut each class by its own draw, so that sizes differ; `--columns` takes them "
    "for the figures, too."
)
SAYS = (
    "ResNet18, on Tiny-ImageNet ResNet50, from PyTorch's ImageNet weights; 100 clients, 10 of them a round.",
    "SGD of rate 0.01; 2,000 rounds, on Tiny-ImageNet 1,000; tau 0.5.",
    SPLIT,
    "A synchronisation interval of 10; 20,000 'epochs' (10,000 on Tiny-ImageNet), of whose last 200 accuracy is the "
    "mean.",
    "Runs: by the text 10 experiments with 5 seeds, by the caption three trials with five.",
)
LEAVES_OPEN = (
    "The interval: read as 10 steps of a client in a round, not as epochs. 2,000 rounds of 10 are the 20,000, and the "
    "last 200 of these are 20 rounds.",
    "Batch size, momentum, decay: 64, none, none, the defaults of GradMA's code, whose terms the text uses. "
    "Augmentation: crop and flip.",
    "Epochs of the copy that is thrown away ('a few preliminary training rounds'): 5. The score: the label's logit.",
    "Equation 4 prints dF/dY: read as dY/dF by guided backpropagation, at the output of each convolution. Equation 11 "
    "measures the first weights, algorithm 2 the trained copy: the copy.",
    "Equation 9 and algorithm 2 divide by the sum over all clients, section 3.2 over those of a round: these. Line 26 "
    "goes away from clients, by their rate: here towards them, by 1 ('typically 1.0').",
    "The images' size in the network: their own, 32 or 64 pixels, under the stem that PyTorch's weights have.",
    "Which convolutions are layers: all in the order in which they run, those of shortcuts, too.",
    "The norm: equation 6 has a square root too many, and is read without it; `fedsls/literal` has it.",
    "Baselines' own settings: our defaults. How FedSL makes images smaller: average pooling.",
)
PROTOCOL: dict[str, Any] = {"says": SAYS, "leaves_open": LEAVES_OPEN}


def tables() -> list[Grid]:
    stand_in = ("Stand-in, where PyTorch's weights are missing, is a ResNet18 trained on Tiny-ImageNet at 32 pixels.",)
    table1 = Grid(
        "fedsls/table1",
        "nine methods and uniform weights on label skew, from pretrained weights",
        {name: Row(words) for name, words in METHODS.items()},
        {**columns(DATA, ALPHAS), **columns(DATA, ALPHAS, "client")},
        WORDS,
        REPORTED,
        notes=stand_in,
        **PROTOCOL,
    )
    hard = columns(("cifar10",), ("0.05", "0.1"))
    switches = Grid(
        "fedsls/switches",
        "FedSLS with one switch changed, against FedAvg and uniform weights",
        {**_SHARED, **_SWITCHED},
        hard,
        WORDS,
        {where: number for where, number in REPORTED.items() if where[1] in hard},
        notes=stand_in,
        **PROTOCOL,
    )
    static = Grid(
        "fedsls/dynamic",
        "weights found once, and every 200 rounds from the current model",
        {"fedsls": _SHARED["fedsls"], "dynamic": Row(_SWITCHED["dynamic"].words, home="fedsls/switches")},
        hard,
        WORDS,
        notes=("The paper says that the two are comparable, static weights slightly better at times; no numbers.",),
        **PROTOCOL,
    )
    return [table1, switches, static]


def panels(*data: str) -> tuple[str, ...]:
    """What --columns of a figure may name: each data set by the split that the text cites, then with unequal sizes."""
    return (*(f"{name}-client" for name in data), *data)


def columns(data: tuple[str, ...] | dict[str, int], alphas: tuple[str, ...], dialect: str = "") -> dict[str, Column]:
    """By data set and alpha; with a dialect of the split, that one, and its name."""
    more = (f"partition.dialect={dialect}",) if dialect else ()
    found = {}
    for name in data:
        for alpha in alphas:
            one = column(name, alpha)
            found[f"{name}{dialect and f'-{dialect}'}/{alpha}"] = replace(one, words=(*one.words, *more))
    return found


def column(data: str, alpha: str) -> Column:
    network = "resnet50" if data == "tiny_imagenet" else "resnet18"
    local = imagenet_weights(network)
    words = (f"data={data}", f"partition.alpha={alpha}", f"model={network}", f"rounds={DATA[data]}")
    weights = f"model.weights={local or f'timm/{network}.tv_in1k'}"
    lacking = local is None and network == "resnet18" and has_stand_in()
    return Column((*words, weights), ("model.weights=stand-in",) if lacking else ())


def imagenet_weights(network: str) -> Path | None:
    """torchvision's first ImageNet weights, in a data folder under the name that the Hugging Face hub has for them."""
    places = (folder / "weights" / f"{network}.tv_in1k.safetensors" for folder in data_folders())
    return next((place.absolute() for place in places if place.is_file()), None)


def has_stand_in() -> bool:
    return any((folder / STAND_IN).is_file() for folder in data_folders())
