"""FedSLS's figures: what they show, drawn from our own runs; the numbers behind each lie beside it as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import config
from ...attribution.figures import as_picture, coloured
from ...core.batches import Shard
from ...core.errors import BadInput
from ...core.files import write_atomic
from ...core.network import Network
from ...core.rng import generator, key, seeded
from ...data import DATASETS, DataSource, Images
from ...data.sources.folders import Npz
from ...experiment import Experiment, build
from ...explain.run import some_images
from ...models.weights import at_hand
from ...plots.style import caption, pyplot, save
from ...runs.figure import label_mix
from ...runs.grid import merged_words
from ...simulate.run import label_counts, matmuls, threads
from ..duration import Effort, images_ahead
from ..figure_runs import Figure, Wanted, note
from ..needs import lacking
from ..quick import few
from . import saliency as drawing
from .cost import pass_cost, weighing_cost
from .gain import PANELS, SIZES, gain, gain_runs
from .latents import SIDE, Eye, comparable, latents, likeness, quartiles, saliency_maps
from .tables import ALPHAS, PROTOCOL, SPLIT, SWITCHES, WORDS, column, imagenet_weights, panels
from .weighing import copies, effective, some_clients, weights_by_switch, weights_over_rounds

_SOURCES = {"cifar10": 1, "cifar100": 1, "tiny_imagenet": 2}  # figure 5's images, in these proportions
SPLITS = panels("cifar10", "cifar100")  # figure 4's
LATENTS: dict[str, Any] = {  # of figures 3 and 5
    "says": (
        "10,000 images, 2,500 of CIFAR-10, 2,500 of CIFAR-100 and 5,000 of Tiny-ImageNet; all and their latents are "
        "brought to 64 x 64 pixels, one brightness and one contrast. Latents are gray.",
        "Saliency is 'the output image of the first layer of BackPropagation' of a ResNet18. The others are made 2, 4 "
        "and 8 times smaller. The cosine is of a ResNet50's outputs.",
    ),
    "leaves_open": (
        "Which output that is: the map at the first convolution. 'At pixels' is the gradient at the image.",
        "Weights and class: PyTorch's, not trained any further, and the predicted one.",
        "How images become smaller: average pooling. Brightness and contrast: mean 1/2, deviation 1/4. Whether images "
        "are gray, too: they are.",
    ),
}
OF_SPLIT: dict[str, Any] = {  # of figure 4
    "says": (SPLIT, "100 clients; CIFAR-10 and CIFAR-100, alpha 0.5, 0.1 and 0.05."),
    "leaves_open": ("The draw: that of seed 0.",),
}
_DRAWN = "model.weights="
_HEADS = {"stand-in": 200, "": 10}  # classes that initial weights know; ImageNet's 1000 otherwise


def asked(wanted: Wanted, *defaults: str, last: Sequence[str] = ()) -> Experiment:
    """The paper's setting with our defaults, the user's words and `last` over it; in quick mode a smaller one."""
    paper = column("cifar10", "0.1")
    words = (*WORDS, *paper.words, "algorithm=fedsls/paper", *paper.instead, *defaults)
    return config.read(None, [*merged_words((*words, *wanted.over((*words, *last)), *last)).values()]).resolved()


def looking(wanted: Wanted) -> Experiment:
    """The same where images are looked at alone: quick mode, too, has the paper's network, at least its shape."""
    found = asked(replace(wanted, quick=False))
    if wanted.quick and lacking(replace(found, data=DATASETS["mnist5k"]())):
        found = asked(replace(wanted, quick=False, words=("model.weights=", *wanted.words)))
    return found


def data_of(wanted: Wanted, experiment: Experiment) -> dict[DataSource, int]:
    """Where figures 3 and 5 draw their images from, and in which proportions."""
    if any(config.setting(word)[0] == "data" for word in wanted.words):
        return {experiment.data: 1}
    if wanted.quick:
        return {Npz(str(few(name, wanted.out, write=not wanted.dry))): share for name, share in _SOURCES.items()}
    return {DATASETS[name](): share for name, share in _SOURCES.items()}


def maps_of_clients(wanted: Wanted) -> list[Path]:
    """The same test images through the eyes of the copies that clients trained on their own data."""
    experiment = asked(wanted)
    with threads(1), matmuls(experiment.execution.precision):
        net, federation = build(experiment)
        loaded = experiment.data.load()
        some = some_clients(federation)
        models = {"at first": net.initial_weights()}
        models |= {f"client {number}": weights for number, weights in copies(experiment, net, federation, some).items()}
        shown = some_images(loaded, federation.pool.cpu(), wanted.images)
        shard = Shard(federation.data, shown.to(federation.pool.device))
        maps = {name: saliency_maps(net, weights, shard.x, shard.y).cpu() for name, weights in models.items()}
    columns = {"image": as_picture(loaded.x[shown] / 255), **{name: coloured(found) for name, found in maps.items()}}
    titles = [loaded.classes[label] for label in loaded.y[shown].tolist()]
    drawn = drawing.pictures(columns, wanted.path, titles)
    return [drawn, note(wanted, {"clients": some, "classes": titles, **_setting(experiment)})]


def latent_pictures(wanted: Wanted) -> list[Path]:
    """Figure 3: images, their saliency latent, and the images made smaller."""
    experiment = looking(wanted)
    eye, loaded = eye_of(experiment), next(iter(data_of(wanted, experiment))).load()
    chosen = drawn_images(loaded, wanted.images, experiment.seed)
    shown = {"gray": comparable(chosen.mean(1)), **{n: comparable(maps) for n, maps in latents(eye, chosen).items()}}
    columns = {"image": as_picture(chosen), **{name: maps[:, 0].numpy() for name, maps in shown.items()}}
    return [drawing.pictures(columns, wanted.path), note(wanted, _setting(experiment))]


def bubbles(wanted: Wanted) -> list[Path]:
    """Figure 4: who owns how many images of which class, for every alpha."""
    names = _dealt(wanted)
    plt = pyplot()
    figure, axes = plt.subplots(len(names), len(ALPHAS), figsize=(5 * len(ALPHAS), 3.6 * len(names)), squeeze=False)
    for name, line in zip(names, axes, strict=True):
        data = name.removesuffix("-client")
        split = () if data == name else ("partition.dialect=client",)
        for alpha, axis in zip(ALPHAS, line, strict=True):
            experiment = asked(wanted, f"data={data}", *split, last=[f"partition.alpha={alpha}"])
            ending = "-client" if getattr(experiment.partition, "dialect", "") == "client" else ""
            loaded = experiment.data.load()
            label_mix(axis, label_counts(experiment.federation(loaded)[0], len(loaded.classes)))
            dots = axis.collections[-1]
            dots.set_sizes(dots.get_sizes() * min(1, 20 / len(loaded.classes)))  # or a hundred classes hide each other
            axis.set_title(f"{data}{ending} ({len(loaded.train):,} images), alpha = {alpha}")
    figure.tight_layout()
    caption(figure, SIZES)
    return [save(figure, wanted.path)]


def _dealt(wanted: Wanted) -> Sequence[str]:
    """Panels of figure 4: of the user's own data one."""
    own = [word for word in wanted.words if config.setting(word)[0] == "data"]
    return panels(own[-1].partition("=")[2])[:1] if own else wanted.chosen(SPLITS, SPLITS[:2])


def likeness_boxes(wanted: Wanted) -> list[Path]:
    """Figure 5: how like their images saliency latents and smaller images are, by three measures."""
    experiment = looking(wanted)
    sources = data_of(wanted, experiment)
    chosen = [
        drawn_images(source.load(), wanted.images * share // sum(sources.values()), experiment.seed)
        for source, share in sources.items()
    ]
    eye = eye_of(experiment)
    judge, judged_by = judge_of(wanted, experiment)
    parts_of = [likeness(eye, some, judge) for some in chosen]
    scores = {
        measure: {name: torch.cat([part[measure][name] for part in parts_of]) for name in of}
        for measure, of in parts_of[0].items()
    }
    count = sum(map(len, chosen))
    network = config.to_dict(experiment.model)["is"]
    title = f"latents beside their images, {count:,} images; saliency by {network}, {weights_in_words(experiment)}; "
    drawn = drawing.boxes(scores, wanted.path, f"{title}\ncosine of the outputs of {judged_by}")
    numbers = {"images": count, "boxes": quartiles(scores), "cosine by": judged_by, **_setting(experiment)}
    return [drawn, note(wanted, numbers)]


def judge_of(wanted: Wanted, experiment: Experiment) -> tuple[Eye, str]:
    """The network whose outputs the cosine compares, in words, too: the paper's ResNet50 where its weights are here."""
    found = _resnet50(wanted)
    weights = str(getattr(found.model, "weights", ""))
    if not at_hand(weights):
        named = config.to_dict(experiment.model)["is"]
        return eye_of(experiment), f"the same {named} (the paper's ResNet50 was not run here: needs {weights})"
    return eye_of(found), f"ResNet50, {weights_in_words(found)}"


def _resnet50(wanted: Wanted) -> Experiment:
    weights = imagenet_weights("resnet50") or "timm/resnet50.tv_in1k"
    return asked(replace(wanted, quick=False, words=()), "model=resnet50", f"model.weights={weights}")


def static_and_dynamic(wanted: Wanted) -> list[Path]:
    """How weights that are found again and again move away from those found once."""
    experiment = asked(wanted, "rounds=200", "algorithm.recompute_every=40")
    with threads(1), matmuls(experiment.execution.precision):
        found = weights_over_rounds(experiment, *build(experiment))
    if len(found) < 2:
        raise BadInput("algorithm.recompute_every: weights were found once; lower it, or ask for more rounds")
    shares = {rounds: weights.used for rounds, weights in found.items()}
    drawn = drawing.moved_weights(found, wanted.path)
    return [drawn, note(wanted, {"shares": shares, "by_samples": found[0].by_samples, **_setting(experiment)})]


def switched_weights(wanted: Wanted) -> list[Path]:
    """What every switch makes of clients' weights before the first round: how equal they are, how far from FedAvg's."""
    experiment = asked(wanted)
    ways = {"fedsls": (), **SWITCHES}
    ways.pop("dynamic")  # which needs rounds
    switched = {name: asked(wanted, last=own).algorithm for name, own in ways.items()}
    with threads(1), matmuls(experiment.execution.precision):
        found = weights_by_switch(experiment, *build(experiment), switched, wanted.images)
    numbers = {name: {"counted": w.counted, "moved": w.moved, "grows": w.grows} for name, w in found.items()}
    by_samples = effective(found["fedsls"].by_samples.values())
    drawn = drawing.switched_weights(numbers, {"by samples": by_samples, "uniform": experiment.clients}, wanted.path)
    return [drawn, note(wanted, {"switches": numbers, "by_samples": by_samples, **_setting(experiment)})]


def cost(wanted: Wanted) -> list[Path]:
    """Operations and memory of the guided pass, beside the paper's. Counts are those of any weights: none stand in."""
    experiment = asked(wanted, _DRAWN)
    with threads(1), matmuls(experiment.execution.precision):
        net, federation = build(experiment)
        index = torch.cat([federation.train[client] for client in sorted(federation.train)])[: wanted.images]
        shard = Shard(federation.data, index)
        found = pass_cost(net, net.initial_weights(), shard.x, shard.y)
    per_thousand = 1000 / found.images
    rows = {
        "products, forward alone (10^9)": (f"{found.forward_operations / 2e9 * per_thousand:.1f}", "37 (GFLOPs)"),
        "operations, forward and backward (10^9)": (f"{found.all_operations / 1e9 * per_thousand:.1f}", ""),
        "maps of all layers if stored, all channels (MB)": (f"{found.channel_bytes / 1e6 * per_thousand:.1f}", "89.38"),
        "maps of the first layer, all channels": (f"{found.first_channel_bytes / 1e6 * per_thousand:.1f}", "11.76"),
        "maps of all layers if stored, channel means (MB)": (f"{found.map_bytes / 1e6 * per_thousand:.2f}", ""),
        "maps of the first layer, channel means": (f"{found.first_map_bytes / 1e6 * per_thousand:.2f}", ""),
        "peak memory beyond network and images (MB, not scaled)": (f"{found.peak_bytes / 1e6:.0f}", ""),
        "seconds (not scaled)": (f"{found.seconds:.2f}", ""),
    }
    shown = 1 if wanted.quick else 2  # another network than the paper's has no number of it beside
    lines = [
        f"# fedsls/cost: the guided pass over {found.images:,} images, brought to 1,000",
        "",
        f"| | {' | '.join(('ours', 'paper')[:shown])} |",
        f"| --- |{' ---: |' * shown}",
        *(f"| {name} | {' | '.join(values[:shown])} |" for name, values in rows.items()),
        "",
        f"- {_described(experiment)}. Maps are reduced to one number a layer inside the backward pass: none is stored.",
        "- The paper does not say whether a FLOP is a product or an operation, nor of how many images its 37 G are. "
        "Its maps, of 1,000 images, have all channels.",
    ]
    table = wanted.path.with_suffix(".md")
    table.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(table, ("\n".join(lines) + "\n").encode())
    return [table, note(wanted, {**asdict(found), **_setting(experiment)})]


def seconds(wanted: Wanted) -> list[Path]:
    """How long all clients together take for their numbers, and the memory that needs."""
    experiment = asked(wanted)
    with threads(1), matmuls(experiment.execution.precision):
        found = weighing_cost(experiment)
    return [note(wanted, {**asdict(found), **_setting(experiment)})]


# ---- how much work that is ------------------------------------------------------------------------------------------
def _passes(count: float) -> Callable[[Wanted], list[Effort]]:
    """Each image so often through the network."""
    return lambda wanted: [Effort(looking(wanted), lambda images: count * wanted.images)]


def _likeness_passes(wanted: Wanted) -> list[Effort]:
    """Each image of each data set so often through the network."""
    if wanted.quick:
        return _passes(6)(wanted)
    experiment = looking(wanted)
    shares = data_of(wanted, experiment)
    whole = sum(shares.values())
    return [
        Effort(replace(experiment, data=source), lambda _, share=share: 6 * wanted.images * share / whole)
        for source, share in shares.items()
    ]


def _split_data(wanted: Wanted) -> list[Experiment]:
    """A split needs data and no network."""
    return [asked(wanted, f"data={name.removesuffix('-client')}", _DRAWN) for name in _dealt(wanted)]


def _copies(share: float) -> Callable[[Wanted], list[Effort]]:
    """A share of all clients trains a copy of the model and looks at its images."""

    def work(wanted: Wanted) -> list[Effort]:
        experiment = asked(wanted)
        epochs = 1 + getattr(experiment.algorithm, "pretrain_epochs", 0)
        return [Effort(experiment, lambda images: share * epochs * len(images.train))]

    return work


def _rounds(wanted: Wanted) -> list[Effort]:
    experiment = asked(wanted, "rounds=200", "algorithm.recompute_every=40")
    return [Effort(experiment, lambda images: images_ahead(experiment, images))]


FIGURES = [
    Figure(
        "fedsls/figure1", "gain over FedAvg and FedAU by alpha", 0, gain, runs=gain_runs, columns=PANELS, **PROTOCOL
    ),
    Figure(
        "fedsls/figure3",
        "images, saliency latents and down-sampled latents",
        6,
        latent_pictures,
        work=_passes(6),
        **LATENTS,
    ),
    Figure(
        "fedsls/figure4",
        "who owns how many images of which class",
        0,
        bubbles,
        needs=_split_data,
        columns=SPLITS,
        **OF_SPLIT,
    ),
    Figure(
        "fedsls/figure5",
        "SSIM, cosine and distance of latents to their images",
        10_000,
        likeness_boxes,
        work=_likeness_passes,
        needs=lambda wanted: [_resnet50(wanted)],
        few=80,
        **LATENTS,
    ),
    Figure(
        "fedsls/maps",
        "saliency maps of the same images by several clients' models",
        6,
        maps_of_clients,
        work=_copies(0.04),
        **PROTOCOL,
    ),
    Figure(
        "fedsls/static_dynamic",
        "weights found once against weights found again and again",
        0,
        static_and_dynamic,
        work=_rounds,
        **PROTOCOL,
    ),
    Figure(
        "fedsls/weights",
        "what every switch makes of clients' weights, before any round",
        100,
        switched_weights,
        work=_copies(2),
        few=10,
        **PROTOCOL,
    ),
    Figure(
        "fedsls/cost",
        "operations and memory of the guided pass over 1,000 images",
        1000,
        cost,
        work=lambda wanted: [Effort(asked(wanted, _DRAWN), lambda images: 2 * wanted.images)],
        few=50,
    ),
    Figure("fedsls/seconds", "seconds and memory until all clients know their weight", 0, seconds, work=_copies(1)),
]


# ---- images and eyes -------------------------------------------------------------------------------------------------
def eye_of(experiment: Experiment) -> Eye:
    """The model with its initial weights and the classes that these know."""
    named = getattr(experiment.model, "weights", "")
    with seeded(key(experiment.seed, "init")):
        module = experiment.model.build(_HEADS.get(named, 1000), 3, SIDE)
    return Eye(Network(module))


def drawn_images(loaded: Images, count: int, seed: int) -> Tensor:
    """Some of all images, [n, 3, 64, 64] in [0, 1]."""
    order = torch.randperm(len(loaded), generator=generator(key(seed, "figure", loaded.name)))[:count]
    images = loaded.x[order].float() / 255
    images = torch.nn.functional.interpolate(images, (SIDE, SIDE), mode="bilinear", align_corners=False)
    return images.expand(-1, 3, -1, -1)


def weights_in_words(experiment: Experiment) -> str:
    named = getattr(experiment.model, "weights", "")
    if named == "stand-in":
        return "stand-in weights (Tiny-ImageNet at 32 pixels)"
    return f"weights {Path(named).name}" if named else "random weights"


def _described(experiment: Experiment) -> str:
    parts_named = config.to_dict(experiment)
    return f"{parts_named['model']['is']} on {parts_named['data']['is']}, {weights_in_words(experiment)}"


def _setting(experiment: Experiment) -> dict[str, Any]:
    place = experiment.execution
    where = {"device": place.device, "precision": place.precision, "seed": experiment.seed}
    return {"setting": _described(experiment), "clients_in_all": experiment.clients, **where}
