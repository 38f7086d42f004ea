"""FedSLS's figures: what they show, drawn from our own runs; the numbers behind each lie beside it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import config
from ...attribution.figures import as_picture, coloured
from ...core.batches import Shard
from ...core.errors import BadInput
from ...core.files import write_atomic, write_json
from ...core.network import Network
from ...core.rng import generator, key, seeded
from ...data import DATASETS, Images
from ...experiment import Experiment, build
from ...explain.run import some_images
from ...plots.style import pyplot, save
from ...runs.figure import label_mix
from ...runs.grid import merged_words
from ...simulate.run import label_counts, matmuls, threads
from ..figure_runs import Figure
from . import saliency as drawing
from .cost import pass_cost, weighing_cost
from .latents import SIDE, Eye, comparable, latents, likeness, quartiles, saliency_maps
from .tables import ALPHAS, SWITCHES, WORDS, column
from .weighing import copies, effective, some_clients, weights_by_switch, weights_over_rounds

_SOURCES = {"cifar10": 1, "cifar100": 1, "tiny_imagenet": 2}  # figure 5's images, in these proportions
_HEADS = {"stand-in": 200, "": 10}  # classes that initial weights know; ImageNet's 1000 otherwise


def asked(words: Sequence[str], *defaults: str) -> Experiment:
    """The paper's setting with our defaults and the user's words over it."""
    paper = column("cifar10", "0.1")
    whole = merged_words((*WORDS, *paper.words, "algorithm=fedsls", *paper.instead, *defaults, *words))
    return config.read(None, [*whole.values()]).resolved()


def maps_of_clients(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 1: the same test images through the eyes of the copies that clients trained on their own data."""
    experiment = asked(words)
    with threads(1), matmuls(experiment.execution.precision):
        net, federation = build(experiment)
        loaded = experiment.data.load()
        some = some_clients(federation)
        models = {"at first": net.initial_weights()}
        models |= {f"client {number}": weights for number, weights in copies(experiment, net, federation, some).items()}
        shown = some_images(loaded, federation.pool.cpu(), images)
        shard = Shard(federation.data, shown.to(federation.pool.device))
        maps = {name: saliency_maps(net, weights, shard.x, shard.y).cpu() for name, weights in models.items()}
    columns = {"image": as_picture(loaded.x[shown] / 255), **{name: coloured(found) for name, found in maps.items()}}
    titles = [loaded.classes[label] for label in loaded.y[shown].tolist()]
    drawn = drawing.pictures(columns, path, titles)
    return [drawn, _note(path, {"clients": some, "classes": titles, **_setting(experiment)})]


def latent_pictures(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 3: images, their saliency latent, and the images made smaller."""
    experiment = asked(words)
    eye, loaded = eye_of(experiment), experiment.data.load()
    chosen = drawn_images(loaded, images, experiment.seed)
    shown = {"gray": comparable(chosen.mean(1)), **{n: comparable(maps) for n, maps in latents(eye, chosen).items()}}
    columns = {"image": as_picture(chosen), **{name: maps[:, 0].numpy() for name, maps in shown.items()}}
    return [drawing.pictures(columns, path), _note(path, _setting(experiment))]


def bubbles(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 4: who owns how many images of which class, for every alpha."""
    own = [word for word in words if config.setting(word)[0] == "data"]
    names = [own[-1].partition("=")[2]] if own else ["cifar10", "cifar100"]
    plt = pyplot()
    figure, axes = plt.subplots(len(names), len(ALPHAS), figsize=(5 * len(ALPHAS), 3.6 * len(names)), squeeze=False)
    for name, line in zip(names, axes, strict=True):
        for alpha, axis in zip(ALPHAS, line, strict=True):
            experiment = asked([*words, f"data={name}", f"partition.alpha={alpha}"])
            loaded = experiment.data.load()
            label_mix(axis, label_counts(experiment.federation(loaded)[0], len(loaded.classes)))
            dots = axis.collections[-1]
            dots.set_sizes(dots.get_sizes() * min(1, 20 / len(loaded.classes)))  # or a hundred classes hide each other
            axis.set_title(f"{name} ({len(loaded.train):,} images), alpha = {alpha}")
    figure.tight_layout()
    return [save(figure, path)]


def likeness_boxes(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 5: how like their images saliency latents and smaller images are, by three measures."""
    experiment = asked(words)
    named = any(config.setting(word)[0] == "data" for word in words)
    sources = [experiment.data] if named else [DATASETS[name]() for name in _SOURCES]
    shares = [1] if named else list(_SOURCES.values())
    chosen = [
        drawn_images(source.load(), images * share // sum(shares), experiment.seed)
        for source, share in zip(sources, shares, strict=True)
    ]
    eye = eye_of(experiment)
    parts_of = [likeness(eye, some) for some in chosen]
    scores = {
        measure: {name: torch.cat([part[measure][name] for part in parts_of]) for name in of}
        for measure, of in parts_of[0].items()
    }
    count = sum(map(len, chosen))
    title = f"latents beside their images, {count:,} images; ResNet18, {weights_in_words(experiment)}"
    drawn = drawing.boxes(scores, path, title)
    return [drawn, _note(path, {"images": count, "boxes": quartiles(scores), **_setting(experiment)})]


def static_and_dynamic(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """How weights that are found again and again move away from those found once."""
    experiment = asked(words, "rounds=200", "algorithm.recompute_every=40")
    with threads(1), matmuls(experiment.execution.precision):
        found = weights_over_rounds(experiment, *build(experiment))
    if len(found) < 2:
        raise BadInput("algorithm.recompute_every: weights were found once; lower it, or ask for more rounds")
    shares = {rounds: weights.used for rounds, weights in found.items()}
    drawn = drawing.moved_weights(found, path)
    return [drawn, _note(path, {"shares": shares, "by_samples": found[0].by_samples, **_setting(experiment)})]


def switched_weights(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """What every switch makes of clients' weights before the first round: how equal they are, how far from FedAvg's."""
    experiment = asked(words)
    ways = {"fedsls": (), **SWITCHES}
    ways.pop("dynamic")  # which needs rounds
    switched = {name: asked([*words, *own]).algorithm for name, own in ways.items()}
    with threads(1), matmuls(experiment.execution.precision):
        found = weights_by_switch(experiment, *build(experiment), switched, images)
    numbers = {name: {"counted": w.counted, "moved": w.moved, "grows": w.grows} for name, w in found.items()}
    by_samples = effective(found["fedsls"].by_samples.values())
    drawn = drawing.switched_weights(numbers, {"by samples": by_samples, "uniform": experiment.clients}, path)
    return [drawn, _note(path, {"switches": numbers, "by_samples": by_samples, **_setting(experiment)})]


def cost(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Operations and memory of the guided pass, beside the paper's."""
    experiment = asked(words)
    with threads(1), matmuls(experiment.execution.precision):
        net, federation = build(experiment)
        index = torch.cat([federation.train[client] for client in sorted(federation.train)])[:images]
        shard = Shard(federation.data, index)
        found = pass_cost(net, net.initial_weights(), shard.x, shard.y)
    per_thousand = 1000 / found.images
    lines = [
        f"# fedsls/cost: the guided pass over {found.images:,} images, brought to 1,000",
        "",
        "| | ours | paper |",
        "| --- | ---: | ---: |",
        f"| products, forward alone (10^9) | {found.forward_operations / 2e9 * per_thousand:.1f} | 37 (GFLOPs) |",
        f"| operations, forward and backward (10^9) | {found.all_operations / 1e9 * per_thousand:.1f} | |",
        f"| maps of all layers if stored, channel means (MB) | {found.map_bytes / 1e6 * per_thousand:.2f} | 89.38 |",
        f"| maps of all layers if stored, all channels (MB) | {found.channel_bytes / 1e6 * per_thousand:.1f} | |",
        f"| peak memory beyond network and images (MB, not scaled) | {found.peak_bytes / 1e6:.0f} | |",
        f"| seconds (not scaled) | {found.seconds:.2f} | |",
        "",
        f"- {_described(experiment)}. Maps are reduced to one number a layer inside the backward pass: none is stored.",
        "- The paper does not say whether a FLOP is a product or an operation, nor what the maps hold.",
    ]
    table = path.with_suffix(".md")
    table.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(table, ("\n".join(lines) + "\n").encode())
    return [table, _note(path, {**asdict(found), **_setting(experiment)})]


def seconds(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """How long all clients together take for their numbers, and the memory that needs."""
    experiment = asked(words)
    with threads(1), matmuls(experiment.execution.precision):
        found = weighing_cost(experiment)
    return [_note(path, {**asdict(found), **_setting(experiment)})]


FIGURES = [
    Figure("fedsls/figure1", "saliency maps of the same images by several clients' models", 6, maps_of_clients),
    Figure("fedsls/figure3", "images, saliency latents and down-sampled latents", 6, latent_pictures),
    Figure("fedsls/figure4", "who owns how many images of which class", 0, bubbles),
    Figure("fedsls/figure5", "SSIM, cosine and distance of latents to their images", 10_000, likeness_boxes),
    Figure("fedsls/static_dynamic", "weights found once against weights found again and again", 0, static_and_dynamic),
    Figure("fedsls/weights", "what every switch makes of clients' weights, before any round", 100, switched_weights),
    Figure("fedsls/cost", "operations and memory of the guided pass over 1,000 images", 1000, cost),
    Figure("fedsls/seconds", "seconds and memory until all clients know their weight", 0, seconds),
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


def _note(path: Path, numbers: dict[str, Any]) -> Path:
    beside = path.with_name(path.name + ".json")
    beside.parent.mkdir(parents=True, exist_ok=True)
    write_json(beside, numbers)
    return beside
