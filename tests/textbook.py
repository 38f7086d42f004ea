"""Every method against a plain PyTorch loop, round by round, with its server state and its clients' memories.

The loops here know modules, torch.optim and flat vectors, and no Tree, hook or engine. Shared with the package are the
first weights, the rows that `plan` draws, and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedlens.core.algorithm import Server, Stage
from fedlens.core.batches import identity, plan
from fedlens.core.cohort import Cohort
from fedlens.core.engine import Job, Reply
from fedlens.core.network import Buffers
from fedlens.core.objective import by_batches, by_examples, uniformly
from fedlens.core.optimizer import Exponential, Sgd
from fedlens.core.rng import key, seeded
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from small import Net, federation, network

TOLERANCE = 1e-12  # absolute, on weights of size one in double precision: rounding of three rounds stays near 1e-15


SEED, BATCH, RATE, FADE, WEIGHT_DECAY = 5, 4, 0.1, 0.9, 1e-3  # FADE: of the rate, per round


SIZES = (9, 4, 6)  # 3, 1 and 2 batches an epoch; the last rows of 9 and 6 wrap round


EVERYONE = ((0, 1, 2), (0, 1, 2), (0, 1, 2))


TWO_OF_THREE = ((0, 1), (1, 2), (0, 2))


NEVER_THE_LAST = ((0, 1), (1,), (0, 1))


# ---- the same small world for the package and for the plain loops ----------------------------------------------------
@dataclass(frozen=True)
class Scripted(Cohort):
    """Who takes part is written down, so that the plain loops need not draw it."""

    cohorts: tuple[tuple[int, ...], ...] = ()

    def __call__(self, population, key_of_round):
        return {key(SEED, "cohort", round): cohort for round, cohort in enumerate(self.cohorts)}[key_of_round]


class Outcome(NamedTuple):
    values: dict[str, Tensor]  # server state and memories, each as one flat vector
    replies: list[list[Reply]]  # of every round
    jobs: list[Job]
    server: Server
    engine: Sequential


class Trained(NamedTuple):
    theta: Tensor
    statistics: Tensor
    steps: int


@dataclass(frozen=True)
class World:
    """Clients, cohorts and local training; read by the package's run and by the loops below."""

    cohorts: tuple[tuple[int, ...], ...] = EVERYONE
    momentum: float = 0.9
    epochs: int = 2
    steps: int | None = None
    weighting: Callable | None = None
    sizes: tuple[int, ...] = SIZES
    batch: int = BATCH
    norm: bool = True
    uplink: tuple[Any, ...] = ()

    def stage(self) -> Stage:
        optimizer = Sgd(RATE, momentum=self.momentum, weight_decay=WEIGHT_DECAY, schedule=Exponential(FADE))
        return Stage(
            None,
            len(self.cohorts),
            Scripted(self.cohorts),
            optimizer,
            epochs=self.epochs,
            steps=self.steps,
            size=self.batch,
            weighting=self.weighting,
            uplink=self.uplink,
        )

    def run(self, recipe: Any, *, buffers: Buffers = "average", engine: type[Sequential] = Sequential) -> Outcome:
        """What the package makes of it. The engine checks that nothing read-only is written."""
        net, replies, jobs = network(self.norm, buffers), [], []
        clients = engine(net, federation(self.sizes, identity), checked=True)

        def observe(server, job, answers):
            replies.append(answers)
            jobs.append(job)

        server = run(recipe, net, clients, self.stage(), seed=SEED, observe=observe)
        values = {}
        for name, tree in server.state.items():
            values |= flat(name, tree, self.model())
        for client in clients.memories:
            for name, tree in clients.memories.get(client).items():
                values |= flat(f"{name} of {client}", tree, self.model()) if name != "seen" else {}
        return Outcome(values, replies, jobs, server, clients)

    def model(self) -> nn.Module:
        with seeded(7):
            return Net(self.norm).double()

    def start(self) -> tuple[Tensor, Tensor]:
        return vector(self.model()), statistics(self.model())

    def rate(self, round: int) -> float:
        return RATE * FADE**round

    def at(self, theta: Tensor, running: Tensor) -> nn.Module:
        """The model with these values."""
        return fill(self.model(), theta, running)

    @cache  # noqa: B019  worlds are few, and every loop asks for the same rows
    def batches(self, round: int, client: int, epochs: int | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """x, y and the weights of examples; an explicit number of epochs (fine-tuning) overrules `steps`."""
        everyone = federation(self.sizes, identity)
        data, mine = everyone.data, everyone.train[client]
        length: dict[str, Any] = {"epochs": epochs} if epochs else {"epochs": self.epochs, "steps": self.steps}
        drawn = plan(len(mine), self.batch, key(SEED, "batches", round, client), **length)
        return [(data.x[mine[row]], data.y[mine[row]], weight) for row, weight in zip(*drawn[:2], strict=True)]

    def shares(self, cohort: tuple[int, ...], weighting: Callable = by_examples) -> dict[int, float]:
        """p_k of the clients of a round; they sum to one."""
        counts = {
            by_examples: lambda k: self.sizes[k],
            uniformly: lambda k: 1,
            by_batches: lambda k: len(self.batches(0, k)),
        }[self.weighting or weighting]
        return {k: counts(k) / sum(counts(j) for j in cohort) for k in cohort}


# ---- plain pieces ----------------------------------------------------------------------------------------------------
def total(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(0)


def vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()


def statistics(model: nn.Module) -> Tensor:
    """Running means and variances; the counter of batches is an integer and no statistic."""
    found = [buffer.flatten() for buffer in model.buffers() if buffer.is_floating_point()]
    return torch.cat(found) if found else torch.empty(0).double()


def filled(model: nn.Module, theta: Tensor, running: Tensor) -> nn.Module:
    """A copy of the model with these values."""
    return fill(copy.deepcopy(model), theta, running)


def fill(model: nn.Module, theta: Tensor, running: Tensor) -> nn.Module:
    """The model itself, with these values."""
    vector_to_parameters(theta.clone(), model.parameters())
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(running[: buffer.numel()].view_as(buffer))
            running = running[buffer.numel() :]
    return model


def flat(name: str, tree: Tree | Tensor, model: nn.Module) -> dict[str, Tensor]:
    """A tree of the package as vectors in the order of the module's own parameters and buffers; a tensor as it is."""
    if isinstance(tree, Tensor):
        return {name: tree}
    if "params" not in tree:
        return {name: in_order(tree, [n for n, _ in model.named_parameters()])}
    running = [n for n, buffer in model.named_buffers() if buffer.is_floating_point()]
    return {**flat(name, tree.params, model), f"{name} statistics": in_order(tree.buffers, running)}


def in_order(tree: Tree, names: list[str]) -> Tensor:
    """All of these names, or none of them: a part that is kept elsewhere."""
    assert not tree or tree.keys() == set(names), f"{sorted(tree)} are not {sorted(names)}"
    return torch.cat([tree[n].flatten() for n in names]) if tree else torch.empty(0).double()


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of every vector; both sides must know the same ones."""
    assert found.keys() == expected.keys()
    both = {name: (found[name], expected[name]) for name in found if found[name].numel() or expected[name].numel()}
    return {name: (mine - theirs).abs().max().item() for name, (mine, theirs) in both.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within the tolerance everywhere; not a number is not within."""
    wrong = {name: difference for name, difference in far(found, expected).items() if not difference <= TOLERANCE}
    assert not wrong, f"off by {wrong}"


def loss(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (F.cross_entropy(model(x), y, reduction="none") * weight).sum() / weight.sum()


def sgd(world: World, rate: float, parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=rate, momentum=world.momentum, weight_decay=WEIGHT_DECAY)


def add_to_gradients(model: nn.Module, term: Tensor) -> None:
    pieces = term.split([p.numel() for p in model.parameters()])
    for p, piece in zip(model.parameters(), pieces, strict=True):
        assert p.grad is not None
        p.grad += piece.view_as(p)


def local_training(
    world: World,
    theta: Tensor,
    running: Tensor,
    round: int,
    client: int,
    term: Callable[[Tensor], Tensor] | None = None,
    clip: float | None = None,
    clip_loss: float | None = None,
) -> Trained:
    """Stochastic gradient descent from theta; `term(w)` is added to every gradient; norms are clipped before, after."""
    model = world.at(theta, running).train()
    optimizer, batches = sgd(world, world.rate(round), model.parameters()), world.batches(round, client)
    for x, y, weight in batches:
        optimizer.zero_grad()
        loss(model, x, y, weight).backward()
        shorten_gradients(model, clip_loss)
        if term is not None:
            add_to_gradients(model, term(vector(model)))
        shorten_gradients(model, clip)
        optimizer.step()
    return Trained(vector(model), statistics(model), len(batches))


def shorten_gradients(model: nn.Module, clip: float | None) -> None:
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    if clip is not None and norm > clip:
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= clip / norm


def effective_steps(world: World, steps: int) -> float:
    """What momentum SGD travels on a gradient of one at a rate of one, step by step."""
    velocity = travelled = 0.0
    for _ in range(steps):
        velocity = world.momentum * velocity + 1
        travelled += velocity
    return travelled


# ---- the methods -----------------------------------------------------------------------------------------------------
def once(loop: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """The values of a loop, computed once for a world and settings: several tests compare with them."""
    kept = cache(loop)
    return wraps(loop)(lambda *given, **named: dict(kept(*given, **named)))


@once
def fedavg(world: World, server_lr: float = 1.0) -> dict[str, Tensor]:
    theta, running = world.start()
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        local = {k: local_training(world, theta, running, round, k) for k in cohort}
        theta = theta + server_lr * total(p[k] * (local[k].theta - theta) for k in cohort)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running}


@once
def fedprox(world: World, mu: float, server_lr: float = 1.0) -> dict[str, Tensor]:
    """The proximal term as its gradient, mu (w - theta)."""
    theta, running = world.start()
    for round, cohort in enumerate(world.cohorts):
        p, local = world.shares(cohort), {}
        for k in cohort:
            local[k] = local_training(world, theta, running, round, k, lambda w, theta=theta: mu * (w - theta))
        theta = theta + server_lr * total(p[k] * (local[k].theta - theta) for k in cohort)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running}


@once
def fedavgm(world: World, beta: float, dampening: float, nesterov: bool, server_lr: float) -> dict[str, Tensor]:
    """v <- beta v + (1 - dampening) (theta - mean of clients); theta <- theta - eta v, or Nesterov's look ahead."""
    theta, running = world.start()
    v = torch.zeros_like(theta)
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        local = {k: local_training(world, theta, running, round, k) for k in cohort}
        gradient = theta - total(p[k] * local[k].theta for k in cohort)
        v = beta * v + (1 - dampening) * gradient
        theta = theta - server_lr * (gradient + beta * v if nesterov else v)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running, "velocity": -v}  # the package keeps it in direction of travel


def fedavgm_by_torch(world: World, beta: float, nesterov: bool, server_lr: float) -> dict[str, Tensor]:
    """The server's step by torch.optim.SGD on the pseudo-gradient."""
    theta, running = world.start()
    parameter = nn.Parameter(theta.clone())
    server = torch.optim.SGD([parameter], lr=server_lr, momentum=beta, nesterov=nesterov)
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        theta = parameter.detach().clone()
        local = {k: local_training(world, theta, running, round, k) for k in cohort}
        parameter.grad = theta - total(p[k] * local[k].theta for k in cohort)
        server.step()
        running = total(p[k] * local[k].statistics for k in cohort)
    velocity = -server.state[parameter]["momentum_buffer"]
    return {"model": parameter.detach(), "model statistics": running, "velocity": velocity}


@once
def fednova(world: World, server_lr: float = 1.0) -> dict[str, Tensor]:
    """d_k = (theta - theta_k) / a_k; theta <- theta - (sum p_k a_k) (sum p_k d_k)."""
    theta, running = world.start()
    for round, cohort in enumerate(world.cohorts):
        p = world.shares(cohort)
        local = {k: local_training(world, theta, running, round, k) for k in cohort}
        a = {k: effective_steps(world, local[k].steps) for k in cohort}
        d = {k: (theta - local[k].theta) / a[k] for k in cohort}
        effective = sum(p[k] * a[k] for k in cohort)
        theta = theta - server_lr * effective * total(p[k] * d[k] for k in cohort)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running}


@once
def scaffold(world: World, server_lr: float = 1.0, clip: float | None = None) -> dict[str, Tensor]:
    """c_k+ = c_k - c + (theta - theta_k) / (a_k eta); c <- c + sum over the cohort of (c_k+ - c_k) / N."""
    theta, running = world.start()
    c, controls = torch.zeros_like(theta), {}
    for round, cohort in enumerate(world.cohorts):
        p, local, moved = world.shares(cohort, uniformly), {}, {}
        for k in cohort:
            c_k = controls.get(k, torch.zeros_like(theta))
            correction = c - c_k
            local[k] = local_training(world, theta, running, round, k, lambda w, term=correction: term, clip_loss=clip)
            path = (theta - local[k].theta) / (effective_steps(world, local[k].steps) * world.rate(round))
            controls[k] = c_k - c + path
            moved[k] = controls[k] - c_k
        theta = theta + server_lr * total(p[k] * (local[k].theta - theta) for k in cohort)
        c = c + total(moved.values()) / len(world.sizes)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {
        "model": theta,
        "model statistics": running,
        "control": c,
        **{f"control of {k}": control for k, control in controls.items()},
    }


@once
def feddyn(world: World, alpha: float, clip: float | None) -> dict[str, Tensor]:
    """h-form: minimise f_k(w) - <h_k, w> + alpha/2 |w - theta|^2, then h_k <- h_k - alpha (theta_k - theta)."""
    theta, running = world.start()
    averaged, h, duals = theta, torch.zeros_like(theta), {}
    for round, cohort in enumerate(world.cohorts):
        local = {}
        for k in cohort:
            h_k = duals.get(k, torch.zeros_like(theta))
            local[k] = local_training(
                world, theta, running, round, k, lambda w, theta=theta, h_k=h_k: alpha * (w - theta) - h_k, clip
            )
            duals[k] = h_k - alpha * (local[k].theta - theta)
        h = h - alpha / len(world.sizes) * total(local[k].theta - theta for k in cohort)
        averaged = total(local[k].theta for k in cohort) / len(cohort)
        running = total(local[k].statistics for k in cohort) / len(cohort)
        theta = averaged - h / alpha
    return {
        "model": theta,
        "model statistics": running,
        "averaged": averaged,
        "averaged statistics": running,
        "dual": h,
        **{f"dual of {k}": dual for k, dual in duals.items()},
    }


def feddyn_by_displacement(world: World, alpha: float) -> dict[str, Tensor]:
    """q-form: loss + alpha <w, q_k - theta> with weight decay alpha on top; theta <- mean of models + mean of all q."""
    theta, running = world.start()
    q = {k: torch.zeros_like(theta) for k in range(len(world.sizes))}
    averaged, seen = theta, set()
    for round, cohort in enumerate(world.cohorts):
        ends = {}
        for k in cohort:
            model = world.at(theta, running).train()
            optimizer = torch.optim.SGD(
                model.parameters(), world.rate(round), momentum=world.momentum, weight_decay=alpha + WEIGHT_DECAY
            )
            for x, y, weight in world.batches(round, k):
                optimizer.zero_grad()
                linear = parameters_to_vector(model.parameters()) @ (q[k] - theta)
                (loss(model, x, y, weight) + alpha * linear).backward()
                optimizer.step()
            ends[k] = Trained(vector(model), statistics(model), 0)
            q[k] = q[k] + ends[k].theta - theta
        seen |= set(cohort)
        averaged = total(end.theta for end in ends.values()) / len(cohort)
        running = total(end.statistics for end in ends.values()) / len(cohort)
        theta = averaged + total(q.values()) / len(q)
    return {
        "model": theta,
        "model statistics": running,
        "averaged": averaged,
        "averaged statistics": running,
        "dual": -alpha * total(q.values()) / len(q),
        **{f"dual of {k}": -alpha * q[k] for k in seen},
    }


@once
def fedsam(world: World, rho: float, server_lr: float = 1.0) -> dict[str, Tensor]:
    """g at w; then the gradient at w + rho g / |g| moves w. The statistics are those of the first pass alone.

    Without the package's guard of 1e-12 on the norm, which leaves a difference of 3e-13.
    """
    theta, running = world.start()
    for round, cohort in enumerate(world.cohorts):
        p, local = world.shares(cohort), {}
        for k in cohort:
            model = world.at(theta, running).train()
            optimizer = sgd(world, world.rate(round), model.parameters())
            for x, y, weight in world.batches(round, k):
                before = vector(model), statistics(model)
                g = torch.autograd.grad(loss(model, x, y, weight), list(model.parameters()))
                g = torch.cat([piece.flatten() for piece in g])
                above = filled(model, before[0] + rho * g / g.norm(), before[1])
                loss(above, x, y, weight).backward()
                for parameter, there in zip(model.parameters(), above.parameters(), strict=True):
                    parameter.grad = there.grad
                optimizer.step()
            local[k] = Trained(vector(model), statistics(model), 0)
        theta = theta + server_lr * total(p[k] * (local[k].theta - theta) for k in cohort)
        running = total(p[k] * local[k].statistics for k in cohort)
    return {"model": theta, "model statistics": running}


@once
def local_only(world: World) -> dict[str, Tensor]:
    """Every client goes on from its own model in the rounds it takes part in; the server has none."""
    models: dict[int, tuple[Tensor, Tensor]] = {}
    for round, cohort in enumerate(world.cohorts):
        for k in cohort:
            models[k] = local_training(world, *models.get(k, world.start()), round, k)[:2]
    nothing = torch.empty(0).double()
    found = {"model": nothing, "model statistics": nothing}
    for k, (theta, running) in models.items():
        found |= {f"private of {k}": theta, f"private of {k} statistics": running}
    return found


def fine_tuned(world: World, base: dict[str, Tensor], epochs: int, part: str) -> dict[str, Tensor]:
    """Everyone, from the final model, at the first round's rate, with fresh momentum; the server does not move."""
    found = dict(base)
    for k in range(len(world.sizes)):
        model = world.at(base["model"], base["model statistics"])
        trains: Any = model.head if part == "head" else model
        model.train(part == "all")  # a frozen body reads its statistics and leaves them alone
        optimizer = sgd(world, RATE, trains.parameters())
        for x, y, weight in world.batches(len(world.cohorts), k, epochs):
            model.zero_grad()
            loss(model, x, y, weight).backward()
            optimizer.step()
        found |= {f"tuned of {k}": vector(model), f"tuned of {k} statistics": statistics(model)}
    return found


WORLDS = {
    "everyone": World(),
    "two of three": World(TWO_OF_THREE),
    "without momentum": World(TWO_OF_THREE, momentum=0.0),
    "steps": World(TWO_OF_THREE, steps=5),
    "one never comes": World(NEVER_THE_LAST),
}


worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())


def star(worlds: dict[str, World], names: str, options: list[Any]) -> pytest.MarkDecorator:
    """Every world with the first of the options, and one in which clients stay away with all of them."""
    whole = worlds["two of three"]
    cases = [(world, options[0]) for world in worlds.values()] + [(whole, option) for option in options[1:]]
    ids = [*worlds, *(f"two of three-{option}" for option in options[1:])]
    values = [(world, *(option if isinstance(option, tuple) else (option,))) for world, option in cases]
    return pytest.mark.parametrize(("world", *names.split()), values, ids=ids)


server_lrs = star(WORLDS, "server_lr", [1.0, 0.5])
