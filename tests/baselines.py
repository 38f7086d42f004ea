"""FedDISCO, FedDF, FedGen, FedFTG, FedFed and FedAux against plain loops over modules and torch.optim.

Shared with the package are first weights, the rows that `plan` draws and the numbers that keys draw; nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.algorithms import (
    FedFed,
)
from fedlens.core.batches import identity, plan
from fedlens.core.rng import key, seeded
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from recipes import public_data
from small import PLAN, SIZES, Net, federation, network

CLASSES, WIDTH = 3, 64


DATA = federation(prepare=identity)


PUBLIC = public_data()


ROUNDS = PLAN.rounds


# ---- a plain federation ----------------------------------------------------------------------------------------------
def carried_out(recipe, norm=True, plan=PLAN, auxiliary=PUBLIC):
    """(server state, all jobs and replies) of a run."""
    seen, engine = [], Sequential(network(norm), DATA, checked=True)

    def observe(server, job, replies):
        seen.append((job, replies))

    return run(recipe, network(norm), engine, plan, auxiliary=auxiliary, observe=observe).state, seen


def cohort(round: int) -> list[int]:
    return list(PLAN.cohort(len(SIZES), key(0, "cohort", round)))


def fresh(norm=True) -> nn.Module:
    with seeded(7):
        return Net(norm).double()


def cross_entropy(model, x, y, weight, seed) -> Tensor:
    return (F.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum()


def trained(model: nn.Module, round: int, client: int, loss: Callable = cross_entropy, begun: int = 0) -> nn.Module:
    """A copy of the model after a client's local training, in a stage that began in round `begun`."""
    model = copy.deepcopy(model).train()
    descent = torch.optim.SGD(model.parameters(), 0.1 * 0.9 ** (round - begun), momentum=0.9, weight_decay=1e-3)
    mine = DATA.train[client]
    rows, weights, _ = plan(len(mine), 4, key(0, "batches", round, client), epochs=2)
    for t, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        descent.zero_grad()
        seed = torch.tensor(key(0, "step", round, client, t))
        loss(model, DATA.data.x[mine[row]], DATA.data.y[mine[row]], weight, seed).backward()
        descent.step()
    return model.eval()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in model.state_dict().items() if leaf.is_floating_point()}


def averaged(models: list[nn.Module], weights: list[float]) -> nn.Module:
    new, shares = copy.deepcopy(models[0]), [weight / sum(weights) for weight in weights]
    for name, leaf in values(new).items():
        leaf.copy_(sum(share * values(model)[name] for model, share in zip(models, shares, strict=True)))
    return new.eval()


def counts(client: int) -> list[int]:
    labels = DATA.data.y[DATA.train[client]].tolist()
    return [labels.count(c) for c in range(CLASSES)]


def apart(model: nn.Module, found: Tree) -> float:
    named = {**found.params, **found.buffers}
    mine = values(model)
    assert mine.keys() == named.keys()
    return max(float((named[name] - leaf).abs().max()) for name, leaf in mine.items())


def loaded(module: nn.Module, weights: Tree) -> nn.Module:
    named = {**weights.params, **weights.buffers}
    module.double().load_state_dict(named, strict=False)
    assert values(module).keys() == named.keys()
    return module


# ---- FedDF -----------------------------------------------------------------------------------------------------------
def distilled_by_hand(model, target, rows, weights, lr, x):
    descent = torch.optim.Adam(model.parameters(), lr)
    steps = len(rows)
    for t, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        descent.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * t / max(steps - 1, 1))) / 2
        descent.zero_grad()
        p, q = target[row].softmax(1), model(x[row]).softmax(1)
        (((p * (p.log() - q.log())).sum(1) * weight).sum() / weight.sum()).backward()
        descent.step()


def shares_of(who):
    total = [max(1, sum(counts(k)[c] for k in who)) for c in range(CLASSES)]
    return [torch.tensor([counts(k)[c] / total[c] for c in range(CLASSES)], dtype=torch.float64) for k in who]


def spread(noise, made) -> Tensor:
    """The diversity term, pair by pair."""
    total = torch.zeros(()).double()
    for i in range(len(noise)):
        for j in range(len(noise)):
            total = total + (noise[i] - noise[j]).pow(2).mean() * (made[i] - made[j]).abs().mean()
    return torch.exp(-total / len(noise) ** 2)


# ---- FedFed ----------------------------------------------------------------------------------------------------------
FED = FedFed(**FedFed.presets["earlier"] | {"distil_rounds": 3, "latent": 4, "width": 4, "sigma1": 0.1, "sigma2": 0.3})


# ---- runs ------------------------------------------------------------------------------------------------------------
def write_images(path, count, side, channels, seed):
    draw = np.random.Generator(np.random.Philox(seed))
    y = np.arange(count) % 3
    x = draw.integers(0, 120, (count, side, side, channels)) + 40 * y[:, None, None, None]
    np.savez(path, x_train=x.astype(np.uint8), y_train=y, x_test=x[:30].astype(np.uint8), y_test=y[:30])


def words(folder, name, *more):
    return [
        f"data={folder / 'own.npz'}",
        f"auxiliary={folder / 'public.npz'}",
        "partition=iid",
        "clients=4",
        "cohort=2",
        "rounds=2",
        "model=mlp",
        "model.hidden=8",
        "local.batch_size=8",
        "picture=false",
        "engine=sequential",
        f"algorithm={name}",
        *more,
    ]


SHORT = {
    "feddf": ("algorithm.steps=3",),
    "fedaux": ("algorithm.steps=3", "algorithm.pretrain_steps=2", "algorithm.pretrain_batch=8"),
    "fedgen": ("algorithm.steps=2",),
    "fedfed": ("algorithm.distil_rounds=1", "algorithm.latent=4", "algorithm.width=4"),
    "fedftg": ("algorithm.iterations=1", "algorithm.width=2"),
    "feddisco": ("algorithm.base=scaffold",),
}
