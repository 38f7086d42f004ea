"""An actor and a critic over the layer graph, and their update: proximal policy optimisation as functions of Trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.errors import BadInput
from ..core.optimizer import Adam
from ..core.rng import fold, uniform
from ..core.tree import Tree, grad
from ..core.wire import decode, encode
from .graph import Layer
from .pruning import Costs, entries

WIDTH, HIDDEN = 50, 200  # of the graph encoders, and of the actor behind its own
SPREAD = 0.5  # standard deviation of actions
DISCOUNT, CLIP, OF_CRITIC = 0.99, 0.2, 0.5
EPOCHS = 20  # of an update
ADAM = Adam(3e-4)

Learns = Literal["all", "head"]  # of an agent; head: all but its graph encoders


class Situation(NamedTuple):
    """What an agent sees: one node for each layer, and how they are connected."""

    nodes: Tensor  # [layers, features], all but the ratio that is kept
    adjacency: Tensor  # [layers, layers], with loops, divided by the roots of both degrees

    def states(self, ratios: Tensor) -> Tensor:
        """[episodes, layers, features] where these ratios, [episodes, layers], are kept."""
        nodes = self.nodes.to(ratios).expand(*ratios.shape, -1)
        return torch.cat([nodes, ratios[..., None]], -1)


def situation(costs: Costs, layers: Sequence[Layer]) -> Situation:
    """Place, channels, kernel, stride, map size, shares of operations and parameters, and whether branches join."""
    flops = [costs.pixels[e.name] * e.kernel * e.inputs // e.groups * e.filters for e in layers]
    params = [e.filters * entries(e) for e in layers]
    rows = [
        [
            at / len(layers),
            math.log2(e.inputs) / 10,
            math.log2(e.filters) / 10,
            math.log2(e.kernel) / 5,
            math.log2(e.stride),
            math.log2(costs.pixels[e.name]) / 10,
            flops[at] / sum(flops),
            params[at] / sum(params),
            float(e.joins),
        ]
        for at, e in enumerate(layers)
    ]
    number = {costs.graph.layers.index(e): at for at, e in enumerate(layers)}
    links = torch.eye(len(layers), dtype=torch.float64)
    for a, b in costs.graph.edges:
        if a in number and b in number:
            links[number[a], number[b]] = links[number[b], number[a]] = 1
    root = links.sum(0).rsqrt()
    return Situation(torch.tensor(rows, dtype=torch.float64), root[:, None] * links * root)


# ---- actor and critic ------------------------------------------------------------------------------------------------
def first_agent(seed: int, seen: Situation) -> Tree:
    """weights of actor and critic as they begin, and their optimizer's state."""
    layers, features = seen.nodes.shape[0], seen.nodes.shape[1] + 1
    shapes = {
        **{f"{who}.{part}": size for who in ("actor", "critic") for part, size in _encoder(features).items()},
        "actor.hidden": (WIDTH, HIDDEN),
        "actor.action": (HIDDEN, layers),
        "critic.value": (WIDTH, 1),
    }
    weights = Tree()
    for name, (inputs, outputs) in shapes.items():
        bound = inputs**-0.5
        drawn = uniform(fold(torch.tensor(seed), name), inputs + 1, outputs) * 2 * bound - bound
        weights = weights.replace(**{f"{name}.weight": drawn[:-1].clone(), f"{name}.bias": drawn[-1].clone()})
    return Tree(weights=weights, optimizer=ADAM.init(weights))


def _encoder(features: int) -> dict[str, tuple[int, int]]:
    return {"near": (features, WIDTH), "far": (WIDTH, WIDTH)}


def _through(weights: Tree, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _embedded(weights: Tree, who: str, seen: Situation, states: Tensor) -> Tensor:
    """[episodes, WIDTH]: two rounds of messages between neighbours, then the mean over layers."""
    adjacency = seen.adjacency.to(states)
    near = _through(weights, f"{who}.near", adjacency @ states).tanh()
    return _through(weights, f"{who}.far", adjacency @ near).tanh().mean(-2)


def actions(weights: Tree, seen: Situation, states: Tensor) -> Tensor:
    """[episodes, layers] in (-1, 1): the middle of what the actor would do."""
    hidden = _through(weights, "actor.hidden", _embedded(weights, "actor", seen, states)).relu()
    return _through(weights, "actor.action", hidden).tanh()


def values(weights: Tree, seen: Situation, states: Tensor) -> Tensor:
    """[episodes] in (-1, 1), as normalised returns mostly are."""
    return _through(weights, "critic.value", _embedded(weights, "critic", seen, states)).tanh()[..., 0]


def log_probability(middle: Tensor, action: Tensor) -> Tensor:
    """Of independent normal actions; summed over layers."""
    return (-((action - middle) ** 2) / (2 * SPREAD**2) - math.log(SPREAD * math.sqrt(2 * math.pi))).sum(-1)


# ---- learning --------------------------------------------------------------------------------------------------------
class Experience(NamedTuple):
    """What was seen, what was done, how likely that was then, and what came of it."""

    states: Tensor  # [steps, layers, features]
    actions: Tensor  # [steps, layers]
    likely: Tensor  # [steps]
    returns: Tensor  # [steps]


def returns(rewards: Sequence[float]) -> list[float]:
    """Discounted sums of what follows, of one episode."""
    found, ahead = [], 0.0
    for reward in reversed(rewards):
        ahead = reward + DISCOUNT * ahead
        found.append(ahead)
    return found[::-1]


def loss(weights: Tree, seen: Situation, past: Experience) -> Tensor:
    """Schulman et al., 2017, equation 9. The bonus for entropy is left out: with a fixed spread it is a constant."""
    wanted = (past.returns - past.returns.mean()) / (past.returns.std(unbiased=False) + 1e-7)
    guessed = values(weights, seen, past.states)
    better = wanted - guessed.detach()
    ratio = (log_probability(actions(weights, seen, past.states), past.actions) - past.likely).exp()
    gain = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better)
    return -gain.mean() + OF_CRITIC * ((guessed - wanted) ** 2).mean()


def updated(agent: Tree, seen: Situation, past: Experience, epochs: int = EPOCHS, *, learns: Learns = "all") -> Tree:
    """The agent after so many passes over all that it has seen."""
    agent = agent.clone()
    moving = agent.weights.select(lambda name: learns == "all" or name.split(".")[1] not in ("near", "far"))
    for _ in range(epochs):
        with torch.enable_grad():
            leaves = moving.map(lambda leaf: leaf.detach().requires_grad_())
            slope = grad(loss(agent.weights | leaves, seen, past), leaves)
        ADAM.update_(agent.weights, slope, agent.optimizer)
    return agent


# ---- agents from elsewhere -------------------------------------------------------------------------------------------
def save_agent(agent: Tree, path: str | Path) -> None:
    Path(path).write_bytes(encode(Tree(weights=agent.weights)))


def pretrained_agent(path: str | Path, agent: Tree) -> Tree:
    """This agent with the weights of a file: all of them, or those of the graph encoders if layers are others."""
    try:
        weights = decode(Path(path).read_bytes()).weights
    except FileNotFoundError:
        raise BadInput(f"algorithm.pretrained={path}: there is no such file") from None
    except Exception:  # whatever a file that is something else makes the reader say
        raise BadInput(f"algorithm.pretrained={path} does not hold an agent") from None
    fits = Tree({k: v for k, v in weights.items() if k in agent.weights and v.shape == agent.weights[k].shape})
    if not any(name.startswith("actor.near") for name in fits):
        raise BadInput(f"algorithm.pretrained={path} does not hold an agent that sees what this one sees")
    return agent.replace(weights=agent.weights | fits)
