"""Attacks on what FedXDS, FedFed, FedAvg, SCAFFOLD and SPATL really send, on real images: curves, tables, pictures.

    python benchmarks/audit.py --out audit                 # CIFAR-10 on a GPU, a few minutes
    python benchmarks/audit.py --out audit --small         # MNIST-5k on a CPU: a look, no measurement

Releases: masks, clipping and noise of FedXDS in all combinations over epsilon (delta 1e-5; "none" is no noise), the
model that masks trained centrally for some epochs instead of by warm-up rounds; membership by shadow and forest,
inversion by a denoising autoencoder on auxiliary test images. FedFed's residuals come from a short run. Gradients: one
step of SGD by clients that were just initialised, with 1 and 8 images, under client-level privacy, under SCAFFOLD, and
as SPATL uploads it (half of the filters; controls dense, salient, or none), turned back by Geiping et al.'s attack.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedlens.algorithms import SPATL, FedAvg, FedFed, Scaffold
from fedlens.audit.attack import Answers, Knowledge, LabelledImages, Prior, trained
from fedlens.audit.figures import grid_of, over_epsilon
from fedlens.audit.gradients import GradientInversion
from fedlens.audit.image_similarity import likeness
from fedlens.audit.inversion import FeatureInversion
from fedlens.audit.measures import Measure
from fedlens.audit.membership import SharedMembership
from fedlens.core.algorithm import Stage
from fedlens.core.batches import Shard
from fedlens.core.cohort import Everyone
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import generator, key
from fedlens.core.run import run, timetable
from fedlens.data import DATASETS, PARTITIONS
from fedlens.engines.sequential import Sequential
from fedlens.experiment import Execution, Experiment, build
from fedlens.models import model_named
from fedlens.papers.fedxds.figures import DEFENCES, EPSILONS, Study, mechanism, study
from fedlens.privacy.client_level import ClientPrivacy
from fedlens.runs.transcript import Recording, Transcript


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("audit"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="", help="cifar10; mnist5k with --small")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=0, help="to turn a gradient back: 600, 100 with --small")
    parser.add_argument("--parts", nargs="*", default=["releases", "gradients"], choices=["releases", "gradients"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    began, found = time.perf_counter(), {}
    if "releases" in asked.parts:
        found["releases"] = releases(asked)
    if "gradients" in asked.parts:
        found["gradients"] = gradients(asked)
    name = torch.cuda.get_device_name() if asked.device != "cpu" else "CPU"
    found |= {"device": name, "torch": torch.__version__, "seconds": round(time.perf_counter() - began, 1)}
    (asked.out / "audit.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{asked.out / 'audit.json'}  {found['seconds']} s on {name}")


def experiment(asked: argparse.Namespace, model: str, clients: int) -> Experiment:
    data = DATASETS[asked.data or ("mnist5k" if asked.small else "cifar10")]()
    return Experiment(
        data=data,
        partition=PARTITIONS["iid"](),
        clients=clients,
        model=model_named(model),
        execution=Execution(device=asked.device, precision="fp32"),
    )


# ---- releases -------------------------------------------------------------------------------------------------------
def releases(asked: argparse.Namespace) -> dict[str, Any]:
    small = asked.small
    setting = experiment(asked, "cnn2" if small else "resnet8", 4)
    net, federation = build(setting)
    images = 200 if small else 2000
    some = torch.cat([federation.train[client] for client in federation.train])[: 500 if small else 10_000]
    shard = Shard(federation.data, some)
    weights = trained(net, LabelledImages(shard.x, shard.y), key("warm-up"), epochs=2 if small else 5, size=128)
    made = study(setting, net, federation, setting.data.load(), weights, images)
    member = SharedMembership(images=images, epochs=3 if small else 15, size=32 if small else 128, trees=100)
    inverse = FeatureInversion(
        images=50 if small else 500, copies=1 if small else 2, steps=30 if small else 600, width=8 if small else 32
    )
    epsilons, seeds = ((5.0, math.inf), 1) if small else (EPSILONS, 2)
    found: dict[str, dict[float, dict[str, Measure]]] = {}
    rows = {"original": made.prior.pixels(made.members.x[:8]).cpu()}
    for name in DEFENCES:
        for epsilon in epsilons:
            by, began = mechanism(name, epsilon), time.perf_counter()
            inverted, released, guess = made.inversion(by, inverse, 1)
            found.setdefault(name, {})[epsilon] = {**made.membership(by, member, seeds), **inverted}
            level = "none" if math.isinf(epsilon) else f"{epsilon:g}"
            rows[f"{name}, ε {level}"] = made.prior.pixels(released[:8]).cpu()
            rows[f"recovered ({name}, {level})"] = made.prior.pixels(guess[:8]).cpu()
            print(
                f"{name}, epsilon {level}: {said(found[name][epsilon])} ({time.perf_counter() - began:.1f} s)",
                flush=True,
            )
    chance = made.membership(None, member, seeds)
    few = made.members[slice(inverse.images)]
    chance |= likeness(made.prior.prototypes(few.y), few, made.prior)
    print(f"by chance: {said(chance)}")
    for measure in ("AUC", "recall", "SSIM", "recognised"):
        curves = {name: {e: each[measure] for e, each in points.items()} for name, points in found.items()}
        over_epsilon(
            curves, asked.out / f"releases-{measure}", ylabel=measure, levels={"chance": chance[measure].value}
        )
    grid_of(rows, asked.out / "releases")
    residuals = of_fedfed(asked, made, member, inverse)
    print(f"FedFed's residuals: {said(residuals)}")
    plain = {name: {str(e): numbers(each) for e, each in points.items()} for name, points in found.items()}
    return {**plain, "chance": numbers(chance), "fedfed": numbers(residuals)}


def of_fedfed(
    asked: argparse.Namespace, made: Study, member: SharedMembership, inverse: FeatureInversion
) -> dict[str, Measure]:
    """Residuals of a short run, under the same two attacks."""
    setting = experiment(asked, "cnn2" if asked.small else "resnet8", 20)
    net, federation = build(setting)
    federation = replace(federation, train={client: federation.train[client] for client in range(2)})
    recipe = FedFed(distil_rounds=1 if asked.small else 5, latent=64 if asked.small else 2048)
    plan = Stage(None, 1, Everyone(), Sgd(0.01), steps=1, size=64)
    with tempfile.TemporaryDirectory() as folder:
        transcript, stages = recorded(Path(folder), recipe, plan, net, federation, asked.device)
        prior = replace(made.prior, candidates={0: made.others})
        answers = Answers(federation, stages, 0, {0: torch.zeros(len(made.others), dtype=torch.bool)})
        knowledge = Knowledge(replace(prior, net=net), answers, (), 1)
        found = [attack.run(transcript, knowledge, "fedfed") for attack in (member, inverse)]
    gallery = found[1].gallery
    assert gallery is not None and gallery.released is not None
    shown = {"original": gallery.original, "residual": gallery.released, "recovered": gallery.recovered}
    grid_of(shown, asked.out / "residuals")
    return {**found[0].found, **found[1].found}


def recorded(folder: Path, recipe: Any, plan: Stage, net: Any, federation: Any, device: str) -> tuple[Transcript, Any]:
    taken = Recording(folder / "transcript", 4000, 0)
    engine = Sequential(net, federation)
    server = run(recipe, net, engine, plan, observe=lambda server, job, replies: taken.add(job, replies))
    stages = [stage for stage, _, _ in timetable(recipe, plan)]
    return Transcript(folder / "transcript", stages, server.state, device), stages


# ---- gradients ------------------------------------------------------------------------------------------------------
SENT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "FedAvg": (FedAvg(), ()),
    "FedAvg under dp, noise 0.01": (FedAvg(), (ClientPrivacy(norm=1.0, multiplier=0.01),)),
    "FedAvg under dp, noise 1": (FedAvg(), (ClientPrivacy(norm=1.0, multiplier=1.0),)),
    "SCAFFOLD": (Scaffold(), ()),
    "SPATL, dense control": (SPATL(selector="uniform", budget=0.5), ()),
    "SPATL, salient control": (SPATL(selector="uniform", budget=0.5, control_upload="salient"), ()),
    "SPATL, no control": (SPATL(selector="uniform", budget=0.5, control_scale=0.0), ()),
}


def gradients(asked: argparse.Namespace) -> dict[str, Any]:
    setting = experiment(asked, "cnn", 20)
    net, federation = build(setting)
    federation = replace(federation, train={client: federation.train[client] for client in range(4)})
    loaded = setting.data.load()
    pool = federation.pool[torch.randperm(len(federation.pool), generator=generator(0)).to(federation.pool.device)]
    others = Shard(federation.data, pool[:1000])
    found: dict[str, Any] = {}
    for size in (1,) if asked.small else (1, 8):
        rows: dict[str, Any] = {}
        for name, (recipe, uplink) in SENT.items():
            plan = Stage(None, 1, Everyone(), Sgd(0.1), steps=1, size=size, uplink=uplink)
            steps = asked.steps or (100 if asked.small else 600)
            attack = GradientInversion("cosine", victims=2 if asked.small else 4, steps=steps, smoothness=1e-4)
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                transcript, stages = recorded(Path(folder), recipe, plan, net, federation, asked.device)
                prior = Prior(net, {}, LabelledImages(others.x, others.y), loaded.mean, loaded.std)
                knowledge = Knowledge(prior, Answers(federation, stages, 0, {}), (), 1)
                verdict = attack.run(transcript, knowledge, name)
            assert verdict.gallery is not None
            rows |= {"original": verdict.gallery.original, name: verdict.gallery.recovered}
            found[f"{name}, batch {size}"] = verdict.plain()
            seconds = time.perf_counter() - began
            print(f"{name}, batch {size}: {verdict.sentence} {'; '.join(verdict.notes)} ({seconds:.1f} s)", flush=True)
        grid_of(rows, asked.out / f"gradients-batch-{size}")
    return found


# ---- what is said ---------------------------------------------------------------------------------------------------
def said(measures: dict[str, Measure]) -> str:
    return ", ".join(f"{name} {measure}" for name, measure in measures.items())


def numbers(measures: dict[str, Measure]) -> dict[str, Any]:
    return {name: vars(measure) for name, measure in measures.items()}


if __name__ == "__main__":
    main()
