"""FedXDS's figures 2a and 2b: what attacks make of released images, with and without masks, over epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import config
from ...algorithms._sharing import unpacked
from ...algorithms.fedxds import FedXDS
from ...audit.attack import LabelledImages, Prior
from ...audit.figures import grid_of, over_epsilon
from ...audit.image_similarity import likeness
from ...audit.inversion import FeatureInversion
from ...audit.measures import Measure, merged
from ...audit.membership import SharedMembership, forest_measures
from ...core.batches import Shard
from ...core.cohort import Everyone
from ...core.errors import BadInput
from ...core.files import write_json
from ...core.network import Network
from ...core.rng import fold, generator, key
from ...core.tree import Tree
from ...experiment import Experiment, build
from ...runs.folder import RunFolder
from ...runs.grid import merged_words
from ...simulate import run as simulate
from ...simulate.resume import resume
from ...simulate.run import matmuls, threads
from ..figure_runs import Figure
from .tables import WORDS, column

EPSILONS = (1.0, 5.0, 20.0, math.inf)
SPARSITIES = (0, 60, 70, 80)
# The paper's text has no clipping, its released code has: with it an unmasked image is dimmed more than a masked one.
DEFENCES: dict[str, dict[str, Any]] = {
    "mask, clip, noise": {},
    "clip, noise": {"sparsity": 0},
    "mask, noise": {"clip_norm": None},
    "noise": {"sparsity": 0, "clip_norm": None},
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


def mechanism(defence: str, epsilon: float, **more: Any) -> FedXDS:
    noise = {"sigma": 0.0} if math.isinf(epsilon) else {"epsilon": epsilon}
    return FedXDS(**{**DEFENCES[defence], **noise, **more})


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


def membership_over_epsilon(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 2a: recall, and AUC beside it, of the forest on a shadow's answers."""
    made, attack = _prepared(words, images, path), SharedMembership(images=images, size=128)
    found = {
        name: {epsilon: made.membership(mechanism(name, epsilon), attack, 2) for epsilon in EPSILONS}
        for name in DEFENCES
    }
    chance = made.membership(None, attack, 2)
    drawn = [
        over_epsilon(
            _of(found, measure), _beside(path, ending), ylabel=measure, levels={"noise alone": chance[measure].value}
        )
        for measure, ending in (("recall", ""), ("AUC", "-auc"))
    ]
    return [*drawn, _note(path, found, chance)]


def inversion_over_sparsity(words: Sequence[str], images: int, path: Path) -> list[Path]:
    """Figure 2b: SSIM of what a denoising autoencoder recovers, over sparsity and epsilon, and the pictures."""
    made = _prepared(words, images, path)
    attack = FeatureInversion(images=min(images, 500), copies=2, steps=max(images // 2, 1), width=32)
    found, rows = {}, {"original": made.prior.pixels(made.members.x[:8]).cpu()}
    for epsilon in (5.0, 20.0):
        for sparsity in SPARSITIES:
            by = mechanism("mask, noise", epsilon, sparsity=sparsity)
            measures, released, guess = made.inversion(by, attack, 1)
            found.setdefault(f"ε = {epsilon:g}", {})[float(sparsity)] = measures
            rows |= {f"s {sparsity}, ε {epsilon:g}": made.prior.pixels(released[:8]).cpu()}
            rows |= {f"recovered {sparsity}, {epsilon:g}": made.prior.pixels(guess[:8]).cpu()}
    some = made.members[slice(attack.images)]
    chance = likeness(made.prior.prototypes(some.y), some, made.prior)
    level = {"prototype of the class": chance["SSIM"].value}
    curve = over_epsilon(_of(found, "SSIM"), path, ylabel="SSIM", levels=level, xlabel="sparsity, %")
    return [curve, grid_of(rows, _beside(path, "-pictures")), _note(path, found, chance)]


def warmed(experiment: Experiment, place: Path) -> Tree:
    """The global model after the paper's warm-up; run once and kept there."""
    plan = FedXDS()
    warm = replace(
        experiment,
        rounds=plan.warmup_rounds,
        cohort=Everyone(),
        local=replace(experiment.local, epochs=plan.warmup_epochs or 1, steps=None),
        evaluate=replace(experiment.evaluate, every=0, personal="none"),
        picture=False,
        out=str(place),
    )
    if not (place / "result.json").exists():
        resume(place) if (place / "config.yaml").exists() else simulate.run(warm)
    checkpoint, _ = RunFolder.open(place).load()
    assert checkpoint is not None  # a complete run ends with one
    return checkpoint.state.model.map(lambda leaf: leaf.to(experiment.execution.device))


def _prepared(words: Sequence[str], images: int, path: Path) -> Study:
    paper = column("cifar10", "K10", "0.1")
    whole = merged_words((*WORDS, *paper.words, "algorithm=fedavg", "precision=fp32", *words))
    experiment = config.read(None, [*whole.values()]).resolved()
    weights = warmed(experiment, path.parent / f"{path.name}-warm-up")
    with threads(1), matmuls("fp32"):
        net, federation = build(experiment)
        return study(experiment, net, federation, experiment.data.load(), weights, images)


def _of(found: Mapping[str, Mapping[float, Mapping[str, Measure]]], measure: str) -> dict[str, dict[float, Measure]]:
    return {name: {x: measures[measure] for x, measures in points.items()} for name, points in found.items()}


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _note(path: Path, found: Mapping[str, Any], chance: Mapping[str, Measure]) -> Path:
    """The numbers behind a picture."""
    content = {name: {str(x): _plain(measures) for x, measures in points.items()} for name, points in found.items()}
    write_json(path.with_suffix(".json"), {**content, "chance": _plain(chance)})
    return path.with_suffix(".json")


def _plain(measures: Mapping[str, Measure]) -> dict[str, Any]:
    return {name: vars(measure) for name, measure in measures.items()}


FIGURES = [
    Figure("fedxds/figure2a", "membership inference on released images over epsilon", 2000, membership_over_epsilon),
    Figure("fedxds/figure2b", "inversion of released images over sparsity", 2000, inversion_over_sparsity),
]
