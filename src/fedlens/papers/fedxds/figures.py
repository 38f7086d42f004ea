"""FedXDS's figures 1, 2a and 2b: an image on its way, and what attacks make of released ones, over epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ... import config
from ...algorithms._sharing import unpacked
from ...algorithms.fedxds import FedXDS
from ...attribution.figures import coloured
from ...audit.attack import LabelledImages, Prior
from ...audit.figures import grid_of, over_epsilon
from ...audit.image_similarity import likeness
from ...audit.inversion import FeatureInversion
from ...audit.measures import Measure, merged
from ...audit.membership import SharedMembership, forest_measures
from ...core.batches import Shard
from ...core.cohort import Everyone
from ...core.errors import BadInput
from ...core.network import Network
from ...core.rng import fold, generator, key
from ...core.tree import Tree
from ...experiment import Experiment, build
from ...runs.folder import RunFolder
from ...runs.grid import merged_words
from ...simulate import run as simulate
from ...simulate.resume import resume
from ...simulate.run import matmuls, threads
from ..duration import Effort, images_ahead
from ..figure_runs import Figure, Wanted, note
from .tables import LEAVES_OPEN, PAPER, SAYS, WORDS, column

EPSILONS = (1.0, 5.0, 20.0, math.inf)
SPARSITIES = (0, 60, 70, 80)
CLIP = 10.0  # the released code's
FEWEST = 20  # images of a study
# The paper's text has no clipping, its released code has: with it an unmasked image is dimmed more than a masked one.
DEFENCES: dict[str, dict[str, Any]] = {
    "mask, noise": {},
    "noise": {"sparsity": 0.0},
    "mask, clip, noise": {"clip_norm": CLIP},
    "clip, noise": {"sparsity": 0.0, "clip_norm": CLIP},
}


@dataclass(frozen=True)
class Study:
    """Images that are released, others of the same kind, and the model that masks."""

    prior: Prior
    weights: Tree
    members: LabelledImages  # whose releases are attacked
    others: LabelledImages  # test images, as many

    def release(self, by: FedXDS, images: LabelledImages, seed: int) -> Tensor:
        root, found = torch.tensor(key("study", seed), device=images.x.device), []
        for number, index in enumerate(torch.arange(len(images), device=images.x.device).split(250)):
            some = images[index]
            sent = by.released(self.prior.net, self.weights, some.x, some.y, fold(root, f"images {number}"))
            found.append(unpacked(sent, torch.arange(len(some), device=some.x.device), some.x)[0])
        return torch.cat(found)

    def membership(self, by: FedXDS | None, attack: SharedMembership, seeds: int) -> dict[str, Measure]:
        """Of a mechanism; None: of noise that has seen no image."""
        equal = min(len(self.members), len(self.others))
        candidates = LabelledImages(
            torch.cat([self.members.x[:equal], self.others.x[:equal]]),
            torch.cat([self.members.y[:equal], self.others.y[:equal]]),
        )
        member = torch.arange(2 * equal) < equal
        told = torch.where(torch.arange(2 * equal) % 2 == 0, member.long(), -1)
        found = []
        for seed in range(seeds):
            nothing = torch.randn(self.members.x.shape, generator=generator(key(seed, "nothing")))
            x = nothing.to(self.members.x) if by is None else self.release(by, self.members, seed)
            scores = attack.guess(LabelledImages(x, self.members.y), candidates, told, self.prior, seed)
            found.append(forest_measures(scores, member[told < 0], ()))
        return merged(found)

    def inversion(self, by: FedXDS, attack: FeatureInversion, seeds: int) -> tuple[dict[str, Measure], Tensor, Tensor]:
        """(measures, some releases, what was made of them)"""
        some = self.members[slice(attack.images)]
        pairs = attack.pairs(lambda images, copy: self.release(by, images, 1000 + copy), self.prior)
        found, shown = [], some.x
        released = self.release(by, some, 0)
        for seed in range(seeds):
            guess = attack.guess(released, pairs, seed)
            shown = guess if seed == 0 else shown
            found.append(likeness(guess, some, self.prior))
        return merged(found), released, shown


@cache
def as_printed() -> FedXDS:
    """The method with the paper's settings: equation 10 has no clipping."""
    return cast(FedXDS, config.read(None, [PAPER]).algorithm)


def mechanism(defence: str, epsilon: float, **more: Any) -> FedXDS:
    noise = {"sigma": 0.0} if math.isinf(epsilon) else {"epsilon": epsilon}
    return replace(as_printed(), **{**DEFENCES[defence], **noise, **more})


def study(experiment: Experiment, net: Network, federation: Any, loaded: Any, weights: Tree, images: int) -> Study:
    """As many training images and test images; the other test images are the adversary's."""
    owned = torch.cat([federation.train[client] for client in sorted(federation.train)])
    order = torch.randperm(len(owned), generator=generator(key(experiment.seed, "members")))[:images]
    pool = federation.pool
    mixed = pool[torch.randperm(len(pool), generator=generator(key(experiment.seed, "pool"))).to(pool.device)]
    half = min(images, len(pool) // 2)
    if half < 20:
        raise BadInput(f"{loaded.name} has {len(pool)} test images, too few for an attack")
    shards = [owned[order.to(owned.device)], mixed[:half], mixed[half : half + max(images, 500)]]
    members, others, auxiliary = (LabelledImages(s.x, s.y) for s in (Shard(federation.data, index) for index in shards))
    return Study(Prior(net, {}, auxiliary, loaded.mean, loaded.std), weights, members, others)


def on_its_way(wanted: Wanted) -> list[Path]:
    """Figure 1: images, what the warm-up's model finds important, the mask, the masked image, and what is shared."""
    made, by = _prepared(wanted), as_printed()
    some = made.members[slice(wanted.images)]
    seed = torch.tensor(key("study", 0), device=some.x.device)
    worth = by.pixel_scores(made.prior.net, made.weights, some.x, some.y, len(some), seed)
    masked, keep = by.masked(some.x, worth, seed)
    released = unpacked(by.release(some.x, some.y, worth, seed), torch.arange(len(some), device=some.x.device), some.x)[
        0
    ]
    shown = {"image": some.x, "masked": masked, f"shared (ε = {by.epsilon:g})": released}
    rows = {name: made.prior.pixels(x).cpu() for name, x in shown.items()}
    relevance = torch.from_numpy(coloured(worth[:, 0].cpu())).permute(0, 3, 1, 2)
    mask = keep.float().expand(-1, some.x.shape[1], -1, -1).cpu()
    image, *after = rows.items()
    rows = dict([image, (by.attribution.upper(), relevance), (f"mask (s = {by.sparsity:g} %)", mask), *after])
    kept = float(keep.float().mean())
    numbers = {"kept": kept, "sigma": by.noise, "clip_norm": by.clip_norm, "settings": PAPER}
    return [grid_of(rows, wanted.path), note(wanted, numbers)]


def membership_over_epsilon(wanted: Wanted) -> list[Path]:
    """Figure 2a: recall, and AUC beside it, of the forest on a shadow's answers."""
    made, path = _prepared(wanted), wanted.path
    attack = SharedMembership(images=wanted.images, size=128, epochs=2 if wanted.quick else 10)
    epsilons, seeds = (EPSILONS[1:3], 1) if wanted.quick else (EPSILONS, 2)
    found = {
        name: {epsilon: made.membership(mechanism(name, epsilon), attack, seeds) for epsilon in epsilons}
        for name in DEFENCES
    }
    chance = made.membership(None, attack, seeds)
    drawn = [
        over_epsilon(
            _of(found, measure), _beside(path, ending), ylabel=measure, levels={"noise alone": chance[measure].value}
        )
        for measure, ending in (("recall", ""), ("AUC", "-auc"))
    ]
    return [*drawn, _note(wanted, found, chance)]


def inversion_over_sparsity(wanted: Wanted) -> list[Path]:
    """Figure 2b: SSIM of what a denoising autoencoder recovers, over sparsity and epsilon, and the pictures."""
    made, path, images = _prepared(wanted), wanted.path, wanted.images
    attack = FeatureInversion(images=min(images, 500), copies=2, steps=max(images // 2, 1), width=32)
    attack = replace(attack, copies=1, steps=20, width=8) if wanted.quick else attack
    found, rows = {}, {"original": made.prior.pixels(made.members.x[:8]).cpu()}
    for epsilon in (5.0, 20.0):
        for sparsity in SPARSITIES:
            by = mechanism("mask, noise", epsilon, sparsity=float(sparsity))
            measures, released, guess = made.inversion(by, attack, 1)
            found.setdefault(f"ε = {epsilon:g}", {})[float(sparsity)] = measures
            rows |= {f"s {sparsity}, ε {epsilon:g}": made.prior.pixels(released[:8]).cpu()}
            rows |= {f"recovered {sparsity}, {epsilon:g}": made.prior.pixels(guess[:8]).cpu()}
    some = made.members[slice(attack.images)]
    chance = likeness(made.prior.prototypes(some.y), some, made.prior)
    level = {"prototype of the class": chance["SSIM"].value}
    curve = over_epsilon(_of(found, "SSIM"), path, ylabel="SSIM", levels=level, xlabel="sparsity, %")
    return [curve, grid_of(rows, _beside(path, "-pictures")), _note(wanted, found, chance)]


def warm_up(wanted: Wanted) -> Experiment:
    """The paper's, by FedAvg in its setting."""
    words = (*WORDS, *column("cifar10", "K10", "0.1").words, "algorithm=fedavg", "precision=fp32")
    experiment = config.read(None, [*merged_words((*words, *wanted.over(words))).values()]).resolved()
    plan = as_printed()
    rounds, epochs = (1, 2) if wanted.quick else (plan.warmup_rounds, plan.warmup_epochs or 1)
    return replace(
        experiment,
        rounds=rounds,
        cohort=Everyone(),
        local=replace(experiment.local, epochs=epochs, steps=None),
        evaluate=replace(experiment.evaluate, every=0, personal="none"),
    ).with_execution(picture=False)


def warmed(experiment: Experiment, place: Path) -> Tree:
    """The global model after the warm-up; run once and kept there."""
    if not (place / "result.json").exists():
        begun = (place / "config.yaml").exists()
        resume(place) if begun else simulate.run(experiment.with_execution(out=str(place)))
    checkpoint, _ = RunFolder.open(place).load()
    assert checkpoint is not None  # a complete run ends with one
    return checkpoint.state.model.map(lambda leaf: leaf.to(experiment.execution.device))


def _prepared(wanted: Wanted) -> Study:
    experiment = warm_up(wanted)
    weights = warmed(experiment, wanted.path.parent / f"{wanted.path.name}-warm-up")
    with threads(1), matmuls("fp32"):
        net, federation = build(experiment)
        return study(experiment, net, federation, experiment.data.load(), weights, max(wanted.images, FEWEST))


def _of(found: Mapping[str, Mapping[float, Mapping[str, Measure]]], measure: str) -> dict[str, dict[float, Measure]]:
    return {name: {x: measures[measure] for x, measures in points.items()} for name, points in found.items()}


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _note(wanted: Wanted, found: Mapping[str, Any], chance: Mapping[str, Measure]) -> Path:
    """The numbers behind a picture."""
    content = {name: {str(x): _plain(measures) for x, measures in points.items()} for name, points in found.items()}
    return note(wanted, {**content, "chance": _plain(chance)})


def _plain(measures: Mapping[str, Measure]) -> dict[str, Any]:
    return {name: vars(measure) for name, measure in measures.items()}


def _work(passes: float) -> Callable[[Wanted], list[Effort]]:
    """The warm-up, then each image so often through the network."""

    def work(wanted: Wanted) -> list[Effort]:
        experiment = warm_up(wanted)
        return [Effort(experiment, lambda images: images_ahead(experiment, images) + passes * wanted.images)]

    return work


FIGURES = [
    Figure(
        "fedxds/figure1",
        "images on their way: attribution, mask, noise",
        6,
        on_its_way,
        work=_work(3),
        says=SAYS,
        leaves_open=LEAVES_OPEN,
    ),
    Figure(
        "fedxds/figure2a",
        "membership inference on released images over epsilon",
        2000,
        membership_over_epsilon,
        work=_work(2 * 16 * 12),
        few=60,
        says=(*SAYS, "A shadow model trains on what all clients share; a random forest tells members by its answers."),
        leaves_open=(*LEAVES_OPEN, "Epsilons: 1, 5, 20, and no noise. The shadow: a ResNet-8, trained for 10 epochs."),
    ),
    Figure(
        "fedxds/figure2b",
        "inversion of released images over sparsity",
        2000,
        inversion_over_sparsity,
        work=_work(8 * 40),
        few=40,
        says=(*SAYS, "A denoising autoencoder learns the way back from pairs of a release and its image."),
        leaves_open=(*LEAVES_OPEN, "Sparsities: 60, 70, 80, and no mask, at epsilon 5 and 20. The autoencoder: ours."),
    ),
]
