"""Personalised methods against plain PyTorch loops over modules, round by round, with what every client remembers.

The loops know modules, state dicts and torch.optim, and no Tree, hook or engine. Shared with the package are the first
weights, the rows that `plan` draws, and L2GD's coins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedlens.algorithms import L2GD
from fedlens.core.algorithm import Algorithm, Server
from fedlens.core.batches import identity
from fedlens.core.engine import Job, Reply
from fedlens.core.network import Buffers
from fedlens.core.objective import by_examples
from fedlens.core.rng import key
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from small import federation, network
from textbook import NEVER_THE_LAST, SEED, TOLERANCE, TWO_OF_THREE, World, loss, sgd

Values = dict[str, Tensor]


WORLDS = {
    "everyone": World(),
    "two of three": World(TWO_OF_THREE),
    "without momentum": World(TWO_OF_THREE, momentum=0.0),
    "one never comes": World(NEVER_THE_LAST),
    "without norms": World(TWO_OF_THREE, norm=False),
    "smaller than a batch": World(TWO_OF_THREE, sizes=(1, 3, 2), batch=8),
}


worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())


# ---- what the package makes of it ------------------------------------------------------------------------------------
class Outcome(NamedTuple):
    values: Values  # "model conv.weight" of the server, "own of 2 conv.weight" of a client's memory
    replies: list[list[Reply]]
    jobs: list[Job]
    server: Server
    engine: Sequential

    def personal(self, client: int, recipe: Algorithm) -> Values:
        """The weights that a client predicts with after the last round."""
        stage = replace(self.jobs[-1].stage, algorithm=recipe)
        job = replace(self.jobs[-1], stage=stage, download=recipe.broadcast(self.server), round=self.server.round)
        return named("", recipe.personal(self.engine.open(job, client)[0]))


def by_package(world: World, recipe: Any, buffers: Buffers = "average") -> Outcome:
    """Checked: nothing that is read-only may be written."""
    net, replies, jobs = network(world.norm, buffers), [], []
    engine = Sequential(net, federation(world.sizes, identity), checked=True)

    def observe(server, job, answers):
        replies.append(answers)
        jobs.append(job)

    server = run(recipe, net, engine, world.stage(), seed=SEED, observe=observe)
    values: Values = {}
    for name, tree in server.state.items():
        values |= named(name, tree)
    for client in engine.memories:
        for name, tree in engine.memories.get(client).items():
            values |= named(f"{name} of {client}", tree) if name != "seen" else {}
    return Outcome(values, replies, jobs, server, engine)


def named(name: str, tree: Tree | Tensor) -> Values:
    if isinstance(tree, Tensor):
        return {name: tree}
    return {f"{name} {path.partition('/')[2]}".strip(): leaf for path, leaf in tree.paths()}


def gap(found: Values, expected: Values) -> float:
    """The largest difference; both sides must know the same names."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in found)


def assert_same(found: Values, expected: Values) -> None:
    assert gap(found, expected) <= TOLERANCE


# ---- plain pieces ----------------------------------------------------------------------------------------------------
def weights(model: nn.Module) -> Values:
    return {n: v.detach().clone() for n, v in model.state_dict().items() if v.is_floating_point()}


def loaded(world: World, values: Values) -> nn.Module:
    model = world.model()
    model.load_state_dict(values, strict=False)
    return model


def label(name: str, values: Values) -> Values:
    return {f"{name} {weight}": value for weight, value in values.items()}


def mean(models: dict[int, Values], shares: dict[int, float]) -> Values:
    first = next(iter(models.values()))
    return {n: torch.stack([shares[k] * models[k][n] for k in models]).sum(0) for n in first}


def descend(world: World, model: nn.Module, round: int, client: int) -> Values:
    model.train()
    descent = sgd(world, world.rate(round), model.parameters())
    for batch in world.batches(round, client):
        descent.zero_grad()
        loss(model, *batch).backward()
        descent.step()
    return weights(model)


# ---- a part of the network stays: FedPer, FedBN, LG-FedAvg, FedRep ---------------------------------------------------
Training = Callable[[World, nn.Module, int, int], Values]


def partly_private(
    world: World,
    stays: Callable[[str], bool],
    train: Training = descend,
    weighting: Callable = by_examples,
    server_lr: float = 1.0,
) -> Values:
    """Every client goes on from the server's part and its own; the server averages its part alone."""
    first = weights(world.model())
    shared, own = {n: v for n, v in first.items() if not stays(n)}, {}
    for round, cohort in enumerate(world.cohorts):
        local = {k: train(world, loaded(world, shared | own.get(k, {})), round, k) for k in cohort}
        own |= {k: {n: v for n, v in local[k].items() if stays(n)} for k in cohort}
        middle = mean({k: {n: local[k][n] for n in shared} for k in cohort}, world.shares(cohort, weighting))
        rate = {n: 1.0 if "running" in n else server_lr for n in shared}
        shared = {n: shared[n] + rate[n] * (middle[n] - shared[n]) for n in shared}
    found = label("model", shared)
    for k, values in own.items():
        found |= label(f"private of {k}", values)
    return found


def is_head(name: str) -> bool:
    return name.startswith("head.")


def head_then_body(head_epochs: int) -> Training:
    """FedRep's two descents: in the first the body is out of training, in the second the head is fixed."""

    def train(world: World, model: Any, round: int, client: int) -> Values:
        batches = world.batches(round, client)
        turn = head_epochs * len(batches) // world.epochs
        body = [p for n, p in model.named_parameters() if not is_head(n)]
        for part, rows, mode in ((model.head.parameters(), batches[:turn], False), (body, batches[turn:], True)):
            model.train(mode)
            descent = sgd(world, world.rate(round), part)  # its momentum begins here
            for batch in rows:
                model.zero_grad()
                loss(model, *batch).backward()
                descent.step()
        return weights(model)

    return train


# ---- Ditto -----------------------------------------------------------------------------------------------------------
def ditto(world: World, pull: float, server_lr: float = 1.0) -> Values:
    """v <- v - eta (grad f(v) + pull (v - theta)), theta the model that was received; beside it, FedAvg."""
    theta, own = weights(world.model()), {}
    for round, cohort in enumerate(world.cohorts):
        local = {k: descend(world, loaded(world, theta), round, k) for k in cohort}
        for k in cohort:
            v = loaded(world, own.get(k, weights(world.model()))).train()
            descent = sgd(world, world.rate(round), v.parameters())
            for batch in world.batches(round, k):
                descent.zero_grad()
                near = sum(((p - theta[n]) ** 2).sum() for n, p in v.named_parameters())
                (loss(v, *batch) + pull / 2 * near).backward()
                descent.step()
            own[k] = weights(v)
        middle = mean(local, world.shares(cohort))
        theta = {n: theta[n] + (1.0 if "running" in n else server_lr) * (middle[n] - theta[n]) for n in theta}
    found = label("model", theta)
    for k, values in own.items():
        found |= label(f"own of {k}", values)
    return found


# ---- APFL ------------------------------------------------------------------------------------------------------------
def apfl(world: World, alpha: float, every: str, order: str) -> Values:
    """The mixed model as one function of (v, w, alpha), differentiated by autograd in all of them."""
    theta, own, alphas = weights(world.model()), {}, {}
    for round, cohort in enumerate(world.cohorts):
        local = {}
        for k in cohort:
            w = loaded(world, theta).train()
            v = loaded(world, own.get(k, weights(world.model()))).train()
            a = alphas.get(k, torch.tensor(alpha, dtype=torch.float64))
            steps_w, steps_v = (sgd(world, world.rate(round), m.parameters()) for m in (w, v))
            for t, (x, y, weight) in enumerate(world.batches(round, k)):

                def step_w(batch=(x, y, weight), w=w, steps=steps_w):
                    steps.zero_grad()
                    loss(w, *batch).backward()
                    steps.step()

                if order == "sequential":
                    step_w()
                share = a.clone().requires_grad_()
                theirs = dict(w.named_parameters())
                mixed = {n: share * p.detach() + (1 - share) * theirs[n].detach() for n, p in v.named_parameters()}
                losses = F.cross_entropy(functional_call(v, mixed, (x,)), y, reduction="none")
                value = (losses * weight).sum() / weight.sum()
                slope, *grads = torch.autograd.grad(value, [share, *mixed.values()])
                for p, g in zip(v.parameters(), grads, strict=True):
                    p.grad = g
                steps_v.param_groups[0]["lr"] = world.rate(round) * a.item()
                if order == "together":
                    step_w()
                steps_v.step()
                if every == "step" or (every == "round" and t == 0):
                    a = (a - world.rate(round) * slope).clamp(0, 1)
            local[k], own[k], alphas[k] = weights(w), weights(v), a
        theta = mean(local, world.shares(cohort))
    found = label("model", theta)
    for k, values in own.items():
        found |= label(f"own of {k}", values) | {f"alpha of {k}": alphas[k]}
    return found


# ---- L2GD ------------------------------------------------------------------------------------------------------------
def runs_of_aggregations(recipe: L2GD, rounds: int) -> list[int]:
    server = Server(network(), Tree(), 3)
    return [recipe.aggregations(replace(server, key=key(SEED, "server", round))) for round in range(rounds)]


def l2gd(world: World, recipe: L2GD) -> tuple[dict[int, Values], dict[int, Values], Values]:
    """One iteration after the other: (models before the last aggregations, after them, the last mean).

    With everyone in every round, so that a mean is the mean of all: each aggregation computes it anew.
    """
    models = {k: weights(world.model()) for k in range(len(world.sizes))}
    middle, before, n = weights(world.model()), models, len(models)
    for round, times in enumerate(runs_of_aggregations(recipe, len(world.cohorts))):
        before = models = {k: descend(world, loaded(world, models[k]), round, k) for k in models}
        # The rate of a local step is eta / (n (1 - p)); clients aggregate at the rate of the round they come back in.
        eta = world.rate(min(round + 1, len(world.cohorts) - 1)) * n * (1 - recipe.p)
        for _ in range(times):
            middle, share = mean(models, dict.fromkeys(models, 1 / n)), eta * recipe.pull / (n * recipe.p)
            models = {k: {w: (1 - share) * v + share * middle[w] for w, v in m.items()} for k, m in models.items()}
    return before, models, middle


# ---- Fed-MTL ---------------------------------------------------------------------------------------------------------
def relation(kind: str, m: int) -> Tensor:
    """Omega as a matrix: I - 11'/m times itself; in the public code ones stand for I, and entries are squared."""
    ones = torch.ones(m, m, dtype=torch.float64)
    centring = torch.eye(m, dtype=torch.float64) - ones / m
    return centring @ centring if kind == "laplacian" else (ones - ones / m) ** 2


def flat(values: Values) -> Tensor:
    return torch.cat([v.flatten() for n, v in values.items() if "running" not in n])


def fedmtl(world: World, kind: str, strength: float) -> Values:
    """W with all clients' columns, penalised as a matrix; autograd, and only the own column is free."""
    m = len(world.sizes)
    columns = {k: weights(world.model()) for k in range(m)}
    omega, seen = relation(kind, m), set()
    for round, cohort in enumerate(world.cohorts):
        start = {k: flat(values) for k, values in columns.items()}
        for k in cohort:
            model = loaded(world, columns[k]).train()
            descent = sgd(world, world.rate(round), model.parameters())
            for batch in world.batches(round, k):
                descent.zero_grad()
                own = torch.cat([p.flatten() for p in model.parameters()])
                W = torch.stack([own if j == k else start[j] for j in range(m)], 1)
                (loss(model, *batch) + strength * (W.norm() ** 2 + (W @ omega @ W.T).trace())).backward()
                descent.step()
            columns[k] = weights(model)
        seen |= set(cohort)
    found = label("model", mean(columns, dict.fromkeys(columns, 1 / m)))
    for k in seen:
        found |= label(f"own of {k}", columns[k])
    return found
